"""Fires MonitorEvents on an engine, whatever its train step does."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Engine, Events

from ignite_monitor.events.accumulation import AccumulationProbe
from ignite_monitor.events.gradient_tracker import (
    GradientsReady,
    GradientTracker,
    await_end,
    gradient_hook,
)
from ignite_monitor.events.hooks import Patch, remove_all, weak_method
from ignite_monitor.events.monitor_events import PHASES, MonitorEvents, NonFiniteSource, Phase, register_events
from ignite_monitor.events.step_owner import StepOwner
from ignite_monitor.model._torch import EVENT_HANDLERS, HANDLE_EXCEPTION, TRAIN_STEP, in_backward


class EventSource:
    """Fires :class:`MonitorEvents` on one engine; shared by all monitors attached to it.

    Hooks exist from the first iteration of a run to its end; those on parameters exist in monitored iterations only.
    The engine owns the source. All other references to it, and its own to engine and monitors, are weak.
    """

    _ATTRIBUTE = "_ignite_monitor_events"
    _NAMES = tuple(event._name_ for event in MonitorEvents)  # equal to the events, and faster to look up

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self.trackers: dict[int, GradientTracker] = {}  # of the monitored models, by id of the model
        self._reached: dict[int, set[int]] = {}  # number of a running backward -> ids of the parameters it has reached
        self._inside: dict[int, set[int]] = {}  # number of a backward -> those of it and the ones that run in it
        self._gradient_hook = gradient_hook(torch.compiler.disable(weak_method(self._start_backward)))
        self._on_backward_end = torch.compiler.disable(weak_method(self._end_backward))
        self._steps = StepOwner(self)
        self._handles: list[Any] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False
        self._monitors: list[weakref.ref[Any]] = []
        self._listeners: dict[str, list[tuple[Any, Any]]] = {name: [] for name in (*self._NAMES, *Phase.__members__)}
        self._reset()

    def _reset(self) -> None:
        self._reached.clear()
        self._inside.clear()
        for tracker in self.trackers.values():
            tracker.reset()
        self.nonfinite_source: NonFiniteSource | None = None  # of this iteration, as far as it has been located
        self.users_error: Exception | None = None  # that a handler of the user's has raised in this iteration
        self.in_train_step = False  # whether one is running that monitors, or handlers of the user's, follow
        self.listened = False  # whether the user's handlers listened to any event when it started
        self._awaits_step = False
        self._has_captured = False  # whether the train step has captured a CUDA graph

    @classmethod
    def of(cls, engine: Engine) -> EventSource:
        """The engine's source; the first monitor creates it."""
        source = cls.on(engine)
        if source is None:
            register_events(engine)
            source = cls(engine)
            setattr(engine, cls._ATTRIBUTE, source)
            for event, handler in source._own_handlers():
                engine.add_event_handler(event, handler)
        return source

    def add(self, monitor: Any, handlers: Iterable[tuple[MonitorEvents | Phase, Any]]) -> None:
        """Add a monitor, whose methods are called at their events before all other handlers."""
        reference = weakref.ref(monitor)
        self._monitors.append(reference)
        for event, handler in handlers:
            self._listeners[event._name_].append((reference, handler.__func__))
        if id(monitor.model) not in self.trackers:
            self.trackers[id(monitor.model)] = GradientTracker(monitor.model)

    def remove(self, monitor: Any) -> None:
        """Remove a monitor; with the last one, remove everything from the engine."""
        self._monitors = [reference for reference in self._monitors if reference() is not monitor]
        for name, listeners in self._listeners.items():
            self._listeners[name] = [listener for listener in listeners if listener[0]() is not monitor]
        tracker = self.trackers.get(id(monitor.model))
        if tracker is not None and all(other.model is not monitor.model for other in self.monitors):
            self.trackers.pop(id(monitor.model)).hook.remove()
        engine = self._engine()
        if not self._monitors and engine is not None:
            self._uninstall()
            for event, handler in self._own_handlers():
                if engine.has_event_handler(handler, event):  # an interrupt may have come before it was added
                    engine.remove_event_handler(handler, event)
            vars(engine).pop(self._ATTRIBUTE, None)  # an interrupt may have come after it was removed

    def is_awaited(self, event: MonitorEvents) -> bool:
        """Return True if monitors or the user's handlers listen to an event."""
        return bool(self._listeners[event._name_]) or self._has_handlers(event._name_)

    @classmethod
    def on(cls, engine: Engine) -> EventSource | None:
        """The engine's source, if a monitor has created it."""
        return getattr(engine, cls._ATTRIBUTE, None)

    @property
    def monitors(self) -> list[Any]:
        """The monitors attached to the engine."""
        return [monitor for reference in self._monitors if (monitor := reference()) is not None]

    def fire(self, event: MonitorEvents, about: Mapping[int, Any] | None = None) -> None:
        """Call the monitors that listen to an event, those of models in ``about`` with its value, then the user's."""
        engine = self._engine()
        if engine is None:
            return
        # All monitors read before anything is changed: the order of attaching must not matter.
        for moment in () if self._has_captured else (event, *PHASES.get(event._name_, ())):
            if moment is Phase.STEP_DECIDED and not self._steps.decide():
                break
            for reference, handler in self._listeners[moment._name_]:
                monitor = reference()
                if monitor is not None and monitor._monitored and (about is None or id(monitor.model) in about):
                    monitor._guarded(handler, monitor, engine, *(() if about is None else (about[id(monitor.model)],)))
        if event is MonitorEvents.TRAIN_STEP_COMPLETED:
            self.in_train_step = False
        if getattr(engine, EVENT_HANDLERS).get(event._name_):
            with self.users_code():
                engine.fire_event(event)

    @contextmanager
    def users_code(self) -> Iterator[None]:
        """Call code of the user's, whose errors end training."""
        try:
            with torch.enable_grad() if in_backward() else nullcontext():  # autograd disables them in a backward pass
                yield
        except Exception as error:
            self.users_error = error
            raise

    def _start_backward(self, number: int) -> set[int] | None:
        # FSDP2 calls hooks outside of a backward, without a number, where finalize_backward() reduces.
        if not self.in_train_step or number == -1 or self.sees_capture():
            return None
        if number not in self._reached:
            self._reached[number] = set()
            await_end(number, self._inside, self._on_backward_end, self._callback_depth)
        return self._reached[number]

    def sees_capture(self) -> bool:
        """Return True if a CUDA graph is captured: what monitors computed in it would be computed at every replay."""
        self._has_captured |= torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
        return self._has_captured

    def _end_backward(self, outermost: int) -> None:
        """Fire GRADIENTS_READY for the models that a backward, with those inside of it, has reached."""
        numbers = self._inside.pop(outermost, set())
        reached = set[int]().union(*map(self._reached.pop, numbers))
        changed: dict[GradientTracker, Set[int]] = {}
        for tracker in self.trackers.values():
            if (own := reached & tracker.ids) and (whole := tracker.backward_ended(numbers, own)):
                changed[tracker] = whole
        everything = set[int]().union(*changed.values())
        about = {}
        for tracker, whole in changed.items():
            shared = not everything <= tracker.ids
            tracker.has_own_backward |= not shared
            about[id(tracker.model)] = GradientsReady(tracker, whole, shared, self._steps.evaluates_again)
        if about:
            self.fire(MonitorEvents.GRADIENTS_READY, about)

    def _has_handlers(self, *names: str) -> bool:
        engine = self._engine()
        return engine is not None and any(map(getattr(engine, EVENT_HANDLERS).get, names))

    def _own_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [
            (Events.ITERATION_STARTED, self._start_iteration),
            (Events.COMPLETED, self._end),
            (Events.TERMINATE, self._end),
            (Events.INTERRUPT, self._interrupt),
        ]

    def _start_iteration(self, engine: Engine) -> None:
        if self.on(engine) is not self:  # the last monitor was detached by a handler before this one
            return
        if not self._handles:
            # An interrupt can come at any moment: first the handle that removes the rest is appended.
            # A handler of EXCEPTION_RAISED would make Ignite swallow the exception.
            self._handles.append(Patch(engine, HANDLE_EXCEPTION, self._handle_exception))
            # The end of the train step comes before all other handlers of ITERATION_COMPLETED.
            self._handles.append(Patch(engine, TRAIN_STEP, self._train_step))
            self._steps.install()
            # DistributedDataParallel reduces in a callback, with a static graph in one that queues another.
            self._callback_depth = 3 if dist.is_available() and dist.is_initialized() else 1
        self._reset()
        self._awaits_step = True

    def _train_step(self, original: Callable[..., Any], engine: Engine, batch: Any) -> Any:
        self.listened = self._has_handlers(*self._NAMES)
        monitored = [item for reference in self._monitors if (item := reference()) is not None and item._monitored]
        self.in_train_step, self._awaits_step = bool(monitored) or self.listened, False
        self._steps.acting = acting = set(map(attrgetter("acts_on"), monitored)) - {None}
        has_hooks = self.in_train_step and self.is_awaited(MonitorEvents.GRADIENTS_READY)
        for tracker in self.trackers.values():
            hook = self._gradient_hook if has_hooks else None
            tracker.start_train_step(hook, refresh=self.in_train_step, may_skip=bool(acting))
        for monitor in monitored:
            monitor._guarded(monitor.before_train_step, engine)
        try:
            with ExitStack() as contexts:
                if acting:
                    self._steps.patch()
                for tracker in self.trackers.values():
                    if tracker.accumulates:
                        tracker.probe = contexts.enter_context(AccumulationProbe(tracker, None))
                for monitor in sorted(monitored, key=attrgetter("measures_time")):
                    if not monitor._has_failed:
                        monitor._guarded(_enter, contexts, monitor)
                output = original(engine, batch)
        finally:
            self._steps.end_train_step(bool(self._handles))
        for monitor in monitored if self._has_captured else ():
            monitor.clear(engine)
            monitor.report(
                "captured", "the train step captures a CUDA graph: nothing is reported of it", severity="note"
            )
        if self.in_train_step:
            engine.state.output = output  # as Ignite is about to, for the handlers of this event
            self.fire(MonitorEvents.TRAIN_STEP_COMPLETED)
        return output

    def _handle_exception(self, original: Callable[..., Any], error: BaseException) -> None:
        try:
            self._uninstall()  # and reads nothing: the device may not answer
        finally:
            original(error)

    def _end(self, engine: Engine) -> None:
        try:
            for monitor in self.monitors:
                if not monitor._has_failed:
                    monitor._guarded(monitor.on_run_end)
        finally:
            self._uninstall()

    def _interrupt(self, engine: Engine) -> None:
        # A run interrupted between ITERATION_STARTED and the train step continues with the train step.
        if not self._awaits_step:
            self._uninstall()

    def _uninstall(self) -> None:
        remove_all(self._handles)
        for tracker in self.trackers.values():
            tracker.reset(run=True)
        self._steps.uninstall()
        self._reset()
        for monitor in self.monitors:
            monitor.reset_run_state()


def _enter(contexts: ExitStack, monitor: Any) -> None:
    for context in monitor.train_step_contexts():
        context.__enter__()
        contexts.push(functools.partial(monitor._guarded, context.__exit__))
