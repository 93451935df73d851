"""State that is the same on all ranks of a healthy run."""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm

from ignite_monitor.model.dtensor import is_dtensor, local
from ignite_monitor.model.isolation import capture_rng_state
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import named_modules, named_parameters


def items_of(model: nn.Module, optimizer: Any, ignored: Set[int]) -> dict[str, Any]:
    """Return the tensors of a model, and the tensors, numbers and strings of its optimizer, by name.

    ``ignored`` are the ids of the parameters that ranks do not share.
    """
    names = {parameter: name for name, parameter, _ in named_parameters(model)}
    items: dict[str, Any] = {name: parameter for parameter, name in names.items() if id(parameter) not in ignored}
    for name, module in named_modules(model):
        own_batches = hasattr(module, "running_mean") and not isinstance(module, SyncBatchNorm)
        for last, buffer in module.named_buffers(recurse=False):
            if not (own_batches and last in ("running_mean", "running_var")):
                items[f"{name}.{last}".lstrip(".")] = buffer
    for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
        items |= {f"{key} of group {number} of the optimizer": value for key, value in group.items()}
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in ignored:
                owner = f"{names.get(parameter, f'parameter {i} of group {number}')} in the optimizer"
                items |= {f"{key} of {owner}": value for key, value in optimizer.state.get(parameter, {}).items()}
    return {name: value for name, value in items.items() if _is_comparable(value)}


def _is_comparable(value: Any) -> bool:
    """True for a tensor with data on this rank, numbers, strings, and sequences of these."""
    if isinstance(value, (tuple, list)):
        return all(not isinstance(member, Tensor) and _is_comparable(member) for member in value)
    return (
        has_local_data(local(value)) if isinstance(value, Tensor) else isinstance(value, (int, float, str, type(None)))
    )


def rng_items(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators of torch, Python, NumPy and a CUDA device."""
    state = capture_rng_state([device] if device.type == "cuda" else [])
    devices = state.pop("devices")
    return {f"RNG state of {name}": value for name, value in {**state, **devices}.items()}


def replica_groups(item: Any, groups: Iterable[Any]) -> tuple[Any, ...]:
    """Return the process groups whose ranks hold the same part of a DTensor; those given for another item."""
    if not (isinstance(item, Tensor) and is_dtensor(item)):
        return tuple(groups)
    mesh, placements = item.device_mesh, item.placements  # type: ignore[attr-defined]
    if mesh.get_coordinate() is None:
        return ()
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_replicate())
