"""The built-in statistics of a tensor, from sums that those of several tensors add up to."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ignite_monitor.model._torch import foreach_norm
from ignite_monitor.model.devices import upload, wide_dtype

STATISTICS = ("mean", "std", "l2_norm", "max_abs", "dead_fraction", "nonfinite_count")

# Their elements are no real numbers.
WITHOUT_STATISTICS = {torch.complex32, torch.complex64, torch.complex128, getattr(torch, "float4_e2m1fn_x2", None)}

# Elements taken at a time where a copy of them is needed: of 8 bytes on the CPU, which has no sum that converts as it
# goes, and of 1 byte elsewhere.
_PIECE = 2**19
_LARGER_PIECE = 2**22

# A sum of squares as many times the one of differences from the mean leaves the latter seven digits in float64.
_SHARED = 1e8


def unit_dimension(shape: Sequence[int]) -> int | None:
    """The dimension whose indices are the units of an activation.

    That of the features, which is the last one, and in tensors with four and more dimensions that of the channels,
    which is the second; None where there is but a batch, which the shape includes.
    """
    if len(shape) < 2:
        return None
    return 1 if len(shape) >= 4 else len(shape) - 1


def is_float8(tensor: Tensor) -> bool:
    """Whether a tensor is of a dtype that is for storing alone, and which float32 holds exactly."""
    return tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point


def sum_up(stacks: Sequence[tuple[Tensor, int | None]]) -> tuple[Tensor, list[Tensor]]:
    """What the statistics of tensors are computed from, those of one shape stacked.

    They are taken in float64 (float32 on devices without it); nothing waits for a device but the CPU, which there is
    no waiting for, and no copy of a large tensor is made.

    Args:
        stacks: tensors of shape (tensors, ...) on one device, without a gradient, with elements; and the dimension of
            the units in each, None for a single unit.

    Returns:
        Sums, of shape (tensors, 7): the number of elements, that of vectors along the last dimension, the sums of the
        elements, of the squares of what they differ from their mean by, and of the vectors' norms, how many elements
        are not finite, and the squared sum of the elements over their number. And for each stack, of shape (its
        tensors, units), the largest absolute value of each unit, NaN where it has one.
    """
    tensors = [each if each.ndim > 1 else each.unsqueeze(-1) for each, _ in stacks]
    if tensors[0].device.type != "cpu":
        single = [each for each, (_, unit) in zip(tensors, stacks, strict=True) if unit is None]
        largest = iter(_largest(single) if single else ())
        units = [
            next(largest) if unit is None else _units(each, unit)
            for each, (_, unit) in zip(tensors, stacks, strict=True)
        ]
        return _sums_elsewhere(tensors), units
    sums = torch.cat([_sums(each) for each in tensors])
    elements, vectors, total, squares, norms, nonfinite = sums.unbind(1)
    of_mean = total * (total / elements)
    centred = squares - of_mean
    # The difference keeps the digits that float64 has more than the two share.
    kept = squares <= _SHARED * centred
    sums = torch.stack([elements, vectors, total, centred, norms, nonfinite, of_mean], 1)
    if len(kept.logical_not().nonzero()):
        rows = [len(each) for each in tensors]
        for each in zip(tensors, sums.split(rows), kept.split(rows), strict=True):
            _look_again(*each)
    return sums, [_units(each, unit) for each, (_, unit) in zip(tensors, stacks, strict=True)]


def _sums_elsewhere(tensors: Sequence[Tensor]) -> Tensor:
    """The sums that :func:`sum_up` gives, on an accelerator: in few operations, of which none waits."""
    small = [each for each in tensors if each.numel() <= _LARGER_PIECE]
    of_small = iter(_sums_together(small).split([len(each) for each in small]) if small else ())
    parts = [next(of_small) if each.numel() <= _LARGER_PIECE else _sums_of_large(each) for each in tensors]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _sums_together(tensors: Sequence[Tensor]) -> Tensor:
    """Those of small tensors, vector by vector, all with vectors of one length together."""
    device, wide = tensors[0].device, wide_dtype(tensors[0].device)
    alike: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, each in enumerate(tensors):
        alike.setdefault((each.shape[-1], each.dtype), []).append(index)
    matrices = [torch.cat([tensors[index].reshape(-1, length) for index in own]) for (length, _), own in alike.items()]
    # For each tensor as it comes in these: how many elements, how many vectors, and where it is to be.
    order = [index for own in alike.values() for index in own]
    starts = [0, *itertools.accumulate(map(len, tensors))]
    sizes, places = [], list[int]()
    for index in order:
        each = tensors[index][0]
        sizes += [(each.numel(), each.numel() // each.shape[-1])] * len(tensors[index])
        places += range(starts[index], starts[index + 1])
    of_rows = torch.empty(len(places), 2, dtype=torch.int64, device="cpu")
    of_rows[torch.tensor(places, device="cpu")] = torch.tensor(sizes, device="cpu")
    ends = torch.tensor([size for _, size in sizes], device="cpu").cumsum(0)
    at = torch.bucketize(torch.arange(int(ends[-1]), device=device), upload(ends, device), right=True)
    if places != sorted(places):
        at = upload(torch.tensor(places, device="cpu"), device)[at]
    elements, vectors = upload(of_rows.to(wide).T.contiguous(), device).unbind()
    parts = list(itertools.pairwise(itertools.accumulate(map(len, matrices), initial=0)))
    by_vector = torch.empty(4, len(at), dtype=wide, device=device)
    for each, (start, end) in zip(matrices, parts, strict=True):
        torch.sum(each, 1, dtype=wide, out=by_vector[0, start:end])
        torch.linalg.vector_norm(each, dim=1, dtype=wide, out=by_vector[1, start:end])
        by_vector[2, start:end] = torch.count_nonzero(each - each, 1)  # which is NaN where it is not 0
    sums = torch.zeros(3, len(places), dtype=wide, device=device).index_add_(1, at, by_vector[:3])
    total, norms, nonfinite = sums.unbind()
    mean = total / elements
    means = mean[at].unsqueeze(1)
    for each, (start, end) in zip(matrices, parts, strict=True):
        torch.linalg.vector_norm(each - means[start:end], dim=1, out=by_vector[3, start:end])
    centred = torch.zeros_like(total).index_add_(0, at, by_vector[3].square_())
    return torch.stack([elements, vectors, total, centred, norms, nonfinite, total * mean], 1)


def _sums_of_large(tensors: Tensor) -> Tensor:
    """Those of tensors of which no copy is made."""
    elements, vectors, total, squares, norms, nonfinite = _sums(tensors).unbind(1)
    of_mean = total * (total / elements)
    centred = squares - of_mean
    again = _centred(tensors, centred)
    centred = torch.where(squares <= _SHARED * centred, centred, again)
    return torch.stack([elements, vectors, total, centred, norms, nonfinite, of_mean], 1)


def _largest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The largest absolute value of each, of tensors without units on an accelerator."""
    rows = [row for each in tensors for row in each.unbind()]
    largest = torch.stack(foreach_norm(rows, math.inf)).unsqueeze(1)
    return list(largest.to(torch.promote_types(largest.dtype, torch.float32)).split([len(each) for each in tensors]))


