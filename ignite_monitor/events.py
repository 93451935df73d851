"""MonitorEvents, and what fires them: hooks on parameters, optimizers and the train step, there while a run lasts."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from itertools import chain
from operator import is_
from typing import Any, Protocol

import torch
from ignite.engine import Engine, Events
from ignite.engine.events import EventEnum
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

# How often the callback at the end of backward queues itself anew, so as to run after those of
# DistributedDataParallel: its reduction takes one callback, and with a static graph one that queues another.
_HOPS = 3


class MonitorEvents(EventEnum):
    """What happens inside a train step, fired on the user's engine by the monitors attached to it.

    Handlers, filters and loggers use them like Ignite's own events; a filter counts iterations. They are registered
    on an engine by the first monitor attached to it, and fire in monitored iterations; where handlers of the user's
    own listen to them, in every iteration.

    - GRADIENTS_READY : a backward that reached the parameters of a monitored model has ended, with everything
      reduced (a backward under ``no_sync()`` of DistributedDataParallel has not been, and fires nothing). Once per
      backward, before ``backward()`` returns. Under ``checkpoint(use_reentrant=True)`` once more for every
      checkpointed segment, the last time with the whole gradient.
    - SPIKE_DETECTED : a gradient norm exceeded its threshold.
    - OPTIMIZER_STEP_STARTED : an optimizer that holds parameters of a monitored model is about to make its step; where
      the step is given a closure, when that has returned for the first time.
    - OPTIMIZER_STEP_COMPLETED : it has returned from it.
    - TRAIN_STEP_COMPLETED : the train step has returned, ITERATION_COMPLETED is next; monitors publish here.
    """

    GRADIENTS_READY = "gradients_ready"
    """triggered when a backward has ended and the gradients are reduced."""
    SPIKE_DETECTED = "spike_detected"
    """triggered when a gradient norm exceeds its threshold."""
    OPTIMIZER_STEP_STARTED = "optimizer_step_started"
    """triggered before an optimizer's step."""
    OPTIMIZER_STEP_COMPLETED = "optimizer_step_completed"
    """triggered after an optimizer's step."""
    TRAIN_STEP_COMPLETED = "train_step_completed"
    """triggered when the train step has returned."""


class Member(Protocol):
    """What a :class:`Watch` knows of a monitor."""

    def release(self) -> None:
        """Let go of everything that belongs to the run that has ended."""


