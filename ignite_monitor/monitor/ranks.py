"""Sums, norms and lists over the ranks of torch's process group.

Under ``join()`` of DistributedDataParallel some ranks may be gone: ask :func:`all_take_part` before a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.model._torch import is_in_join
from ignite_monitor.model.norms import any_sharded, combine, is_sharded, norms, reduce_norm, total_norm
from ignite_monitor.model.sharding import all_reduce

T = TypeVar("T")


def reduction_of(model: nn.Module, reduction: str) -> str | None:
    """Return the reduction that :func:`gradient_norm` needs for a model; None if gradients are the same on all ranks.

    Args:
        reduction: the user's choice, ``"mean"`` or ``"sum"``.

    Raises:
        ValueError: if it does not fit the model's wrapper.
    """
    if not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return reduction
    if reduction == "sum":
        raise ValueError(
            "Argument reduction should be 'mean' with DistributedDataParallel, which leaves the same gradient on every "
            "rank, but given 'sum'"
        )
    return None  # bitwise the same, and join() does not allow for a collective of ours


def gradient_norm(gradients: Sequence[Tensor], norm_type: float, reduction: str | None) -> Tensor:
    """Return the p-norm of a gradient over all ranks, the same on every rank.

    Args:
        gradients: this rank's gradients, at least one; for DTensors the norm is exact with any reduction.
        reduction: ``"mean"`` for the root mean square of the ranks' norms, ``"sum"`` if the ranks have parts of one
            gradient, None if their gradients are bitwise the same.
    """
    plain, sharded = gradients, list[Any]()
    if any_sharded(gradients):
        plain = [gradient for gradient in gradients if not is_sharded(gradient)]
        sharded = [gradient for gradient in gradients if is_sharded(gradient)]
    parts = [_over_ranks(total_norm(plain, norm_type), norm_type, reduction)] if plain else []
    parts += [combine(norms(sharded, norm_type), norm_type)] if sharded else []
    return parts[0] if len(parts) == 1 else combine(parts, norm_type)


def norm_of_parts(
    gradients: Sequence[Tensor], tensor_norms: Tensor, norm_type: float, reduction: str | None, flag: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the norm of a gradient over all ranks from the norms of its tensors, by the same collectives.

    Args:
        tensor_norms: vector of the norms of the gradients, of DTensors over all their ranks.
        flag: 0-dim bool tensor.

    Returns:
        The norm, and the flag of any rank.
    """
    if reduction is None or world_size() == 1:
        return combine(tensor_norms, norm_type), flag
    sharded = list(map(is_sharded, gradients))
    if all(sharded):
        return combine(tensor_norms, norm_type), flag
    each = tensor_norms.unbind()
    plain = combine([norm for norm, of_all in zip(each, sharded, strict=True) if not of_all], norm_type)
    norm, any_flag = _over_ranks(torch.stack((plain, flag.to(plain))), norm_type, reduction).unbind()
    if any(sharded):
        of_all_ranks = [norm for norm, of_all in zip(each, sharded, strict=True) if of_all]
        norm = combine([norm, *of_all_ranks], norm_type)
    return norm, any_flag > 0


def _over_ranks(norm: Tensor, norm_type: float, reduction: str | None) -> Tensor:
    ranks = 1 if reduction is None else world_size()
    if ranks == 1:
        return norm
    if reduction == "mean":
        return (all_reduce(norm**2) / ranks).sqrt()
    return reduce_norm(norm, norm_type, all_reduce)


def world_size() -> int:
    """Return the number of ranks of torch's process group; 1 without one."""
    return dist.get_world_size() if _has_group() else 1


def own_rank() -> int:
    """Return the number of this rank."""
    return dist.get_rank() if _has_group() else 0


def all_take_part(model: nn.Module) -> bool:
    """Return True if all ranks are known to be at this point, so that they may communicate."""
    if world_size() == 1:
        return True
    return not any(isinstance(each, DistributedDataParallel) and is_in_join(each) for each in model.modules())


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors, of one shape on all ranks, in one collective."""
    return values if world_size() == 1 else all_reduce(values)


def max_over_ranks(values: Tensor) -> Tensor:
    """Return the elementwise maximum of the ranks' tensors, in one collective."""
    return values if world_size() == 1 else all_reduce(values, largest=True)


def from_every_rank(value: T) -> list[T]:
    """Return every rank's value, any object that can be pickled, in the order of ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