def _sums(tensors: Tensor) -> Tensor:
    """The first six of what :func:`sum_up` gives, with the squares of the elements themselves."""
    pieces = list(_pieces(tensors))
    sums = _sums_of_piece(pieces[0])
    for piece in pieces[1:]:
        sums += _sums_of_piece(piece)
    return sums


def _sums_of_piece(tensors: Tensor) -> Tensor:
    on_cpu, wide = tensors.device.type == "cpu", wide_dtype(tensors.device)
    if on_cpu:
        tensors = tensors.to(wide)  # all else is four times as slow
    norms = torch.linalg.vector_norm(tensors, dim=-1, dtype=wide).reshape(len(tensors), -1)
    total = tensors.flatten(1).sum(1, dtype=wide)
    # On the CPU a look at these sums says whether it is worth counting.
    nonfinite = torch.zeros_like(total) if on_cpu else _count_nonfinite(tensors).to(wide)
    elements, vectors = (torch.full_like(total, each.shape[1:].numel()) for each in (tensors, norms))
    return torch.stack([elements, vectors, total, norms.square().sum(1), norms.sum(1), nonfinite], 1)


def _units(tensors: Tensor, unit: int | None) -> Tensor:
    """The largest absolute value of each unit."""
    rest = [dim for dim in range(1, tensors.ndim) if unit is None or dim != unit + 1]
    # Not the norm for p = inf, which takes fifty times as long on the CPU.
    units = torch.maximum(tensors.amax(rest), tensors.amin(rest).neg()) if rest else tensors.abs()
    return units.reshape(len(tensors), -1).to(torch.promote_types(units.dtype, torch.float32))


