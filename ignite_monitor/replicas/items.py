"""State that is the same on all ranks of a healthy run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.optim import Optimizer

from ignite_monitor.model.dtensor import is_dtensor, local
from ignite_monitor.model.isolation import capture_rng_state
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.replicas.hashes import hash_of

Items = dict[str, Tensor | int]


def items_of(model: nn.Module, optimizer: Optimizer | None, ignored: Set[int]) -> Items:
    """Return the tensors of a model and its optimizer, and hashes of the optimizer's other values.

    ``ignored`` are the ids of the parameters that ranks do not share.
    """
    names = {parameter: name for name, parameter, _ in named_parameters(model)}
    items: dict[str, Any] = {name: parameter for parameter, name in names.items() if id(parameter) not in ignored}
    for name, module in named_modules(model):
        own_batches = hasattr(module, "running_mean") and not isinstance(module, SyncBatchNorm)
        for last, buffer in module.named_buffers(recurse=False):
            if not (own_batches and last in ("running_mean", "running_var")):
                items[f"{name}.{last}".lstrip(".")] = buffer
    if optimizer is not None:
        for number, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
            items |= _split("settings", f"group {number} of the optimizer", settings)
            for i, parameter in enumerate(group["params"]):
                if id(parameter) in ignored:
                    continue
                name = names.get(parameter, f"parameter {i} of group {number}")
                items |= _split("numbers", f"{name} in the optimizer", optimizer.state.get(parameter, {}))
    return {name: value for name, value in items.items() if isinstance(value, int) or has_local_data(local(value))}


def rng_items(device: torch.device) -> Items:
    """Return the states of the global generators of torch, Python, NumPy and a CUDA device."""
    state = capture_rng_state([device] if device.type == "cuda" else [])
    items: Items = {"torch's RNG state": state["torch"], "Python's RNG state": hash_of(state["python"])}
    if "numpy" in state:
        items["NumPy's RNG state"] = hash_of(state["numpy"])
    return items | {f"RNG state of {name}": value for name, value in state["devices"].items()}


def replica_groups(item: Any, groups: Iterable[Any]) -> tuple[Any, ...]:
    """Return the process groups whose ranks hold the same part of a DTensor; those given for another item."""
    if not (isinstance(item, Tensor) and is_dtensor(item)):
        return tuple(groups)
    mesh, placements = item.device_mesh, item.placements  # type: ignore[attr-defined]
    if mesh.get_coordinate() is None:
        return ()
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_replicate())


def _split(kind: str, owner: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every tensor, and one hash of all numbers, strings and sequences of them."""
    for key, value in values.items():
        if isinstance(value, Tensor):
            yield f"{key} of {owner}", value
    plain = [(str(key), value) for key, value in values.items() if _is_plain_value(value)]
    if plain:
        yield f"{kind} of {owner}", hash_of(sorted(plain, key=str))


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain_value, value))
    return value is None or isinstance(value, (bool, int, float, str))
