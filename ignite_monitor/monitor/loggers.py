"""Writing a monitor's values to Ignite's loggers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine, State
from ignite.engine.events import RemovableEventHandle
from ignite.handlers.base_logger import BaseLogger
from ignite.handlers.tqdm_logger import ProgressBar

from ignite_monitor.checks import check_type
from ignite_monitor.events.monitor_events import MonitorEvents, register_events
from ignite_monitor.model.names import Selection
from ignite_monitor.monitor.arguments import events_of


def add_logger(
    monitor: Any, logger: BaseLogger, engine: Engine, event: Any, tag: str | None, selection: Selection
) -> list[RemovableEventHandle]:
    """Let a logger write the selected values of a monitor under a tag.

    Returns:
        Handles that remove what was added to the engine.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if loggers can't write at ``event``.
    """
    check_type("logger", logger, BaseLogger, "ignite.handlers.base_logger.BaseLogger")
    check_type("engine", engine, Engine, "ignite.engine.Engine")
    if tag is not None:
        check_type("tag", tag, str, "str or None")
    for single in [event] if isinstance(event, str) else events_of(event):
        if single not in State.event_to_attr and single not in list(MonitorEvents):
            raise ValueError(f"Argument event should be an event that counts epochs or iterations, but given {single}")
    register_events(engine)
    if isinstance(logger, ProgressBar):
        bar = _BarEngine(engine)
        logger.attach(bar, output_transform=Values(monitor, "", selection), event_name=event)  # type: ignore[arg-type]
        return bar.handles
    handles: list[RemovableEventHandle] = []
    # Ignite's handlers always write a tag before a name: without one of the user's, it is the name's first part.
    for family in [""] if tag else monitor.families:
        values = Values(monitor, family, selection)
        handler = logger._create_output_handler(tag=tag or family, output_transform=values)  # type: ignore[call-arg]
        handles.append(logger.attach(engine, LogHandler(handler, values), event))
    return handles


class LogHandler:
    """Call a logger's handler in iterations that have values.

    For some loggers an empty record is a request to a server, or a step of its own.

    Args:
        handler: the logger's output handler.
        values: its ``output_transform``.
    """

    def __init__(self, handler: Callable[..., Any], values: Values) -> None:
        self.handler = handler
        self.values = values

    def __call__(self, engine: Engine, logger: BaseLogger, event_name: Any) -> None:
        if self.values.are_there():
            self.handler(engine, logger, event_name)


class Values:
    """An ``output_transform`` that returns a monitor's values of one family in place of the engine's output.

    Args:
        monitor: the monitor, kept by a weak reference.
        family: the first part of the names; empty for all.
        selection: the names to return.
    """

    def __init__(self, monitor: Any, family: str, selection: Selection) -> None:
        self._monitor = weakref.ref(monitor)
        self._start = f"{family}/" if family else ""
        self._selection = selection

    @property
    def monitor(self) -> Any:
        """The monitor; None if it has been freed."""
        return self._monitor()

    def are_there(self) -> bool:
        """Return True if there are values in this iteration."""
        monitor = self._monitor()
        if monitor is None:
            return False
        if not monitor.metrics and monitor._attached_to() is None:
            monitor._warn_once("log_to() was called, but attach() was not, so nothing is measured")
        there = any(name.startswith(self._start) for name in monitor.metrics)
        return there and (self._selection.is_all or bool(self(None)))

    def __call__(self, _: Any) -> dict[str, Any]:
        monitor = self._monitor()
        host = {} if monitor is None else monitor.on_host()
        names = [name for name in host if name.startswith(self._start)]
        return {name[len(self._start) :]: host[name] for name in self._selection.of(names)}


class _BarEngine:
    """An engine for :meth:`ProgressBar.attach` that keeps the handles of what the bar adds.

    The bar returns none, and its closing handlers are equal, so Ignite would remove those of others too.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.handles: list[RemovableEventHandle] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add_event_handler(self, event: Any, handler: Callable[..., Any], *args: Any) -> RemovableEventHandle:
        self.handles.append(self._engine.add_event_handler(event, functools.partial(handler), *args))
        return self.handles[-1]
