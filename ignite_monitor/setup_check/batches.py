"""Comparison of batches on the host, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.tensors import bits_of


def leaves_of(value: Any) -> list[Any]:
    """Return the parts of a batch; of a tensor its shape and dtype, and a copy of its bits."""
    if isinstance(value, Tensor) and value.is_cpu and has_local_data(value):
        return [(value.shape, value.dtype), bits_of(value).flatten().clone()]
    if isinstance(value, (str, bytes, int, float, type(None))):
        return [value]
    members = value.items() if isinstance(value, Mapping) else value
    if isinstance(value, (Mapping, list, tuple)):
        return [leaf for member in members for leaf in leaves_of(member)]
    return [object()]  # equal to no other


def is_same(first: list[Any], batch: list[Any]) -> bool:
    """Return True if two batches are certainly equal, and hold more than constants, which may be placeholders."""
    tensors = [leaf for leaf in first if isinstance(leaf, Tensor)]
    if len(first) != len(batch) or all(torch.equal(leaf, leaf[:1].expand_as(leaf)) for leaf in tensors):
        return False
    pairs = zip(first, batch, strict=True)
    return all(torch.equal(one, other) if isinstance(one, Tensor) else one == other for one, other in pairs)
