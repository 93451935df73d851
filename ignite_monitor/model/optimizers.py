"""What an optimizer holds."""

from __future__ import annotations

from itertools import chain

from torch import nn
from torch.optim import Optimizer


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer holds, of all groups."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def held_by(optimizer: Optimizer) -> set[int]:
    """The ids of an optimizer's parameters."""
    return set(map(id, parameters_of(optimizer)))
