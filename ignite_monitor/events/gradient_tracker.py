"""Tracks the gradients of a model that monitors of an engine share."""

from __future__ import annotations

import logging
import math
from collections.abc import Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_monitor.events.hooks import weak_method
from ignite_monitor.events.running_statistics import RunningStatistics
from ignite_monitor.model._torch import GradientHook, backward_number, finalizes_manually, in_backward, registries
from ignite_monitor.model.dtensor import any_dtensor
from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.tensors import floating_tensors

_logger = logging.getLogger(__name__)


class GradientsReady(NamedTuple):
    """A backward that reached a model has ended, and its gradients are reduced."""

    tracker: GradientTracker
    reached: Set[int]  # ids of the parameters whose gradients may have changed
    shared: bool  # whether the backward reached other monitored models too
    numbers: Set[int]  # of the backward and those inside of it

    def scale(self, scaler: GradScaler | None) -> Tensor | None:
        """The scale of the gradients, 0-dim; None for 1."""
        if scaler is None:
            return None
        device = next(parameter.device for parameter in self.tracker.parameters if parameter.grad is not None)
        scale: Tensor = scaler.scale(torch.ones((), device=device))  # get_scale() synchronizes
        return scale


@dataclass(eq=False)
class StepRequests:
    """What monitors ask of a step during OPTIMIZER_STEP_STARTED, and then whether it is made."""

    flags: list[bool | Tensor] = field(default_factory=list)
    factors: dict[GradientTracker, Tensor] = field(default_factory=dict)
    made: bool | Tensor = True


class OptimizerStep(NamedTuple):
    """The step of an optimizer that holds parameters of a monitored model.

    During OPTIMIZER_STEP_STARTED monitors may call :meth:`skip` and :meth:`scale`. When all of them have been called,
    the event source does once what they asked: any skip, and of every gradient the smallest factor.
    """

    tracker: GradientTracker  # of the model of the monitor that is called
    optimizer: Optimizer
    parameters: list[nn.Parameter]  # of the model, that the optimizer holds
    requests: StepRequests

    def skip(self, flag: bool | Tensor) -> None:
        """Skip the step if a flag is True: a bool, or a 0-dim bool tensor."""
        self.requests.flags.append(flag)

    def scale(self, factor: Tensor) -> None:
        """Multiply the gradients of the model that the optimizer uses by a 0-dim tensor, from 0 to 1."""
        other = self.requests.factors.get(self.tracker)
        self.requests.factors[self.tracker] = factor if other is None else torch.minimum(factor, other)

    @property
    def made(self) -> bool | Tensor:
        """Whether the step is made, once it is decided; a 0-dim bool tensor if only the device may know."""
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


class AccumulationProbe(ExitStack):
    """Detect whether the next backward in a context accumulates into gradients, or finds all of them None or zero.

    Gradient hooks see ``parameter.grad`` before accumulation. They run in ``autograd.grad`` too: only a backward that
    reaches one of the parameters counts. The gradients are those that ``optimizer`` uses; None for all of the model's.
    """

    def __init__(self, tracker: GradientTracker, optimizer: Optimizer | None) -> None:
        super().__init__()
        self.norm: Tensor | None = None  # maximum norm of this rank's gradients before the backward, 0-dim
        self.accumulates: Tensor | None = None  # whether it was not zero, 0-dim; None before a backward
        self._tracker, self._parameters = tracker, list(tracker.parameters_of(optimizer))
        self._measured: dict[int, Tensor] = {}  # by number of the backward, in order

    def __enter__(self) -> AccumulationProbe:
        leaves = [item for item in self._parameters if item.requires_grad and not item.is_inference()]
        if leaves:
            self.enter_context(register_multi_grad_hook(leaves, weak_method(self._measure), mode="any"))
        if any_dtensor(leaves):  # FSDP2 accumulates into other tensors; gradients of the outputs come first
            self.callback(self._tracker.model.register_forward_hook(weak_method(self._hook_outputs)).remove)
        self._tracker.observers.append(self)
        self.callback(self._tracker.observers.remove, self)
        self.callback(self._parameters.clear)
        self.callback(self._measured.clear)
        return self

    def backward_ended(self, numbers: Set[int], reached: Set[int]) -> None:
        """Take the first measurement of this backward, or of one inside of it, if it reached the parameters."""
        if self.accumulates is None and not reached.isdisjoint(map(id, self._parameters)):
            inside = [number for number in self._measured if number in numbers]
            if inside:
                self.norm = self._measured[inside[0]]
                self.accumulates = self.norm != 0
                self.close()

    def _measure(self, _: Tensor) -> None:
        number = backward_number()
        if number not in self._measured:
            gradients = [parameter.grad.detach() for parameter in self._parameters if parameter.grad is not None]
            zero = torch.zeros((), device=self._parameters[0].device)
            self._measured[number] = total_norm(gradients, math.inf) if gradients else zero

    def _hook_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        for _, tensor in floating_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(weak_method(self._measure))


