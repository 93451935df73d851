"""Base of the monitors that divide gradients by the loss scale."""

from __future__ import annotations

import sys
from traceback import walk_stack
from typing import Any

from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.checks import check_type
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.monitor.base import Handlers, Monitor


class ScaledMonitor(Monitor):
    """Keeps the GradScaler, and reports one that makes the steps but was not given; extend :meth:`handlers`.

    Attributes:
        scaler: the GradScaler, or None.
        optimizer: the optimizer whose steps count; None for all of the model's.
        lacks_scaler: whether a GradScaler that was not given makes the steps; None before a step.
    """

    scaler: GradScaler | None = None  # an enabled one
    optimizer: Optimizer | None = None
    lacks_scaler: bool | None = None

    def set_scaler(self, scaler: GradScaler | None) -> None:
        """Keep the GradScaler, if it is enabled.

        Args:
            scaler: the argument ``scaler`` of the constructor.

        Raises:
            TypeError: if it has another type.
        """
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None

    def handlers(self) -> Handlers:
        return [(MonitorEvents.OPTIMIZER_STEP_STARTED, self._check_scaler)] if self.scaler is None else []

    def _check_scaler(self, engine: Any, step: Any) -> None:
        if self.lacks_scaler is None and step.is_of(self.optimizer):
            frames = (frame for frame, _ in walk_stack(sys._getframe()) if frame.f_code is GradScaler.step.__code__)
            self.lacks_scaler = any(frame.f_locals["self"].is_enabled() for frame in frames)
            if self.lacks_scaler:
                text = "gradients are scaled by a GradScaler, and measured so: give the argument scaler"
                self.report("scaler_not_given", text)