def _centred(tensors: Tensor, centred: Tensor) -> Tensor:
    """The sums of squares of what elements differ from their mean by, taken from the elements."""
    if tensors.dtype not in (torch.float32, torch.float64):
        return centred  # shorter dtypes hold nothing that varies so little
    variance = torch.var(tensors, list(range(1, tensors.ndim)), correction=0)
    return variance.to(centred) * tensors.shape[1:].numel()


def _look_again(tensors: Tensor, sums: Tensor, kept: Tensor) -> None:
    """Take from the elements, where the sums say that it is needed, how they vary and how many are not finite."""
    rows = kept.logical_not().nonzero().flatten()
    if not len(rows):
        return
    mean = (sums[rows, 2] / sums[rows, 0]).reshape(-1, *[1] * (tensors.ndim - 1))
    within, nonfinite = torch.zeros(2, len(rows), dtype=sums.dtype, device=sums.device)
    for piece in _pieces(tensors):
        own = piece[rows]
        nonfinite += _count_nonfinite(own)
        within += own.to(sums.dtype).sub_(mean).square_().flatten(1).sum(1)
    sums[rows, 3], sums[rows, 5] = within, nonfinite


def _count_nonfinite(tensors: Tensor) -> Tensor:
    return tensors.isfinite().logical_not_().flatten(1).sum(1)


def _pieces(tensors: Tensor, dim: int = 1) -> Iterator[Tensor]:
    """Views of few elements, whole along the first and the last dimension."""
    size = _PIECE if tensors.device.type == "cpu" else _LARGER_PIECE
    if tensors.numel() <= size or dim >= tensors.ndim - 1:
        yield tensors
        return
    length = tensors.shape[dim]
    step = max(size * length // tensors.numel(), 1)
    for start in range(0, length, step):
        yield from _pieces(tensors.narrow(dim, start, min(step, length - start)), dim + 1)


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

    ``sums`` are those of :func:`sum_up`, added up over the parts, ``units`` is 0 for tensors without; the result is of
    shape (tensors, 6), in the order of ``STATISTICS``.
    """
    elements, vectors, total, within, norms, nonfinite, of_means = sums.unbind(1)
    mean = total / elements
    # Within the parts and between them, which is exactly 0 where there is one.
    variance = (within + (of_means - total * mean)).clamp(min=0.0) / (elements - 1)
    # Each becomes NaN or infinite by itself where an element is, but for the dead units: there their number is 0.
    dead_fraction = dead / (units * (nonfinite == 0))
    counted = nonfinite / (elements > 0)
    values = [mean, variance.sqrt(), norms / vectors, largest, dead_fraction, counted]
    return torch.stack(values, 1).nan_to_num_(math.nan, math.nan, math.nan)
