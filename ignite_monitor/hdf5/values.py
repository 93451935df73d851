"""From what Ignite's users log to names and float64 numbers."""

from __future__ import annotations

import math
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
    left_out: list[int] = []
    numbers = np.zeros(len(leaves))
    tensors: dict[tuple[torch.device, torch.dtype, torch.layout], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if type(leaf) is float:
            numbers[index] = leaf
        elif isinstance(leaf, Tensor):
            if leaf.ndim == 0:
                tensors.setdefault((leaf.device, leaf.dtype, leaf.layout), []).append(index)
            else:
                left_out.append(index)
        elif np.iscomplexobj(leaf) or not isinstance(leaf, (Number, np.bool_)) or not _put(numbers, index, leaf):
            left_out.append(index)
    left_out += _bring_over(numbers, leaves, list(tensors.values()))
    if left_out:
        for index in sorted(left_out):
            leave_out(names[index], leaves[index])
        kept = sorted(set(range(len(names))).difference(left_out))
        return tuple(names[index] for index in kept), numbers[kept]
    return tuple(names), numbers


def _put(numbers: Numbers, index: int, number: Any) -> bool:
    """False if there is no such number in float64: integers and decimals can be too large for it."""
    try:
        numbers[index] = value = float(number)
    except (ArithmeticError, TypeError, ValueError):
        return False
    return not math.isinf(value) or bool(value == number)


def _add_leaves(found: dict[str, Any], name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif isinstance(value, Tensor) and value.ndim == 1 and _has_numbers(value):
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


def _has_numbers(tensor: Tensor) -> bool:
    """Whether each of its elements is a real number in memory, which a sparse or quantized tensor's are not."""
    stored = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
    return stored and not tensor.is_complex()


def _bring_over(numbers: Numbers, leaves: list[Any], groups: list[list[int]]) -> list[int]:
    """Put the tensors' values at their indices; a device's are joined in float64 and copied once.

    Args:
        groups: the indices of tensors of one device and dtype.

    Returns:
        The indices of those that have no number.
    """
    by_device: dict[torch.device, tuple[list[Tensor], list[int]]] = {}
    left_out: list[int] = []
    with torch.no_grad():
        while groups:
            indices = groups.pop()
            joined = _joined([leaves[index] for index in indices])
            if joined is not None:
                parts, all_indices = by_device.setdefault(joined.device, ([], []))
                parts.append(joined)
                all_indices += indices
            elif len(indices) > 1:
                groups += [[index] for index in indices]
            else:
                left_out += indices
        for parts, all_indices in by_device.values():
            numbers[all_indices] = torch.cat(parts).cpu().numpy()
    return left_out


def _joined(tensors: list[Tensor]) -> Tensor | None:
    """None if a tensor is of a kind (a subclass, a type of a few bits) whose numbers torch does not give."""
    if not _has_numbers(tensors[0]):
        return None
    try:
        joined = torch.stack(tensors)
        joined = joined.float() if joined.device.type == "mps" else joined.double()  # MPS has no float64
    except (RuntimeError, TypeError):
        return None
    return joined if type(joined) is Tensor else None
