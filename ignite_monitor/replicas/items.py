"""State that is the same on all ranks of a healthy run: parameters, buffers, optimizer state, RNG state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.optim import Optimizer

from ignite_monitor.model.isolation import capture_rng_state
from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.model.norms import is_sharded
from ignite_monitor.model.samples import local
from ignite_monitor.replicas.fingerprints import fingerprint_of

Items = dict[str, Tensor | int]


def items_of(model: nn.Module, optimizer: Optimizer | None) -> Items:
    """Return the tensors of a model and its optimizer, and fingerprints of the optimizer's other values.

    Running statistics of unsynchronized batch norms, which belong to a rank's own batches, and sparse, nested and
    packed tensors are skipped.
    """
    names = {parameter: name for name, parameter, _ in named_parameters(model)}
    items: dict[str, Any] = {name: parameter for parameter, name in names.items()}
    for name, module in named_modules(model):
        own_batches = hasattr(module, "running_mean") and not isinstance(module, SyncBatchNorm)
        for last, buffer in module.named_buffers(recurse=False):
            if not (own_batches and last in ("running_mean", "running_var")):
                items[f"{name}.{last}".lstrip(".")] = buffer
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        items |= _split("settings", f"group {number} of the optimizer", settings)
        for i, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"parameter {i} of group {number}")
            state = optimizer.state.get(parameter) if optimizer is not None else None
            items |= _split("numbers", f"{name} in the optimizer", state or {})
    return {name: value for name, value in items.items() if isinstance(value, int) or is_plain(local(value))}


def rng_items(device: torch.device) -> Items:
    """Return the states of the global generators of torch, Python, NumPy and a CUDA device."""
    state = capture_rng_state([device] if device.type == "cuda" else [])
    items: Items = {"torch's RNG state": state["torch"], "Python's RNG state": fingerprint_of(state["python"])}
    if "numpy" in state:
        items["NumPy's RNG state"] = fingerprint_of(state["numpy"])
    return items | {f"RNG state of {name}": value for name, value in state["devices"].items()}


def is_dtensor(item: Any) -> bool:
    """Return True if an item is a DTensor, of which a rank may hold a part."""
    return isinstance(item, Tensor) and is_sharded(item)


def first_holders(tensor: Any, world: int) -> list[int]:
    """Return for every rank the first rank with the same part of a tensor; the rank itself if it has none."""
    if not is_dtensor(tensor):
        return [0] * world
    placed: Any = tensor
    dims = [dim for dim, placement in enumerate(placed.placements) if not placement.is_replicate()]
    parts: dict[int, tuple[int, ...]] = {}
    mesh = placed.device_mesh.mesh
    for index in product(*map(range, mesh.shape)):
        parts[int(mesh[index])] = tuple(index[dim] for dim in dims)
    return [min((other for other in parts if parts[other] == parts.get(rank)), default=rank) for rank in range(world)]


def _split(kind: str, owner: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield every tensor, and one fingerprint of all numbers, strings and sequences of them."""
    for key, value in values.items():
        if isinstance(value, Tensor):
            yield f"{key} of {owner}", value
    plain = [(str(key), value) for key, value in values.items() if _is_plain_value(value)]
    if plain:
        yield f"{kind} of {owner}", fingerprint_of(sorted(plain, key=str))


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain_value, value))
    return value is None or isinstance(value, (bool, int, float, str))
