"""Norms of sparse gradients, without a synchronisation."""

from __future__ import annotations

import torch
from torch import Tensor

from ignite_monitor.model._torch import sparse_parts


def summed_values(sparse: Tensor) -> Tensor:
    """The values of a sparse COO tensor, those at the same place summed.

    ``coalesce()`` does it too, but waits for the device, since the size of its result depends on the indices. This
    result keeps the size that is there, with zeros where several values have become one.

    Returns:
        A dense tensor, of the size of its values, with the same norm as ``sparse``.
    """
    indices, values = sparse_parts(sparse)
    if sparse.is_coalesced() or not len(values):
        return values
    places = torch.zeros_like(indices[0])
    for size, index in zip(sparse.shape, indices, strict=False):
        places = places * size + index
    ordered, order = places.sort()
    first = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.zeros_like(values).index_add_(0, first.cumsum(0), values[order])
