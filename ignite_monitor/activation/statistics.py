"""Built-in statistics of tensors, and their merging over micro-batches and ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import wide_dtype

STATISTICS = ("mean", "std", "l2_norm", "max_abs", "dead_fraction", "nonfinite_count")

# Their elements are not real numbers.
WITHOUT_STATISTICS = {torch.complex32, torch.complex64, torch.complex128, getattr(torch, "float4_e2m1fn_x2", None)}

# Elements converted to float64 at a time: a copy of so many stays in the processor's cache.
PIECE = 2**18


class Moments(NamedTuple):
    """Moments of several tensors of one shape, or of several parts of each.

    Attributes:
        elements: the number of elements of each tensor.
        vectors: the number of vectors along the last dimension of each tensor.
        rows: mean, sum of squared differences from the mean, sum of the vectors' l2 norms, number of non-finite
            elements: of shape (tensors, 4).
        largest: the largest absolute value of each unit, of shape (tensors, units); one unit if there are none.
    """

    elements: int
    vectors: int
    rows: Tensor
    largest: Tensor


def moments(tensors: Tensor, unit: int | None) -> Moments:
    """Compute moments in float64 (float32 on devices without it).

    ``var_mean`` and ``aminmax`` are 10 to 40 times slower on the CPU than the sums and norms that are used instead.

    Args:
        tensors: non-empty tensors of shape (tensors, ...), without a graph.
        unit: the dimension whose indices are units, None if there are none.
    """
    tensors = tensors if tensors.ndim > 1 else tensors.unsqueeze(1)  # single numbers
    return functools.reduce(merged, (_moments(piece, unit) for piece in _pieces(tensors, unit)))


def _pieces(tensors: Tensor, unit: int | None, dim: int = 1) -> Iterator[Tensor]:
    """Views of at most ``PIECE`` elements, undivided in the first, the last and the unit dimension."""
    if tensors.numel() <= PIECE or dim >= tensors.ndim - 1:
        yield tensors
        return
    step = tensors.shape[dim] if dim == unit else max(PIECE * tensors.shape[dim] // tensors.numel(), 1)
    for part in tensors.split(step, dim):
        yield from _pieces(part, unit, dim + 1)


def _moments(tensors: Tensor, unit: int | None) -> Moments:
    wide = tensors.to(wide_dtype(tensors.device), copy=True)
    flat, norms = wide.flatten(1), torch.linalg.vector_norm(wide, dim=-1).reshape(len(wide), -1)
    mean = flat.mean(1)
    nonfinite = torch.zeros_like(mean)
    if wide.device.type != "cpu" or len(mean.isfinite().logical_not_().nonzero()):  # synchronizes, but for the CPU
        nonfinite = flat.isfinite().logical_not_().sum(1).to(wide.dtype)
    largest = _largest(wide if tensors.itemsize == 1 else tensors, unit).to(wide.dtype)
    squares = torch.linalg.vector_norm(flat.sub_(mean.unsqueeze(1)), dim=1).square_()
    rows = torch.stack([mean, squares, norms.sum(1), nonfinite], 1)
    return Moments(flat.shape[1], norms.shape[1], rows, largest)


def _largest(tensors: Tensor, unit: int | None) -> Tensor:
    """The largest absolute value of each unit."""
    rest = [dim for dim in range(1, tensors.ndim) if dim != unit]
    if not rest:
        return tensors.abs()
    # vector_norm with ord=inf takes fifty times as long on the CPU.
    return torch.maximum(tensors.amax(rest), tensors.amin(rest).neg()).reshape(len(tensors), -1)


def merged(one: Moments, other: Moments) -> Moments:
    """Merge moments of the same tensors, of other elements, by Chan's formula."""
    elements = one.elements + other.elements
    difference = other.rows[:, 0] - one.rows[:, 0]
    rows = one.rows + other.rows
    rows[:, 0] = one.rows[:, 0] + difference * (other.elements / elements)
    rows[:, 1] += difference.square() * (one.elements * (other.elements / elements))
    return Moments(elements, one.vectors + other.vectors, rows, torch.maximum(one.largest, other.largest))


def as_sums(counts: Tensor, rows: Tensor) -> Tensor:
    """Moments in a form that adds up over ranks.

    Args:
        counts: numbers of elements and vectors, of shape (tensors, 2).
        rows: as in :class:`Moments`.

    Returns:
        These numbers, with sums for means, and the squared sums over the numbers of elements: of shape (tensors, 7).
    """
    total = counts[:, 0] * rows[:, 0]
    of_mean = total * (total / counts[:, 0])
    return torch.cat([counts, total.unsqueeze(1), rows[:, 1:], of_mean.unsqueeze(1)], 1)


def statistics(sums: Tensor, largest: Tensor, dead: Tensor, units: Tensor) -> Tensor:
    r"""Statistics of tensors from the sums of their parts.

    With n elements :math:`x_i` and m vectors :math:`v_j` along the last dimension:

    .. math::
        \bar x = \frac{1}{n} \sum_i x_i, \qquad
        s = \sqrt{\frac{\sum_i (x_i - \bar x)^2}{n - 1}}, \qquad
        \frac{1}{m} \sum_j \lVert v_j \rVert_2, \qquad
        \max_i |x_i|,

    the fraction of units that are 0 throughout, and the number of non-finite elements. Where there are any, and where
    a statistic is not defined (the standard deviation of one element), it is NaN.

    Args:
        sums: those of :func:`as_sums`, added up over ranks.
        largest: the largest absolute value of each tensor.
        dead: the number of units that are 0 throughout.
        units: the number of units; 0 for tensors without.

    Returns:
        A tensor of shape (tensors, 6), in the order of ``STATISTICS``.
    """
    elements, vectors, total, squares, norms, nonfinite, of_means = sums.unbind(1)
    mean = total / elements
    # Within the parts and between them; the second is exactly 0 for a single part.
    variance = (squares + (of_means - total * mean)).clamp(min=0.0) / (elements - 1)
    dead_fraction = dead / (units * (nonfinite == 0))
    values = [mean, variance.sqrt(), norms / vectors, largest, dead_fraction, nonfinite / (elements > 0)]
    return torch.stack(values, 1).nan_to_num_(math.nan, math.nan, math.nan)