class GradientTracker:
    """The parameters of a model, and the backward passes that reach them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.hook = GradientHook()
        finalize(self, self.hook.remove).atexit = False
        self.parameters: list[nn.Parameter] = []  # when the train step started
        self.statistics = RunningStatistics()
        self.accumulates = False  # whether a backward has reached the model since the last step
        self.reduced = True  # whether the last backward of this iteration has left its gradients reduced
        self.observers: list[Any] = []  # their ``backward_ended`` is called after each backward that reached the model
        self._is_deferred = self._has_warned = False  # deferred: the train step finalizes the reduction
        self._registries: list[dict[str, Any]] = []
        self._members: list[Any] = []
        self._replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._sharded = [module for module in model.modules() if hasattr(module, "unshard")]  # by fully_shard
        self._held: WeakKeyDictionary[Optimizer, tuple[list[int], list[nn.Parameter]]] = WeakKeyDictionary()

    def refresh(self) -> bool:
        """Update the parameters; whether modules or parameters have been added, removed or replaced."""
        members = _values(self._registries)
        if 0 < len(members) == len(self._members) and all(map(is_, members, self._members)):
            return False
        self._registries = registries(self.model.modules())
        self._members = _values(self._registries)
        self.parameters = list(self.model.parameters())
        self._held.clear()
        self.statistics.watch(self.model)
        return True

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

    def iteration_started(self) -> None:
        """Forget the backward passes of the previous iteration."""
        self.reduced, self._is_deferred = True, False

    def backward_ended(self, numbers: Set[int], reached: Set[int]) -> Set[int]:
        """Record a backward, with those inside of it, that has reached parameters of the model.

        Returns:
            The ids of the parameters whose gradients may have changed; empty while they are not reduced, under
            ``no_sync()`` and where the train step calls ``finalize_backward()`` (torch 2.15).
        """
        self.accumulates = True
        self.reduced = all(map(attrgetter("require_backward_grad_sync"), self._replicas))
        if self.reduced and any(map(finalizes_manually, (*self._replicas, *self._sharded))):
            self.defer()
        # DistributedDataParallel gives a rank gradients of parameters that only other ranks have reached.
        changed = set(map(id, self.parameters)) if self._replicas else reached
        for observer in list(self.observers):
            observer.backward_ended(numbers, changed)
        return changed if self.reduced else set()

    def defer(self) -> None:
        """Take gradients as not reduced before the next step, with one warning."""
        self.reduced, self._is_deferred = False, True
        if not self._has_warned:
            self._has_warned = True
            _logger.warning(
                "Gradients of %s are not reduced before finalize_backward(): they are measured, and spikes detected, "
                "when the optimizer's step starts. To skip steps use GradMonitor(on_spike='skip').",
                type(self.model).__name__,
            )

    def step_started(self) -> None:
        """Take gradients as reduced that the train step finalizes before a step outside of backward."""
        if self._is_deferred and not in_backward():
            self.reduced, self._is_deferred = True, False


def _values(dictionaries: list[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dictionaries)))
