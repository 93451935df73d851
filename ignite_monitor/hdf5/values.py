"""Names and float64 numbers of what Ignite's users log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ignite_monitor.model.devices import wide_dtype

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_DTYPES = frozenset({*_INTEGERS, torch.float16, torch.bfloat16, torch.float32, torch.float64})


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
        if type(leaf) is float:
            numbers[name] = leaf
        elif _is_local_tensor(leaf):
            tensors.setdefault(leaf.device, []).append(name)
            numbers[name] = math.nan
        elif (number := _number(leaf)) is not None:
            numbers[name] = number
        else:
            skip(name, leaf)
    for device, names in tensors.items():
        wide = wide_dtype(device)
        joined = torch.stack([leaves[name].detach().to(wide) for name in names])
        numbers.update(zip(names, joined.tolist(), strict=True))
    return numbers


def _add_leaves(leaves: dict[str, Any], name: str, value: Any) -> None:
    if type(value) is float:
        leaves[name] = value
        return
    if isinstance(value, Mapping):
        items: Any = value.items()
    elif _is_local_tensor(value, dimensions=1):
        items = enumerate(value.detach().unbind())
    elif (isinstance(value, Sequence) and not isinstance(value, (str, bytes))) or (
        isinstance(value, np.ndarray) and value.ndim == 1
    ):
        items = enumerate(value)
    else:
        leaves[name] = value
        return
    for key, item in items:
        _add_leaves(leaves, f"{name}/{key}" if name else str(key), item)


def _is_local_tensor(value: Any, dimensions: int = 0) -> bool:
    is_plain = type(value) in (Tensor, nn.Parameter) and value.ndim == dimensions and value.dtype in _DTYPES
    return is_plain and value.layout is torch.strided and not value.is_meta


def _number(leaf: Any) -> float | None:
    """The leaf as a float; None if it is no number, or too large for one."""
    if isinstance(leaf, (str, bytes, bytearray, np.complexfloating)) or getattr(leaf, "ndim", None):
        return None
    try:
        number = float(leaf)
        return number if not math.isinf(number) or bool(leaf == number) else None
    except Exception:  # noqa: BLE001 - a leaf of any type: it is reported as skipped
        return None
