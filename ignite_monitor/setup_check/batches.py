"""Comparison of batches, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.modes import has_local_data


def leaves_of(value: Any, depth: int = 8) -> list[Any]:
    """Return the parts of a batch; of a tensor its shape, dtype and device, and a copy of its bytes by element."""
    if isinstance(value, Tensor) and has_local_data(value) and not value.is_quantized:
        elements = value.detach().resolve_conj().resolve_neg().reshape(value.numel(), 1)
        return [value.shape, value.dtype, value.device, elements.view(torch.uint8).clone()]
    if isinstance(value, (str, bytes, int, float, type(None))):
        return [value]
    if callable(getattr(value, "tobytes", None)):  # arrays of NumPy, images of Pillow
        content = torch.frombuffer(bytearray(value.tobytes() or b"0"), dtype=torch.uint8)
        shape, dtype = str(getattr(value, "shape", "")), str(getattr(value, "dtype", ""))
        return [type(value), shape, dtype, content.shape, content[:, None]]
    members = [*value.items()] if isinstance(value, Mapping) else value
    if not isinstance(members, (list, tuple)) and hasattr(members, "__dict__") and not isinstance(value, type):
        members = [*vars(value).items()]  # an object of a class of the user's
    if depth and isinstance(members, (list, tuple)):
        return [leaf for member in members for leaf in leaves_of(member, depth - 1)]
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
