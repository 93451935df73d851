"""Monitors that were attached together."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ignite.engine import Engine
from ignite.handlers.base_logger import BaseLogger

from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.handles import detach_with_last_values

_ATTRIBUTE = "_ignite_monitor_attached"  # of an engine: prefix -> AttachedMonitors


class AttachedMonitors:
    """Monitors that were attached together; :meth:`remove` or the end of a ``with`` block detaches them together.

    After a ``with`` block their last values stay in ``engine.state.metrics``.

    Args:
        engine: the engine; kept by a weak reference.
        prefix: prefix of all names.
        monitors: name -> monitor and event to attach it with.
        loggers: loggers, each with the patterns of names that it is not given, by name of the monitor.

    Attributes:
        monitors: name -> monitor, read-only; for checkpoints: ``Checkpoint({**handle.monitors, ...}, ...)``.
    """

    def __init__(
        self,
        engine: Engine,
        prefix: str,
        monitors: Mapping[str, tuple[Monitor, Any]],
        loggers: Iterable[tuple[BaseLogger, Mapping[str, str]]],
    ) -> None:
        self.monitors: Mapping[str, Monitor] = MappingProxyType(
            {name: monitor for name, (monitor, _) in monitors.items()}
        )
        self._events = {name: event for name, (_, event) in monitors.items()}
        self._engine = weakref.ref(engine)
        self._prefix = prefix
        self._loggers = list(loggers)

    def attach(self) -> None:
        """Attach all monitors in place of those with the same prefix; if that fails, attach the former ones again.

        Raises:
            ValueError: if the former ones watch another model.
        """
        engine = self._engine()
        if engine is None:
            return
        former: AttachedMonitors | None = vars(engine).get(_ATTRIBUTE, {}).get(self._prefix)
        if former is not None:
            if not former._watches_model_of(self):
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
        attached = {} if engine is None else vars(engine).get(_ATTRIBUTE, {})
        if attached.get(self._prefix) is self:
            del attached[self._prefix]

    def __enter__(self) -> AttachedMonitors:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            detach_with_last_values(self.monitors.values())
        self.remove()

    def _attach_all(self, engine: Engine) -> None:
        for name, monitor in self.monitors.items():
            monitor.attach(engine, self._events[name])
            for logger, excluded in self._loggers:
                monitor.log_to(logger, engine, exclude=excluded.get(name))
        vars(engine).setdefault(_ATTRIBUTE, {})[self._prefix] = self

    def _watches_model_of(self, other: AttachedMonitors) -> bool:
        own, others = (
            {id(parameter) for monitor in handle.monitors.values() for parameter in monitor.model.parameters()}
            for handle in (self, other)
        )
        return not own.isdisjoint(others)
