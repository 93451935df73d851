"""State that is the same on all ranks of a healthy run, and exact hashes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import SyncBatchNorm
from torch.optim import Optimizer

from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.model.dtensor import is_dtensor, local
from ignite_monitor.model.isolation import capture_rng_state
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import named_modules, named_parameters
from ignite_monitor.model.tensors import bits_of

Items = dict[str, Tensor | int]

_PIECE = 1 << 20  # elements that are hashed at once, to bound the memory


def items_of(model: nn.Module, optimizer: Optimizer | None) -> Items:
    """Return the tensors of a model and its optimizer that ranks share, and hashes of the optimizer's other values."""
    names = {parameter: name for name, parameter, _ in named_parameters(model)}
    items: dict[str, Any] = {name: parameter for parameter, name in names.items()}
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


def is_dtensor_item(item: Any) -> bool:
    """Return True if an item is a DTensor, of which a rank may hold a part."""
    return isinstance(item, Tensor) and is_dtensor(item)


def first_holders(item: Any, world: int) -> list[int]:
    """Return for every rank the first rank with the same part of an item; the rank itself if it has none."""
    if not is_dtensor_item(item):
        return [0] * world
    dims = [dim for dim, placement in enumerate(item.placements) if not placement.is_replicate()]
    mesh = item.device_mesh.mesh
    parts = {int(mesh[index]): [index[dim] for dim in dims] for index in product(*map(range, mesh.shape))}
    return [min((other for other in parts if parts[other] == parts.get(rank)), default=rank) for rank in range(world)]


def hashes_of(items: Items, device: torch.device) -> Tensor:
    """Return the hashes of this rank's parts of items, and a 0: an int64 tensor on a device."""
    hashes = [
        hash_bits(local(item)) if isinstance(item, Tensor) else torch.tensor(item, device="cpu")
        for item in [*items.values(), 0]
    ]
    return torch.stack([move(value, device) for value in hashes])


def hash_bits(tensor: Tensor) -> Tensor:
    r"""Hash the bits of a strided tensor, independent of its device and of the order of summation.

    The hash is :math:`\sum_i (b_i + 1)(2 i + 1) \bmod 2^{64}` for elements with bits :math:`b_i` as signed integers.
    The weights are odd, so one flipped bit always changes it, and so do two exchanged elements of up to 32 bits.
    """
    bits = bits_of(tensor).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, len(bits), _PIECE):
        piece = bits[start : start + _PIECE].to(torch.int64) + 1
        index = torch.arange(start, start + len(piece), dtype=torch.int64, device=bits.device)
        total = total + (piece * (2 * index + 1)).sum()
    return total


def as_numbers(hashes: Tensor) -> Tensor:
    """Fold 64-bit hashes to 53 bits, which float64 holds exactly; to 24 bits on devices without float64."""
    wide = wide_dtype(hashes.device)
    bits = 53 if wide == torch.float64 else 24
    folded: Tensor = (hashes ^ (hashes >> 11) ^ (hashes >> 40)) & (2**bits - 1)
    return folded.to(wide)


def hash_of(value: Any) -> int:
    """Hash the ``repr`` of numbers, strings, and sequences of them to 64 bits."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little", signed=True)


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
