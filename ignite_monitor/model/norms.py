"""The norm of many tensors taken as one vector, right over the whole range of their dtypes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ignite_monitor.model._torch import flattened, foreach_norm, sparse_parts
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.sharding import all_reduce

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# On the CPU float32 sums lose digits with the number of terms: of 65,536 equal numbers the norm is off by up to 4e-5,
# of 3e7 normal ones by 1.7e-3. Longer tensors are summed in rows, which keeps it at 5e-7, and is faster for long ones.
_ROW = 1024
_LONGEST_SUM = 16 * _ROW
# To copy short tensors into one, at most so many elements, takes less time than the norm of each of them.
_SHORT = 4 * _ROW
_ROOM = 1 << 24

# Float32 squares are exact enough where the norm lies between these; outside of them they under- or overflow.
_SAFE = (1e-9, 1e18)

# What other powers do to numbers under- or overflows soon.
_TAME = (1.0, 2.0, math.inf)


def total_norm(tensors: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    r"""The p-norm of all elements of all tensors, :math:`(\sum_t \sum_i |t_i|^p)^{1/p}`.

    Right where the p-th powers do not fit the tensors' dtype: sums are taken in float64, or in float32 and once more
    in float64 where those could have lost anything, scaled where float64 could, too. Nothing waits for a device. Sparse
    tensors count their coalesced values; of a DTensor only the local part counts, see :func:`sharded_norm`.

    Args:
        tensors: any number of dense or sparse tensors, real or complex, of any floating-point dtypes and devices.
        norm_type: p > 0, ``math.inf`` for the largest absolute value.

    Returns:
        A 0-dim float64 tensor (float32 on devices without float64) on the device of the first tensor.
    """
    tensors = list(tensors)
    with torch.no_grad():
        # Sets, and not a loop over the tensors: of hundreds of small ones the norms themselves take no longer.
        layouts, dtypes = {tensor.layout for tensor in tensors}, {tensor.dtype for tensor in tensors}
        if layouts - {torch.strided} or any(dtype.is_complex for dtype in dtypes):
            tensors = [_as_dense_real(tensor, norm_type) for tensor in tensors]
        if set(map(Tensor.get_device, tensors)) == {-1} or len({tensor.device for tensor in tensors}) == 1:
            return _norm_on_one_device(tensors, norm_type)
        devices = {tensor.device for tensor in tensors}
        device = tensors[0].device if tensors else torch.device("cpu")
        dtype = wide_dtype(device)
        groups = [[tensor for tensor in tensors if tensor.device == each] for each in devices]
        norms = [_norm_on_one_device(group, norm_type).to(device, dtype) for group in groups]
        return combine(norms, norm_type) if norms else torch.zeros((), dtype=dtype, device=device)


def combine(norms: Iterable[Tensor] | Tensor, norm_type: float = 2.0) -> Tensor:
    r"""The norm of a vector of which the norms of the parts are known, :math:`(\sum_i n_i^p)^{1/p}`.

    Args:
        norms: 0-dim tensors on one device and of one dtype, or a vector.
    """
    values = norms if isinstance(norms, Tensor) else torch.stack(list(norms))
    if norm_type in (1.0, math.inf):
        norm: Tensor = torch.linalg.vector_norm(values, norm_type)
        return norm
    unit = _unit(values.max())
    return unit * torch.as_tensor(torch.linalg.vector_norm(values / unit, norm_type))


def sharded_norm(tensors: Iterable[DTensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm of all elements of all DTensors, every rank's shards included; the same on every rank.

    One collective per device mesh, placement and sharded mesh dimension, however many tensors there are.

    Args:
        tensors: at least one DTensor, placed alike on every rank.
        norm_type: p > 0 or ``math.inf``.
    """
    norms = []
    for over_mesh, local in _by_mesh(tensors, norm_type):
        norms.append(over_mesh(total_norm([tensor for _, tensor in local], norm_type)))
    return norms[0] if len(norms) == 1 else combine(norms, norm_type)


def _by_mesh(
    tensors: Iterable[Any], norm_type: float
) -> Iterator[tuple[Callable[[Tensor], Tensor], list[tuple[int, Tensor]]]]:
    """DTensors that lie alike: what makes norms of this rank's parts those of the whole; (index, this rank's part)."""
    from torch.distributed.tensor import Replicate

    groups: dict[tuple[Any, tuple[int, ...]], list[tuple[int, Tensor]]] = {}
    for index, tensor in enumerate(tensors):
        if any(placement.is_partial() for placement in tensor.placements):
            tensor = tensor.redistribute(placements=[Replicate()] * tensor.device_mesh.ndim)
        dims = tuple(i for i, placement in enumerate(tensor.placements) if not placement.is_replicate())
        groups.setdefault((tensor.device_mesh, dims), []).append((index, tensor.to_local()))

    def over_mesh(norms: Tensor, mesh: Any, dims: tuple[int, ...]) -> Tensor:
        for dim in dims:
            norms = reduce_norm(norms, norm_type, partial(all_reduce, group=mesh.get_group(dim)))
        return norms

    for (mesh, dims), local in groups.items():
        yield partial(over_mesh, mesh=mesh, dims=dims), local


