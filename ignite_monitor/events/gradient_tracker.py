"""Tracks the gradients of a model that monitors of an engine share."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Set
from itertools import chain
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_monitor.events.accumulation_probe import AccumulationProbe
from ignite_monitor.events.hooks import GradientHook
from ignite_monitor.model._torch import finalizes_manually, in_backward, registries


class GradientsReady(NamedTuple):
    """A backward that reached a model has ended, and its gradients are reduced.

    Attributes:
        tracker: of the model.
        reached: ids of the parameters whose gradients may have changed.
        shared: whether the backward reached other monitored models too.
        optimizer: the optimizer in whose step the backward ran; None outside of steps.
    """

    tracker: GradientTracker
    reached: Set[int]
    shared: bool
    optimizer: Optimizer | None

    def reaches(self, optimizer: Optimizer | None) -> bool:
        """Whether gradients that an optimizer uses may have changed; None for all of the model's."""
        parameters = self.tracker.parameters_of(optimizer)
        return parameters is self.tracker.parameters or any(id(parameter) in self.reached for parameter in parameters)

    def scale(self, scaler: GradScaler | None) -> Tensor | None:
        """The scale of the gradients, 0-dim; None for 1."""
        if scaler is None:
            return None
        device = next(parameter.device for parameter in self.tracker.parameters if parameter.grad is not None)
        scale: Tensor = scaler.scale(torch.ones((), device=device))  # get_scale() synchronizes
        return scale


class OptimizerStep(NamedTuple):
    """The step of an optimizer that holds parameters of a monitored model.

    Attributes:
        tracker: of the model of the monitor that is called.
        optimizer: the optimizer.
    """

    tracker: GradientTracker
    optimizer: Optimizer

    @property
    def scale(self) -> Tensor | None:
        """The scale of the gradients during the step, which fused optimizers undo themselves; None for 1."""
        scale: Tensor | None = getattr(self.optimizer, "grad_scale", None)
        return scale

    def is_of(self, optimizer: Optimizer | None) -> bool:
        """Whether an optimizer, or one that wraps it, makes the step; None for any that shares parameters."""
        if optimizer is None:
            return self.tracker.shares(self.optimizer)
        return self.optimizer.param_groups is optimizer.param_groups


class GradientTracker:
    """The parameters of a model, and the backward passes that reach them.

    Attributes:
        monitors: number of monitors of the model.
        hook: the hook on its parameters.
        parameters: its parameters when the train step started.
        reduced: whether the last backward of this iteration has left its gradients reduced.
        observers: objects whose ``backward_ended`` is called after each backward that has reached the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.monitors = 0
        self.hook = GradientHook()
        self.parameters: list[nn.Parameter] = []
        self.reduced = True
        self.observers: list[Any] = []
        self._is_deferred = False  # the train step finalizes the reduction
        self._registries: list[dict[str, Any]] = []
        self._members: list[Any] = []
        self._replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._sharded = [module for module in model.modules() if hasattr(module, "unshard")]  # by fully_shard
        self._train_steps = 0
        self._held: weakref.WeakKeyDictionary[Optimizer, _Held] = weakref.WeakKeyDictionary()

    def refresh(self) -> bool:
        """Update the parameters; whether modules or parameters have been added, removed or replaced."""
        self._train_steps += 1
        if self._members and _are_same(_values(self._registries), self._members):
            return False
        self._registries = registries(self.model.modules())
        self._members = _values(self._registries)
        self.parameters = list(self.model.parameters())
        self._held.clear()
        return True

    def parameters_of(self, optimizer: Optimizer | None) -> list[nn.Parameter]:
        """The model's parameters that an optimizer holds; None for all. The same list while they are the same."""
        if optimizer is None:
            return self.parameters
        lists = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        key, known = (self._train_steps, lists), self._held.get(optimizer)
        if known is not None and known[0] == key:
            return known[1]
        ids = set(map(id, chain.from_iterable(group["params"] for group in optimizer.param_groups)))
        held = [parameter for parameter in self.parameters if id(parameter) in ids]
        for earlier in (self.parameters, *([] if known is None else [known[1]])):
            held = earlier if _are_same(held, earlier) else held
        self._held[optimizer] = key, held
        return held

    def shares(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds parameters of the model."""
        return bool(self.parameters_of(optimizer))

    def iteration_started(self) -> None:
        """Forget the backward passes of the previous iteration."""
        self.reduced, self._is_deferred = True, False

    def backward_ended(self, number: int, reached: Set[int], running: Set[int]) -> Set[int] | None:
        """Record a backward that has reached parameters of the model.

        Args:
            number: number of the backward.
            reached: ids of the parameters.
            running: numbers of the backward passes around it.

        Returns:
            The ids of the parameters whose gradients may have changed; None while they are not reduced, under
            ``no_sync()`` and where the train step calls ``finalize_backward()`` (torch 2.15).
        """
        self.reduced = all(replica.require_backward_grad_sync for replica in self._replicas)
        self._is_deferred = self.reduced and any(map(finalizes_manually, (*self._replicas, *self._sharded)))
        self.reduced &= not self._is_deferred
        # DistributedDataParallel gives a rank gradients of parameters that only other ranks have reached.
        changed = {id(parameter) for parameter in self.parameters} if self._replicas else reached
        for observer in self.observers:
            observer.backward_ended(number, changed, running)
        return changed if self.reduced else None

    def step_started(self, optimizer: Optimizer) -> None:
        """Take gradients as reduced that the train step finalizes before a step outside of backward."""
        if self._is_deferred and self.shares(optimizer) and not in_backward():
            self.reduced, self._is_deferred = True, False

    def lacks_any(self, reached: Iterable[Set[int]]) -> bool:
        """Whether any of the parameters, given by their ids, is not the model's."""
        own = {id(parameter) for parameter in self.parameters}
        return not all(parameters <= own for parameters in reached)

    def accumulation_probe(self, optimizer: Optimizer | None) -> AccumulationProbe:
        """A probe of the gradients that an optimizer uses; None for all of the model's."""
        return AccumulationProbe(self.model, self.parameters_of(optimizer), self.observers)


_Held = tuple[object, list[nn.Parameter]]  # in which train step from which lists; the model's among them


def _values(dictionaries: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dictionaries)))


def _are_same(some: list[Any], others: list[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
