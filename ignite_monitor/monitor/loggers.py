"""Writing of a monitor's values and reports to loggers."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any, NamedTuple

from ignite.engine import Engine, Events, State
from ignite.handlers.base_logger import BaseLogger
from ignite.handlers.tqdm_logger import ProgressBar

from ignite_monitor.checks import check_type
from ignite_monitor.events.hooks import remove_all
from ignite_monitor.events.monitor_events import MonitorEvents, register_events
from ignite_monitor.model.names import Selection
from ignite_monitor.monitor.arguments import events_of

LEVELS = {"problem": logging.WARNING, "warning": logging.WARNING, "note": logging.INFO}
"""Severity of a report -> level of its log line."""


class Report(NamedTuple):
    """A line that a monitor has logged.

    Attributes:
        iteration: the engine's iteration; 0 before it has one.
        monitor: class and prefix of the monitor.
        kind: identifier of what is reported.
        severity: a key of :data:`LEVELS`.
        text: the line without monitor and iteration.
        names: parameters, modules or groups that it speaks of.
    """

    iteration: int
    monitor: str
    kind: str
    severity: str
    text: str
    names: tuple[str, ...] = ()


def add_logger(
    monitor: Any, logger: Any, engine: Engine, event: Any, tag: str | None, selection: Selection
) -> list[Any]:
    """Let a logger write the selected values of a monitor under a tag; return removable handles."""
    check_type("logger", logger, BaseLogger, "ignite.handlers.base_logger.BaseLogger")
    check_type("engine", engine, Engine, "ignite.engine.Engine")
    if tag is not None:
        check_type("tag", tag, str, "str or None")
    events = [event] if isinstance(event, str) else events_of(event)
    for single in events:
        if single not in State.event_to_attr and single not in list(MonitorEvents):
            raise ValueError(f"Argument event should be an event that counts epochs or iterations, but given {single}")
    register_events(engine)
    admitted = getattr(logger, "admitted", None)  # of HDF5Logger, which writes reports too
    handles: list[Any] = []
    with nullcontext() if admitted is None else admitted(engine, monitor.reports), ExitStack() as undo:
        undo.callback(remove_all, handles)
        if isinstance(logger, ProgressBar):  # whose own attach() returns no handles
            values = Values(monitor, "", selection)
            handler = logger._create_output_handler(logger.tqdm_kwargs.get("desc", ""), output_transform=values)
            close = functools.partial(logger._close)  # equal to no handler of the user's
            for single in events:
                handles.append(BaseLogger.attach(logger, engine, handler, single))
            handles.append(engine.add_event_handler(Events.EPOCH_COMPLETED, close))
        else:
            # Ignite's handlers always write a tag before a name: without one of the user's, it is its first part.
            for family in [""] if tag else monitor.families:
                values = Values(monitor, family, selection)
                handler = logger._create_output_handler(tag=tag or family, output_transform=values)
                writer = functools.partial(_write, handler, values)
                for single in events:
                    handles.append(logger.attach(engine, writer, single))
        undo.pop_all()
    return handles


class Values:
    """An ``output_transform`` that returns a monitor's selected values of a family, or of all if that is empty."""

    def __init__(self, monitor: Any, family: str, selection: Selection) -> None:
        self.monitor = weakref.ref(monitor)
        self.start = f"{family}/" if family else ""
        self._selection = selection

    def __call__(self, _: Any) -> dict[str, Any]:
        monitor = self.monitor()
        if monitor is None:
            return {}
        # Ignite still calls the handlers of an event in which one of them has detached the monitor.
        if monitor._log_handlers and monitor._attached_to() is None:
            monitor.report(
                "not_attached", "log_to() was called, but the monitor is not attached, so nothing is measured"
            )
        values = {name: value for name, value in monitor.on_host().items() if name.startswith(self.start)}
        return {name[len(self.start) :]: value for name, value in values.items() if name in self._selection}


def _write(handler: Callable[..., Any], values: Values, engine: Engine, logger: BaseLogger, event_name: Any) -> None:
    """Call a logger's handler if there are values: some loggers make a request to a server for an empty record."""
    if values(None):
        handler(engine, logger, event_name)
