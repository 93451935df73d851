"""Learning rates of optimizers and schedulers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

# Attributes that torch's schedulers keep rates in, then those of Ignite's.
_IN_SCHEDULERS = ("base_lrs", "max_lrs", "eta_min", "start_value", "end_value", "values")
_IN_GROUPS = ("lr", "initial_lr", "max_lr", "min_lr")
_INNER = ("lr_scheduler", "scheduler", "schedulers", "_schedulers")


def scale_learning_rates(things: Iterable[Any], factor: float) -> None:
    """Multiply the rates in parameter groups and the base rates of torch's and Ignite's schedulers."""
    waiting, seen = list(things), set[int]()
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        for group in getattr(thing, "param_groups", ()):
            group.update({name: _times(group[name], factor) for name in _IN_GROUPS if name in group})
        if any(hasattr(thing, name) for name in ("get_last_lr", "simulate_values")):
            own = vars(thing)
            if getattr(thing, "param_name", "lr") == "lr":
                own.update({name: _times(own[name], factor) for name in _IN_SCHEDULERS if name in own})
            for inner in map(own.get, _INNER):
                waiting += inner if isinstance(inner, (list, tuple)) else [inner]


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_times(item, factor) for item in value)
    if isinstance(value, Tensor):
        return value.mul_(factor)  # a compiled step holds this tensor
    return value * factor
