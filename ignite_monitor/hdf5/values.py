"""From what Ignite's users log to names and float64 numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.float64]


def flatten(named: Mapping[Any, Any], leave_out: Callable[[str, Any], None]) -> tuple[tuple[str, ...], Numbers]:
    """The names and values of everything in a mapping, named as Ignite's loggers do: "a/b", "a/0".

    All tensors of a device come over in one transfer.

    Args:
        named: name -> number, 0-dim or 1-dim tensor, or a mapping, list or tuple of such.
        leave_out: called with the name and value of what is none of these.
    """
    names, leaves = list(named), list(named.values())
    kinds = set(map(type, leaves))
    flat = kinds <= {float, int, bool, Tensor} and set(map(type, names)) <= {str}
    if not flat or (Tensor in kinds and any(leaf.ndim for leaf in leaves if type(leaf) is Tensor)):
        found: dict[str, Any] = {}
        _add_leaves(found, "", named)
        names, leaves = list(found), list(found.values())
    left_out: set[int] = set()
    numbers = np.zeros(len(leaves))
    tensors: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, leaf in enumerate(leaves):
        if type(leaf) is float:
            numbers[place] = leaf
        elif isinstance(leaf, Tensor) and leaf.ndim == 0 and not leaf.dtype.is_complex:
            tensors.setdefault((leaf.device, leaf.dtype), []).append(place)
        elif np.iscomplexobj(leaf) or not isinstance(leaf, (Number, np.bool_)) or not _put(numbers, place, leaf):
            left_out.add(place)
            leave_out(names[place], leaf)
    _bring_over(numbers, leaves, tensors)
    if left_out:
        kept = [place for place in range(len(names)) if place not in left_out]
        return tuple(names[place] for place in kept), numbers[kept]
    return tuple(names), numbers


def _put(numbers: Numbers, place: int, number: Any) -> bool:
    try:
        numbers[place] = float(number)
    except OverflowError:  # an integer beyond float64
        return False
    return True


def _add_leaves(found: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, Tensor) and value.ndim == 1:
        items = enumerate(value.detach().unbind())
    elif (isinstance(value, Sequence) and not isinstance(value, (str, bytes))) or (
        isinstance(value, np.ndarray) and value.ndim == 1
    ):
        items = enumerate(value)
    else:
        found[name] = value[()] if isinstance(value, np.ndarray) and value.ndim == 0 else value
        return
    for key, each in items:
        _add_leaves(found, f"{name}/{key}" if name else str(key), each)


def _bring_over(
    numbers: Numbers, leaves: list[Any], tensors: dict[tuple[torch.device, torch.dtype], list[int]]
) -> None:
    """Put the tensors' values into their places; a device's are joined in float64 and copied once."""
    by_device: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
    with torch.no_grad():
        for (device, _), places in tensors.items():
            joined = torch.stack([leaves[place] for place in places])
            parts, all_places = by_device.setdefault(device, ([], []))
            parts.append(joined.float() if device.type == "mps" else joined.double())  # MPS has no float64
            all_places += places
        for parts, all_places in by_device.values():
            numbers[all_places] = torch.cat(parts).cpu().numpy()


def needs_float64(values: Numbers) -> NDArray[np.bool_]:
    """Which values float32 would turn into another number, not just round: integers, and what is out of its range.

    Args:
        values: any, infinite ones and NaN too.
    """
    limits = np.finfo(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        changed = values.astype(np.float32) != values
        size = np.abs(values)
        other = (size > limits.max) | (size < limits.tiny) | (values == np.rint(values))
    return np.asarray(changed & other & np.isfinite(values))
