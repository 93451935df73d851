"""Parameters of an optimizer, and checks of the argument ``optimizer``."""

from __future__ import annotations

from itertools import chain

from torch import nn
from torch.optim import Optimizer


def check_optimizer(optimizer: object, *, optional: bool = False) -> None:
    """Raise a TypeError, which names an optimizer inside, for an object that is none of torch's optimizers."""
    if isinstance(optimizer, Optimizer) or (optional and optimizer is None):
        return
    attributes = getattr(optimizer, "__dict__", {}).items()
    inner = next((name for name, value in attributes if isinstance(value, Optimizer)), None)
    fix = f": give the optimizer inside of it, its attribute {inner!r}" if inner is not None else ""
    kinds = "torch.optim.Optimizer" + " or None" * optional
    raise TypeError(f"Argument optimizer should be of type {kinds}, but given {type(optimizer)}{fix}")


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters that an optimizer holds, of all groups."""
    return list(chain.from_iterable(group["params"] for group in optimizer.param_groups))


def held_by(optimizer: Optimizer) -> set[int]:
    """The ids of an optimizer's parameters."""
    return set(map(id, parameters_of(optimizer)))


def check_holds(optimizer: Optimizer, model: nn.Module) -> None:
    """Raise a ValueError for an optimizer that holds none of a model's parameters."""
    if held_by(optimizer).isdisjoint(map(id, model.parameters())):
        raise ValueError("Argument optimizer should hold parameters of model, but it holds none of them")