def norm_of_each(tensors: Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm of every tensor, as right as :func:`total_norm`; of a DTensor that of all its shards.

    A collective per device mesh, placement and sharded mesh dimension brings the norms of all DTensors together.

    Args:
        tensors: at least one dense or sparse tensor, real or complex, of any floating-point dtypes and devices.
        norm_type: p > 0 or ``math.inf``.

    Returns:
        A float64 vector (float32 on devices without float64) on the device of the first tensor.
    """
    with torch.no_grad():
        if not any_sharded(tensors):
            return _each_plain(tensors, norm_type)
        indices = [i for i, each in enumerate(tensors) if not is_sharded(each)]
        found = dict(zip(indices, _each_plain([tensors[i] for i in indices], norm_type).unbind(), strict=True))
        sharded = [i for i in range(len(tensors)) if i not in found]
        for over_mesh, local in _by_mesh((tensors[i] for i in sharded), norm_type):
            norms = over_mesh(_each_plain([each for _, each in local], norm_type)).unbind()
            found |= zip([sharded[index] for index, _ in local], norms, strict=True)
        return torch.stack([found[i].to(found[0].device) for i in range(len(tensors))])


def _each_plain(tensors: Sequence[Tensor], norm_type: float) -> Tensor:
    layouts, dtypes = {tensor.layout for tensor in tensors}, {tensor.dtype for tensor in tensors}
    if layouts - {torch.strided} or any(dtype.is_complex for dtype in dtypes):
        tensors = [_as_dense_real(tensor, norm_type) for tensor in tensors]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        alone = [_each_plain([each], norm_type) for each in tensors]
        return torch.cat([each.to(alone[0]) for each in alone])
    sizes = list(map(Tensor.numel, tensors))
    if not all(sizes):
        tensors = [tensor if size else tensor.new_zeros(1) for tensor, size in zip(tensors, sizes, strict=True)]
    wide = wide_dtype(tensors[0].device) if tensors else torch.float64
    if not tensors or not tensors[0].is_cpu or norm_type not in _TAME:
        return _wide_norms(tensors, norm_type, wide)
    if not all(map(Tensor.is_contiguous, tensors)):
        tensors = [tensor if tensor.is_contiguous() else _flat(tensor) for tensor in tensors]
    parts = [
        tensor if size <= _LONGEST_SUM else _row_norms(tensor.view(-1), norm_type)
        for tensor, size in zip(tensors, sizes, strict=True)
    ]
    found: dict[int, Tensor] = {}
    for dtype in {part.dtype for part in parts}:
        indices = [i for i, part in enumerate(parts) if part.dtype == dtype]
        group = foreach_norm([parts[i] for i in indices], norm_type, dtype=_sum_dtype(dtype))
        norms = torch.stack(group).double()
        if len(indices) < len(parts):
            found |= zip(indices, norms.unbind(), strict=True)
    if found:
        norms = torch.stack([found[i] for i in range(len(parts))])
    outside = (~((norms > _SAFE[0]) & (norms < _SAFE[1]))).nonzero().flatten().tolist()
    if outside:
        norms[outside] = _wide_norms([tensors[i] for i in outside], norm_type, wide)
    return norms


def reduce_norm(norm: Tensor, norm_type: float, over_ranks: Callable[[Tensor, bool], Tensor]) -> Tensor:
    """The norm of a vector whose parts lie on several ranks, each of which knows the norm of its own.

    Args:
        norm: the norm of this rank's part, 0-dim.
        over_ranks: gives the sum of a tensor over the ranks, or with True as its second argument the largest.
    """
    if norm_type == math.inf:
        return over_ranks(norm, True)
    if norm_type in _TAME:
        return over_ranks(norm**norm_type, False) ** (1.0 / norm_type)
    unit = _unit(over_ranks(norm, True))
    return unit * over_ranks((norm / unit) ** norm_type, False) ** (1.0 / norm_type)


def any_sharded(tensors: Iterable[Tensor]) -> bool:
    """Whether there is a DTensor among tensors."""
    # No DTensor exists before its module is imported, which takes a while.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(issubclass(kind, module.DTensor) for kind in set(map(type, tensors)))


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor."""
    return any_sharded((tensor,))


def whole_tensor(tensor: Tensor) -> Tensor:
    """A tensor as it is, detached: of one that is sharded all parts, of a sparse one a dense one.

    Args:
        tensor: the tensor. Where it is sharded, all ranks have to ask for it.
    """
    tensor = tensor.detach()
    if is_sharded(tensor):
        sharded: Any = tensor
        tensor = sharded.full_tensor()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _as_dense_real(tensor: Tensor, norm_type: float) -> Tensor:
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
    if tensor.layout != torch.strided:
        tensor = tensor.values()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj()) if norm_type == 2.0 else tensor.abs()
    return tensor


