"""Tensors and models that are distributed over ranks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def all_reduce(values: Tensor, largest: bool = False, group: Any = None) -> Tensor:
    """The sum of the tensors of a process group, or their maximum, element by element."""
    values = values.clone(memory_format=torch.contiguous_format)
    kind = torch.distributed.ReduceOp.MAX if largest else torch.distributed.ReduceOp.SUM
    torch.distributed.all_reduce(values, kind, group=group)
    return values


def check_whole(model: nn.Module) -> None:
    """Refuse, with a ValueError, a model that FullyShardedDataParallel (FSDP1) has flattened and sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # no model is sharded before this import
    if fsdp is not None and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            "Argument model should not be sharded by FullyShardedDataParallel, which leaves flattened parts of "
            "parameters: shard it with torch.distributed.fsdp.fully_shard"
        )
