"""MonitorEvents, and what fires them: hooks on parameters, optimizers and the train step, there while a run lasts."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

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
    - OPTIMIZER_STEP_STARTED : an optimizer that holds parameters of a monitored model is about to make its step.
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
        reached: while GRADIENTS_READY fires, the ids of the models that the backward reached.
        stepping: while an optimizer makes its step, the optimizer.
        closure: whether that step was given a closure, which runs backward inside of it.
    """

    _of: ClassVar[weakref.WeakKeyDictionary[Engine, Watch]] = weakref.WeakKeyDictionary()

    def __init__(self, engine: Engine) -> None:
        self._engine = weakref.ref(engine)
        self._models: dict[int, _WatchedModel] = {}
        self._handles: list[Any] = []
        weakref.finalize(self, _remove_all, self._handles).atexit = False
        self._train_step: Callable[..., Any] | None = None
        self._members: weakref.WeakSet[Any] = weakref.WeakSet()
        self._listening: dict[MonitorEvents, int] = dict.fromkeys(MonitorEvents, 0)
        self._claims: set[str] = set()
        self.armed = False
        self._tasks: dict[int, set[int]] = {}
        self.reached: frozenset[int] = frozenset()
        self.stepping: Optimizer | None = None
        self.closure = False

    # Who takes part

    @classmethod
    def of(cls, engine: Engine) -> Watch:
        """The engine's watch, made by the first monitor that asks.

        Args:
            engine: the engine.
        """
        watch = cls._of.get(engine)
        if watch is None:
            register_events(engine)
            watch = cls._of[engine] = cls(engine)
            for event, handler in watch._own_handlers():
                engine.add_event_handler(event, handler)
        return watch

    def join(self, member: Member, model: nn.Module, claims: Iterable[str]) -> None:
        """Take a monitor in.

        Args:
            member: the monitor.
            model: the model whose backward passes and optimizer steps it wants to hear of.
            claims: names in the engine's state that are to be its own.

        Raises:
            ValueError: if another monitor on this engine has claimed one of the names.
        """
        taken = self._claims.intersection(claims)
        if taken:
            raise ValueError(f"{', '.join(sorted(taken))} is already claimed by another monitor on this engine")
        self._claims.update(claims)
        self._members.add(member)
        self._models.setdefault(id(model), _WatchedModel(model)).monitors += 1
        if self._train_step is not None:  # attached while a run is going on
            self._install_model(self._models[id(model)])

    def leave(self, member: Member, model: nn.Module, claims: Iterable[str]) -> None:
        """Let a monitor go; with the last one everything goes.

        Args:
            member: the monitor.
            model: the model it joined with.
            claims: the names it joined with.
        """
        self._claims.difference_update(claims)
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
            del Watch._of[engine]

    def listen(self, event: MonitorEvents, handler: Callable[..., Any]) -> None:
        """Add a monitor's own handler to the engine, before those of loggers and users, which look at its values.

        Args:
            event: the event.
            handler: its handler.
        """
        engine = self._engine()
        if engine is not None:
            engine.add_event_handler(event, handler)
            handlers = engine._event_handlers[event]
            handlers.insert(self._listening[event], handlers.pop())
            self._listening[event] += 1

    def unlisten(self, event: MonitorEvents, handler: Callable[..., Any]) -> None:
        """Remove a monitor's own handler from the engine.

        Args:
            event: the event.
            handler: its handler.
        """
        engine = self._engine()
        if engine is not None:
            engine.remove_event_handler(handler, event)
            self._listening[event] -= 1

    def has_user_handlers(self, *events: MonitorEvents) -> bool:
        """Whether anyone but the monitors listens to one of the events.

        Args:
            events: the events.
        """
        engine = self._engine()
        if engine is None:
            return False
        handlers = engine._event_handlers
        return any(event in handlers and len(handlers[event]) > self._listening[event] for event in events)

    @property
    def members(self) -> list[Any]:
        """The monitors attached to the engine."""
        return list(self._members)

    def fire(self, event: MonitorEvents) -> None:
        """Fire an event on the engine.

        Args:
            event: the event.
        """
        engine = self._engine()
        if engine is not None:
            engine.fire_event(event)

    # A run

    def _own_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        ends = [(event, self._uninstall) for event in (Events.COMPLETED, Events.TERMINATE, Events.INTERRUPT)]
        return [(Events.ITERATION_STARTED, self._start_iteration), *ends]

    def _start_iteration(self, engine: Engine) -> None:
        if self._train_step is None:
            self._install(engine)
        self._tasks.clear()
        self.stepping = None
        self.armed = self.has_user_handlers(*MonitorEvents)

    def _install(self, engine: Engine) -> None:
        for watched in self._models.values():
            self._install_model(watched)
        watch = weakref.ref(self)

        def step_started(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            owner = watch()
            if owner is not None:
                owner._on_step_started(optimizer, closure=[*args[1:], kwargs.get("closure")][0] is not None)

        def step_completed(optimizer: Optimizer, *_: Any) -> None:
            owner = watch()
            if owner is not None:
                owner._on_step_completed(optimizer)

        self._handles += [
            register_optimizer_step_pre_hook(step_started),
            register_optimizer_step_post_hook(step_completed),
        ]
        # The one way to know that a train step has returned, or raised, before anything else on the engine does.
        train_step = engine._process_function

        @functools.wraps(train_step)
        def watched_train_step(engine: Engine, batch: Any) -> Any:
            try:
                output = train_step(engine, batch)
            except BaseException:
                owner = watch()
                if owner is not None:
                    owner._uninstall()
                raise
            owner = watch()
            if owner is not None and owner.armed:
                engine.fire_event(MonitorEvents.TRAIN_STEP_COMPLETED)
            return output

        self._train_step = engine._process_function = watched_train_step

    def _install_model(self, watched: _WatchedModel) -> None:
        hook = self._gradient_hook(watched)
        for parameter in watched.model.parameters():
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            # A frozen parameter takes no hook, but may be unfrozen at any time, in the middle of a train step too.
            frozen = not parameter.requires_grad
            if frozen:
                parameter.requires_grad_(True)
            watched.handles.append(parameter.register_post_accumulate_grad_hook(hook))
            if frozen:
                parameter.requires_grad_(False)
        # The finalizer of a dropped watch has to find these handles too.
        self._handles.append(_Removable(watched.handles))

    def _uninstall(self) -> None:
        engine = self._engine()
        if engine is not None and self._train_step is not None and engine._process_function is self._train_step:
            engine._process_function = self._train_step.__wrapped__  # type: ignore[attr-defined]
        self._train_step = None
        _remove_all(self._handles)
        self._tasks.clear()
        self.stepping = None
        self.armed = False
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
                if owner is not None and owner.armed:
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
        if self.reached:
            self.fire(MonitorEvents.GRADIENTS_READY)

    # Optimizers

    def _on_step_started(self, optimizer: Optimizer, closure: bool) -> None:
        # A step inside a step is that of an optimizer which another one wraps.
        if self.armed and self.stepping is None and any(model.shares(optimizer) for model in self._models.values()):
            self.stepping, self.closure = optimizer, closure
            self.fire(MonitorEvents.OPTIMIZER_STEP_STARTED)

    def _on_step_completed(self, optimizer: Optimizer) -> None:
        if self.stepping is optimizer:
            self.fire(MonitorEvents.OPTIMIZER_STEP_COMPLETED)
            self.stepping = None


class _WatchedModel:
    """A model, how many monitors watch it, and the hooks that are on its parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.monitors = 0
        self.handles: list[Any] = []
        self._replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._shared: weakref.WeakKeyDictionary[Optimizer, tuple[int, bool]] = weakref.WeakKeyDictionary()

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
            own = {id(parameter) for parameter in self.model.parameters()}
            held = (parameter for group in optimizer.param_groups for parameter in group["params"])
            known = self._shared[optimizer] = (size, any(id(parameter) in own for parameter in held))
        return known[1]


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