class Watch:
    """Fires :class:`MonitorEvents` on one engine; shared by all monitors attached to it.

    Its hooks exist from a run's first iteration to its end, whether it completes, is terminated or interrupted, or
    the train step raises. The engine owns the watch; the watch knows the engine, and the hooks know the watch, by
    weak references alone, so that a run that is dropped is freed as it would be without.

    Args:
        engine: the engine to fire on.

    Attributes:
        armed: whether this iteration is monitored.
        active: whether its train step is going on. What happens in handlers, or on other engines, is not watched.
        reached: while GRADIENTS_READY fires, the ids of the models that the backward reached.
        unreduced: ids of the models that a backward of this iteration reached without reducing their gradients.
        stepping: while an optimizer makes its step, the optimizer.
    """

    _ATTRIBUTE = "_ignite_monitor_watch"  # of the engine, which owns its watch

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._models: dict[int, _WatchedModel] = {}
        self._handles: list[Any] = []
        weakref.finalize(self, _remove_all, self._handles).atexit = False
        self._installed = False
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._listeners: dict[MonitorEvents, list[weakref.WeakMethod[Any]]] = {event: [] for event in MonitorEvents}
        self._prefixes: set[str] = set()
        self.armed = self.active = self._awaits_step = False
        self._tasks: dict[int, set[int]] = {}
        self.reached: frozenset[int] = frozenset()
        self.unreduced: frozenset[int] = frozenset()
        self.stepping: Optimizer | None = None

    # Who takes part

    @classmethod
    def of(cls, engine: Engine) -> Watch:
        """The engine's watch, made by the first monitor that asks.

        Args:
            engine: the engine.
        """
        watch: Watch | None = getattr(engine, cls._ATTRIBUTE, None)
        if watch is None:
            register_events(engine)
            watch = cls(engine)
            setattr(engine, cls._ATTRIBUTE, watch)
            for event, handler in watch._own_handlers():
                engine.add_event_handler(event, handler)
        return watch

    def join(self, member: Member, model: nn.Module, prefix: str) -> None:
        """Take a monitor in.

        Args:
            member: the monitor.
            model: the model whose backward passes and optimizer steps it wants to hear of.
            prefix: what the names of its values start with.

        Raises:
            ValueError: if another monitor on this engine has that prefix.
        """
        if prefix in self._prefixes:
            raise ValueError(f"Another monitor on this engine has the prefix {prefix!r}: give this one another prefix")
        self._prefixes.add(prefix)
        self._members.add(member)
        self._models.setdefault(id(model), _WatchedModel(model)).monitors += 1
        if self._installed:  # attached while a run is going on
            self._uninstall()

    def leave(self, member: Member, model: nn.Module, prefix: str) -> None:
        """Let a monitor go; with the last one everything goes.

        Args:
            member: the monitor.
            model: the model it joined with.
            prefix: the prefix it joined with.
        """
        self._prefixes.discard(prefix)
        self._members.discard(member)
        watched = self._models[id(model)]
        watched.monitors -= 1
        if not watched.monitors:
            del self._models[id(model)]
            _remove_all(watched.handles)
        engine = self._engine()
        if not self._members and engine is not None:
            self._uninstall()
            for event, handler in self._own_handlers():
                engine.remove_event_handler(handler, event)
            delattr(engine, self._ATTRIBUTE)

    def listen(self, event: MonitorEvents, handler: Callable[[Engine], Any]) -> None:
        """Call a monitor's method at an event, before all other handlers.

        Args:
            event: the event.
            handler: the bound method; the engine's other handlers keep its monitor alive.
        """
        self._listeners[event].append(weakref.WeakMethod(handler))

    def unlisten(self, event: MonitorEvents, handler: Callable[[Engine], Any]) -> None:
        """Undo :meth:`listen`.

        Args:
            event: the event.
            handler: the bound method.
        """
        self._listeners[event] = [each for each in self._listeners[event] if each() not in (None, handler)]

    def has_handlers(self, *events: MonitorEvents) -> bool:
        """Whether anyone but the monitors listens to one of the events.

        Args:
            events: the events.
        """
        engine = self._engine()
        return engine is not None and any(engine._event_handlers.get(event) for event in events)

    @property
    def members(self) -> list[Any]:
        """The monitors attached to the engine."""
        return list(self._members)

    def parameters(self, model: nn.Module) -> list[nn.Parameter]:
        """The parameters that a model had when the iteration started.

        Args:
            model: a model that a monitor has joined with.
        """
        return self._models[id(model)].parameters

    def shares(self, model: nn.Module) -> bool:
        """Whether the optimizer whose step is going on holds parameters of a model.

        Args:
            model: a model that a monitor has joined with.
        """
        return self.stepping is not None and self._models[id(model)].shares(self.stepping)

    def fire(self, event: MonitorEvents) -> None:
        """Call the monitors, and then everyone else who listens.

        Args:
            event: the event.
        """
        engine = self._engine()
        if engine is None:
            return
        for listener in list(self._listeners[event]):
            handler = listener()
            if handler is not None:
                handler(engine)
        if event == MonitorEvents.TRAIN_STEP_COMPLETED:
            self.active = False
        if self.has_handlers(event):
            engine.fire_event(event)

    # A run

    def _own_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [
            (Events.ITERATION_STARTED, self._start_iteration),
            (Events.COMPLETED, self._uninstall),
            (Events.TERMINATE, self._uninstall),
            (Events.INTERRUPT, self._interrupt),
        ]

    def _start_iteration(self, engine: Engine) -> None:
        if not self._installed:
            self._install(engine)
        self._reset()
        self._awaits_step = True
        if self.has_handlers(*MonitorEvents):
            self.arm()

    def arm(self) -> None:
        """Watch the train step of the iteration that is starting."""
        if not self.armed:
            self.armed = True
            for watched in self._models.values():
                if watched.refresh():
                    self._install_model(watched)

    def _interrupt(self) -> None:
        # A run that is interrupted between ITERATION_STARTED and the train step goes on with the train step.
        if not self._awaits_step:
            self._uninstall()

    def _reset(self) -> None:
        self._tasks.clear()
        self.reached = self.unreduced = frozenset()
        self.stepping = None
        self.armed = self.active = self._awaits_step = False

    def _install(self, engine: Engine) -> None:
        for watched in self._models.values():
            self._install_model(watched)
            # The finalizer of a dropped watch has to find these handles too.
            self._handles.append(_Removable(watched.handles))
        watch = weakref.ref(self)

        def step_started(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            owner = watch()
            return None if owner is None else owner._on_step_started(optimizer, args, kwargs)

        def step_completed(optimizer: Optimizer, *_: Any) -> None:
            owner = watch()
            if owner is not None:
                owner._on_step_completed(optimizer)

        def train_step(original: Callable[..., Any], engine: Engine, batch: Any) -> Any:
            owner = watch()
            if owner is None:
                return original(engine, batch)
            owner.active, owner._awaits_step = owner.armed, False
            output = original(engine, batch)
            if owner.active:
                owner.fire(MonitorEvents.TRAIN_STEP_COMPLETED)
            return output

        def handle_exception(original: Callable[..., Any], error: BaseException) -> None:
            owner = watch()
            if owner is not None:
                owner._uninstall()
            original(error)

        self._installed = True
        self._handles += [
            # A compiled step would trace into the hooks.
            register_optimizer_step_pre_hook(torch.compiler.disable(step_started)),
            register_optimizer_step_post_hook(torch.compiler.disable(step_completed)),
            # The one way to know that a train step has returned before anything else on the engine does. And Ignite
            # swallows exceptions as soon as anyone has ever listened to EXCEPTION_RAISED, so nobody here may.
            _Patch(engine, "_process_function", train_step),
            _Patch(engine, "_handle_exception", handle_exception),
        ]

    def _install_model(self, watched: _WatchedModel) -> None:
        _remove_all(watched.handles)
        watched.refresh()
        hook = self._gradient_hook(watched)
        for parameter in watched.parameters:
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            # A frozen parameter takes no hook, but may be unfrozen at any time, in the middle of a train step too.
            frozen = not parameter.requires_grad
            if frozen:
                parameter.requires_grad_(True)
            watched.handles.append(parameter.register_post_accumulate_grad_hook(hook))
            if frozen:
                parameter.requires_grad_(False)

    def _uninstall(self) -> None:
        self._installed = False
        _remove_all(self._handles)
        self._reset()
        for member in self._members:
            member.release()

    # Backward

    def _gradient_hook(self, watched: _WatchedModel) -> Callable[[Tensor], None]:
        watch = weakref.ref(self)
        key = id(watched.model)
        current_task = torch._C._current_graph_task_id
        last_task = -1

        def hook(_: Tensor) -> None:
            nonlocal last_task
            task = current_task()
            if task != last_task:
                last_task = task
                owner = watch()
                if owner is not None and owner.active:
                    owner._on_first_gradient(task, key)

        return hook

    def _on_first_gradient(self, task: int, key: int) -> None:
        if task in self._tasks:
            self._tasks[task].add(key)
            return
        self._tasks[task] = {key}
        queue_callback = torch.autograd.Variable._execution_engine.queue_callback
        watch = weakref.ref(self)
        hops = _HOPS

        def backward_ended() -> None:
            nonlocal hops
            hops -= 1
            owner = watch()
            if hops:
                queue_callback(backward_ended)
            elif owner is not None:
                owner._on_gradients_ready(task)

        queue_callback(backward_ended)

    def _on_gradients_ready(self, task: int) -> None:
        reached = self._tasks.pop(task, set()) & self._models.keys()
        self.reached = frozenset(key for key in reached if self._models[key].reduces)
        self.unreduced |= reached - self.reached
        if self.reached:
            self.fire(MonitorEvents.GRADIENTS_READY)

    # Optimizers

    def _on_step_started(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.active or (self.stepping is not None and _is_nested(optimizer)):
            return None
        if not any(model.shares(optimizer) for model in self._models.values()):
            return None
        self.stepping = optimizer
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self.fire(MonitorEvents.OPTIMIZER_STEP_STARTED)
            return None
        # The closure makes the gradients that the step is about to use.
        closure = self._firing_once(closure)
        return (args, kwargs | {"closure": closure}) if "closure" in kwargs else ((args[0], closure, *args[2:]), kwargs)

    def _firing_once(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        watch = weakref.ref(self)
        fired = False

        @functools.wraps(closure)
        def fire_after(*args: Any, **kwargs: Any) -> Any:
            nonlocal fired
            loss = closure(*args, **kwargs)
            owner = watch()
            if owner is not None and owner.active and not fired:
                fired = True
                owner.fire(MonitorEvents.OPTIMIZER_STEP_STARTED)
            return loss

        return fire_after

    def _on_step_completed(self, optimizer: Optimizer) -> None:
        if self.stepping is optimizer:
            self.fire(MonitorEvents.OPTIMIZER_STEP_COMPLETED)
            self.stepping = None


def _is_nested(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step is made inside of another one, as those of wrapped optimizers and base classes are.

    If not, an earlier one has raised an error that the train step lives with.
    """
    hooked = getattr(type(optimizer).step, "__code__", None)  # the function around every step that calls its hooks
    frame, steps = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        steps += frame.f_code is hooked
    return steps > 1


class _WatchedModel:
    """A model, how many monitors watch it, and the hooks that are on its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.monitors = 0
        self.handles: list[Any] = []
        self.parameters: list[nn.Parameter] = []
        # The dictionaries that its modules keep parameters and submodules in, and what was in them at the last look.
        self._registries: list[dict[str, Any]] = []
        self._members: list[Any] = []
        self._replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._shared: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()

    def refresh(self) -> bool:
        """Look at the model's parameters anew: whether there are others than at the last time."""
        members = list(chain.from_iterable(map(dict.values, self._registries)))
        if len(members) == len(self._members) and members and all(map(is_, members, self._members)):
            return False
        modules = list(self.model.modules())
        self._registries = [vars(each)[name] for each in modules for name in ("_parameters", "_modules")]
        self._members = list(chain.from_iterable(map(dict.values, self._registries)))
        self.parameters = list(self.model.parameters())
        self._shared.clear()
        return True

    @property
    def reduces(self) -> bool:
        """Whether backward leaves gradients reduced: not under ``no_sync()``."""
        return all(replica.require_backward_grad_sync for replica in self._replicas)

    def shares(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds parameters of the model.

        Args:
            optimizer: the optimizer.
        """
        size = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._shared.get(optimizer)
        if known is None or known[0] != size:
            own = {id(parameter) for parameter in self.parameters}
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            known = self._shared[optimizer] = (size, any(id(parameter) in own for parameter in held))
        return known[1]


class _Patch:
    """Something callable of an engine, replaced until it is removed.

    Args:
        engine: the engine.
        name: the attribute.
        replacement: is called with the original, and what the original is called with.
    """

    def __init__(self, engine: Engine, name: str, replacement: Callable[..., Any]) -> None:
        self._engine = weakref.ref(engine)
        self._name = name
        self._original = original = vars(engine).get(name)
        if original is None:  # a method of its class, which must not hold the engine
            method = getattr(type(engine), name)
            owner = self._engine

            def original(*args: Any) -> Any:
                return method(owner(), *args)

        @functools.wraps(original)
        def patched(*args: Any) -> Any:
            return replacement(original, *args)

        self._patched = patched
        setattr(engine, name, patched)

    def remove(self) -> None:
        engine = self._engine()
        if engine is None or vars(engine).get(self._name) is not self._patched:
            return
        if self._original is None:
            delattr(engine, self._name)
        else:
            setattr(engine, self._name, self._original)


class _Removable:
    """A list of handles as one handle."""

    def __init__(self, handles: list[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        _remove_all(self._handles)


def _remove_all(handles: list[Any]) -> None:
    while handles:
        handles.pop().remove()


def register_events(engine: Engine) -> None:
    """Make an engine know :class:`MonitorEvents`.

    Args:
        engine: the engine.
    """
    if not engine.has_registered_events(MonitorEvents.GRADIENTS_READY):
        engine.register_events(*MonitorEvents, event_to_attr=dict.fromkeys(MonitorEvents, "iteration"))
