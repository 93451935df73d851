"""What lies in parts on several ranks: putting it together, and telling who keeps it so."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def all_reduce(values: Tensor, largest: bool = False, group: Any = None) -> Tensor:
    """The sum of the tensors of a process group, or with ``largest`` the largest numbers, place by place."""
    values = values.clone(memory_format=torch.contiguous_format)
    kind = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(values, kind, group=group)
    return values


def flat_sharding(model: nn.Module) -> str | None:
    """How parameters are parts of flattened ones, of which neither shape nor elements can be told; None if not so.

    FullyShardedDataParallel, the predecessor of ``fully_shard``, keeps them so: ``"sharded"`` where each rank has
    another part, ``"hybrid"`` where some ranks have the same.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return None
    flat: Any = fsdp.FullyShardedDataParallel
    kinds = {module.sharding_strategy.name for module in model.modules() if isinstance(module, flat)} - {"NO_SHARD"}
    if not kinds:
        return None
    return "hybrid" if any("HYBRID" in kind for kind in kinds) else "sharded"


def check_whole(model: nn.Module) -> None:
    """Refuse, with a ValueError, a model whose parameters can't be told one from the other."""
    if flat_sharding(model) is not None:
        raise ValueError(
            "Argument model should not be sharded by FullyShardedDataParallel, which leaves flattened parts of "
            "parameters: shard it with torch.distributed.fsdp.fully_shard"
        )
