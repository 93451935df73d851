"""How much weights have moved, which have stopped, and the order statistics that sum many parameters up."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload, wide_dtype

# Rows up to this length are cheap enough to be summed in float64.
_SHORT = 1 << 14
# On the CPU longer ones are summed in float32 in blocks of this length, which keeps the sums right to 1e-6; where the
# norm is not between these, squares may have left float32's range.
_BLOCK = 1024
_SAFE = (1e-9, 1e18)
# The same for float64.
_SAFE_WIDE = (1e-140, 1e150)
_RANKS = torch.tensor([[1, 1, 95, 0, 1], [-1, 0, -1, 0, -1], [2, 2, 100, 1, 1]], device="cpu")


def row_norms(rows: Tensor) -> Tensor:
    """The l2 norm of every row of a real or complex tensor, summed in float64 (float32 on devices without it)."""
    dtype = wide_dtype(rows.device)
    if rows.is_complex():
        rows = torch.view_as_real(rows).flatten(-2)
    if rows.dtype != dtype and (rows.device.type != "cpu" or rows.shape[-1] <= _SHORT):
        return _norm(rows, dtype)
    shape, rows = rows.shape[:-1], rows.reshape(-1, rows.shape[-1])
    if rows.dtype == dtype:
        return _norm_of_any_size(rows).view(shape)
    whole = rows.shape[1] // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(rows[:, :whole].unflatten(1, (-1, _BLOCK)), dim=2)
    norms = _norm(torch.cat([blocks, rows[:, whole:]], dim=1), dtype)
    outside = _outside(norms, *_SAFE)
    if len(outside):
        norms[outside] = _norm(rows[outside], dtype)
    return norms.view(shape)


def row_norms_of_each(tables: Iterable[Tensor]) -> list[Tensor]:
    """The :func:`row_norms` of several tensors."""
    return list(map(row_norms, tables))


def update_ratios(changes: Tensor, weights: Tensor, eps: float) -> Tensor:
    """How much parameters have moved for their size: norms of changes by those of the weights before, plus ``eps``."""
    return changes / (weights + eps)


def count_still(still: Tensor, ratios: Tensor, threshold: float, measured: Tensor) -> Tensor:
    """In how many measured steps in a row each parameter has stood still, one more step included.

    Others than the measured ones keep their count. A ratio of NaN, of weights that are not finite, is no standing
    still.
    """
    return torch.where(measured, torch.where(ratios <= threshold, still + 1, 0), still)


def order_statistics(values: Tensor) -> Tensor:
    """Median, 95th percentile, minimum and maximum, along the last dimension, of what is not NaN; NaN of nothing.

    The median of an even number of values is the mean of the two in the middle; the percentile is the nearest-rank one,
    the smallest value that at least 95 % of the values do not exceed (rank ceil(0.95 n)).
    """
    if not values.shape[-1]:
        return values.new_full((*values.shape[:-1], 4), torch.nan)
    # The two in the middle, the percentile, the first and the last are at (count * factor + summand) // divisor, from 0
    # on. Sorting puts NaN last, which is all there is where the count is 0.
    factors, summands, divisors = upload(_RANKS, values.device).unbind()
    count = (values == values).sum(-1, keepdim=True)
    at = torch.addcmul(summands, count, factors).floor_divide_(divisors).clamp_(min=0)
    picked = values.sort(-1).values.gather(-1, at)
    return torch.cat([picked[..., :2].mean(-1, keepdim=True), picked[..., 2:]], -1)


def _norm_of_any_size(rows: Tensor) -> Tensor:
    """Norms of rows whose squares may not fit their dtype, which is the widest."""
    if rows.device.type != "cpu":
        return _scaled_norm(rows)
    norms = _norm(rows, rows.dtype)
    outside = _outside(norms, *_SAFE_WIDE)
    if len(outside):
        norms[outside] = _scaled_norm(rows[outside])
    return norms


def _scaled_norm(rows: Tensor) -> Tensor:
    if not rows.shape[1]:
        return _norm(rows, rows.dtype)
    largest = rows.abs().amax(-1, keepdim=True)
    unit = torch.where((largest > 0) & largest.isfinite(), largest, 1.0)
    return unit.squeeze(-1) * _norm(rows / unit, rows.dtype)


def _outside(norms: Tensor, least: float, most: float) -> Tensor:
    return ((norms <= least) | ~(norms < most)).nonzero().squeeze(1)


def _norm(values: Tensor, dtype: torch.dtype) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=dtype)
    return norms
