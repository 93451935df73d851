"""What fires MonitorEvents: hooks on parameters, optimizers and the train step."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ignite_monitor.events.gradient_tracker import GradientsReady, GradientTracker, OptimizerStep
from ignite_monitor.events.hooks import Patch, is_nested, remove_all
from ignite_monitor.events.monitor_events import MonitorEvents, NonFiniteSource, register_events
from ignite_monitor.model._torch import (
    EVENT_HANDLERS,
    HANDLE_EXCEPTION,
    TRAIN_STEP,
    backward_number,
    check_engine,
    handles_exceptions,
    need,
    queue_callback,
)
from ignite_monitor.model.eager import out_of_compiler, untraced
from ignite_monitor.model.modes import users_grad_mode

# How often the callback at the end of backward queues itself anew, so as to run after those of others, and of
# DistributedDataParallel: its reduction takes one callback, and with a static graph one that queues another.
_HOPS, _HOPS_OF_RANKS = 1, 3


class EventSource:
    """Fires :class:`MonitorEvents` on one engine; shared by all monitors attached to it.

    Its hooks exist from a run's first iteration to its end, whether it completes, is terminated or interrupted, or
    raises an error; those on parameters in monitored iterations alone. The engine owns the source; the source knows the
    engine, and the hooks know the source, by weak references alone, so that a run that is dropped is freed as it would
    be without.

    Attributes:
        monitored: whether this iteration is monitored.
        running: whether its train step is going on. What happens in handlers, or on other engines, is not watched.
        listened: whether anyone but the monitors listened to any event when it started.
        stepping: while an optimizer makes its step, the optimizer.
        nonfinite_source: where what is not finite in this iteration comes from, if that has been found.
    """

    _ATTRIBUTE = "_ignite_monitor_events"  # of the engine, which owns its source
    _train_steps = 0  # that are going on, on any engine

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._models: dict[int, GradientTracker] = {}
        self._handles: list[Any] = []
        weakref.finalize(self, remove_all, self._handles).atexit = False
        self._installed = False
        self._monitors: weakref.WeakSet[Any] = weakref.WeakSet()
        self._listeners: dict[MonitorEvents, list[weakref.WeakMethod[Any]]] = {event: [] for event in MonitorEvents}
        self._prefixes: set[str] = set()
        self.monitored = self.running = self.listened = self._awaits_step = False
        self._monitoring: set[int] = set()  # ids of the monitors that look at this iteration
        # Number of a backward that is going on -> id of a model -> ids of the parameters of it that it has reached.
        self._backwards: dict[int, dict[int, set[int]]] = {}
        self.stepping: Optimizer | None = None
        self.nonfinite_source: NonFiniteSource | None = None
        self._reported_outside = False

    # Who takes part

    @classmethod
    def of(cls, engine: Engine) -> EventSource:
        """The engine's source, made by the first monitor that asks."""
        source: EventSource | None = getattr(engine, cls._ATTRIBUTE, None)
        if source is None:
            register_events(engine)
            source = cls(engine)
            setattr(engine, cls._ATTRIBUTE, source)
            for event, handler in source._own_handlers():
                engine.add_event_handler(event, handler)
        return source

    def add(self, monitor: Any, model: nn.Module, prefixes: Iterable[str]) -> None:
        """Take a monitor in.

        Args:
            model: the model whose backward passes and optimizer steps it wants to hear of.

        Raises:
            ValueError: if another monitor on this engine has one of these prefixes.
        """
        prefixes = set(prefixes)
        taken = sorted(prefixes & self._prefixes)
        if taken:
            raise ValueError(
                f"Another monitor on this engine has the prefix {taken[0]!r}: detach() that one, as before a cell of a "
                "notebook is run again, or give this one another prefix"
            )
        self._prefixes |= prefixes
        self._monitors.add(monitor)
        entry = self._models.get(id(model))
        if entry is None:
            entry = self._models[id(model)] = GradientTracker(model)
            if self._installed:  # attached while a run is going on
                self._handles.append(entry.hook)
            if self.running:
                self._register(entry)
        entry.monitors += 1

    def remove(self, monitor: Any, model: nn.Module, prefixes: Iterable[str]) -> None:
        """Let a monitor go; with the last one everything goes."""
        self._prefixes.difference_update(prefixes)
        self._monitors.discard(monitor)
        entry = self._models[id(model)]
        entry.monitors -= 1
        if not entry.monitors:
            del self._models[id(model)]
            entry.hook.remove()
        engine = self._engine()
        if not self._monitors and engine is not None:
            self._uninstall()
            for event, handler in self._own_handlers():
                engine.remove_event_handler(handler, event)
            delattr(engine, self._ATTRIBUTE)

    def listen(self, event: MonitorEvents, handler: Callable[..., Any]) -> None:
        """Call a monitor's method at an event, before all other handlers.

        Args:
            handler: the bound method; the engine's other handlers keep its monitor alive. It is called with the
                engine, and in iterations that its monitor looks at with a :class:`GradientsReady` of its model, or an
                :class:`OptimizerStep`, of the events that these belong to. What it changes of that which the other
                monitors look at, it does in a function that it returns; what it wants to see after all changes, it
                looks at in a function that this one returns.
        """
        self._listeners[event].append(weakref.WeakMethod(handler))
        if self.running and event == MonitorEvents.GRADIENTS_READY:
            for entry in self._models.values():
                self._register(entry)

    def unlisten(self, event: MonitorEvents, handler: Callable[..., Any]) -> None:
        """Undo :meth:`listen`."""
        self._listeners[event] = [each for each in self._listeners[event] if each() not in (None, handler)]

    def has_handlers(self, *events: MonitorEvents) -> bool:
        """Whether anyone but the monitors listens to one of the events; where that can't be known, yes."""
        engine = self._engine()
        if engine is None:
            return False
        handlers = getattr(engine, EVENT_HANDLERS, None)
        return handlers is None or any(map(handlers.get, events))

    def is_awaited(self, event: MonitorEvents) -> bool:
        """Whether anyone listens to an event, monitors included."""
        return bool(self._listeners[event]) or self.has_handlers(event)

    @property
    def monitors(self) -> list[Any]:
        """The monitors attached to the engine."""
        return list(self._monitors)

    def tracker(self, model: nn.Module) -> GradientTracker:
        """What is known of the gradients of a model."""
        return self._models[id(model)]

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that a model had when the train step started."""
        return self._models[id(model)].parameters

    def fire(self, event: MonitorEvents, about: Mapping[int, Any] | None = None) -> None:
        """Call the monitors, and then everyone else who listens.

        Args:
            about: id of a model -> what has happened to its gradients. The monitors of other models, and those that
                do not look at this iteration, are not called. None calls all of them with the engine alone; those that
                do not look at this iteration not at the train step's end.
        """
        engine = self._engine()
        if engine is None:
            return
        handlers: list[Any] = [handler for listener in self._listeners[event] if (handler := listener()) is not None]
        if event == MonitorEvents.TRAIN_STEP_COMPLETED or about is not None:
            handlers = [each for each in handlers if id(each.__self__) in self._monitoring]
        # All of them look before one changes anything: their order is that of attaching, and must not matter.
        if about is None:
            changes = [handler(engine) for handler in handlers]
        else:
            changes = [
                handler(engine, about[id(handler.__self__.model)])
                for handler in handlers
                if id(handler.__self__.model) in about
            ]
        # What a change returns looks at what all of them have changed, and may change something in turn.
        while changes:
            changes = [change() for change in changes if change is not None]
        if event == MonitorEvents.TRAIN_STEP_COMPLETED:
            self.running = False
        if self.has_handlers(event):
            with users_grad_mode():
                engine.fire_event(event)

    # A run

    def _own_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [
            (Events.ITERATION_STARTED, self._start_iteration),
            (Events.COMPLETED, self._end),
            (Events.TERMINATE, self._end),
            (Events.INTERRUPT, self._interrupt),
        ]

    def _start_iteration(self, engine: Engine) -> None:
        if not self._installed:
            self._install(engine)
        self._reset()
        self._awaits_step = True
        if self.has_handlers(*MonitorEvents):
            self.monitor_iteration()

    def monitor_iteration(self, monitor: Any = None) -> None:
        """Follow the train step of the iteration that is starting, for a monitor or for listeners of the user's."""
        self.monitored = True
        if monitor is not None:
            self._monitoring.add(id(monitor))

    def _register(self, entry: GradientTracker) -> None:
        changed = entry.refresh()
        if not (self._listeners[MonitorEvents.GRADIENTS_READY] or self.has_handlers(MonitorEvents.GRADIENTS_READY)):
            entry.hook.remove()
        elif changed or not entry.hook.places:
            entry.hook.register(entry.parameters, self._gradient_hook(entry))

    def _end(self, engine: Engine | None = None) -> None:
        for monitor in self._monitors:
            monitor.on_run_end()
        self._uninstall()

    def _interrupt(self, engine: Engine) -> None:
        # A run that is interrupted between ITERATION_STARTED and the train step goes on with the train step.
        if not self._awaits_step:
            self._uninstall()

    def _reset(self) -> None:
        self._backwards.clear()
        self._monitoring.clear()
        for tracker in self._models.values():
            tracker.reduced = True
        self.stepping = self.nonfinite_source = None
        self.monitored = self.running = self._awaits_step = False

    def _install(self, engine: Engine) -> None:
        remove_all(self._handles)  # those of an interrupt that came while others were put on or taken off
        # The finalizer of a dropped source has to find these too.
        self._handles += [entry.hook for entry in self._models.values()]
        # One by one, and what takes them off again first: an interrupt may come at any moment.
        # Ignite swallows exceptions as soon as anyone has ever listened to EXCEPTION_RAISED, so nobody here may.
        if handles_exceptions(engine):
            self._handles.append(Patch(engine, HANDLE_EXCEPTION, self._handle_exception))
        # The one way to know that a train step has returned before anything else on the engine does.
        self._handles.append(Patch(engine, TRAIN_STEP, self._train_step))
        # The compiler would trace into what a compiled function or step calls.
        untraced(_end_backward)
        source = weakref.ref(self)

        def started(*args: Any) -> Any:
            owner = source()
            return None if owner is None else owner._on_step_started(*args)

        def completed(optimizer: Optimizer, *_: Any) -> None:
            owner = source()
            if owner is not None:
                owner.step_completed(optimizer)

        self._handles.append(register_optimizer_step_pre_hook(torch.compiler.disable(started)))
        self._handles.append(register_optimizer_step_post_hook(torch.compiler.disable(completed)))
        self._installed = True

    def _handle_exception(self, original: Callable[..., Any], error: BaseException) -> None:
        self._end()
        original(error)

    def _train_step(self, original: Callable[..., Any], engine: Engine, batch: Any) -> Any:
        self.running, self._awaits_step = self.monitored, False
        self.listened = self.running and self.has_handlers(*MonitorEvents)
        for entry in self._models.values():
            if self.monitored:
                self._register(entry)
            else:
                entry.hook.remove()
        with ExitStack() as around:
            if self.running:
                for monitor in [each for each in self._monitors if id(each) in self._monitoring]:
                    for context in monitor.train_step_contexts():
                        around.enter_context(context)
            EventSource._train_steps += 1
            try:
                output = original(engine, batch)
            finally:
                EventSource._train_steps -= 1
        if self.running:
            engine.state.output = output  # as Ignite is about to: it is known to who listens
            self.fire(MonitorEvents.TRAIN_STEP_COMPLETED)
        return output

    def _uninstall(self) -> None:
        self._installed = False
        remove_all(self._handles)
        for entry in self._models.values():
            entry.run_ended()
        self._reset()
        for monitor in self._monitors:
            monitor.reset_run_state()

    # Backward

    def _gradient_hook(self, entry: GradientTracker) -> Callable[[Tensor], None]:
        source = weakref.ref(self)
        key = id(entry.model)
        current_backward = backward_number
        on_first_gradient = out_of_compiler(EventSource._on_first_gradient)
        last = -1
        note: Callable[[int], None] = _ignore

        def hook(parameter: Tensor) -> None:
            nonlocal last, note
            if current_backward() != last:
                last = current_backward()
                owner = source()
                note = _ignore if owner is None or not owner.running else on_first_gradient(owner, last, key)
            note(id(parameter))

        return untraced(hook)

    def _on_first_gradient(self, backward: int, key: int) -> Callable[[int], None]:
        """The first gradient of a model in a backward; what takes in the ids of the parameters that it reaches."""
        if backward not in self._backwards:
            ranks = dist.is_available() and dist.is_initialized()
            _end_backward(weakref.ref(self), backward, _HOPS_OF_RANKS if ranks else _HOPS)
        return self._backwards.setdefault(backward, {}).setdefault(key, set()).add

    def _on_gradients_ready(self, backward: int) -> None:
        ready: dict[int, Set[int]] = {}
        for key, reached in self._backwards.pop(backward, {}).items():
            if key in self._models:
                changed = self._models[key].backward_ended(backward, reached, self._backwards.keys())
                if changed is not None:
                    ready[key] = changed
        if ready:
            trackers = {key: self._models[key] for key in ready}
            self.fire(
                MonitorEvents.GRADIENTS_READY,
                {
                    key: GradientsReady(
                        tracker, ready[key], len(ready) > 1 and tracker.lacks_any(ready.values()), self.stepping
                    )
                    for key, tracker in trackers.items()
                },
            )

    # Optimizers

    def _on_step_started(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.running:
            self._report_outside(optimizer)
            return None
        if self.stepping is not None and is_nested(optimizer):
            return None
        if not any(model.shares(optimizer) for model in self._models.values()):
            return None
        self.stepping = optimizer
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._fire_step(MonitorEvents.OPTIMIZER_STEP_STARTED, optimizer)
            return None
        # The closure makes the gradients that the step is about to use.
        closure = self._firing_once(closure, optimizer)
        return (args, kwargs | {"closure": closure}) if "closure" in kwargs else ((args[0], closure, *args[2:]), kwargs)

    def _report_outside(self, optimizer: Optimizer) -> None:
        engine = self._engine()
        if EventSource._train_steps or self._reported_outside or engine is None:
            return
        if any(model.shares(optimizer) for model in self._models.values()):
            self._reported_outside = True
            event = engine.last_event_name
            logging.getLogger(f"{__name__}.{type(self).__name__}").warning(
                "%s made a step outside the train step, in a handler of %s: monitors see none of what happens there. "
                "Make backward() and step() in the train step, which may look for itself whether it is their turn.",
                type(optimizer).__name__,
                getattr(event, "name", event),
            )

    def _firing_once(self, closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
        source = weakref.ref(self)
        fired = False

        @functools.wraps(closure)
        def fire_after(*args: Any, **kwargs: Any) -> Any:
            nonlocal fired
            loss = closure(*args, **kwargs)
            owner = source()
            if owner is not None and owner.running and not fired:
                fired = True
                owner._fire_step(MonitorEvents.OPTIMIZER_STEP_STARTED, optimizer)
            return loss

        return fire_after

    def step_completed(self, optimizer: Optimizer) -> None:
        """An optimizer has made its step, or it was left out."""
        if self.stepping is optimizer:
            self._fire_step(MonitorEvents.OPTIMIZER_STEP_COMPLETED, optimizer)
            self.stepping = None

    def _fire_step(self, event: MonitorEvents, optimizer: Optimizer) -> None:
        self.fire(event, {key: OptimizerStep(tracker, optimizer) for key, tracker in self._models.items()})


def check_events(feature: str, engine: Engine, events: Iterable[MonitorEvents]) -> None:
    """Refuse what can't be heard of with the installed torch and Ignite.

    Raises:
        RuntimeError: if a private name that one of the events needs is gone.
    """
    check_engine(engine)
    if MonitorEvents.GRADIENTS_READY in events:
        need(feature, backward_number, queue_callback)


def _ignore(_: int) -> None:
    pass


def _end_backward(source: weakref.ref[EventSource], backward: int, hops: int) -> None:
    owner = source()
    if hops:
        queue_callback(functools.partial(_end_backward, source, backward, hops - 1))
    elif owner is not None:
        out_of_compiler(EventSource._on_gradients_ready)(owner, backward)
