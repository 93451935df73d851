"""From a monitor's values to Ignite's loggers."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine, EventsList, State
from ignite.engine.events import CallableEventWithFilter
from ignite.handlers.base_logger import BaseLogger
from ignite.handlers.tqdm_logger import ProgressBar

from ignite_monitor.checks import check_type
from ignite_monitor.events.monitor_events import MonitorEvents, register_events
from ignite_monitor.model._torch import event_handlers, need
from ignite_monitor.model.names import Selection


class AddedHandlers:
    """The handlers that something adds to an engine between the making of this object and :meth:`note`.

    Ignite's own handles do not tell two equal handlers from each other, and a progress bar gives none.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        need("log_to", event_handlers(engine))
        self._before = {id(handler) for handlers in event_handlers(engine).values() for handler in handlers}
        self._added: list[tuple[Any, tuple[Any, ...]]] = []

    def note(self, values: Values | None = None) -> None:
        """Take the handlers down that are new; those of a monitor's values are called only where there are any.

        For some loggers an empty record is a request to a server, or a step of its own. A filtered event would do as
        well, but Ignite's filters close a reference cycle through the engine.

        Args:
            values: what they write; None if they are to be called always.
        """
        engine = self._engine()
        if engine is None:
            return
        for event, handlers in event_handlers(engine).items():
            for index, (handler, args, kwargs) in enumerate(handlers):
                if id(handlers[index]) in self._before:
                    continue
                if values is not None and isinstance(getattr(handler, "__self__", None), BaseLogger):
                    continue  # its own business: it sees a run begin and end
                if values is not None:
                    handlers[index] = (_where_any(handler, values), args, kwargs)
                self._added.append((event, handlers[index]))
            self._before |= {id(handler) for handler in handlers}

    def remove(self) -> None:
        """Remove the handlers from the engine."""
        engine = self._engine()
        for event, added in self._added:
            if engine is not None:
                handlers = event_handlers(engine)[event]
                event_handlers(engine)[event] = [handler for handler in handlers if handler is not added]
        self._added.clear()


def add_logger(
    monitor: Any, logger: BaseLogger, engine: Engine, event: Any, tag: str | None, selection: Selection
) -> AddedHandlers:
    """Let a logger write a monitor's values whose names are selected, with a tag before them.

    Raises:
        ValueError: if ``event`` is not one that loggers can write at.
    """
    check_type("logger", logger, BaseLogger, "ignite.handlers.base_logger.BaseLogger")
    check_type("engine", engine, Engine, "ignite.engine.Engine")
    if tag is not None:
        check_type("tag", tag, str, "str or None")
    for each in [event] if isinstance(event, str) else events_of(event):
        if each not in State.event_to_attr and each not in list(MonitorEvents):
            raise ValueError(f"Argument event should be an event that counts epochs or iterations, but given {each}")
    register_events(engine)
    added = AddedHandlers(engine)
    if isinstance(logger, ProgressBar):
        logger.attach(engine, output_transform=Values(monitor, "", selection), event_name=event)
        added.note()
        return added
    # Ignite's handlers always put a tag before a name: where the user wants none, it is the name's first part.
    for family in [""] if tag else monitor.families:
        values = Values(monitor, family, selection)
        logger.attach_output_handler(engine, event, tag=tag or family, output_transform=values)
        added.note(values)
    return added


def events_of(event: Any) -> list[CallableEventWithFilter]:
    """The events that the argument is, or is a list of.

    Raises:
        TypeError: if it is none.
    """
    if not isinstance(event, (CallableEventWithFilter, EventsList)):
        raise TypeError(f"Argument event should be an event of Ignite or of MonitorEvents, but given {type(event)}")
    return list(event) if isinstance(event, EventsList) else [event]


def _where_any(handler: Callable[..., Any], values: Values) -> Callable[..., Any]:
    @functools.wraps(handler, updated=())
    def handle(*args: Any, **kwargs: Any) -> Any:
        return handler(*args, **kwargs) if values.are_there() else None

    return handle


class Values:
    """An ``output_transform`` that gives a monitor's values of one family instead of the engine's output.

    Args:
        monitor: the monitor, which is not kept alive.
        family: what the names of the values start with; empty for any.
        selection: the names that are given.
    """

    def __init__(self, monitor: Any, family: str, selection: Selection) -> None:
        self._monitor = weakref.ref(monitor)
        self._start = f"{family}/" if family else ""
        self._selection, self._is_all = selection, selection.is_all

    def are_there(self) -> bool:
        """Whether there are any in this iteration."""
        monitor = self._monitor()
        if monitor is not None and not monitor.metrics:
            monitor.nothing_to_log()
        there = monitor is not None and any(name.startswith(self._start) for name in monitor.metrics)
        return there and (self._is_all or bool(self(None)))

    def __call__(self, _: Any) -> dict[str, Any]:
        monitor = self._monitor()
        host = {} if monitor is None else monitor.on_host()
        start = self._start
        names = [name for name in host if name.startswith(start)]
        return {name[len(start) :]: host[name] for name in (names if self._is_all else self._selection.of(names))}
