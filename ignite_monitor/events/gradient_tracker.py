"""Tracks the gradients of a model that monitors of an engine share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_monitor.events.hooks import remove_all
from ignite_monitor.events.running_statistics import RunningStatistics
from ignite_monitor.model._torch import (
    GradientHook,
    backward_number,
    calling_node,
    finalizes_manually,
    queue_callback,
    registries,
    untraced,
)


class GradientsReady(NamedTuple):
    """A backward that reached a model has ended, and its gradients are reduced."""

    tracker: GradientTracker
    reached: Set[int]  # ids of the parameters whose gradients may have changed
    shared: bool  # whether the backward reached other monitored models too
    in_step: bool  # whether the closure of a step that has started is evaluated again

    def scale(self, scaler: GradScaler | None) -> Tensor | None:
        """The scale of the gradients, 0-dim; None for 1."""
        if scaler is None:
            return None
        devices = {item.device for item in self.tracker.parameters if item.grad is not None}
        # The scaler does not wait for its copy to the CPU. A hook may have taken all gradients away.
        device = min(devices, key=lambda device: device.type == "cpu", default=None)
        scale: Tensor = scaler.scale(torch.ones((), device=device))  # get_scale() synchronizes
        return scale


@dataclass(eq=False)
class StepRequests:
    """Requests of monitors to a step during OPTIMIZER_STEP_STARTED, and the decision on it."""

    optimizer: Optimizer
    may_skip: bool
    flags: list[Tensor] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)
    made: bool | Tensor = True


class OptimizerStep(NamedTuple):
    """The step of an optimizer that holds parameters of a monitored model.

    During OPTIMIZER_STEP_STARTED monitors may call :meth:`skip` and :meth:`scale`. When all of them have been called,
    the event source does once what they asked: any skip, and the smallest factor.
    """

    tracker: GradientTracker  # of the model of the monitor that is called
    optimizer: Optimizer
    parameters: list[nn.Parameter]  # of the model, that the optimizer holds
    requests: StepRequests

    def skip(self, flag: bool | Tensor) -> None:
        """Skip the step if a flag is True: a bool, or a 0-dim bool tensor; ValueError without ``acts_on``."""
        if not self.requests.may_skip:
            kind = type(self.optimizer).__name__
            raise ValueError(
                f"a step of {kind} is skipped only if this optimizer is the attribute acts_on of a monitor"
            )
        self.requests.flags.append(flag if isinstance(flag, Tensor) else torch.tensor(flag, device="cpu"))

    def scale(self, factor: Tensor) -> None:
        """Multiply all gradients that the optimizer uses by a 0-dim tensor, from 0 to 1."""
        self.requests.factors.append(factor)

    @property
    def made(self) -> bool | Tensor:
        """True if the step is made, once it is decided; a 0-dim bool tensor if only the device may know."""
        return self.requests.made

    @property
    def loss_scale(self) -> Tensor | None:
        """The scale of the gradients, which a fused optimizer divides by; None for 1."""
        return getattr(self.optimizer, "grad_scale", None)

    def is_of(self, optimizer: Optimizer | None) -> bool:
        """Return True if an optimizer, or one that wraps it, makes the step; None for any that shares parameters."""
        if optimizer is None:
            return bool(self.parameters)
        return self.optimizer.param_groups is optimizer.param_groups


class GradientTracker:
    """The parameters of a model, and what has happened to them since its last step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.hook = GradientHook()
        finalize(self, self.hook.remove).atexit = False
        self.parameters: list[nn.Parameter] = []  # when the train step started
        self.ids: Set[int] = frozenset()  # their ids
        self.reduced = True  # whether the last backward has reduced its gradients, or the train step does so
        self.observers: list[Any] = []  # their ``backward_ended`` is called after each backward that reached the model
        self.probe: Any = None  # AccumulationProbe that shows whether the statistics' window continues
        self.accumulates = False  # whether a backward has reached the model since the last step
        self.has_own_backward = False  # whether one of these reached no other monitored model
        self._has_stepped = False  # whether an optimizer of the model has made a step in this train step
        self._statistics = RunningStatistics()
        self._registries: list[dict[str, Any]] = []
        self._members: list[Any] = []
        self._replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._sharded = [module for module in model.modules() if hasattr(module, "unshard")]  # by fully_shard
        self._held: WeakKeyDictionary[Optimizer, tuple[list[int], list[nn.Parameter]]] = WeakKeyDictionary()

    def _refresh(self) -> bool:
        """Update the parameters; whether modules or parameters have been added, removed or replaced."""
        members = _values(self._registries)
        if 0 < len(members) == len(self._members) and all(map(is_, members, self._members)):
            return False
        self._registries = registries(self.model.modules())
        self._members = _values(self._registries)
        self.parameters = list(self.model.parameters())
        self.ids = frozenset(map(id, self.parameters))
        self._held.clear()
        self._statistics.watch(self.model)
        return True

    def start_train_step(self, hook: Callable[[Tensor], None] | None, refresh: bool, may_skip: bool) -> None:
        """Hook the parameters, unless the hook is None, and keep the buffers that a skipped step restores."""
        if (refresh and self._refresh()) or hook is None:
            self.hook.remove()
        if hook is not None and not self.hook.places:
            self.hook.register(self.parameters, hook)
        self.accumulates &= may_skip
        if may_skip:
            self._statistics.keep(may_continue=self.accumulates)

    def parameters_of(self, optimizer: Optimizer | None) -> list[nn.Parameter]:
        """The model's parameters that an optimizer holds; None for all. The same list while they are the same."""
        if optimizer is None:
            return self.parameters
        held = list(map(id, chain.from_iterable(map(itemgetter("params"), optimizer.param_groups))))
        former, parameters = self._held.get(optimizer, ([], []))
        if held != former:
            ids = set(held)
            parameters = [parameter for parameter in self.parameters if id(parameter) in ids]
            self._held[optimizer] = held, parameters
        return parameters

    def reset(self, run: bool = False) -> None:
        """Forget the iteration, or the whole run."""
        self.reduced, self._has_stepped, self.probe = True, False, None
        if run:
            self.hook.remove()
            self.accumulates = self.has_own_backward = False

    def step_skipped(self, flag: Tensor, own: bool) -> None:
        """Restore the buffers where a flag is True, if the step, its own or another model's, uses what changed them."""
        # A discriminator that has seen backwards of its generator's loss alone is passed through too.
        if own or self._is_passed_through or (self.accumulates and not self.has_own_backward):
            self._statistics.restore(flag)

    def step_completed(self, own: bool, may_skip: bool) -> None:
        """Start another window after a step of its own, or another model's."""
        if own or self._is_passed_through:
            self.accumulates, self.has_own_backward, self._has_stepped = False, False, True
            if may_skip:
                self._statistics.keep()

    @property
    def _is_passed_through(self) -> bool:
        """True if its forward passes belong to steps of others, as a discriminator's to those of its generator."""
        if self.has_own_backward:
            return False
        return self._has_stepped or not any(map(attrgetter("requires_grad"), self.parameters))

    def backward_ended(self, numbers: Set[int], reached: Set[int]) -> Set[int]:
        """Record a backward; return the ids of parameters with other gradients, none before these are reduced."""
        self.accumulates = True
        # DistributedDataParallel gives a rank gradients of parameters that only other ranks have reached.
        changed = self.ids if self._replicas else reached
        for observer in list(self.observers):
            observer.backward_ended(numbers, changed)
        if self.probe is not None and self.probe.accumulates is not None:
            self._statistics.continue_window(self.probe.accumulates)
            self.probe = None
        self.reduced = all(map(attrgetter("require_backward_grad_sync"), self._replicas))
        if not self.reduced or any(map(finalizes_manually, (*self._replicas, *self._sharded))):
            return frozenset()
        return changed


