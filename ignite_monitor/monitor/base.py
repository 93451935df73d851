"""Base class of all monitors: attach, publish, log, detach."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from ignite.base import Serializable
from ignite.engine import Engine, Events
from ignite.handlers.base_logger import BaseLogger
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_choice
from ignite_monitor.events.hooks import remove_all
from ignite_monitor.events.monitor_events import MonitorEvents, Phase
from ignite_monitor.events.source import EventSource
from ignite_monitor.model._torch import put_first
from ignite_monitor.model.isolation import is_from_signal_handler
from ignite_monitor.model.names import Pattern, Selection
from ignite_monitor.monitor import arguments, transfer
from ignite_monitor.monitor.arguments import NoModel, check_flag
from ignite_monitor.monitor.handle import MonitorHandle
from ignite_monitor.monitor.loggers import LEVELS, Report, add_logger
from ignite_monitor.monitor.ranks import Group, Ranks
from ignite_monitor.schema import Schema

__all__ = ["Handlers", "Monitor", "MonitorHandle", "NoModel", "check_flag"]

Handlers = list[tuple[MonitorEvents | Phase, Callable[..., Any]]]


class Monitor(Serializable):
    """Base class of all monitors, and of your own.

    A subclass overrides :meth:`handlers` and calls :meth:`publish`. Values on a device are 0-dim tensors until a logger
    or :meth:`on_host` reads them. A non-finite number is not reported, unless the schema allows it. ``{keys}`` in a
    docstring is replaced by the list of the schema.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped), or a :class:`NoModel`.
        prefix: prefix of all names, without the slash.
        families: the first parts of names that follow the prefix; with them the prefix may be empty.
        group: the ranks whose optimizers step together, a ``ProcessGroup`` or ``DeviceMesh``; None for those of the
            model's wrappers.

    Attributes:
        ranks: the ranks whose optimizers step together, once the monitor is attached.
        schema: the keys that the monitor publishes.
        logger: logger of the class.
        metrics: values of this iteration by name, until the next one starts; also in ``engine.state.metrics``.
        attributes: attributes of ``engine.state`` that the monitor sets -> their value before it is known.
        reports: what :meth:`report` has recorded, oldest first.
        acts_on: the optimizer whose steps the monitor may skip; None by default.

    Raises:
        ValueError: if the model has no initialized parameters with data, or ``prefix`` is unfit for loggers.
    """

    schema: ClassVar[Schema] = Schema("other", "", ())
    acts_on: Optimizer | None = None
    measures_time = False  # True in a monitor whose contexts are the innermost ones
    _is_guarded = True  # False while the monitor changes a part of training: an error has to end it

    def __init_subclass__(cls, schema: Schema | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if schema is not None:
            cls.schema = schema
            cls.__doc__ = inspect.cleandoc(cls.__doc__ or "").replace("{keys}", schema.listing())

    def __init__(self, model: nn.Module, prefix: str, families: Sequence[str] = (), *, group: Group = None) -> None:
        if not isinstance(model, NoModel):
            arguments.check_model(model)
        arguments.check_prefix(prefix, optional=bool(families))
        self.model, self.prefix, self.ranks = model, prefix, Ranks(group, model)
        # No two monitors on an engine share a family, and loggers write every family under a tag of its own.
        self.families = [self._named(family) for family in families] or [prefix]
        self.logger = logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")
        self.reports: list[Report] = []
        self._reported_kinds: set[str] = set()
        self.metrics: dict[str, float | Tensor] = {}
        self.attributes: dict[str, Any] = {}
        self._source: EventSource | None = None
        self._engine: weakref.ref[Engine] | None = None
        self._filters: list[Any] = []
        self._log_handlers: list[Any] = []
        self._engine_handles: list[Any] = []
        self._monitored = False
        self._waiting: list[transfer.NamedValues] = []  # published tensors on a device
        self._is_resolved = True  # False until deferred values have been resolved
        self._has_failed = False

    def handlers(self) -> Handlers:
        """Return the events and phases it listens to in monitored iterations, with methods that return nothing."""
        return []

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        """Return Ignite's events, with functions of the engine, called first at ITERATION_STARTED."""
        return []

    def before_train_step(self, engine: Engine) -> None:
        """Prepare for the train step of a monitored iteration, before any context of a monitor is entered."""

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        """Return context managers to enter around the train step."""
        return []

    def on_run_end(self) -> None:
        """Report at the end of a run that no error has ended."""

    def reset_run_state(self) -> None:
        """Release everything that belongs to a run that ended or was interrupted; called on detaching too."""

    def clear(self, engine: Engine) -> None:
        """Reset metrics and attributes, at the start of every iteration and on detaching."""
        self.clear_metrics()
        for name, value in self.attributes.items():
            setattr(engine.state, name, value)

    def deferred_tensors(self) -> list[Tensor]:
        """Return tensors to bring to the host in the same transfer as published values."""
        return []

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        """Compute further values, by name without the prefix, from the elements of :meth:`deferred_tensors`."""
        return {}

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return the state to save; empty by default."""
        return OrderedDict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a saved state.

        Args:
            state_dict: a state that :meth:`state_dict` returned.

        Raises:
            ValueError: if a monitor of another kind has saved it.
        """
        super().load_state_dict(state_dict)
        if unknown := state_dict.keys() - self.state_dict().keys():
            raise ValueError(f"Argument state_dict should be a state of {self._title}, but has {sorted(unknown)}")

    def attach(self, engine: Engine, event: Any = Events.ITERATION_STARTED) -> MonitorHandle:
        """Attach the monitor to an engine; ``remove()`` or the ``with`` block of the handle detaches it.

        Args:
            engine: the engine that trains the model.
            event: ``Events.ITERATION_STARTED``, with any filter: ``Events.ITERATION_STARTED(every=10)``.

        Raises:
            ValueError: if ``event`` is another event, the monitor is attached already, or a name is taken.
        """
        return MonitorHandle(engine, {self.prefix: (self, event)})

    def _connect(self, engine: Engine, event: Any) -> None:
        """Add the handlers of :meth:`attach`, or raise an error that leaves everything as it was."""
        events = arguments.events_of(event, only=Events.ITERATION_STARTED)
        arguments.check_attachable(self, engine)
        self._has_failed = False
        handlers, engine_handlers = self.handlers(), self.engine_handlers()
        try:
            self.ranks.resolve()
            self._source, self._engine = EventSource.of(engine), weakref.ref(engine)
            self._filters = [getattr(single, "filter", None) for single in events]
            self._source.add(self, handlers)
            self._engine_handles.append(engine.add_event_handler(Events.ITERATION_STARTED, self._start))
            for name, handler in engine_handlers:
                listener = functools.partial(self._if_attached, handler)
                self._engine_handles.append(engine.add_event_handler(name, listener))
                if name == Events.ITERATION_STARTED:
                    put_first(engine, name)
        except BaseException:  # also an interrupt
            self._source = EventSource.on(engine)  # which it may have created
            self._disconnect()
            raise

    def _disconnect(self) -> None:
        """Remove what :meth:`_connect` and :meth:`log_to` have added."""
        remove_all(self._log_handlers)
        remove_all(self._engine_handles)
        if self._source is not None:
            self._source.remove(self)
        self.ranks.release()
        self._source, self._engine, self._monitored = None, None, False

    def detach(self) -> None:
        """Undo :meth:`attach` and :meth:`log_to`: remove all hooks, handlers, metrics and attributes."""
        engine = self._attached_to()
        if engine is None:
            self._disconnect()
            return
        with contextlib.ExitStack() as stack:  # an error leaves nothing attached
            for attribute in self.attributes:
                stack.callback(vars(engine.state).pop, attribute, None)
            stack.callback(self._disconnect)
            stack.callback(self.clear, engine)
            self.reset_run_state()

    def log_to(
        self,
        logger: BaseLogger,
        engine: Engine,
        event: Any = Events.ITERATION_COMPLETED,
        tag: str | None = None,
        *,
        include: Pattern | Callable[[str], Any] = None,
    ) -> None:
        """Write the values of monitored iterations to an Ignite logger; call before or after :meth:`attach`.

        Args:
            logger: any Ignite logger: ``TensorboardLogger``, ``WandBLogger``, ``MLflowLogger``, ``ProgressBar`` …
            engine: the engine the monitor is attached to.
            event: any event of the engine or of :class:`MonitorEvents`, filtered or not.
            tag: prefix of the written names; None for none.
            include: a regular expression, or a function of a name; only names that match are written. None for all.
        """
        self._log_handlers += add_logger(self, logger, engine, event, tag, Selection(include))

    def report(
        self, kind: str, text: str, *, severity: str = "warning", names: Sequence[str] = (), once: bool = True
    ) -> None:
        """Log a line, and record it: an ``HDF5Logger`` writes it to its file.

        Args:
            kind: identifier of what is reported: ``"not_in_optimizer"``.
            text: the line without class, prefix and iteration, which precede it in the log.
            severity: ``"problem"``, ``"warning"`` or ``"note"``.
            names: the parameters, modules or groups it speaks of.
            once: False to report a kind again that this monitor has reported.

        Raises:
            ValueError: if ``severity`` is another.
        """
        check_choice("severity", severity, *LEVELS)
        if once and kind in self._reported_kinds:
            return
        self._reported_kinds.add(kind)
        engine = self._attached_to()
        iteration = 0 if engine is None else engine.state.iteration
        self.reports.append(Report(iteration, self._title, str(kind), severity, str(text), tuple(map(str, names))))
        place = f"iteration {iteration}: " if iteration else ""
        self.logger.log(LEVELS[severity], "%s: %s%s", self._title, place, text)

    def publish(self, /, **values: Tensor | float) -> None:
        """Publish numbers or 0-dim tensors, by name without the prefix, until the next iteration starts."""
        self._is_resolved = False
        for name, value in values.items():
            if isinstance(value, Tensor) and value.device.type not in transfer.HOST:
                self._waiting.append(transfer.NamedValues([name], value.reshape(1)))
            else:
                values[name] = float(value)
        self._put(values)

    def publish_table(self, names: Sequence[str], values: Tensor) -> None:
        """Publish the elements of a vector under names without the prefix."""
        self._is_resolved = False
        if not transfer.is_cpu(values):
            self._waiting.append(transfer.NamedValues(names, values))
            self._put(dict(zip(names, values.unbind(), strict=True)))
        else:
            self._put(dict(zip(names, map(float, values.tolist()), strict=True)))

    def on_host(self) -> Mapping[str, float | Tensor]:
        """Return this iteration's values as floats; all monitors on the engine share a transfer."""
        if not self._is_resolved:
            transfer.bring_to_host([self] if self._source is None else self._source.monitors)
        return self.metrics

    def clear_metrics(self) -> None:
        """Remove this iteration's values."""
        for metrics in self._all_metrics():
            for name in list(self.metrics):
                metrics.pop(name, None)
        self._waiting.clear()
        self._is_resolved = True

    @property
    def _title(self) -> str:
        """Class and prefix, as log messages begin."""
        return f"{type(self).__name__} ({self.prefix})" if self.prefix else type(self).__name__

    def _attached_to(self) -> Engine | None:
        return None if self._engine is None else self._engine()

    @property
    def _is_running(self) -> bool:
        """True during a train step that this monitor watches."""
        return self._monitored and self._source is not None and self._source.in_train_step

    def _named(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _if_attached(self, handler: Callable[[Engine], Any], engine: Engine) -> None:
        # Ignite still calls the handlers of an event that one of them removes.
        if self._attached_to() is engine and not self._has_failed:
            self._guarded(handler, engine)

    def _start(self, engine: Engine) -> None:
        if self._attached_to() is not engine:  # a handler before this one has detached it
            return
        self.clear(engine)
        # Every filter is called, as by Ignite: it may have a state.
        accepted = [accepts is None or accepts(engine, engine.state.iteration) for accepts in self._filters]
        self._monitored = any(accepted) and not self._has_failed

    def _guarded(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of the monitor; after an error, which ends its measuring and not training, return None.

        The error is raised where others than this monitor depend on it: if a handler of the user's has raised it, while
        a part of training is changed, and with other ranks, which would wait for this one.
        """
        try:
            return function(*arguments)
        except Exception as error:
            of_user = self._source is not None and self._source.users_error is error
            if of_user or is_from_signal_handler(error) or not self._is_guarded or self.ranks.size > 1:
                raise
            self._has_failed, self._monitored = True, False
            with contextlib.suppress(Exception):
                self.reset_run_state()
            self.clear_metrics()  # attributes, such as the flag of a spike, hold until the next iteration
            self.logger.error("%s: the error that ends its measuring", self._title, exc_info=error)
            self.report("failed", f"an error ends its measuring: {_in_short(error)}", once=False)
            return None

    @contextlib.contextmanager
    def _training_continues(self, kind: str, text: str) -> Iterator[None]:
        """Report an error of the user's objects with a text before it; those of signal handlers are raised."""
        try:
            yield
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            self.report(kind, f"{text}: {_in_short(error)}")

    def _put(self, values: Mapping[str, float | Tensor]) -> None:
        not_reported = self.schema.not_reported(values)
        start = self._named("")
        named = {start + name: value for name, value in values.items() if name not in not_reported}
        for metrics in self._all_metrics():
            for name in not_reported:
                metrics.pop(start + name, None)
            metrics.update(named)

    def _all_metrics(self) -> list[dict[str, Any]]:
        engine = self._attached_to()
        return [self.metrics] if engine is None else [engine.state.metrics, self.metrics]


def _in_short(error: Exception) -> str:
    reason = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {reason}"
