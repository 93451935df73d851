"""Names and float64 numbers of what Ignite's users log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.devices import wide_dtype


def flatten(named: Mapping[Any, Any], skip: Callable[[str, Any], None]) -> dict[str, float]:
    """Names and values of all numbers in a mapping, named as by Ignite's loggers: "a/b", "a/0".

    All tensors of a device are copied to the host in one transfer.

    Args:
        named: name -> number, 0-dim or 1-dim tensor, or a mapping, list or tuple of such.
        skip: called with the name and value of each leaf that is no number.
    """
    leaves: dict[str, Any] = {}
    _add_leaves(leaves, "", named)
    numbers: dict[str, float] = {}
    tensors: dict[torch.device, list[str]] = {}
    for name, leaf in leaves.items():
        if isinstance(leaf, (float, Real)):  # float first: it is the fastest
            numbers[name] = float(leaf)
        elif _is_local_tensor(leaf, 0):
            tensors.setdefault(leaf.device, []).append(name)
            numbers[name] = math.nan  # keeps its place
        else:
            skip(name, leaf)
    for device, names in tensors.items():
        joined = torch.stack([leaves[name].detach().to(wide_dtype(device)) for name in names])
        numbers.update(zip(names, joined.tolist(), strict=True))
    return numbers


def _add_leaves(leaves: dict[str, Any], name: str, value: Any) -> None:
    items: Any = None
    if isinstance(value, (float, Real, str, bytes)):
        pass
    elif isinstance(value, Mapping):
        items = value.items()
    elif _is_local_tensor(value, 1):
        items = enumerate(value.detach().unbind())
    elif isinstance(value, Sequence):
        items = enumerate(value)
    if items is None:
        leaves[name] = value
        return
    for key, item in items:
        _add_leaves(leaves, f"{name}/{key}" if name else str(key), item)


def _is_local_tensor(value: Any, dimensions: int) -> bool:
    """True for a tensor of real numbers that is read without other ranks."""
    is_plain = type(value) in (Tensor, nn.Parameter) and value.ndim == dimensions and not value.is_meta
    return is_plain and value.layout is torch.strided and not value.is_complex()
