"""Norms of tensors, right over the whole range of their dtypes and over ranks, and their order statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model._torch import foreach_norm, indices_of, values_of
from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.model.dtensor import all_reduce, any_dtensor, is_dtensor, local, without_partial_sums

# On the CPU sums in float64 take 2 to 13 times as long as in float32, where the norm of 3e7 normal numbers is off by
# 1.7e-3. Float32 norms of rows of this length, combined in float64, are right to 1e-6 and no slower.
_ROW = 1024
_LONGEST_SUM = 16 * _ROW
# Float32 squares are exact enough where the norm is between these; else they may have under- or overflowed.
_SAFE = (1e-9, 1e18)
_kind = attrgetter("device", "layout", "dtype")
_NARROW = {torch.float32, torch.bfloat16, torch.float16}
_COMPLEX = {torch.complex32, torch.complex64, torch.complex128}


@torch.no_grad()
def norms(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The 1-, 2- or maximum norm of every tensor, without synchronization, on the device of the first tensor.

    In float64, or float32 on devices without it. Sparse tensors count coalesced, DTensors with all shards: one
    collective per device mesh and sharded mesh dimension.
    """
    if not any_dtensor(tensors):
        return _local_norms(tensors, norm_type)
    tensors = [without_partial_sums(tensor) if is_dtensor(tensor) else tensor for tensor in tensors]
    return over_shards(_local_norms([*map(local, tensors)], norm_type), tensors, norm_type)


def over_shards(norms: Tensor, tensors: Sequence[Any], norm_type: float = 2.0) -> Tensor:
    """Norms (…, tensors) of all elements from those of this rank's parts of tensors, as :func:`norms`."""
    sharded: dict[Any, list[int]] = {}
    for column, tensor in enumerate(tensors):
        if is_dtensor(tensor):
            dims = tuple(i for i, placement in enumerate(tensor.placements) if not placement.is_replicate())
            sharded.setdefault((tensor.device_mesh, dims), []).append(column)
    for (mesh, dims), columns in sharded.items():
        at = move(torch.tensor(columns, device="cpu"), norms.device)
        part = norms.index_select(-1, at)
        for dim in dims:
            part = reduce_norm(part, norm_type, partial(all_reduce, group=mesh.get_group(dim)))
        norms = norms.index_copy(-1, at, part)
    return norms


def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all elements of all tensors, as :func:`norms`, 0-dim."""
    parts = list(tensors)
    if not parts:
        return torch.zeros((), dtype=torch.float64)
    with torch.set_grad_enabled(False):  # half the calls of no_grad()
        if any_dtensor(parts):
            return combine(norms(parts, norm_type), norm_type, parts)
        devices, layouts, dtypes = map(set, zip(*set(map(_kind, parts)), strict=True))
        if len(devices) == 1 and layouts == {torch.strided} and dtypes <= _NARROW:
            # The norm of one vector of all short tensors takes a third of the time of their norms.
            short = [tensor.flatten() for tensor in parts if tensor.numel() <= _LONGEST_SUM]
            long = [tensor for tensor in parts if tensor.numel() > _LONGEST_SUM]
            parts = [*long, torch.cat(short)] if short else long
        return combine(_local_norms(parts, norm_type), norm_type, parts)


def combine(values: Tensor, norm_type: float = 2.0, tensors: Sequence[Tensor] = ()) -> Tensor:
    """The norm of a vector from the norms of its parts, which may be ``tensors``."""
    if values.numel() == 1:
        return values[0]
    wide = {torch.float64, torch.complex128}  # squares of the norms of other tensors fit in float64
    fits = values.dtype == torch.float64 and tensors and wide.isdisjoint(map(attrgetter("dtype"), tensors))
    if norm_type != 2.0 or fits:
        return torch.linalg.vector_norm(values, norm_type)  # type: ignore[no-any-return]
    unit = _unit(values.amax())
    return unit * torch.as_tensor(torch.linalg.vector_norm(values / unit))


def reduce_norm(norm: Tensor, norm_type: float, over_ranks: Callable[[Tensor, bool], Tensor]) -> Tensor:
    """Norms of vectors from those of this rank's parts, by the sum over ranks, or with True their maximum."""
    if norm_type != 2.0:
        return over_ranks(norm, norm_type == math.inf)
    scaled = torch.stack([norm, norm * 2.0**-600, norm * 2.0**600])
    middle, large, small = over_ranks(scaled.square(), False).sqrt().unbind()
    extreme = torch.where(middle < 1.0, small * 2.0**-600, large * 2.0**600)
    return torch.where((middle < 2.0**-500) | (middle > 2.0**500), extreme, middle)


