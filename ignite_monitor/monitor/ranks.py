"""The norm of a gradient, and sums, that lie on several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.model.norms import any_sharded, combine, is_sharded, reduce_norm, sharded_norm, total_norm
from ignite_monitor.model.sharding import flat_sharding


def reduction_of(model: nn.Module, reduction: str) -> str | None:
    """What :func:`gradient_norm` has to do for a model.

    Args:
        reduction: what the user wants: ``"mean"`` or ``"sum"``.

    Raises:
        ValueError: if a wrapper of the model leaves something else to be reduced.
    """
    sharding = flat_sharding(model)
    if sharding == "hybrid":
        raise ValueError(
            "Argument model should not be sharded by FullyShardedDataParallel with a hybrid strategy, which leaves "
            "parts of the gradient on several ranks: shard it with torch.distributed.fsdp.fully_shard"
        )
    if sharding == "sharded" and reduction == "mean":
        raise ValueError(
            "Argument reduction should be 'sum' with FullyShardedDataParallel, which leaves another part of the "
            "gradient on every rank, but given 'mean'"
        )
    if not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return reduction
    if reduction == "sum":
        raise ValueError(
            "Argument reduction should be 'mean' with DistributedDataParallel, which leaves the same gradient on every "
            "rank, but given 'sum'"
        )
    return None  # the same to the last bit, and its join() bears no collective of ours


def gradient_norm(gradients: Sequence[Tensor], norm_type: float, reduction: str | None) -> Tensor:
    """The p-norm of a gradient over all ranks, the same on every rank.

    Args:
        gradients: this rank's gradients, at least one.
        reduction: what the ranks' plain gradients are to each other: ``"mean"`` replicas, of whose norms the root
            mean square is taken; ``"sum"`` parts of one; None the same to the last bit, so that nothing is
            communicated. DTensors are exact in any.
    """
    plain, sharded = gradients, list[Any]()
    if any_sharded(gradients):
        plain = [gradient for gradient in gradients if not is_sharded(gradient)]
        sharded = [gradient for gradient in gradients if is_sharded(gradient)]
    norms = [_over_ranks(total_norm(plain, norm_type), norm_type, reduction)] if plain else []
    norms += [sharded_norm(sharded, norm_type)] if sharded else []
    return norms[0] if len(norms) == 1 else combine(norms, norm_type)


def _over_ranks(norm: Tensor, norm_type: float, reduction: str | None) -> Tensor:
    ranks = 1 if reduction is None else world_size()
    if ranks == 1:
        return norm
    if reduction == "mean":
        return (_all_reduce(norm**2, False) / ranks).sqrt()
    return reduce_norm(norm, norm_type, _all_reduce)


def world_size() -> int:
    """How many ranks train."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    # Ignite remembers a process group of torch's beyond its end.
    return 1 if idist.model_name() in ("serial", "native-dist") else idist.get_world_size()


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of the ranks' tensors, in one collective; without other ranks the tensor itself.

    Args:
        values: a tensor of one shape on all ranks.
    """
    return values if world_size() == 1 else _all_reduce(values, False)


def any_over_ranks(flag: Tensor) -> Tensor:
    """Whether a 0-dim bool tensor is True on any rank, in one collective."""
    return _all_reduce(flag.to(torch.float32), True) > 0


def from_first_rank(number: int) -> int:
    """A number as rank 0 has it, in one collective; without other ranks the number itself."""
    if world_size() == 1:
        return number
    if dist.is_available() and dist.is_initialized():
        numbers = [number]
        dist.broadcast_object_list(numbers, src=0)
        return numbers[0]
    return int(str(idist.broadcast(str(number), src=0)))


def _all_reduce(value: Tensor, largest: bool) -> Tensor:
    value = value.clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(value, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
        return value
    return torch.as_tensor(idist.all_reduce(value, op="MAX" if largest else "SUM"))
