"""What every monitor shares: attaching, publishing, logging, letting go."""

from __future__ import annotations

import inspect
import logging
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ignite.engine import Engine, Events, EventsList, State
from ignite.engine.events import CallableEventWithFilter, RemovableEventHandle
from ignite.handlers.base_logger import BaseLogger
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ignite_monitor.checks import check_type
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.events.source import EventSource, check_events
from ignite_monitor.model._torch import put_first
from ignite_monitor.model.names import Pattern, Selection
from ignite_monitor.monitor.loggers import AddedHandlers, add_logger, events_of
from ignite_monitor.monitor.publisher import Publisher
from ignite_monitor.schema import Schema

Handlers = list[tuple[MonitorEvents, Callable[..., Any]]]


class Monitor(Publisher):
    """Base of all monitors.

    A monitor overrides :meth:`handlers`, whose handlers run in monitored iterations only, and calls
    :meth:`publish`; what else it overrides, it extends. In its docstring ``{keys}`` is its schema's table.

    Args:
        model: the model to watch, as the train step uses it (wrapped, where it is wrapped), or a :class:`NoModel`.
        prefix: what the names of its values start with, before a slash.
        families: what comes next in every name, one of these; with them the prefix may be empty.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the model has no parameters, some that no forward pass has initialized yet, or none with data,
            or ``prefix`` holds what a tag can't.
    """

    def __init_subclass__(cls, schema: Schema | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if schema is not None:
            cls.schema = schema
            if cls.__doc__ is not None:
                cls.__doc__ = inspect.cleandoc(cls.__doc__).replace("{keys}", schema.table())

    def __init__(self, model: nn.Module, prefix: str, families: Sequence[str] = ()) -> None:
        if not isinstance(model, NoModel):
            _check_model(model)
        check_type("prefix", prefix, str, "str")
        if not (prefix or families) or not re.fullmatch(r"[A-Za-z0-9_./-]*", prefix):
            raise ValueError(f"Argument prefix should be letters, digits, '-', '_', '.' and '/', but given {prefix!r}")
        super().__init__(prefix)
        self.model = model
        # What its names start with, so that none is another monitor's, and loggers have a tag for each.
        self.families = [self._named(family) for family in families] or [prefix]
        # What it sets on the engine's state: name -> value where there is nothing to tell.
        self.attributes: dict[str, Any] = {}
        self.logger = logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")
        # Keys of its state that stay as they are where the training goes back: a reference does not change.
        self.kept_on_rollback: tuple[str, ...] = ("reference",)
        self._source: EventSource | None = None
        self._filters: list[Callable[[Engine, int], bool] | None] = []
        self._log_handlers: list[AddedHandlers] = []
        self._warned_texts: set[str] = set()
        self._monitored = False

    # What a monitor overrides

    def handlers(self) -> Handlers:
        """The events the monitor listens to, each with its method."""
        return []

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        """Ignite's events, each with what to call in iterations that are not monitored too; first, where one starts."""
        return []

    def start_iteration(self, engine: Engine) -> None:
        """Get ready for a monitored iteration."""

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        """What to have around the train step that is about to start, where the monitor is armed."""
        return []

    def on_run_end(self) -> None:
        """The run has ended: say what it lacked."""

    def reset_run_state(self) -> None:
        """Let go of everything that belongs to the run that has ended, or is interrupted."""

    def clear(self, engine: Engine) -> None:
        """Take this monitor's values out of the engine's state."""
        self.clear_metrics()
        for name, value in self.attributes.items():
            setattr(engine.state, name, value)

    def counts(self) -> Tensor | None:
        """Spikes, values that are not finite and fresh starts of its rule so far; None of who judges nothing."""
        return None

    def reset_threshold(self) -> None:
        """Forget the level that values are judged by; counts go on."""

    # What users call

    def attach(
        self, engine: Engine, event: CallableEventWithFilter | EventsList = Events.ITERATION_STARTED
    ) -> MonitorHandle:
        """Start to watch an engine's iterations.

        Args:
            engine: the engine that trains the model.
            event: ``Events.ITERATION_STARTED``, with any filter: ``Events.ITERATION_STARTED(every=10)``.

        Returns:
            A handle whose ``remove()`` detaches again; a ``with`` block does it at its end.

        Raises:
            TypeError: if ``engine`` is no Engine, or ``event`` no event.
            ValueError: if ``event`` is another event, the monitor is attached already, or the names that it needs in
                the engine's state are taken.
            RuntimeError: if what it needs is gone from the installed torch or Ignite.

        Examples:
            .. code-block:: python

                with monitor.attach(trainer, Events.ITERATION_STARTED(every=10)):
                    trainer.run(loader, max_epochs=5)
        """
        check_type("engine", engine, Engine, "ignite.engine.Engine")
        events = events_of(event)
        if not events or any(each != Events.ITERATION_STARTED for each in events):
            raise ValueError(f"Argument event should be Events.ITERATION_STARTED, filtered or not, but given {event}")
        if self._attached_to() is not None:
            raise ValueError(f"This {type(self).__name__} is attached already: detach() it first, or make another one")
        taken = [name for name in self.attributes if hasattr(engine.state, name)]
        if taken:
            raise ValueError(
                f"engine.state.{taken[0]} is already claimed, by another monitor or by code of your own: detach() the "
                f"other {type(self).__name__}, as before a cell of a notebook is run again, or give this one a prefix "
                "and a flag of its own"
            )
        check_events(type(self).__name__, engine, [event for event, _ in self.handlers()])
        source = EventSource.of(engine)
        source.add(self, self.model, self.families)
        self._source = source
        self._engine = weakref.ref(engine)
        self._filters = [getattr(each, "filter", None) for each in events]
        engine.add_event_handler(Events.ITERATION_STARTED, self._start)
        for name, handler in self.engine_handlers():
            engine.add_event_handler(name, handler)
            if name == Events.ITERATION_STARTED:
                put_first(engine, name)
        for event_name, listener in self.handlers():
            source.listen(event_name, listener)
        self.clear(engine)
        return MonitorHandle(self, engine)

    def detach(self) -> None:
        """Undo :meth:`attach` and :meth:`log_to`: no handler, hook, value or attribute stays on engine or model."""
        while self._log_handlers:
            self._log_handlers.pop().remove()
        engine = self._attached_to()
        if engine is None or self._source is None:
            return
        for event_name, listener in self.handlers():
            self._source.unlisten(event_name, listener)
        engine.remove_event_handler(self._start, Events.ITERATION_STARTED)
        for name, handler in self.engine_handlers():
            engine.remove_event_handler(handler, name)
        self.on_run_end()
        self.reset_run_state()
        self.clear(engine)
        self._monitored = False
        self._source.remove(self, self.model, self.families)
        self._source = self._engine = None
        for attribute in self.attributes:
            delattr(engine.state, attribute)

    def log_to(
        self,
        logger: BaseLogger,
        engine: Engine,
        event: Any = Events.ITERATION_COMPLETED,
        tag: str | None = None,
        *,
        include: Pattern = None,
        exclude: Pattern = None,
    ) -> None:
        """Write each monitored iteration's values to an Ignite logger, before or after :meth:`attach`.

        Whatever the number of monitors, values and loggers on an engine: the values come to the host together, in
        one transfer per iteration. Where no iteration was monitored nothing is written.

        Args:
            logger: any Ignite logger: ``TensorboardLogger``, ``WandBLogger``, ``MLflowLogger``, ``ProgressBar`` …
            engine: the engine the monitor is attached to.
            event: when to write, any event of the engine or of :class:`MonitorEvents`, filtered or not.
            tag: what to put before the values' names; None for nothing.
            include: a regular expression; only values in whose name it is found are written. None for all.
            exclude: a regular expression; those in whose name it is found are not.

        Raises:
            TypeError: if an argument is of another type.
            ValueError: if ``event`` is not one that loggers can write at, or a pattern is no regular expression.
        """
        self._log_handlers.append(add_logger(self, logger, engine, event, tag, Selection(include, exclude)))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping.
            ValueError: if it was saved by a monitor of another kind.
        """
        super().load_state_dict(state_dict)

    # Its state

    def nothing_to_log(self) -> None:
        """Say once where there never will be anything."""
        if self._engine is None:
            self._warn_once("log_to() was called, but attach() was not, so nothing is measured")

    def _warn_once(self, text: str, *values: object) -> None:
        """Log a warning, unless there has been one of this text, if with other values in it."""
        if text not in self._warned_texts:
            self._warned_texts.add(text)
            self.logger.warning(f"%s: {text}", self.prefix, *values)

    @property
    def _is_running(self) -> bool:
        """Whether a train step is going on that this monitor watches."""
        return self._monitored and self._source is not None and self._source.running

    def _with_same_engine(self) -> Sequence[Publisher]:
        return [self] if self._source is None else self._source.monitors

    def _start(self, engine: Engine) -> None:
        self.clear(engine)
        iteration = engine.state.iteration
        self._monitored = any(accepts is None or accepts(engine, iteration) for accepts in self._filters)
        if self._monitored and self._source is not None:
            self._source.monitor_iteration(self)
            self.start_iteration(engine)


class NoModel(nn.Module):
    """What a monitor that watches no model has in place of one."""


class MonitorHandle(RemovableEventHandle):
    """Undoes :meth:`Monitor.attach`.

    Args:
        monitor: the monitor.
        engine: the engine it is attached to.
    """

    def __init__(self, monitor: Monitor, engine: Engine) -> None:
        super().__init__(Events.ITERATION_STARTED, monitor._start, engine)
        self._monitor = weakref.ref(monitor)

    def remove(self) -> None:
        """Detach the monitor, if it is still attached to the engine."""
        monitor, engine = self._monitor(), self.engine()
        if monitor is not None and engine is not None and monitor._attached_to() is engine:
            monitor.detach()


def check_flag(flag: str) -> None:
    """Refuse a name that can't be an attribute of an engine's state.

    Raises:
        TypeError: if it is no string.
        ValueError: if it is no name, or Ignite uses it.
    """
    check_type("flag", flag, str, "str")
    if not flag.isidentifier() or hasattr(State(), flag):
        raise ValueError(f"Argument flag should name an attribute that Ignite does not use, but given {flag!r}")


def _check_model(model: nn.Module) -> None:
    check_type("model", model, nn.Module, "torch.nn.Module")
    parameters = list(model.parameters())
    if not parameters:
        raise ValueError("Argument model should have parameters, but it has none")
    if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
        raise ValueError("Argument model has lazy modules: run one forward pass before a monitor is made")
    if all(parameter.is_meta for parameter in parameters):
        raise ValueError("Argument model has no data, but lies on the meta device: materialize it first")
