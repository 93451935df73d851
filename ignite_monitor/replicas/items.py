"""State that is the same on all ranks of a healthy run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm

from ignite_monitor.model.dtensor import is_dtensor, local
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import named_modules, named_parameters


def items_of(model: nn.Module, optimizer: Any, ignored: Set[int]) -> dict[str, Any]:
    """Return the tensors of a model, and the tensors, numbers and strings of its optimizer, by name.

    ``ignored`` are the ids of the parameters that ranks do not share.
    """
    names = {parameter: name for name, parameter, _ in named_parameters(model)}
    state: dict[str, Any] = {name: parameter for parameter, name in names.items() if id(parameter) not in ignored}
    for name, module in named_modules(model):
        own_batches = hasattr(module, "running_mean") and not isinstance(module, SyncBatchNorm)
        for last, buffer in module.named_buffers(recurse=False):
            if not (own_batches and last in ("running_mean", "running_var")):
                state[f"{name}.{last}".lstrip(".")] = buffer
    for number, group in enumerate([] if optimizer is None else optimizer.param_groups):
        state[f"group {number} of the optimizer"] = {key: group[key] for key in group if key != "params"}
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in ignored:
                owner = names.get(parameter, f"parameter {i} of group {number}")
                state[f"{owner} in the optimizer"] = optimizer.state.get(parameter)
    return dict(leaf for name, value in state.items() for leaf in _leaves(name, value))


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors with data on this rank, numbers and strings in a value, with names ``{key} of {name}``."""
    if isinstance(value, Tensor):
        if has_local_data(local(value)):
            yield name, value
    elif isinstance(value, (int, float, str)):
        yield name, value
    elif isinstance(value, (Mapping, tuple, list)):
        for key, member in value.items() if isinstance(value, Mapping) else enumerate(value):
            if isinstance(key, (int, str)):  # the names of other keys may differ between ranks
                yield from _leaves(f"{key} of {name}", member)


def replica_groups(item: Any, groups: Iterable[Any]) -> tuple[Any, ...]:
    """Return the process groups whose ranks hold the same part of a DTensor; those given for another item."""
    if not (isinstance(item, Tensor) and is_dtensor(item)):
        return tuple(groups)
    mesh, placements = item.device_mesh, item.placements  # type: ignore[attr-defined]
    if mesh.get_coordinate() is None:
        return ()
    return tuple(mesh.get_group(dim) for dim, placement in enumerate(placements) if placement.is_replicate())
