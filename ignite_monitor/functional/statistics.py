"""The built-in statistics of a tensor, from sums that those of several tensors add up to."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.functional._devices import wide_dtype

STATISTICS = ("mean", "std", "l2_norm", "max_abs", "dead_fraction", "nonfinite_count")

# Elements taken at a time where a copy of them is needed: of 8 bytes on the CPU, which has no sum that converts as it
# goes, and of 1 byte elsewhere.
_PIECE = 2**19
_LARGER_PIECE = 2**22

# A sum of squares as many times the one of differences from the mean leaves the latter seven digits in float64.
_SHARED = 1e8


class Sums(NamedTuple):
    """What the statistics of tensors are computed from.

    Attributes:
        sums: of shape (tensors, 7): the number of elements, that of vectors along the last dimension, the sums of the
            elements, of the squares of what they differ from their mean by, and of the vectors' norms, how many
            elements are not finite, and the squared sum of the elements over their number.
        units: of shape (tensors, units): the largest absolute value of each unit, NaN where it has one.
    """

    sums: Tensor
    units: Tensor


def unit_dimension(shape: Sequence[int]) -> int | None:
    """The dimension whose places are the units of an activation.

    That of the features, which is the last one, and in tensors with four and more dimensions that of the channels,
    which is the second; None where there is but a batch.

    Args:
        shape: the activation's shape, batch included.
    """
    if len(shape) < 2:
        return None
    return 1 if len(shape) >= 4 else len(shape) - 1


def has_statistics(tensor: Tensor) -> bool:
    """Whether a tensor's elements are numbers that the statistics are defined for: real ones.

    Args:
        tensor: the tensor.
    """
    return not tensor.is_complex() and tensor.dtype != getattr(torch, "float4_e2m1fn_x2", None)


def is_float8(tensor: Tensor) -> bool:
    """Whether a tensor is of a dtype that is for storing alone, and which float32 holds exactly.

    Args:
        tensor: the tensor.
    """
    return tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point


def sum_up(tensors: Tensor, unit: int | None) -> Sums:
    """The sums of tensors of one shape.

    They are taken in float64 (float32 on devices without it); nothing waits for a device but the CPU, which there is
    no waiting for, and no copy of a large tensor is made.

    Args:
        tensors: of shape (tensors, ...), without a gradient, with elements.
        unit: the dimension of the units in each; None for a single unit.
    """
    wide = wide_dtype(tensors.device)
    if tensors.ndim == 1:
        tensors = tensors.unsqueeze(-1)
    pieces = list(_pieces(tensors, _PIECE if tensors.device.type == "cpu" else _LARGER_PIECE))
    sums = _sums(pieces[0], wide)
    for piece in pieces[1:]:
        sums += _sums(piece, wide)
    sums = _centred(sums, tensors, pieces)
    if tensors.device.type == "cpu" and len(sums.isfinite().logical_not_().nonzero()):
        sums[:, 5] = sum(map(_count_nonfinite, pieces))
    rest = [place for place in range(1, tensors.ndim) if unit is None or place != unit + 1]
    # Not the norm for p = inf, which takes fifty times as long on the CPU.
    units = torch.maximum(tensors.amax(rest), tensors.amin(rest).neg()) if rest else tensors.abs()
    return Sums(sums, units.reshape(len(tensors), -1).to(wide if units.dtype == wide else torch.float32))


def _sums(tensors: Tensor, wide: torch.dtype) -> Tensor:
    on_cpu = tensors.device.type == "cpu"
    if on_cpu:
        tensors = tensors.to(wide)  # all else is four times as slow
    norms = torch.linalg.vector_norm(tensors, dim=-1, dtype=wide).reshape(len(tensors), -1)
    total = tensors.flatten(1).sum(1, dtype=wide)
    # On the CPU a look at these sums says whether it is worth counting.
    nonfinite = torch.zeros_like(total) if on_cpu else _count_nonfinite(tensors).to(wide)
    elements, vectors = (torch.full_like(total, each.shape[1:].numel()) for each in (tensors, norms))
    return torch.stack([elements, vectors, total, norms.square().sum(1), norms.sum(1), nonfinite], 1)


def _centred(sums: Tensor, tensors: Tensor, pieces: list[Tensor]) -> Tensor:
    """The sums of :class:`Sums`, where those of squares are not yet of differences from the mean."""
    elements, _, total, squares, _, _ = sums.unbind(1)
    mean = total / elements
    of_mean = total * mean
    centred = squares - of_mean
    # The difference keeps the digits that float64 has more than the two share; few tensors need another look.
    lost = squares > _SHARED * centred
    if tensors.device.type != "cpu":
        # There one would have to wait to know. Shorter dtypes hold nothing that varies so little.
        if tensors.dtype in (torch.float32, torch.float64):
            variance = torch.var(tensors, list(range(1, tensors.ndim)), correction=0)
            centred = torch.where(lost, variance.to(centred) * elements, centred)
    elif len(rows := lost.nonzero().flatten()):
        own = mean[rows].reshape(-1, *[1] * (tensors.ndim - 1))
        again = (piece[rows].to(own.dtype).sub_(own) for piece in pieces)
        centred[rows] = sum(each.square_().flatten(1).sum(1) for each in again)
    return torch.cat([sums[:, :3], centred.unsqueeze(1), sums[:, 4:], of_mean.unsqueeze(1)], 1)


def _count_nonfinite(tensors: Tensor) -> Tensor:
    return tensors.isfinite().logical_not_().flatten(1).sum(1)


def _pieces(tensors: Tensor, size: int, dim: int = 1) -> Iterator[Tensor]:
    """Views of at most ``size`` elements, whole along the first and the last dimension."""
    if tensors.numel() <= size or dim >= tensors.ndim - 1:
        yield tensors
        return
    length = tensors.shape[dim]
    step = max(size * length // tensors.numel(), 1)
    for start in range(0, length, step):
        yield from _pieces(tensors.narrow(dim, start, min(step, length - start)), size, dim + 1)


def statistics(sums: Tensor, largest: Tensor, dead: Tensor, units: Tensor) -> Tensor:
    r"""The statistics of tensors, each of which may have come in parts.

    With n elements :math:`x_i` and m vectors :math:`v_j` along the last dimension:

    .. math::
        \bar x = \frac{1}{n} \sum_i x_i, \qquad
        s = \sqrt{\frac{\sum_i (x_i - \bar x)^2}{n - 1}}, \qquad
        \frac{1}{m} \sum_j \lVert v_j \rVert_2, \qquad
        \max_i |x_i|,

    the fraction of units that are 0 throughout, and how many elements are not finite. Where there are any, and where
    there is no such number (the standard deviation of one element), a statistic is NaN.

    Args:
        sums: as in :class:`Sums`, added up over the parts.
        largest: the largest absolute values.
        dead: how many units are dead.
        units: how many there are; 0 for tensors without.

    Returns:
        A tensor of shape (tensors, 6), in the order of ``STATISTICS``.
    """
    elements, vectors, total, within, norms, nonfinite, of_means = sums.unbind(1)
    mean = total / elements
    # Within the parts and between them, which is exactly 0 where there is one.
    variance = (within + (of_means - total * mean)).clamp(min=0.0) / (elements - 1)
    values = torch.stack([mean, variance.sqrt(), norms / vectors, largest.to(mean), dead.to(mean) / units], 1)
    finite = (nonfinite == 0).unsqueeze(1) & values.isfinite()
    counted = torch.where(elements > 0, nonfinite, math.nan)
    return torch.cat([torch.where(finite, values, math.nan), counted.unsqueeze(1)], 1)
