"""Handles that detach monitors: one, or several that were attached together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ignite.engine import Engine, Events
from ignite.engine.events import RemovableEventHandle
from ignite.handlers.base_logger import BaseLogger

_ATTACHED = "_ignite_monitor_attached"  # of an engine: prefix -> AttachedMonitors
_LAST_VALUES = "_ignite_monitor_last_values"  # of an engine: names that stay after a ``with`` block


class MonitorHandle(RemovableEventHandle):
    """Handle that :meth:`Monitor.attach` returns; references engine and monitor weakly.

    After its ``with`` block the last values stay in ``engine.state.metrics``.
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
        for monitor in self._attached():
            monitor.detach()

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            _detach_with_last_values(self._attached())
        self.remove()

    def _attached(self) -> list[Any]:
        monitor, engine = self._monitor(), self.engine()
        is_attached = monitor is not None and engine is not None and monitor._attached_to() is engine
        return [monitor] if is_attached else []


class AttachedMonitors:
    """Monitors that were attached together; :meth:`remove` or the end of a ``with`` block detaches them together.

    After a ``with`` block their last values stay in ``engine.state.metrics``.

    Args:
        prefix: prefix of all names.
        monitors: name -> monitor and event to attach it with.
        loggers: loggers, each with the patterns of names that it is not given, by name of the monitor.

    Attributes:
        monitors: name -> monitor, read-only; for checkpoints: ``Checkpoint({**handle.monitors, ...}, ...)``.
    """

    def __init__(
        self,
        prefix: str,
        monitors: Mapping[str, tuple[Any, Any]],
        loggers: Iterable[tuple[BaseLogger, Mapping[str, str]]],
    ) -> None:
        self.monitors: Mapping[str, Any] = MappingProxyType({name: monitor for name, (monitor, _) in monitors.items()})
        self._events = {name: event for name, (_, event) in monitors.items()}
        self._prefix, self._loggers = prefix, list(loggers)

    def attach(self, engine: Engine) -> None:
        """Attach all monitors in place of those with the same prefix; if that fails, attach the former ones again.

        Raises:
            ValueError: if the former ones watch another model.
        """
        former: AttachedMonitors | None = vars(engine).get(_ATTACHED, {}).get(self._prefix)
        if former is not None:
            if former._parameters().isdisjoint(self._parameters()):
                raise ValueError(
                    f"Monitors of another model are attached to this engine with the prefix {self._prefix!r}: give "
                    "every model a prefix of its own, or remove() the handle of the former ones"
                )
            former.remove()
        try:
            self._attach_all(engine)
        except BaseException:
            self.remove()
            if former is not None:
                former._attach_all(engine)
            raise

    def remove(self) -> None:
        """Detach all monitors that are still attached."""
        for monitor in self.monitors.values():
            monitor.detach()
        engine = self._engine()
        attached = {} if engine is None else vars(engine).get(_ATTACHED, {})
        if attached.get(self._prefix) is self:
            del attached[self._prefix]

    def __enter__(self) -> AttachedMonitors:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            _detach_with_last_values(self.monitors.values())
        self.remove()

    def _attach_all(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        for name, monitor in self.monitors.items():
            monitor.attach(engine, self._events[name])
            for logger, excluded in self._loggers:
                monitor.log_to(logger, engine, exclude=excluded.get(name))
        vars(engine).setdefault(_ATTACHED, {})[self._prefix] = self

    def _parameters(self) -> set[int]:
        return {id(parameter) for monitor in self.monitors.values() for parameter in monitor.model.parameters()}


def _detach_with_last_values(monitors: Iterable[Any]) -> None:
    """Detach monitors, and leave their values in the metrics, as floats."""
    for monitor in monitors:
        engine = monitor._attached_to()
        if engine is not None:
            last = dict(monitor.on_host())
            monitor.detach()
            monitor.metrics.update(last)
            engine.state.metrics.update(last)
            vars(engine).setdefault(_LAST_VALUES, set()).update(last)


def forget_last_values(engine: Engine) -> None:
    """Remove the values that monitors left after a ``with`` block."""
    for name in vars(engine).pop(_LAST_VALUES, ()):
        engine.state.metrics.pop(name, None)
