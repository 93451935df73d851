"""Fires MonitorEvents on an engine, whatever its train step does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack
from typing import Any

from ignite.engine import Engine, Events
from torch import nn
from torch.optim import Optimizer

from ignite_monitor.events.backward import BackwardPasses
from ignite_monitor.events.gradient_tracker import GradientsReady, GradientTracker, OptimizerStep
from ignite_monitor.events.hooks import Patch, remove_all
from ignite_monitor.events.monitor_events import MonitorEvents, NonFiniteSource, register_events
from ignite_monitor.events.optimizer_steps import OptimizerSteps
from ignite_monitor.events.run_summary import log_run_summary
from ignite_monitor.model._torch import EVENT_HANDLERS, HANDLE_EXCEPTION, TRAIN_STEP, check_engine
from ignite_monitor.model.modes import users_grad_mode

_NAMES = tuple(event.name for event in MonitorEvents)  # equal to the events, but faster to look up


class EventSource:
    """Fires :class:`MonitorEvents` on one engine; shared by all monitors attached to it.

    Hooks exist from the first iteration of a run to its end (completed, terminated, interrupted, or an error); those
    on parameters exist in monitored iterations only. The engine owns the source. References from the source to engine
    and monitors, and from hooks to the source, are weak, so that reference counting frees a run that is dropped.

    Attributes:
        running: whether a train step is running that monitors or handlers of the user's follow.
        listened: whether the user's handlers listened to any event when the train step started.
        nonfinite_source: source of this iteration's first non-finite value, as far as it has been located.
    """

    _ATTRIBUTE = "_ignite_monitor_events"

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._models: dict[int, GradientTracker] = {}
        self._handles: list[Any] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False
        self._monitors: weakref.WeakSet[Any] = weakref.WeakSet()
        self._listeners: dict[str, list[weakref.WeakMethod[Any]]] = {name: [] for name in _NAMES}
        self._monitoring: set[int] = set()  # ids of the monitors of this iteration
        self.running = self.listened = self._awaits_step = False
        self._passes, self._steps = BackwardPasses(self), OptimizerSteps(self)
        self.nonfinite_source: NonFiniteSource | None = None

    @property
    def engine(self) -> Engine | None:
        """The engine, if it still exists."""
        return self._engine()

    # Participants

    @classmethod
    def of(cls, engine: Engine) -> EventSource:
        """The engine's source; the first monitor creates it. A RuntimeError if a private name is missing."""
        source: EventSource | None = getattr(engine, cls._ATTRIBUTE, None)
        if source is None:
            check_engine(engine)
            register_events(engine)
            source = cls(engine)
            setattr(engine, cls._ATTRIBUTE, source)
            for event, handler in source._own_handlers():
                engine.add_event_handler(event, handler)
        return source

    def add(self, monitor: Any, handlers: Iterable[tuple[MonitorEvents, Callable[..., Any]]]) -> None:
        """Add a monitor, whose handlers are called at their events before all other handlers.

        Args:
            handlers: bound methods, referenced weakly, called if their monitor monitors the iteration. They get the
                engine, and for backward passes and optimizer steps a :class:`GradientsReady` or :class:`OptimizerStep`
                of their model. A function that one returns is called when all monitors have read the gradients, and
                may change them; a function which that returns is called after all changes.

        Raises:
            ValueError: if another monitor on this engine has one of its families.
        """
        taken = sorted({family for other in self._monitors for family in other.families}.intersection(monitor.families))
        if taken:
            raise ValueError(
                f"Another monitor on this engine has the prefix {taken[0]!r}: detach() that one, as before a cell of a "
                "notebook is run again, or give this one another prefix"
            )
        self._monitors.add(monitor)
        for event, handler in handlers:
            self._listeners[event.name].append(weakref.WeakMethod(handler))
        if id(monitor.model) not in self._models:
            self._models[id(monitor.model)] = GradientTracker(monitor.model)

    def remove(self, monitor: Any) -> None:
        """Remove a monitor; with the last one, remove everything from the engine."""
        self._monitors.discard(monitor)
        for name, methods in self._listeners.items():
            self._listeners[name] = [
                method for method in methods if getattr(method(), "__self__", monitor) is not monitor
            ]
        if all(other.model is not monitor.model for other in self._monitors):
            self._models.pop(id(monitor.model)).hook.remove()
        engine = self.engine
        if not self._monitors and engine is not None:
            self._uninstall()
            for event, handler in self._own_handlers():
                engine.remove_event_handler(handler, event)
            delattr(engine, self._ATTRIBUTE)

    def monitor_iteration(self, monitor: Any) -> None:
        """Follow the train step of the iteration that starts, for a monitor."""
        self._monitoring.add(id(monitor))

    def is_awaited(self, event: MonitorEvents) -> bool:
        """Whether monitors or the user's handlers listen to an event."""
        return bool(self._listeners[event.name]) or self._has_handlers(event.name)

    @property
    def monitors(self) -> list[Any]:
        """The monitors attached to the engine."""
        return list(self._monitors)

    def tracker(self, model: nn.Module) -> GradientTracker:
        """The tracker of a model's gradients."""
        return self._models[id(model)]

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that a model had when the train step started."""
        return self._models[id(model)].parameters

    def shares_parameters(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds parameters of a monitored model."""
        return any(tracker.shares(optimizer) for tracker in self._models.values())

    # Events

    def fire(self, event: MonitorEvents, about: Mapping[int, Any] | None = None) -> None:
        """Call the monitors of this iteration that listen to an event, then the user's handlers.

        Args:
            about: id of a model -> second argument for its monitors; monitors of other models are not called.
        """
        engine, name = self._engine(), event.name
        if engine is None:
            return
        # All monitors read before one changes anything: the order of attaching must not matter.
        changes = []
        for handler in [method() for method in self._listeners[name]]:
            if handler is None or id(handler.__self__) not in self._monitoring:
                continue
            if about is None:
                changes.append(handler(engine))
            elif id(handler.__self__.model) in about:
                changes.append(handler(engine, about[id(handler.__self__.model)]))
        while changes:
            changes = [change() for change in changes if change is not None]
        if event is MonitorEvents.TRAIN_STEP_COMPLETED:
            self.running = False
        if self._has_handlers(name):
            with users_grad_mode():
                engine.fire_event(event)

    def fire_step(self, event: MonitorEvents, optimizer: Optimizer) -> None:
        """Fire an event of an optimizer's step."""
        if event is MonitorEvents.OPTIMIZER_STEP_STARTED:
            for tracker in self._models.values():
                tracker.step_started(optimizer)
        self.fire(event, {key: OptimizerStep(tracker, optimizer) for key, tracker in self._models.items()})

    def step_completed(self, optimizer: Optimizer) -> None:
        """Report the end of an optimizer's step that a monitor has skipped."""
        self._steps.complete(optimizer)

    def backward_ended(self, number: int, reached: Mapping[int, Set[int]]) -> None:
        """Fire GRADIENTS_READY for the models that a backward has reached; ids of parameters by id of the model."""
        ready: dict[int, Set[int]] = {}
        for key, parameters in reached.items():
            if key in self._models:
                changed = self._models[key].backward_ended(number, parameters, self._passes.reached.keys())
                if changed is not None:
                    ready[key] = changed
        about = {}
        for key, changed in ready.items():
            tracker = self._models[key]
            shared = len(ready) > 1 and not set().union(*ready.values()).issubset(map(id, tracker.parameters))
            about[key] = GradientsReady(tracker, changed, shared, self._steps.stepping)
        if about:
            self.fire(MonitorEvents.GRADIENTS_READY, about)

    def gradients_finalized(self, model: int) -> None:
        """Have gradients of a model, given by its id, measured when the optimizer's step starts."""
        if model in self._models:
            self._models[model].defer()

    def _has_handlers(self, *names: str) -> bool:
        engine = self._engine()
        return engine is not None and any(map(getattr(engine, EVENT_HANDLERS).get, names))

    # A run

    def _own_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [
            (Events.ITERATION_STARTED, self._start_iteration),
            (Events.COMPLETED, self._end),
            (Events.TERMINATE, self._end),
            (Events.INTERRUPT, self._interrupt),
        ]

    def _start_iteration(self, engine: Engine) -> None:
        if not self._handles:
            # An interrupt can come at any moment: handles are appended one by one, first the one that removes the rest.
            # A handler of EXCEPTION_RAISED would make Ignite swallow the exception.
            self._handles.append(Patch(engine, HANDLE_EXCEPTION, self._handle_exception))
            # The end of the train step comes before all other handlers of ITERATION_COMPLETED.
            self._handles.append(Patch(engine, TRAIN_STEP, self._train_step))
            self._steps.register(self._handles)
        self._reset()
        self._awaits_step = True

    def _reset(self) -> None:
        self._passes.reached.clear()
        self._monitoring.clear()
        for tracker in self._models.values():
            tracker.iteration_started()
        self._steps.stepping = self.nonfinite_source = None
        self.running = self._awaits_step = False

    def _train_step(self, original: Callable[..., Any], engine: Engine, batch: Any) -> Any:
        self.listened = self._has_handlers(*_NAMES)
        self.running, self._awaits_step = bool(self._monitoring) or self.listened, False
        has_hooks = self.running and self.is_awaited(MonitorEvents.GRADIENTS_READY)
        for tracker in self._models.values():
            if (self.running and tracker.refresh()) or not has_hooks:
                tracker.hook.remove()
            if has_hooks and not tracker.hook.is_registered:
                tracker.hook.register(tracker.parameters, self._passes.gradient_hook(id(tracker.model)))
        with ExitStack() as contexts:
            for monitor in [monitor for monitor in self._monitors if id(monitor) in self._monitoring]:
                for context in monitor.train_step_contexts():
                    contexts.enter_context(context)
            OptimizerSteps.train_steps += 1
            try:
                output = original(engine, batch)
            finally:
                OptimizerSteps.train_steps -= 1
        if self.running:
            engine.state.output = output  # as Ignite is about to, for the handlers of this event
            self.fire(MonitorEvents.TRAIN_STEP_COMPLETED)
        return output

    def _handle_exception(self, original: Callable[..., Any], error: BaseException) -> None:
        self._end()
        original(error)

    def _end(self, engine: Engine | None = None) -> None:
        if engine is not None:  # after an error the device may not answer
            log_run_summary(self._monitors)
        for monitor in self._monitors:
            monitor.on_run_end()
        self._uninstall()

    def _interrupt(self, engine: Engine) -> None:
        # A run interrupted between ITERATION_STARTED and the train step continues with the train step.
        if not self._awaits_step:
            self._uninstall()

    def _uninstall(self) -> None:
        remove_all(self._handles)
        for tracker in self._models.values():
            tracker.hook.remove()
        self._reset()
        for monitor in self._monitors:
            monitor.reset_run_state()