def _norm_on_one_device(tensors: list[Tensor], norm_type: float) -> Tensor:
    sizes = list(map(Tensor.numel, tensors))
    if not all(sizes):
        tensors = [tensor for tensor in tensors if tensor.numel()] or [torch.zeros(1, device=tensors[0].device)]
        sizes = list(map(Tensor.numel, tensors))
    # On other devices reading memory takes longer than adding in float64, and no branch may depend on a value.
    if tensors[0].is_cpu and norm_type in _TAME:
        norm = _float32_norm(tensors, sizes, norm_type)
        if torch.is_nonzero(norm.clamp(*_SAFE) == norm):
            return norm
    return _wide_norm(tensors, norm_type, wide_dtype(tensors[0].device))


def _wide_norm(tensors: list[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    if _is_plain(tensors, norm_type, dtype):
        norm: Tensor = torch.linalg.vector_norm(torch.stack(foreach_norm(tensors, norm_type, dtype=dtype)), norm_type)
        return norm
    unit = _unit(combine(foreach_norm(tensors, math.inf, dtype=dtype), math.inf))
    return unit * combine([torch.linalg.vector_norm(each.to(dtype) / unit, norm_type) for each in tensors], norm_type)


def _wide_norms(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> Tensor:
    if not tensors:
        return torch.zeros(0, dtype=dtype)
    if _is_plain(tensors, norm_type, dtype):
        return torch.stack(foreach_norm(list(tensors), norm_type, dtype=dtype))
    units = _unit(torch.stack(foreach_norm(list(tensors), math.inf, dtype=dtype)))
    scaled = [each.to(dtype) / unit for each, unit in zip(tensors, units.unbind(), strict=True)]
    return units * torch.stack([torch.linalg.vector_norm(each, norm_type) for each in scaled])


def _is_plain(tensors: Sequence[Tensor], norm_type: float, dtype: torch.dtype) -> bool:
    """Whether no power of a number can leave a dtype's range."""
    return norm_type in _TAME and not (norm_type == 2.0 and _has_larger_squares(tensors, dtype))


def _has_larger_squares(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether there may be numbers whose squares do not fit a dtype."""
    root = torch.finfo(dtype).max ** 0.5
    return any(torch.finfo(each).max > root for each in {tensor.dtype for tensor in tensors})


def _unit(largest: Tensor) -> Tensor:
    """What to divide by so that powers neither under- nor overflow: the largest absolute value, where there is one."""
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


def _float32_norm(tensors: list[Tensor], sizes: list[int], norm_type: float) -> Tensor:
    short, others = tensors, list[Tensor]()
    if max(sizes) > _SHORT:
        short = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size <= _SHORT]
        others = [tensor for tensor, size in zip(tensors, sizes, strict=True) if size > _SHORT]
    if sum(sizes) > _ROOM and sum(map(Tensor.numel, short)) > _ROOM:
        short, others = [], tensors
    norms = [_row_norms(flattened(short), norm_type)] if short else []
    if not all(map(Tensor.is_contiguous, others)):  # sums take another way, with fewer digits
        others = [tensor if tensor.is_contiguous() else _flat(tensor) for tensor in others]
    norms += [_row_norms(tensor.view(-1), norm_type) for tensor in others if tensor.numel() > _LONGEST_SUM]
    middling = [tensor for tensor in others if tensor.numel() <= _LONGEST_SUM]
    for dtype in {tensor.dtype for tensor in middling}:
        group = [tensor for tensor in middling if tensor.dtype == dtype]
        norms.append(torch.stack(foreach_norm(group, norm_type, dtype=_sum_dtype(dtype))))
    norm: Tensor = torch.linalg.vector_norm(torch.cat([each.double() for each in norms]), norm_type)
    return norm


def _row_norms(values: Tensor, norm_type: float) -> Tensor:
    """Norms of the rows that a long tensor is cut into, the norm of which is its own."""
    rest = values.numel() % _ROW
    rows = values[: values.numel() - rest].view(-1, _ROW)
    norms: Tensor = torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=_sum_dtype(values.dtype)).double()
    if rest:
        last = torch.linalg.vector_norm(values[-rest:], norm_type, dtype=_sum_dtype(values.dtype))
        norms = torch.cat((norms, last.view(1).double()))
    return norms


def _sum_dtype(dtype: torch.dtype) -> torch.dtype | None:
    return None if dtype in (torch.float32, torch.float64) else torch.float32


def _flat(tensor: Tensor) -> Tensor:
    # The order of the elements does not matter: read them as they lie.
    return tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True)).reshape(-1)


def summed_values(sparse: Tensor) -> Tensor:
    """The values of a sparse COO tensor, those at the same place summed.

    ``coalesce()`` does it too, but waits for the device, since the size of its result depends on the indices. This
    result keeps the size that is there, with zeros where several values have become one.

    Returns:
        A dense tensor, of the size of its values, with the same norm as ``sparse``.
    """
    indices, values = sparse_parts(sparse)
    if sparse.is_coalesced() or not len(values):
        return values
    places = torch.zeros_like(indices[0])
    for size, index in zip(sparse.shape, indices, strict=False):
        places = places * size + index
    ordered, order = places.sort()
    first = torch.cat([torch.zeros_like(ordered[:1]), (ordered[1:] != ordered[:-1]).long()])
    return torch.zeros_like(values).index_add_(0, first.cumsum(0), values[order])
