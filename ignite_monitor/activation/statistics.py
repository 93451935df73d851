"""Built-in statistics of tensors, and their merging over micro-batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import move, wide_dtype
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


class Moments(NamedTuple):
    """Columns of a table of :func:`moments`, with a row for each tensor."""

    elements: Tensor
    vectors: Tensor  # number of vectors along the last dimension
    norms: Tensor  # sum of the vectors' l2 norms
    nonfinite: Tensor  # number of non-finite elements
    squares: Tensor  # sum of squared differences from the mean
    mean: Tensor
    largest: Tensor  # largest absolute value of each unit: of shape (tensors, units)


_SUMMED = Moments._fields.index("mean")  # columns that add up
_UNITS = Moments._fields.index("largest")


def columns(rows: Tensor) -> Moments:
    """Views of the columns of a table."""
    return Moments._make([*rows[:, :_UNITS].unbind(1), rows[:, _UNITS:]])


def moments(tensors: Tensor, unit: int | None) -> Tensor:
    """Compute moments in float64 (float32 on devices without it), on the CPU from vectors' sums and norms in float32.

    Args:
        tensors: non-empty tensors of shape (tensors, ...), without a graph.
        unit: the dimension whose indices are units; None for a single unit.

    Returns:
        A table with the :func:`columns` of :class:`Moments`.
    """
    tensors = tensors if tensors.ndim > 1 else tensors.unsqueeze(1)  # single numbers
    if tensors.itemsize == 1 or (tensors.is_cpu and tensors.itemsize == 2 and tensors.is_floating_point()):
        tensors = tensors.float()
    # Reading whether results are exact synchronizes, but for the CPU.
    quick = transfer.is_cpu(tensors) and tensors.is_floating_point() and tensors.shape[-1] <= _LONGEST_VECTOR
    sums = _in_one_pass(tensors) if quick else _in_two_passes(tensors)
    return torch.cat([sums, _largest(tensors, unit)], 1)


def _in_one_pass(tensors: Tensor) -> Tensor:
    """Sums of tensors on the CPU, where ``var_mean`` and ``isfinite`` take 10 times as long as sums and norms."""
    elements, vectors = tensors[0].numel(), tensors[0].numel() // tensors.shape[-1]
    totals = tensors.sum(-1).reshape(-1, vectors).sum(1, dtype=torch.float64)
    norms = torch.linalg.vector_norm(tensors, dim=-1).reshape(-1, vectors)
    lengths, whole = norms.sum(1, dtype=torch.float64), torch.linalg.vector_norm(norms, dim=1, dtype=torch.float64)
    rows = []
    for i, (total, length, norm) in enumerate(zip(totals.tolist(), lengths.tolist(), whole.tolist(), strict=True)):
        mean, squares = total / elements, norm * norm
        centred = squares - mean * total
        row = [elements, vectors, length, 0.0, centred, mean]
        is_exact = centred > _SHARED * max(squares, _SMALLEST_SQUARES)  # False if one of them is NaN
        rows.append(row if is_exact else _in_two_passes(tensors[i : i + 1])[0].tolist())
    return torch.tensor(rows, dtype=torch.float64, device="cpu")


def _in_two_passes(tensors: Tensor) -> Tensor:
    parts = [_exact(piece) for piece in _pieces(tensors)]
    if len(parts) == 1:
        return parts[0]
    owners = torch.arange(len(parts) * len(tensors), device=tensors.device) % len(tensors)
    return merged(torch.cat(parts), owners, len(tensors))


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
    if not transfer.is_cpu(mean) or not mean.isfinite().all():
        nonfinite = flat.isfinite().logical_not_().sum(1).to(mean.dtype)
    centred = torch.linalg.vector_norm(flat - mean.unsqueeze(1), dim=1).square_()
    counts = (torch.full_like(mean, rows.shape[1]) for rows in (flat, norms))
    return torch.stack([*counts, norms.sum(1), nonfinite, centred, mean], 1)


def _largest(tensors: Tensor, unit: int | None) -> Tensor:
    rest = [dim for dim in range(1, tensors.ndim) if dim != unit]
    if not rest:
        return tensors.abs()
    # vector_norm with ord=inf takes fifty times as long on the CPU.
    largest = torch.maximum(tensors.amax(rest), tensors.amin(rest).neg_())
    return largest if largest.ndim > 1 else largest.unsqueeze(1)


def merged(rows: Tensor, owners: Tensor, count: int) -> Tensor:
    """Merge rows of :func:`moments` with the same owner, an index below the count, by Chan's formula."""
    result = grouped(rows, owners, count, _SUMMED)
    parts, whole = columns(rows), columns(result)
    # Differences from the largest mean, so that equal means stay as they are.
    shifts = torch.zeros_like(whole.mean).index_add_(0, owners, parts.elements * (parts.mean - whole.mean[owners]))
    whole.mean.add_(shifts / whole.elements)
    whole.squares.index_add_(0, owners, parts.elements * (parts.mean - whole.mean[owners]).square())
    return result


