"""Built-in statistics of tensors, and their merging over micro-batches and ranks."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import move, upload, wide_dtype
from ignite_monitor.monitor import transfer
from ignite_monitor.monitor.transfer import NamedValues

STATISTICS = ("mean", "std", "l2_norm", "max_abs", "max_over_rms", "dead_fraction", "nonfinite_count")

# Their elements are not real numbers.
WITHOUT_STATISTICS = {torch.complex32, torch.complex64, torch.complex128, getattr(torch, "float4_e2m1fn_x2", None)}

# Elements converted to float64 at a time: on the CPU as many as its cache holds.
PIECE = 2**18
_PIECE_ON_ACCELERATOR = 2**24

# On the CPU the norms of vectors of up to so many elements are computed in float32: their error is 2e-7.
_LONGEST_VECTOR = 4096

# Of a larger share of the sum of squares, their difference from the mean's has six digits in float32.
_SHARED = 0.1
_SMALLEST_SQUARES = 1e-30  # smaller ones may be 0 in float32

# Of the mean fourth power, central moments above so many rounding errors have six digits: in float64 the mean is then
# less than about 100 standard deviations.
_ROUNDING_ERRORS = 1e8


class Moments(NamedTuple):
    """Moments of some tensors, row by row; on the CPU the sums are lists, which cost less than small tensors."""

    sums: Tensor | list[list[float]]  # the first six columns of :func:`rows_of_moments`
    largest: Tensor  # the other columns


def moments(tensors: Tensor, unit: int | None) -> Moments:
    """Compute moments in float64 (float32 on devices without it), on the CPU from vectors' sums and norms in float32.

    Args:
        tensors: non-empty tensors of shape (tensors, ...), without a graph.
        unit: the dimension whose indices are units; None for a single unit.
    """
    tensors = tensors if tensors.ndim > 1 else tensors.unsqueeze(1)  # single numbers
    if tensors.itemsize == 1 or (tensors.is_cpu and tensors.itemsize == 2 and tensors.is_floating_point()):
        tensors = tensors.float()
    # Reading whether results are exact synchronizes, but for the CPU.
    quick = transfer.is_on_host(tensors) and tensors.is_floating_point() and tensors.shape[-1] <= _LONGEST_VECTOR
    sums = _in_one_pass(tensors) if quick else _in_two_passes(tensors)
    if isinstance(sums, Tensor) and transfer.is_on_host(sums):
        sums = sums.tolist()
    return Moments(sums, _largest(tensors, unit))


def rows_of_moments(parts: Sequence[Moments]) -> Tensor:
    """Concatenate moments of tensors with the same number of units on one device.

    Returns:
        Number of elements, number of vectors along the last dimension, sum of the vectors' l2 norms, number of
        non-finite elements, mean, sum of squared differences from the mean, and the largest absolute value of each
        unit: of shape (tensors, 6 + units).
    """
    lists = [row for part in parts if isinstance(part.sums, list) for row in part.sums]
    sums = [part.sums for part in parts if isinstance(part.sums, Tensor)]
    rows = torch.tensor(lists, dtype=torch.float64, device="cpu") if lists else torch.cat(sums)
    return torch.cat([rows, torch.cat([part.largest for part in parts])], 1)


def _in_one_pass(tensors: Tensor) -> list[list[float]]:
    """Sums of tensors on the CPU, where ``var_mean`` and ``isfinite`` take 10 times as long as sums and norms."""
    elements, vectors = tensors[0].numel(), tensors[0].numel() // tensors.shape[-1]
    totals = tensors.sum(-1).reshape(-1, vectors).sum(1, dtype=torch.float64)
    norms = torch.linalg.vector_norm(tensors, dim=-1).reshape(-1, vectors)
    lengths, whole = norms.sum(1, dtype=torch.float64), torch.linalg.vector_norm(norms, dim=1, dtype=torch.float64)
    rows = []
    for i, (total, length, norm) in enumerate(zip(totals.tolist(), lengths.tolist(), whole.tolist(), strict=True)):
        mean, squares = total / elements, norm * norm
        centred = squares - mean * total
        row = [elements, vectors, length, 0.0, mean, centred]
        is_exact = centred > _SHARED * max(squares, _SMALLEST_SQUARES)  # False if one of them is NaN
        rows.append(row if is_exact else _in_two_passes(tensors[i : i + 1])[0].tolist())
    return rows


def _in_two_passes(tensors: Tensor) -> Tensor:
    return functools.reduce(merged, map(_exact, _pieces(tensors)))


def _pieces(tensors: Tensor, dim: int = 1) -> Iterator[Tensor]:
    """Views of at most so many elements, undivided in the first and the last dimension."""
    most = PIECE if tensors.is_cpu else _PIECE_ON_ACCELERATOR
    if tensors.numel() <= most or dim >= tensors.ndim - 1:
        yield tensors
        return
    for part in tensors.split(max(most * tensors.shape[dim] // tensors.numel(), 1), dim):
        yield from _pieces(part, dim + 1)


def _exact(tensors: Tensor) -> Tensor:
    wide = tensors.to(wide_dtype(tensors.device))
    flat, norms = wide.flatten(1), torch.linalg.vector_norm(wide, dim=-1).reshape(len(wide), -1)
    mean = flat.mean(1)
    nonfinite = torch.zeros_like(mean)
    if not transfer.is_on_host(mean) or not mean.isfinite().all():
        nonfinite = flat.isfinite().logical_not_().sum(1).to(mean.dtype)
    centred = torch.linalg.vector_norm(flat - mean.unsqueeze(1), dim=1).square_()
    counts = (torch.full_like(mean, rows.shape[1]) for rows in (flat, norms))
    return torch.stack([*counts, norms.sum(1), nonfinite, mean, centred], 1)


def _largest(tensors: Tensor, unit: int | None) -> Tensor:
    rest = [dim for dim in range(1, tensors.ndim) if dim != unit]
    if not rest:
        return tensors.abs()
    # vector_norm with ord=inf takes fifty times as long on the CPU.
    largest = torch.maximum(tensors.amax(rest), tensors.amin(rest).neg_())
    return largest if largest.ndim > 1 else largest.unsqueeze(1)


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Merge moments of the same tensors, of other elements, by Chan's formula."""
    rows = one + other
    difference, share = other[:, 4] - one[:, 4], other[:, 0] / rows[:, 0]
    rows[:, 4] = one[:, 4] + difference * share
    rows[:, 5] += difference.square() * one[:, 0] * share
    rows[:, 6:] = torch.maximum(one[:, 6:], other[:, 6:])
    return rows


