"""Counts of elements in the buckets of TensorBoard's histograms."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, chain, repeat, takewhile
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload, wide_dtype

# Those of ``SummaryWriter``: 1e-12, 1.1 times that, and so on, on either side of 0.
_POSITIVE = list(takewhile(lambda edge: edge < 1e20, accumulate(chain([1e-12], repeat(1.1)), float.__mul__)))
EDGES = [*(-edge for edge in reversed(_POSITIVE)), 0.0, *_POSITIVE]

# Elements counted at a time.
_PIECE = 1 << 22


def count(tensor: Tensor, scale: Tensor | None = None) -> Tensor:
    """Count the finite elements of a tensor over a scale; elements beyond 1e20 are in the outermost buckets.

    Returns:
        The number of elements in each bucket, their sum, the sum of their squares, the largest element, and the
        smallest one with its sign changed (-inf if there are none): of shape (buckets + 4,).
    """
    edges = _edges(tensor.device)
    sums = torch.zeros(len(EDGES) + 1, dtype=edges.dtype, device=edges.device)
    extremes = torch.full_like(sums[:2], -torch.inf)
    for piece in tensor.reshape(-1).split(_PIECE) if tensor.numel() else ():
        values = piece.to(edges.dtype)
        if scale is not None:
            values = values / scale.to(values, non_blocking=True)
        finite = values.isfinite()
        signed = torch.where(finite, torch.stack([values, -values]), -torch.inf)
        extremes = torch.maximum(extremes, signed.amax(1))
        values = torch.where(finite, values, 0.0)
        bucket = torch.bucketize(values, edges, right=True).clamp_(1, len(EDGES) - 1) - 1
        sums.index_add_(0, bucket, finite.to(values.dtype))
        sums[-2:] += torch.stack([values.sum(), values.square().sum()])
    return torch.cat([sums, extremes])


def as_histogram(counted: Sequence[float]) -> dict[str, Any] | None:
    """Convert what :func:`count` returned to arguments of ``SummaryWriter.add_histogram_raw``; None for no elements."""
    *counts, total, squares, largest, smallest = counted
    filled = [bucket for bucket, number in enumerate(counts) if number]
    if not filled:
        return None
    first, end = filled[0], filled[-1] + 1
    return {
        "min": -smallest,
        "max": largest,
        "num": int(sum(counts)),
        "sum": total,
        "sum_squares": squares,
        # A bucket has its right limit alone, so an empty one comes first.
        "bucket_limits": EDGES[first : end + 1],
        "bucket_counts": [0.0, *counts[first:end]],
    }


@functools.lru_cache(8)
def _edges(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return upload(torch.tensor(EDGES, dtype=wide_dtype(device), device="cpu"), device)
