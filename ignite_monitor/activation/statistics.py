"""Built-in statistics of tensors, and their merging over micro-batches and ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.monitor import transfer
from ignite_monitor.monitor.transfer import NamedValues

STATISTICS = ("mean", "std", "l2_norm", "max_abs", "max_over_rms", "dead_fraction", "nonfinite_count")

# Their elements are not real numbers.
WITHOUT_STATISTICS = {torch.complex32, torch.complex64, torch.complex128, getattr(torch, "float4_e2m1fn_x2", None)}

# Elements whose differences from the mean are held at a time: on the CPU as many as its cache holds.
PIECE = 2**18
_PIECE_ON_ACCELERATOR = 2**24


class Moments(NamedTuple):
    """Columns of a table of tensors; all but the last one add up over parts and ranks."""

    elements: Tensor
    vectors: Tensor  # number of vectors along the last dimension
    parts: Tensor
    norms: Tensor  # sum of the vectors' l2 norms
    nonfinite: Tensor  # number of non-finite elements
    squares: Tensor  # sum of squared differences from the mean of the part
    total: Tensor  # sum of all elements
    squared_means: Tensor  # sum over parts of their elements times their squared mean
    units: Tensor
    dead: Tensor
    largest: Tensor


SUMMED = Moments._fields.index("units")  # columns of :func:`table_of` that are summed up
_ADDED = Moments._fields.index("largest")


class Part(NamedTuple):
    """Sums of tensors of one shape."""

    names: list[str]
    elements: int
    vectors: int
    sums: list[Tensor]  # norms, nonfinite, squares about the pivot, total, and the pivot: each of shape (tensors,)
    largest: Tensor  # largest absolute value of each unit: of shape (tensors, units)


def partial_sums(names: list[str], tensors: Tensor, unit: int | None) -> Part:
    """Sum up in float64 (float32 on devices without it).

    Args:
        names: names of the tensors.
        tensors: non-empty tensors of shape (tensors, ...), without a graph.
        unit: the dimension whose indices are units; None for a single unit.
    """
    wide = wide_dtype(tensors.device)
    tensors = tensors if tensors.ndim > 1 else tensors.unsqueeze(1)  # single numbers
    if not tensors.is_floating_point():
        tensors = tensors.to(wide)
    elif tensors.itemsize == 1 or (tensors.is_cpu and tensors.itemsize == 2):
        tensors = tensors.float()
    vectors = tensors.reshape(len(tensors), -1, tensors.shape[-1])
    most = PIECE if tensors.is_cpu else _PIECE_ON_ACCELERATOR
    pieces = [vectors] if vectors.numel() <= most else vectors.split(max(most // vectors[:, 0].numel(), 1), 1)
    elements = vectors[0].numel()
    total = _added(piece.sum((1, 2), dtype=wide) for piece in pieces)
    norms = _added(torch.linalg.vector_norm(piece, dim=2, dtype=wide).sum(1) for piece in pieces)
    if transfer.is_cpu(total) and math.isfinite(total.sum()):
        nonfinite = torch.zeros_like(total)
    else:
        differing = ((piece - piece).ne(0.0) for piece in pieces)  # fewer operations than isfinite()
        nonfinite = _added(item.sum((1, 2), dtype=wide) for item in differing)
    # Differences from the mean keep their digits in the tensors' dtype, in which the pivot is exact.
    pivot = (total / elements).to(torch.promote_types(tensors.dtype, torch.float32))
    differences = (piece - pivot.view(-1, 1, 1) for piece in pieces)
    squares = _added(torch.linalg.vector_norm(item, dim=(1, 2), dtype=wide).square_() for item in differences)
    sums = [norms, nonfinite, squares, total, pivot]
    return Part(names, elements, vectors.shape[1], sums, _largest(tensors, unit))


def table_of(parts: Sequence[Part]) -> NamedValues:
    """Table of the parts: the first :data:`SUMMED` columns of :class:`Moments`, then the largest values of units."""
    device = parts[0].largest.device
    columns = zip(*(part.sums for part in parts), strict=True)
    norms, nonfinite, squares, total, pivot = (torch.cat([move(it, device) for it in column]) for column in columns)
    sizes = [[part.elements, part.vectors, 1] for part in parts for _ in part.names]
    counts = move(torch.tensor(sizes, dtype=total.dtype, device="cpu"), device)
    mean = total / counts[:, 0]
    squares = squares.addcmul_(counts[:, 0], (mean - pivot).square_(), value=-1).clamp_(min=0.0)
    sums = torch.stack([norms, nonfinite, squares, total, total * mean], 1)
    largest = torch.cat([move(part.largest, device) for part in parts])
    return NamedValues([name for part in parts for name in part.names], torch.cat([counts, sums, largest], 1))


def _added(parts: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, parts)


def _largest(tensors: Tensor, unit: int | None) -> Tensor:
    rest = [dim for dim in range(1, tensors.ndim) if dim != unit]
    if not rest:
        return tensors.abs()
    if tensors.is_cpu:  # where the norm takes fifty times as long
        largest = torch.maximum(tensors.amax(rest), tensors.amin(rest).neg_())
    else:
        largest = torch.linalg.vector_norm(tensors, math.inf, rest)
    return largest if largest.ndim > 1 else largest.unsqueeze(1)


def grouped(rows: Tensor, owners: Tensor, count: int, summed: int) -> Tensor:
    """Sums of the first columns, and maxima of the others, of rows with the same owner, an index below the count."""
    sums, others = rows[:, :summed], rows[:, summed:]
    maxima = others.new_full((count, others.shape[1]), -math.inf)
    maxima.scatter_reduce_(0, owners.unsqueeze(1).expand_as(others), others, "amax")
    return torch.cat([sums.new_zeros(count, summed).index_add_(0, owners, sums), maxima], 1)


def merged(parts: Sequence[NamedValues], summed: int) -> NamedValues:
    """Concatenate parts, and merge the rows of the same name as :func:`grouped`."""
    device = parts[0].values.device
    names = [name for names, _ in parts for name in names]
    rows = torch.cat([move(rows, device) for _, rows in parts])
    index = {name: i for i, name in enumerate(dict.fromkeys(names))}
    if len(index) < len(names):
        owners = torch.tensor([index[name] for name in names], device="cpu")
        rows = grouped(rows, move(owners, device), len(index), summed)
    return NamedValues([*index], rows)


def with_units(sums: Tensor, largest: Tensor, units: int) -> Tensor:
    """Table with the columns of :class:`Moments`, from those of :func:`table_of`; ``units`` is 0 if there are none."""
    top = largest.amax(1)
    dead = (largest == 0).sum(1).to(top.dtype) if units else torch.zeros_like(top)
    return torch.cat([sums, torch.stack([torch.full_like(top, units), dead, top], 1)], 1)


def statistics(parts: Sequence[NamedValues]) -> NamedValues:
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
    NaN. So is the standard deviation of several parts if it is below about 1e-4 of the mean (in float32 2e-2): rounding
    errors would prevail.

    Args:
        parts: tables of :func:`with_units`, over all ranks; a name may be in several.
    """
    names, rows = merged(parts, _ADDED)
    sums = Moments._make(rows.unbind(1))
    mean, info = sums.total / sums.elements, torch.finfo(rows.dtype)
    between_parts = (sums.squared_means - sums.total * mean).clamp_(min=0.0)  # exactly 0 for one part
    squares = sums.squares + between_parts
    is_exact = (sums.parts == 1) | (squares >= info.eps**0.5 * sums.squared_means)
    # The squares of larger elements, and of the differences of smaller ones, leave the dtype's range.
    smallest = info.tiny**0.5 / info.eps
    in_range = torch.nn.functional.hardshrink(sums.largest, smallest).clamp_(max=1 / smallest) == sums.largest
    norms, squares = torch.where(in_range, torch.stack([sums.norms, squares]), math.nan)
    values = [
        mean,
        torch.where(is_exact, squares / (sums.elements - 1), math.nan).sqrt(),
        norms / sums.vectors,
        sums.largest,
        sums.largest / (squares / sums.elements + mean.square()).sqrt(),
        sums.dead / (sums.units * (sums.nonfinite == 0)),
        sums.nonfinite / (sums.elements > 0),
    ]
    return NamedValues(names, torch.stack(values, 1).nan_to_num_(math.nan, math.nan, math.nan))