def summed_values(sparse: Tensor) -> Tensor:
    """The values of a sparse COO tensor as those of ``coalesce()`` and zeros, without its synchronization."""
    values, places = values_of(sparse), torch.zeros_like(indices_of(sparse)[0])
    for size, index in zip(sparse.shape, indices_of(sparse), strict=False):
        places = places * size + index
    ordered, order = places.sort()
    differs = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.zeros_like(values).index_add_(0, differs.cumsum(0), values[order])


def _local_norms(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    devices, layouts, dtypes = map(set, zip(*set(map(_kind, tensors)), strict=True))
    if layouts != {torch.strided} or not dtypes.isdisjoint(_COMPLEX):
        return _local_norms([_as_dense_real(tensor, norm_type) for tensor in tensors], norm_type)
    first = tensors[0].device
    if len(devices) > 1:
        unjoined = [_local_norms([tensor], norm_type) for tensor in tensors]
        return torch.cat([norm.to(first, wide_dtype(first)) for norm in unjoined])
    # Devices other than the CPU read memory slower than they add in float64, and no branch may depend on a value there.
    if first.type != "cpu" or not dtypes <= _NARROW:
        return wide_norms(tensors, norm_type)
    if not all(map(Tensor.numel, tensors)):
        tensors = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    tensors = list(map(Tensor.contiguous, tensors))  # sums of others take another way, with fewer digits
    short = [tensor if tensor.numel() <= _LONGEST_SUM else tensor.new_zeros(1) for tensor in tensors]
    values = torch.stack(foreach_norm(short, norm_type, dtype=torch.float32)).double()
    for i, tensor in enumerate(tensors):
        if tensor.numel() > _LONGEST_SUM:
            values[i] = _long_norm(tensor.view(-1), norm_type)
    is_safe = values == values.clamp(*_SAFE)
    if norm_type != math.inf and not torch.is_nonzero(is_safe.all()):
        unsafe = [tensor for tensor, flag in zip(tensors, is_safe, strict=True) if not torch.is_nonzero(flag)]
        values[~is_safe] = wide_norms(unsafe, norm_type)
    return values


def _long_norm(vector: Tensor, norm_type: float) -> Tensor:
    if norm_type == math.inf:  # for which vector_norm takes 20 times as long
        least, largest = vector.aminmax()
        return torch.maximum(-least, largest)
    rest = vector.numel() % _ROW
    rows = torch.linalg.vector_norm(vector[: vector.numel() - rest].view(-1, _ROW), norm_type, 1, dtype=torch.float32)
    if rest:
        rows = torch.cat((rows, torch.linalg.vector_norm(vector[-rest:], norm_type, dtype=torch.float32).view(1)))
    return torch.linalg.vector_norm(rows, norm_type, dtype=torch.float64)  # type: ignore[no-any-return]


def wide_norms(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norms of strided tensors on one device, at least one, in its widest dtype and without reading a value."""
    tensors = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    dtype = wide_dtype(tensors[0].device)
    largest = max(torch.finfo(kind).max for kind in {tensor.dtype for tensor in tensors})
    if norm_type != 2.0 or largest < torch.finfo(dtype).max ** 0.5:  # no square under- or overflows
        return torch.stack(foreach_norm(tensors, norm_type, dtype=dtype))
    units = _unit(torch.stack(foreach_norm(tensors, math.inf, dtype=dtype)))
    scaled = [tensor.to(dtype) / unit for tensor, unit in zip(tensors, units.unbind(), strict=True)]
    return units * torch.stack(foreach_norm(scaled, norm_type))


def _unit(largest: Tensor) -> Tensor:
    """A divisor that keeps squares in range, from the largest absolute value, which may be 0, inf or NaN."""
    limits = torch.finfo(largest.dtype)
    return largest.clamp(limits.tiny, limits.max)


def _as_dense_real(tensor: Tensor, norm_type: float) -> Tensor:
    if tensor.layout != torch.strided:
        tensor = summed_values(tensor) if tensor.is_sparse else tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()) if norm_type == 2.0 else tensor.abs()
    return tensor


def order_statistics(values: Tensor) -> Tensor:
    """Median, 95th percentile (nearest rank), minimum and maximum of the values that are not NaN; NaN without any.

    They are taken along the last dimension.
    """
    if not values.shape[-1]:
        return values.new_full((*values.shape[:-1], 4), torch.nan)
    # Sorting puts NaN last, so that where there is no other value all are NaN.
    last = (values == values).sum(-1, keepdim=True) - 1
    ranks = [last // 2, (last + 1) // 2, (95 * last + 94) // 100, torch.zeros_like(last), last]
    picked = values.sort(-1).values.gather(-1, torch.cat(ranks, -1).clamp(min=0))
    return torch.cat([picked[..., :2].mean(-1, keepdim=True), picked[..., 2:]], -1)
