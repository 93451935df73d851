"""Hashes of batches on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.hashes import hashes_of
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.tensors import bits_of


def hash_batch(batch: Any) -> Tensor | None:
    """Return None for a batch with objects of unknown equality, and for constants, which may be placeholders."""
    leaves = _leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cpu and has_local_data(leaf)]
    others = [leaf for leaf in leaves if isinstance(leaf, (str, bytes, int, float, type(None)))]
    bits = [bits_of(tensor).flatten() for tensor in tensors]
    if len(tensors) + len(others) < len(leaves) or all(torch.equal(item, item[:1].expand_as(item)) for item in bits):
        return None
    return hashes_of({str(i): leaf for i, leaf in enumerate(leaves)}, torch.device("cpu"))


def _leaves(value: Any) -> list[Any]:
    members = tuple(value.items()) if isinstance(value, Mapping) else value
    return [leaf for item in members for leaf in _leaves(item)] if isinstance(members, (list, tuple)) else [value]
