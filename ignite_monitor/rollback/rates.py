"""Lowering learning rates for good, where a schedule sets them too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ignite_monitor.rollback.parts import is_scheduler

# What schedules keep learning rates in: torch's in parameter groups and in lists, Ignite's in numbers and lists.
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_IN_SCHEDULES = ("base_lrs", "max_lrs", "eta_min", "start_value", "end_value", "values")
_INNER = ("lr_scheduler", "scheduler", "schedulers", "_schedulers")


def lower(things: Iterable[Any], factor: float) -> None:
    """Multiply the learning rates of optimizers and schedules.

    Args:
        things: optimizers, schedulers of torch and Ignite; what is none is left alone.
        factor: by what.
    """
    seen: set[int] = set()
    for thing in things:
        _lower(thing, factor, seen)


def _lower(thing: Any, factor: float, seen: set[int]) -> None:
    if id(thing) in seen:
        return
    seen.add(id(thing))
    groups = getattr(thing, "param_groups", None)
    if groups is not None:
        for group in groups:
            for name in _IN_GROUPS:
                if name in group:
                    group[name] = _times(group[name], factor)
    elif is_scheduler(thing):
        own = vars(thing) if getattr(thing, "param_name", "lr") == "lr" else {}
        for name in [name for name in _IN_SCHEDULES if name in own]:
            setattr(thing, name, _times(own[name], factor))
        for inner in (vars(thing).get(name) for name in _INNER):
            for each in inner if isinstance(inner, (list, tuple)) else [inner]:
                _lower(each, factor, seen)


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_times(each, factor) for each in value)
    if isinstance(value, Tensor):
        return value.mul_(factor)  # whoever has compiled a step with it goes on with this one
    return value * factor
