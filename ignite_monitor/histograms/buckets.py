"""Counts of elements in the buckets of TensorBoard's histograms."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import accumulate, chain, repeat, takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload, wide_dtype

# As ``SummaryWriter`` has them: 1e-12, 1.1 times that, and so on, on either side of 0.
_POSITIVE = list(takewhile(lambda edge: edge < 1e20, accumulate(chain([1e-12], repeat(1.1)), float.__mul__)))
EDGES = [*(-edge for edge in reversed(_POSITIVE)), 0.0, *_POSITIVE]

# So many elements are counted at a time.
_PIECE = 1 << 22


class Counts(NamedTuple):
    """What a histogram is drawn from.

    Attributes:
        sums: how many elements each bucket has, their sum, and that of their squares: of shape (buckets + 2,).
        extremes: the largest element, and the smallest one with its sign changed, minus infinity where there is none.
    """

    sums: Tensor
    extremes: Tensor

    def plus(self, other: Counts) -> Counts:
        """Those of two tensors together."""
        return Counts(self.sums + other.sums, torch.maximum(self.extremes, other.extremes))


def count(tensor: Tensor, scale: Tensor | None = None) -> Counts:
    """Count the finite elements of a tensor; those beyond 1e20 are in the outermost buckets.

    Args:
        tensor: of floating point, without a gradient.
        scale: what the elements are to be divided by, 0-dim; None for 1.
    """
    with torch.inference_mode(False):
        edges = _edges(tensor.device)
        nothing = torch.zeros(len(EDGES) + 1, dtype=edges.dtype, device=edges.device)
        found = Counts(nothing, torch.full((2,), -torch.inf, dtype=edges.dtype, device=edges.device))
    for piece in tensor.reshape(-1).split(_PIECE) if tensor.numel() else ():
        values = piece.to(edges.dtype)
        if scale is not None:
            values = values / scale.to(values, non_blocking=True)
        finite = values.isfinite()
        largest = torch.where(finite, torch.stack([values, -values]), -torch.inf).amax(1)
        values = torch.where(finite, values, 0.0)
        bucket = torch.bucketize(values, edges, right=True).clamp_(1, len(EDGES) - 1) - 1
        sums = torch.zeros_like(nothing).index_add_(0, bucket, finite.to(values.dtype))
        sums[-2:] = torch.stack([values.sum(), values.square().sum()])
        found = found.plus(Counts(sums, largest))
    return found


def as_histogram(sums: Sequence[float], extremes: Sequence[float]) -> dict[str, Any] | None:
    """What ``SummaryWriter.add_histogram_raw`` takes, without the empty buckets at the ends; None of no elements.

    Args:
        sums: as in :class:`Counts`.
        extremes: likewise.
    """
    *counts, total, squares = sums
    filled = [bucket for bucket, number in enumerate(counts) if number]
    if not filled:
        return None
    first, end = filled[0], filled[-1] + 1
    return {
        "min": -extremes[1],
        "max": extremes[0],
        "num": int(sum(counts)),
        "sum": total,
        "sum_squares": squares,
        # A bucket has its right limit alone, so an empty one comes first.
        "bucket_limits": EDGES[first : end + 1],
        "bucket_counts": [0.0, *counts[first:end]],
    }


@functools.lru_cache(8)
def _edges(device: torch.device) -> Tensor:
    return upload(torch.tensor(EDGES, dtype=wide_dtype(device), device="cpu"), device)