def merged_by_name(parts: Sequence[NamedValues], merge: Callable[[Tensor, Tensor], Tensor]) -> NamedValues:
    """Concatenate parts, and merge the rows of the same name."""
    device = parts[0].values.device
    names = [name for names, _ in parts for name in names]
    together = NamedValues(names, torch.cat([move(rows, device) for _, rows in parts]))
    if len(set(names)) == len(names):
        return together
    turns: list[dict[str, int]] = []  # name -> place of its first row, of its second one, ...
    counts = Counter[str]()
    for place, name in enumerate(names):
        if counts[name] == len(turns):
            turns.append({})
        turns[counts[name]][name] = place
        counts[name] += 1
    first, *others = turns
    place_of = {name: place for place, name in enumerate(first)}
    result = together.rows([*first.values()])
    for turn in others:
        into = upload(torch.tensor([place_of[name] for name in turn], device="cpu"), device)
        result.values[into] = merge(result.values[into], together.rows([*turn.values()]).values)
    return result


def as_sums(rows: Tensor) -> Tensor:
    """Moments with sums for means, and squared sums over numbers of elements: of shape (tensors, 7)."""
    elements, total = rows[:, 0], rows[:, 0] * rows[:, 4]
    columns = [*rows[:, :4].unbind(1), total, rows[:, 5], total * (total / elements)]
    return torch.stack(columns, 1)


def with_units(sums: Tensor, largest: Tensor, units: int) -> Tensor:
    """Sums, number of units, number of dead ones, and the largest absolute value: of shape (tensors, 10)."""
    top = largest.amax(1)
    dead = (largest == 0).sum(1).to(top.dtype) if units else torch.zeros_like(top)
    return torch.cat([sums, torch.stack([torch.full_like(top, units), dead, top], 1)], 1)


def added(one: Tensor, other: Tensor) -> Tensor:
    """Merge rows of :func:`with_units` of the same tensors."""
    return torch.cat([one[:, :9] + other[:, :9], torch.maximum(one[:, 9:], other[:, 9:])], 1)


def statistics(rows: Tensor) -> Tensor:
    r"""Statistics of tensors from the sums of their parts.

    With n elements :math:`x_i` and m vectors :math:`v_j` along the last dimension:

    .. math::
        \bar x = \frac{1}{n} \sum_i x_i, \qquad
        s = \sqrt{\frac{\sum_i (x_i - \bar x)^2}{n - 1}}, \qquad
        \frac{1}{m} \sum_j \lVert v_j \rVert_2, \qquad
        \max_i |x_i|, \qquad
        \frac{\max_i |x_i|}{\sqrt{\frac{1}{n} \sum_i x_i^2}},

    the fraction of units that are 0 throughout, and the number of non-finite elements. Where there are any, and where
    a statistic is not defined (the standard deviation of one element), it is NaN.

    Args:
        rows: of :func:`with_units`, added up over ranks.
    """
    elements, vectors, norms, nonfinite, total, squares, of_means, units, dead, largest = rows.unbind(1)
    mean = total / elements
    # Within the parts and between them; the second is exactly 0 for a single part.
    centred = (squares + (of_means - total * mean)).clamp(min=0.0)
    over_rms = largest / (centred / elements + mean.square()).sqrt()
    values = [mean, (centred / (elements - 1)).sqrt(), norms / vectors, largest, over_rms]
    values += [dead / (units * (nonfinite == 0)), nonfinite / (elements > 0)]
    return torch.stack(values, 1).nan_to_num_(math.nan, math.nan, math.nan)


def power_sums(tensor: Tensor) -> Tensor:
    """Number of elements, and sums of their first four powers, in float64 (float32 on devices without it)."""
    sums = []
    for piece in tensor.flatten().split(PIECE if tensor.is_cpu else _PIECE_ON_ACCELERATOR):
        wide = piece.to(wide_dtype(piece.device))
        square = wide.square()
        elements = torch.full_like(wide[0], len(wide))
        powers = [elements, wide.sum(), torch.dot(wide, wide), torch.dot(square, wide), torch.dot(square, square)]
        sums.append(torch.stack(powers))
    return sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)


def kurtosis(rows: Tensor) -> Tensor:
    r"""Kurtosis :math:`\frac{1}{n} \sum_i (x_i - \bar x)^4 / (\frac{1}{n} \sum_i (x_i - \bar x)^2)^2`; NaN if inexact.

    Args:
        rows: :func:`power_sums`, added up over passes and ranks.
    """
    mean, second, third, fourth = (rows[:, 1:] / rows[:, :1]).unbind(1)
    variance = second - mean.square()
    central = fourth - 4 * mean * third + 6 * mean.square() * second - 3 * mean.square().square()
    exact = central > _ROUNDING_ERRORS * torch.finfo(rows.dtype).eps * fourth
    return torch.where(exact, central / variance.square(), math.nan)
