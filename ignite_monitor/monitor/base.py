"""What every monitor shares: attaching, publishing, logging, letting go."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.base import Serializable
from ignite.engine import Engine, Events, EventsList, State
from ignite.engine.events import CallableEventWithFilter, RemovableEventHandle
from ignite.handlers.base_logger import BaseLogger
from ignite.handlers.tqdm_logger import ProgressBar
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ignite_monitor.checks import check_type
from ignite_monitor.events.monitor_events import MonitorEvents, register_events
from ignite_monitor.events.source import EventSource, check_events
from ignite_monitor.monitor.loggers import AddedHandlers, LoggedValues, transfer
from ignite_monitor.monitor.views import NamedViews

Handlers = list[tuple[MonitorEvents, Callable[..., Any]]]


class Monitor(Serializable):
    """Base of all monitors.

    A monitor overrides :meth:`handlers`, whose handlers run in monitored iterations only, and calls
    :meth:`publish`; what else it overrides, it extends.

    Args:
        model: the model to watch, as the train step uses it (wrapped, where it is wrapped).
        prefix: what the names of its values start with, before a slash.
        families: what comes next in every name, one of these; with them the prefix may be empty.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if the model has no parameters, some that no forward pass has initialized yet, or none with data,
            or ``prefix`` holds what a tag can't.
    """

    def __init__(self, model: nn.Module, prefix: str, families: Sequence[str] = ()) -> None:
        check_type("model", model, nn.Module, "torch.nn.Module")
        check_type("prefix", prefix, str, "str")
        if not (prefix or families) or set(prefix) - set(
            "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_./"
        ):
            raise ValueError(f"Argument prefix should be letters, digits, '-', '_', '.' and '/', but given {prefix!r}")
        parameters = list(model.parameters())
        if not parameters:
            raise ValueError("Argument model should have parameters, but it has none")
        if any(isinstance(parameter, UninitializedParameter) for parameter in parameters):
            raise ValueError("Argument model has lazy modules: run one forward pass before a monitor is made")
        if all(parameter.is_meta for parameter in parameters):
            raise ValueError("Argument model has no data, but lies on the meta device: materialize it first")
        self.model = model
        self.prefix = prefix
        # What its names start with, so that none is another monitor's, and loggers have a tag for each.
        self.families = [self._named(family) for family in families] or [prefix]
        self.metrics: dict[str, Tensor] = {}
        self.logger = logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")
        self._engine: weakref.ref[Engine] | None = None
        self._source: EventSource | None = None
        self._filters: list[Callable[[Engine, int], bool] | None] = []
        self._log_handlers: list[AddedHandlers] = []
        self._monitored = False
        self._host: dict[str, float] | None = None
        self._tables: list[tuple[list[str], Tensor]] = []
        self._views = NamedViews()

    # What a monitor overrides

    def handlers(self) -> Handlers:
        """The events the monitor listens to, each with its method."""
        return []

    @property
    def attributes(self) -> list[str]:
        """The attributes that the monitor sets on the engine's state."""
        return []

    def start_iteration(self, engine: Engine) -> None:
        """Get ready for a monitored iteration."""

    def contexts(self) -> list[AbstractContextManager[Any]]:
        """What to have around the train step that is about to start, where the monitor is armed."""
        return []

    def ended(self) -> None:
        """The run has ended: say what it lacked."""

    def release(self) -> None:
        """Let go of everything that belongs to the run that has ended, or is interrupted."""

    def carried(self) -> list[Tensor]:
        """Tensors of any shape that come to the host whenever the values do, in the same transfer."""
        return []

    def receive(self, carried: list[list[float]]) -> dict[str, float]:
        """Take in what :meth:`carried` gave, now that it is on the host.

        Args:
            carried: the tensors, flat.

        Returns:
            More values, name, without the prefix, -> number, that are known only now.
        """
        return {}

    def clear(self, engine: Engine) -> None:
        """Take this monitor's values out of the engine's state."""
        self.retract()

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
        events = _events(event)
        if not events or any(each != Events.ITERATION_STARTED for each in events):
            raise ValueError(f"Argument event should be Events.ITERATION_STARTED, filtered or not, but given {event}")
        if self._attached_to() is not None:
            raise ValueError(f"This {type(self).__name__} is attached already: detach() it first")
        taken = [name for name in self.attributes if hasattr(engine.state, name)]
        if taken:
            raise ValueError(f"engine.state.{taken[0]} is already claimed, by another monitor or by code of your own")
        check_events(type(self).__name__, engine, [event for event, _ in self.handlers()])
        source = EventSource.of(engine)
        source.add(self, self.model, self.families)
        self._source = source
        self._engine = weakref.ref(engine)
        self._filters = [getattr(each, "filter", None) for each in events]
        engine.add_event_handler(Events.ITERATION_STARTED, self._start)
        for name, handler in self.handlers():
            source.listen(name, handler)
        self.clear(engine)
        return MonitorHandle(self, engine)

    def detach(self) -> None:
        """Undo :meth:`attach` and :meth:`log_to`: no handler, hook, value or attribute stays on engine or model."""
        while self._log_handlers:
            self._log_handlers.pop().remove()
        engine = self._attached_to()
        if engine is None or self._source is None:
            return
        for name, handler in self.handlers():
            self._source.unlisten(name, handler)
        engine.remove_event_handler(self._start, Events.ITERATION_STARTED)
        self.ended()
        self.release()
        self.clear(engine)
        self._views.clear()
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
    ) -> None:
        """Write each monitored iteration's values to an Ignite logger, before or after :meth:`attach`.

        Whatever the number of monitors, values and loggers on an engine: the values come to the host together, in
        one transfer per iteration. Where no iteration was monitored nothing is written.

        Args:
            logger: any Ignite logger: ``TensorboardLogger``, ``WandBLogger``, ``MLflowLogger``, ``ProgressBar`` …
            engine: the engine the monitor is attached to.
            event: when to write, any event of the engine or of :class:`MonitorEvents`, filtered or not.
            tag: what to put before the values' names; None for nothing.

        Raises:
            TypeError: if an argument is of another type.
            ValueError: if ``event`` is not one that loggers can write at.
        """
        check_type("logger", logger, BaseLogger, "ignite.handlers.base_logger.BaseLogger")
        check_type("engine", engine, Engine, "ignite.engine.Engine")
        if tag is not None:
            check_type("tag", tag, str, "str or None")
        for each in [event] if isinstance(event, str) else _events(event):
            if each not in State.event_to_attr and each not in list(MonitorEvents):
                raise ValueError(
                    f"Argument event should be an event that counts epochs or iterations, but given {each}"
                )
        register_events(engine)
        added = AddedHandlers(engine)
        if isinstance(logger, ProgressBar):
            logger.attach(engine, output_transform=LoggedValues(self, ""), event_name=event)
            added.note()
        elif tag:
            logger.attach_output_handler(engine, event, tag=tag, output_transform=LoggedValues(self, ""))
            added.note(self)
        else:
            # Ignite's handlers always put a tag before a name: where the user wants none, it is the name's first part.
            for family in self.families:
                values = LoggedValues(self, family)
                logger.attach_output_handler(engine, event, tag=family, output_transform=values)
                added.note(self, family)
        self._log_handlers.append(added)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping.
            ValueError: if it was saved by a monitor of another kind.
        """
        super().load_state_dict(state_dict)

    # What a monitor calls

    def retract(self) -> None:
        """Take back what has been published in this iteration."""
        engine = self._attached_to()
        for name in self.metrics:
            if engine is not None:
                engine.state.metrics.pop(name, None)
        self.metrics.clear()
        self._tables.clear()
        self._host = None

    def publish(self, **values: Tensor) -> None:
        """Put values where handlers and loggers find them, in ``metrics`` and in ``engine.state.metrics``.

        Args:
            values: name, without the prefix, -> 0-dim tensor.
        """
        self._put({self._named(name): value for name, value in values.items()})
        self._host = None

    def publish_table(self, names: Sequence[str], values: Tensor) -> None:
        """Put many values where :meth:`publish` puts single ones, which come to the host as one.

        Args:
            names: the names, without the prefix; none that is published by itself.
            values: the values, one-dimensional, and no view of anything.
        """
        table = [self._named(name) for name in names] if self.prefix else list(names)
        values, views = self._views.show(table, values)
        self._put(views)
        self._tables.append((table, values))
        self._host = None

    def on_host(self) -> dict[str, float]:
        """This iteration's values as floats; those of all monitors on the engine come over in one transfer."""
        if self._host is None:
            monitors = [self] if self._source is None else self._source.monitors
            stale = [monitor for monitor in monitors if monitor._host is None]
            numbers = transfer([[*monitor._published(), *monitor.carried()] for monitor in stale])
            for monitor, own in zip(stale, numbers, strict=True):
                monitor._take_over(own)
        return self._host or {}

    @property
    def _is_running(self) -> bool:
        """Whether a train step is going on that this monitor watches."""
        return self._monitored and self._source is not None and self._source.running

    def _attached_to(self) -> Engine | None:
        return self._engine() if self._engine is not None else None

    def _named(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _singles(self) -> list[str]:
        if len(self.metrics) == sum(len(names) for names, _ in self._tables):
            return []
        tabled = {name for names, _ in self._tables for name in names}
        return [name for name in self.metrics if name not in tabled]

    def _published(self) -> list[Tensor]:
        return [*(values for _, values in self._tables), *(self.metrics[name] for name in self._singles())]

    def _put(self, values: dict[str, Tensor]) -> None:
        self.metrics.update(values)
        engine = self._attached_to()
        if engine is not None:
            engine.state.metrics.update(values)

    def _take_over(self, numbers: list[list[float]]) -> None:
        names = [*(names for names, _ in self._tables), *([name] for name in self._singles())]
        host: dict[str, float] = {}
        for several, own in zip(names, numbers, strict=False):
            host.update(zip(several, own, strict=True))
        late = {self._named(name): number for name, number in self.receive(numbers[len(names) :]).items()}
        if late:
            self._put({name: torch.tensor(number, dtype=torch.float64, device="cpu") for name, number in late.items()})
            host |= late
        self._host = host

    def _start(self, engine: Engine) -> None:
        self.clear(engine)
        iteration = engine.state.iteration
        self._monitored = any(accepts is None or accepts(engine, iteration) for accepts in self._filters)
        if self._monitored and self._source is not None:
            self._source.monitor_iteration(self)
            self.start_iteration(engine)


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


def _events(event: Any) -> list[CallableEventWithFilter]:
    if not isinstance(event, (CallableEventWithFilter, EventsList)):
        raise TypeError(f"Argument event should be an event of Ignite or of MonitorEvents, but given {type(event)}")
    return list(event) if isinstance(event, EventsList) else [event]
