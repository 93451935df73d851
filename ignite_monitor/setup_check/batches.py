"""Comparison of batches, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.tensors import bits_of


def leaves_of(value: Any) -> list[Any]:
    """Return the parts of a batch; of a tensor its shape, dtype and device, and a copy of its bits."""
    if isinstance(value, Tensor) and has_local_data(value) and not value.is_quantized:
        return [(value.shape, value.dtype, value.device), bits_of(value).flatten().clone()]
    if isinstance(value, (str, bytes, int, float, type(None))):
        return [value]
    members = value.items() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, list, tuple)):
        return [leaf for member in members for leaf in leaves_of(member)]
    return [object()]  # equal to no other


def is_same(first: list[Any], batch: list[Any]) -> Tensor | bool:
    """Return True if two batches are certainly equal, and hold more than constants, which may be placeholders."""
    equal, varies = [], []
    for one, other in zip(first, batch, strict=False):
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            equal.append((one == other).all())
            varies.append((one != one[:1]).any())
        elif one != other:
            return False
    if len(first) != len(batch) or len({flag.device for flag in equal}) != 1:
        return False
    return torch.stack([*equal, torch.stack(varies).any()]).all()
