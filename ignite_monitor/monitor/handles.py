"""Handles of attached monitors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ignite.engine import Engine

_LAST_VALUES = "_ignite_monitor_last_values"  # of an engine: names that stay after a ``with`` block


class MonitorHandle:
    """Handle of monitors on an engine: :meth:`remove` or the end of a ``with`` block detaches them.

    After a ``with`` block their last values stay in ``engine.state.metrics``, until a monitor is attached.

    Attributes:
        monitors: name -> monitor, read-only; for checkpoints: ``Checkpoint({**handle.monitors, ...}, ...)``.
    """

    def __init__(self, engine: Engine, monitors: Mapping[str, Any]) -> None:
        self.monitors = MappingProxyType(dict(monitors))
        self._engine = weakref.ref(engine)

    def remove(self) -> None:
        """Detach the monitors that are still attached to the engine."""
        for monitor in self._attached():
            monitor.detach()

    def __enter__(self) -> MonitorHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        engine = self._engine()
        if kind is None and engine is not None:
            for monitor in self._attached():
                last = dict(monitor.on_host())
                monitor.detach()
                monitor.metrics.update(last)
                engine.state.metrics.update(last)
                vars(engine).setdefault(_LAST_VALUES, set()).update(last)
        self.remove()

    def _attached(self) -> list[Any]:
        return [monitor for monitor in self.monitors.values() if monitor._attached_to() is self._engine()]


def forget_last_values(engine: Engine) -> None:
    """Remove the values that monitors left after a ``with`` block."""
    for name in vars(engine).pop(_LAST_VALUES, ()):
        engine.state.metrics.pop(name, None)