def grouped(rows: Tensor, owners: Tensor, count: int, summed: int) -> Tensor:
    """Sums of the first columns, and maxima of the others, of rows with the same owner, an index below the count."""
    sums, others = rows[:, :summed], rows[:, summed:]
    maxima = others.new_full((count, others.shape[1]), -math.inf)
    maxima.scatter_reduce_(0, owners.unsqueeze(1).expand_as(others), others, "amax")
    return torch.cat([sums.new_zeros(count, summed).index_add_(0, owners, sums), maxima], 1)


def merged_by_name(parts: Sequence[NamedValues], merge: Callable[[Tensor, Tensor, int], Tensor]) -> NamedValues:
    """Concatenate parts, and merge the rows of the same name."""
    device = parts[0].values.device
    names = [name for names, _ in parts for name in names]
    rows = torch.cat([move(rows, device) for _, rows in parts])
    index = {name: i for i, name in enumerate(dict.fromkeys(names))}
    if len(index) < len(names):
        owners = torch.tensor([index[name] for name in names], device="cpu")
        rows = merge(rows, move(owners, device), len(index))
    return NamedValues([*index], rows)


class Totals(NamedTuple):
    """Columns of a table of tensors over all parts and ranks."""

    elements: Tensor
    vectors: Tensor
    norms: Tensor
    nonfinite: Tensor
    squares: Tensor
    total: Tensor  # sum of all elements
    of_means: Tensor  # sum of the squared means, times the elements, of the parts
    units: Tensor
    dead: Tensor
    largest: Tensor
    highest_mean: Tensor
    lowest_mean: Tensor  # with its sign changed


ADDED = Totals._fields.index("largest")  # columns that add up


def over_ranks(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Split moments into columns to add up over ranks, as :class:`Totals` begins, and to take the maximum of."""
    mean, largest = columns(rows).mean.unsqueeze(1), columns(rows).largest
    total = columns(rows).elements.unsqueeze(1) * mean
    return torch.cat([rows[:, :_SUMMED], total, total * mean], 1), torch.cat([mean, -mean, largest], 1)


def with_units(sums: Tensor, maxima: Tensor, units: int) -> Tensor:
    """Table with the columns of :class:`Totals`, from those of :func:`over_ranks`."""
    extremes, largest = maxima.split([2, maxima.shape[1] - 2], 1)
    top = largest.amax(1)
    dead = (largest == 0).sum(1).to(top.dtype) if units else torch.zeros_like(top)
    return torch.cat([sums, torch.stack([torch.full_like(top, units), dead, top], 1), extremes], 1)


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
    a statistic is not defined (the standard deviation of one element), or squares leave the range of the dtype, it is
    NaN. So is the standard deviation of parts with different means if it is below about 1e-4 of the mean (in float32
    2e-2): rounding errors would prevail.

    Args:
        rows: of :func:`with_units`, added up over ranks.
    """
    elements, vectors, norms, nonfinite, squares, total, of_means, units, dead, largest, high, low = Totals._make(
        rows.unbind(1)
    )
    mean, info = total / elements, torch.finfo(rows.dtype)
    has_one_mean = high + low == 0  # lowest means have their sign changed
    # Within the parts and between them.
    centred = squares + (of_means - total * mean).clamp_(min=0.0).masked_fill_(has_one_mean, 0.0)
    is_exact = has_one_mean | (centred > info.eps**0.5 * of_means)
    # The squares of larger elements, and of the differences of smaller ones, leave the dtype's range.
    smallest = info.tiny**0.5 / info.eps
    in_range = torch.nn.functional.hardshrink(largest, smallest).clamp_(max=1 / smallest) == largest
    norms, centred = torch.where(in_range, torch.stack([norms, centred]), math.nan)
    values = [
        mean,
        torch.where(is_exact, centred / (elements - 1), math.nan).sqrt(),
        norms / vectors,
        largest,
        largest / (centred / elements + mean.square()).sqrt(),
    ]
    values += [dead / (units * (nonfinite == 0)), nonfinite / (elements > 0)]
    return torch.stack(values, 1).nan_to_num_(math.nan, math.nan, math.nan)


def power_sums(tensor: Tensor) -> Tensor:
    """Number of elements, and sums of their first four powers, in float64 (float32 on devices without it)."""
    if tensor.dtype in WITHOUT_STATISTICS:
        return torch.full((5,), math.nan, dtype=wide_dtype(tensor.device), device=tensor.device)
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

    Of a central moment that is at least the root of a rounding error of the mean fourth power half of the digits are
    known: eight in float64, four in float32. The mean is then less than about 100 or 8 standard deviations.

    Args:
        rows: :func:`power_sums`, added up over passes and ranks.
    """
    mean, second, third, fourth = (rows[:, 1:] / rows[:, :1]).unbind(1)
    variance = second - mean.square()
    central = fourth - 4 * mean * third + 6 * mean.square() * second - 3 * mean.square().square()
    info = torch.finfo(rows.dtype)
    exact = (central > info.eps**0.5 * fourth) & (fourth > info.tiny / info.eps)
    return torch.where(exact, central / variance.square(), math.nan)
