"""What all ranks should have alike: weights, buffers, optimizer state, random state."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.optim import Optimizer

from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.model.norms import is_sharded
from ignite_monitor.model.samples import local
from ignite_monitor.replicas.fingerprints import fingerprint_of

Items = dict[str, Tensor | int]


def items_of(model: nn.Module, optimizer: Optimizer | None) -> tuple[Items, set[str]]:
    """What a model and its optimizer hold, and the names of the buffers in it.

    Name -> a tensor, or a number that stands for what is none; of tensors without elements of their own nothing.

    Statistics of batches that a rank takes of its own batches alone are no replicas.
    """
    names = {parameter: name for name, parameter, _ in named_parameters(model)}
    found: dict[str, Any] = {name: parameter for parameter, name in names.items()}
    buffers: set[str] = set()
    for name, module in named_modules(model):
        own_batches = hasattr(module, "running_mean") and not isinstance(module, SyncBatchNorm)
        for last, buffer in module.named_buffers(recurse=False):
            if not (own_batches and last in ("running_mean", "running_var")):
                found[f"{name}.{last}".lstrip(".")] = buffer
                buffers.add(f"{name}.{last}".lstrip("."))
    for number, group in enumerate(optimizer.param_groups if optimizer is not None else ()):
        rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        found |= _split(f"group {number} of the optimizer", rest)
        for i, parameter in enumerate(group["params"]):
            name = names.get(parameter, f"parameter {i} of group {number}")
            state = optimizer.state.get(parameter) if optimizer is not None else None
            found |= _split(f"{name} in the optimizer", dict(state or {}))
    return {name: value for name, value in found.items() if isinstance(value, int) or is_plain(local(value))}, buffers


def random_items(device: torch.device) -> Items:
    """The states of Python's, NumPy's and torch's generators of random numbers."""
    found: Items = {"Python's random state": fingerprint_of(random.getstate())}
    found["torch's random state"] = torch.get_rng_state()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state = numpy.random.get_state()
        found["NumPy's random state"] = fingerprint_of((state[1].tobytes(), *state[2:]))
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        found["CUDA's random state"] = torch.cuda.get_rng_state(device)
    return found


def _split(name: str, values: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Tensors each by itself, and all that is written in numbers and words together."""
    for key, value in values.items():
        if isinstance(value, Tensor):
            yield f"{key} of {name}", value
    plain = [(str(key), value) for key, value in values.items() if _is_written(value)]
    if plain:
        yield f"settings of {name}" if "group" in name else f"numbers of {name}", fingerprint_of(sorted(plain, key=str))


def _is_written(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_written, value))
    return value is None or isinstance(value, (bool, int, float, str))


def first_holders(tensor: Any, world: int) -> list[int]:
    """For each rank the first that holds the same part of a tensor; itself for one that holds nothing of it."""
    if not isinstance(tensor, Tensor) or not is_sharded(tensor):
        return [0] * world
    placed: Any = tensor
    dims = [dim for dim, placement in enumerate(placed.placements) if not placement.is_replicate()]
    parts: dict[int, tuple[int, ...]] = {}
    mesh = placed.device_mesh.mesh
    for index in product(*map(range, mesh.shape)):
        parts[int(mesh[index])] = tuple(index[dim] for dim in dims)
    return [min((other for other in parts if parts[other] == parts[rank]), default=rank) if rank in parts else rank
            for rank in range(world)]  # fmt: skip
