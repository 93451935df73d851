"""Follows the steps of the optimizers that hold parameters of monitored models."""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ignite_monitor.events.hooks import weakly
from ignite_monitor.events.monitor_events import MonitorEvents

_logger = logging.getLogger(__name__)


class OptimizerSteps:
    """Reports the start and the end of optimizer steps to an event source, which is referenced weakly.

    Attributes:
        stepping: the optimizer whose step is running.
    """

    train_steps = 0  # running now, on any engine

    def __init__(self, source: Any) -> None:
        self._source = weakref.ref(source)
        self.stepping: Optimizer | None = None
        self._has_warned = False

    def register(self, handles: list[Any]) -> None:
        """Register hooks on all optimizers, and append their handles one by one."""
        handles.append(register_optimizer_step_pre_hook(torch.compiler.disable(weakly(self._start))))
        handles.append(register_optimizer_step_post_hook(torch.compiler.disable(weakly(self.complete))))

    def complete(self, optimizer: Optimizer, *_: Any) -> None:
        """Report the end of the running step, whether it was made or skipped."""
        if self.stepping is optimizer:
            self._fire(MonitorEvents.OPTIMIZER_STEP_COMPLETED)
            self.stepping = None

    def _start(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        source = self._source()
        if source is None:
            return None
        if not source.running:
            self._warn_outside(source, optimizer)
            return None
        if (self.stepping is not None and _is_nested(optimizer)) or not source.shares_parameters(optimizer):
            return None
        self.stepping = optimizer
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._fire(MonitorEvents.OPTIMIZER_STEP_STARTED)
            return None
        # The step uses the gradients that its closure computes.
        closure = self._firing_once(closure, optimizer)
        return (args, kwargs | {"closure": closure}) if "closure" in kwargs else ((args[0], closure, *args[2:]), kwargs)

    def _firing_once(self, closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
        steps, has_fired = weakref.ref(self), False

        @functools.wraps(closure)
        def fire_after(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_fired
            loss = closure(*args, **kwargs)
            owner = steps()
            if not has_fired and owner is not None and owner.stepping is optimizer:
                has_fired = True
                owner._fire(MonitorEvents.OPTIMIZER_STEP_STARTED)
            return loss

        return fire_after

    def _fire(self, event: MonitorEvents) -> None:
        source = self._source()
        if source is not None:
            source.fire_step(event, self.stepping)

    def _warn_outside(self, source: Any, optimizer: Optimizer) -> None:
        if self._has_warned or OptimizerSteps.train_steps or not source.shares_parameters(optimizer):
            return
        self._has_warned = True
        event = source.engine.last_event_name
        _logger.warning(
            "%s made a step outside the train step, in a handler of %s: monitors see none of what happens there. "
            "Make backward() and step() in the train step, which can test itself whether a step is due.",
            type(optimizer).__name__,
            getattr(event, "name", event),
        )


def _is_nested(optimizer: Optimizer) -> bool:
    """Whether a step runs inside another step, as those of wrapped optimizers and base classes do.

    If not, an earlier step has raised an error that the train step caught.
    """
    hooked = getattr(type(optimizer).step, "__code__", None)  # torch's wrapper of every step, which calls its hooks
    frame, steps = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        steps += frame.f_code is hooked
    return steps > 1
