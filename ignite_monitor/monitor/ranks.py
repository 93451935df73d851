"""Sums, norms and lists over ranks.

The ranks are those of torch's process group, or of another backend that Ignite knows; without either there is one, and
nothing is communicated. Under ``join()`` of DistributedDataParallel some may be gone: who adds up what not every rank
may have, asks :func:`all_take_part` first.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import ignite.distributed as idist
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.model._torch import is_in_join
from ignite_monitor.model.norms import any_sharded, combine, is_sharded, reduce_norm, sharded_norm, total_norm
from ignite_monitor.model.sharding import all_reduce

T = TypeVar("T")


def reduction_of(model: nn.Module, reduction: str) -> str | None:
    """What :func:`gradient_norm` has to do for a model.

    Args:
        reduction: what the user wants: ``"mean"`` or ``"sum"``.

    Raises:
        ValueError: if a wrapper of the model leaves something else to be reduced.
    """
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


def norm_of_parts(
    gradients: Sequence[Tensor], norms: Tensor, norm_type: float, reduction: str | None, flag: Tensor
) -> tuple[Tensor, Tensor]:
    """The norm of a gradient over all ranks where those of its tensors are known; the same collectives.

    Args:
        norms: the norm of each gradient, of DTensors over all their ranks: a vector.
        flag: 0-dim bool tensor.

    Returns:
        The norm, and whether the flag is set on any rank.
    """
    if reduction is None or world_size() == 1:
        return combine(norms, norm_type), flag
    sharded = list(map(is_sharded, gradients))
    if all(sharded):
        return combine(norms, norm_type), flag
    each = norms.unbind()
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
        return (_all_reduce(norm**2) / ranks).sqrt()
    return reduce_norm(norm, norm_type, _all_reduce)


def world_size() -> int:
    """How many ranks train."""
    if _has_group():
        return dist.get_world_size()
    # Ignite remembers a process group of torch's beyond its end.
    return 1 if idist.model_name() in ("serial", "native-dist") else idist.get_world_size()


def own_rank() -> int:
    """The number of this rank."""
    if _has_group():
        return dist.get_rank()
    return 0 if idist.model_name() in ("serial", "native-dist") else idist.get_rank()


def all_take_part(model: nn.Module) -> bool:
    """Whether every rank is known to be where this one is, so that they may communicate."""
    if world_size() == 1:
        return True
    return not any(isinstance(each, DistributedDataParallel) and is_in_join(each) for each in model.modules())


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of the ranks' tensors, of one shape on all of them, in one collective."""
    return values if world_size() == 1 else _all_reduce(values)


def max_over_ranks(values: Tensor) -> Tensor:
    """The largest of the ranks' numbers, element by element, in one collective."""
    return values if world_size() == 1 else _all_reduce(values, largest=True)


def from_every_rank(value: T) -> list[T]:
    """What each rank has, anything that pickle knows, in the order of the ranks."""
    if world_size() == 1:
        return [value]
    if _has_group():
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, value)
        return everyone
    # Other backends know text.
    texts: Any = idist.all_gather(pickle.dumps(value).hex())
    return [pickle.loads(bytes.fromhex(text)) for text in texts]


def _all_reduce(values: Tensor, largest: bool = False) -> Tensor:
    if _has_group():
        return all_reduce(values, largest)
    return torch.as_tensor(idist.all_reduce(values.clone(), op="MAX" if largest else "SUM"))


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()
