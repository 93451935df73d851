"""Handles that detach monitors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from ignite.engine import Engine, Events
from ignite.engine.events import RemovableEventHandle

_LAST_VALUES = "_ignite_monitor_last_values"  # of an engine: names that stay after a ``with`` block


class MonitorHandle(RemovableEventHandle):
    """Handle that :meth:`Monitor.attach` returns.

    Args:
        monitor: the monitor.
        engine: the engine it is attached to.
    """

    def __init__(self, monitor: Any, engine: Engine) -> None:
        super().__init__(Events.ITERATION_STARTED, monitor._start, engine)
        self._monitor = weakref.ref(monitor)

    @property
    def monitor(self) -> Any:
        """The monitor; None if it has been freed."""
        return self._monitor()

    def remove(self) -> None:
        """Detach the monitor, if it is still attached to the engine."""
        monitor, engine = self._monitor(), self.engine()
        if monitor is not None and engine is not None and monitor._attached_to() is engine:
            monitor.detach()

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Detach the monitor; its last values stay in ``engine.state.metrics``."""
        monitor, engine = self._monitor(), self.engine()
        if kind is None and monitor is not None and engine is not None and monitor._attached_to() is engine:
            detach_with_last_values([monitor])
        else:
            self.remove()


def detach_with_last_values(monitors: Iterable[Any]) -> None:
    """Detach monitors, and leave their values where they are, as floats."""
    attached = [(monitor, engine) for monitor in monitors if (engine := monitor._attached_to()) is not None]
    values = [dict(monitor.on_host()) for monitor, _ in attached]
    for monitor, _ in attached:
        monitor.detach()
    for (monitor, engine), last in zip(attached, values, strict=True):
        monitor.metrics.update(last)
        engine.state.metrics.update(last)
        vars(engine).setdefault(_LAST_VALUES, set()).update(last)


def forget_last_values(engine: Engine) -> None:
    """Remove the values that :func:`detach_with_last_values` left."""
    for name in vars(engine).pop(_LAST_VALUES, ()):
        engine.state.metrics.pop(name, None)
