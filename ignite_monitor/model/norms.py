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
from ignite_monitor.model.dtensor import all_reduce, any_dtensor, is_dtensor, shard_of

# On the CPU sums in float64 take 2 to 13 times as long as in float32, where the norm of 3e7 normal numbers is off by
# 1.7e-3. Float32 norms of rows of this length, combined in float64, are right to 1e-6 and no slower.
_ROW = 1024
_LONGEST_SUM = 16 * _ROW
# Float32 squares are exact enough where the norm is between these; else they may have under- or overflowed.
_SAFE = (1e-9, 1e18)
# Other devices read memory slower than they add in float64, and no branch may depend on a value there.
_kind = attrgetter("is_cpu", "layout", "dtype")
_DTYPES = torch.float32, torch.bfloat16, torch.float16
_NARROW, _NARROW_ON_DEVICE = (frozenset((on_cpu, torch.strided, it) for it in _DTYPES) for on_cpu in (True, False))


@torch.no_grad()
def norms(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The 1-, 2- or maximum norm of every tensor, without synchronization, on the device of the first tensor.

    In float64, or float32 on devices without it. Sparse tensors count coalesced, DTensors with all shards: one
    collective per device mesh and sharded mesh dimension.
    """
    if not any_dtensor(tensors):
        return _local_norms(tensors, norm_type)
    local, placed = list(tensors), dict[Any, list[int]]()
    for i, tensor in enumerate(tensors):
        if is_dtensor(tensor):
            local[i], mesh, dims = shard_of(tensor)
            placed.setdefault((mesh, dims), []).append(i)
    values = _local_norms(local, norm_type)
    for (mesh, dims), indices in placed.items():
        at = move(torch.tensor(indices, device="cpu"), values.device)
        part = values[at]
        for dim in dims:
            part = reduce_norm(part, norm_type, partial(all_reduce, group=mesh.get_group(dim)))
        values = values.index_copy(0, at, part)
    return values


def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all elements of all tensors, as :func:`norms`, 0-dim; of DTensors only this rank's shards count."""
    local: list[Any] = list(tensors)
    if not local:
        return torch.zeros((), dtype=torch.float64)
    if any_dtensor(local):
        local = [tensor.to_local() if is_dtensor(tensor) else tensor for tensor in local]
    with torch.set_grad_enabled(False):  # half the calls of no_grad()
        # The norm of one vector of all short tensors takes a third of the time of their norms.
        kinds = set(map(_kind, local))
        if kinds <= _NARROW or (kinds <= _NARROW_ON_DEVICE and len(set(map(attrgetter("device"), local))) == 1):
            long = [tensor for tensor in local if tensor.numel() > _LONGEST_SUM]
            short = [tensor.flatten() for tensor in local if 0 < tensor.numel() <= _LONGEST_SUM]
            parts = [*long, torch.cat(short)] if short else long or [local[0].new_zeros(1)]
            if not parts[0].is_cpu:
                return combine(wide_norms(parts, norm_type), norm_type, parts)
            norm = combine([_long_norm(part.flatten(), norm_type) for part in parts], norm_type, local[:1])
            if torch.is_nonzero(norm == norm.clamp(*_SAFE)):
                return norm
        return combine(_local_norms(local, norm_type), norm_type, local)


def whole_norm(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norm of all elements of all tensors, of DTensors with all shards, 0-dim."""
    if any_dtensor(tensors):
        return combine(norms(tensors, norm_type), norm_type, tensors)
    return total_norm(tensors, norm_type)


def combine(norms: Sequence[Tensor] | Tensor, norm_type: float = 2.0, tensors: Sequence[Tensor] = ()) -> Tensor:
    """The norm of a vector from the norms of its parts: 0-dim tensors on one device and of one dtype, or a vector."""
    if len(norms) == 1:
        return norms[0]
    values = norms if isinstance(norms, Tensor) else torch.stack([*norms])
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
    """The values of a sparse COO tensor, those of the same index summed, and zeros in place of merged ones.

    Unlike ``coalesce()`` it does not synchronize.
    """
    values, places = values_of(sparse), torch.zeros_like(indices_of(sparse)[0])
    for size, index in zip(sparse.shape, indices_of(sparse), strict=False):
        places = places * size + index
    ordered, order = places.sort()
    differs = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.zeros_like(values).index_add_(0, differs.cumsum(0), values[order])


def _local_norms(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    if any(tensor.layout != torch.strided or tensor.is_complex() for tensor in tensors):
        return _local_norms([_as_dense_real(tensor, norm_type) for tensor in tensors], norm_type)
    first = tensors[0].device
    if any(tensor.device != first for tensor in tensors):
        unjoined = [_local_norms([tensor], norm_type) for tensor in tensors]
        return torch.cat([norm.to(first, wide_dtype(first)) for norm in unjoined])
    tensors = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    if not _NARROW.issuperset(map(_kind, tensors)):
        return wide_norms(tensors, norm_type)
    tensors = list(map(Tensor.contiguous, tensors))  # sums of others take another way, with fewer digits
    short = [tensor if tensor.numel() <= _LONGEST_SUM else tensor.new_zeros(1) for tensor in tensors]
    values = torch.stack(foreach_norm(short, norm_type, dtype=torch.float32)).double()
    for i, tensor in enumerate(tensors):
        if tensor.numel() > _LONGEST_SUM:
            values[i] = _long_norm(tensor.view(-1), norm_type)
    is_safe = values == values.clamp(*_SAFE)
    if not torch.is_nonzero(is_safe.all()):
        unsafe = [i for i, flag in enumerate(is_safe) if not torch.is_nonzero(flag)]
        values[unsafe] = wide_norms([tensors[i] for i in unsafe], norm_type)
    return values


def _long_norm(vector: Tensor, norm_type: float) -> Tensor:
    rest = vector.numel() % _ROW
    rows = torch.linalg.vector_norm(vector[: vector.numel() - rest].view(-1, _ROW), norm_type, 1, dtype=torch.float32)
    if rest:
        rows = torch.cat((rows, torch.linalg.vector_norm(vector[-rest:], norm_type, dtype=torch.float32).view(1)))
    return torch.linalg.vector_norm(rows, norm_type, dtype=torch.float64)  # type: ignore[no-any-return]


def wide_norms(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norms of strided tensors on one device, at least one, in its widest dtype and without reading a value."""
    dtype = wide_dtype(tensors[0].device)
    largest = max(torch.finfo(kind).max for kind in {tensor.dtype for tensor in tensors})
    if norm_type != 2.0 or largest < torch.finfo(dtype).max ** 0.5:  # no square under- or overflows
        return torch.stack(foreach_norm(tensors, norm_type, dtype=dtype))
    tensors = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
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