def _values(dictionaries: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dictionaries)))


def gradient_hook(start: Callable[[int], set[int] | None]) -> Callable[[Tensor], None]:
    """A hook for parameters; ``start(number of a backward)`` returns the set for the ids of those reached, or None."""
    last, add = -1, set[int]().add
    untraced(_after_backward)  # the compiler would trace into what a compiled train step calls

    def hook(parameter: Tensor) -> None:
        nonlocal last, add
        number = backward_number()
        if number != last or number == -1:
            reached = start(number)
            last, add = number, (set() if reached is None else reached).add
        add(id(parameter))

    return untraced(hook)


def await_end(number: int, inside: dict[int, set[int]], end: Callable[[int], None], callback_depth: int) -> None:
    """Call a function at the end of the running backward, or of the outermost one in which it is called.

    The callback comes after one that queues so many others. ``inside`` gets the number, by that of the outermost.
    """
    node = calling_node()  # of a reentrant checkpoint: gradients are whole when the outer backward ends
    if node is None:
        outermost = backward_number()
        inside.setdefault(outermost, set()).add(number)
        _after_backward(functools.partial(end, outermost), callback_depth)
        return
    handles: list[Any] = []

    def resumed(_: Any) -> None:
        if handles:
            remove_all(handles)
            await_end(number, inside, end, callback_depth)

    handles += [following.register_prehook(untraced(resumed)) for following, _ in node.next_functions if following]


def _after_backward(function: Callable[[], None], callback_depth: int) -> None:
    once_more = functools.partial(_after_backward, function, callback_depth - 1)
    queue_callback(function if callback_depth == 1 else once_more)
