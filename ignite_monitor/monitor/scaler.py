"""Detection of a GradScaler that a monitor was not given."""

from __future__ import annotations

import inspect
from typing import Any

from torch.amp.grad_scaler import GradScaler

from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents


def lacks_scaler(monitor: Any) -> bool:
    """Return True if a monitor measures gradients, takes a scaler, and has none."""
    events = [event for event, _ in monitor.handlers()]
    return getattr(monitor, "scaler", monitor) is None and MonitorEvents.GRADIENTS_READY in events


def check_scaler(monitor: Any, step: OptimizerStep) -> None:
    """Warn if an enabled GradScaler calls the first optimizer step of the monitor's model."""
    if monitor._has_seen_step or not step.tracker.shares(step.optimizer):
        return
    monitor._has_seen_step = True
    if _steps_through_scaler():
        monitor._warn_once("gradients are scaled by a GradScaler, and measured so: give the argument scaler")


def _steps_through_scaler() -> bool:
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code is GradScaler.step.__code__:
            return bool(frame.f_locals["self"].is_enabled())
        frame = frame.f_back
    return False
