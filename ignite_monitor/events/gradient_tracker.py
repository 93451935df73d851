"""One model's gradients on one engine: what happens to them is found out once per event, and handed to the monitors."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence, Set
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
from ignite_monitor.model._torch import registries


class GradientsReady(NamedTuple):
    """A backward that reached a model has ended, and its gradients are reduced.

    Attributes:
        tracker: of the model.
        reached: ids of the parameters whose gradients it may have changed.
        shared: whether it reached other monitored models too.
        optimizer: the optimizer in whose step it was run; None for in none.
    """

    tracker: GradientTracker
    reached: Set[int]
    shared: bool
    optimizer: Optimizer | None

    def reaches(self, optimizer: Optimizer | None) -> bool:
        """Whether it may have changed gradients of the model that an optimizer uses; None for any."""
        own = self.tracker.parameters_of(optimizer)
        return own is self.tracker.parameters or any(id(parameter) in self.reached for parameter in own)

    def scale(self, scaler: GradScaler | None) -> Tensor | None:
        """What the gradients are scaled by, 0-dim; None for 1."""
        if scaler is None:
            return None
        device = next(each.device for each in self.tracker.parameters if each.grad is not None)
        scale: Tensor = scaler.scale(torch.ones((), device=device))  # get_scale() would wait for the device
        return scale


class OptimizerStep(NamedTuple):
    """An optimizer that holds parameters of a monitored model makes its step.

    Attributes:
        tracker: of the model that is asked about, which need not be the one whose parameters it holds.
        optimizer: the optimizer.
    """

    tracker: GradientTracker
    optimizer: Optimizer

    @property
    def scale(self) -> Tensor | None:
        """What gradients are scaled by that no backward has made; None for 1."""
        # Others get them unscaled; fused optimizers are given what to unscale them by.
        scale: Tensor | None = getattr(self.optimizer, "grad_scale", None)
        return scale

    def is_of(self, optimizer: Optimizer | None) -> bool:
        """Whether it is the step of an optimizer, or of one around it; of None it is if it uses the model's gradients.

        An optimizer that wraps another one has its param_groups.
        """
        if optimizer is None:
            return self.tracker.shares(self.optimizer)
        return self.optimizer.param_groups is optimizer.param_groups


class GradientTracker:
    """A model that monitors of an engine look at, and what is known of its gradients.

    Attributes:
        monitors: how many monitors look at it.
        hook: the hook that is on its parameters in monitored iterations.
        parameters: those that it had when the train step started.
        reduced: whether this iteration's last backward that reached it has left its gradients reduced.
        observers: objects whose ``backward_ended`` is called after each backward that has reached the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.monitors = 0
        self.hook = GradientHook()
        self.parameters: list[nn.Parameter] = []
        self.reduced = True
        self.observers: list[Any] = []
        # The dictionaries that its modules keep parameters and submodules in, what was in them at the last look, and
        # those that were empty.
        self._registries: list[dict[str, Any]] = []
        self._members: list[Any] = []
        self._empty: list[dict[str, Any]] = []
        self._replicas = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self._train_steps = 0
        # Optimizer -> in which train step it was looked at, the lists that it held, what is in them, and what of that
        # is the model's.
        self._own: weakref.WeakKeyDictionary[Optimizer, _Holding] = weakref.WeakKeyDictionary()

    def refresh(self) -> bool:
        """Look at the model's parameters anew: whether there are others than at the last time."""
        self._train_steps += 1
        if self._members and not any(self._empty) and _are_same(_values(self._registries), self._members):
            return False
        # What scripted modules consist of is fixed, and kept in no dictionaries.
        plain = [each for each in self.model.modules() if not isinstance(each, torch.jit.ScriptModule)]
        found = [registry for each in plain for registry in registries(each)]
        self._registries, self._empty = [each for each in found if each], [each for each in found if not each]
        self._members = _values(self._registries)
        self.parameters = list(self.model.parameters())
        self._own.clear()
        return True

    def run_ended(self) -> None:
        """Forget what optimizers hold."""
        self._own.clear()

    def parameters_of(self, optimizer: Optimizer | None) -> list[nn.Parameter]:
        """The model's parameters that an optimizer holds; for None all of them."""
        if optimizer is None:
            return self.parameters
        known = self._own.get(optimizer)
        # Looked at one by one once per train step, which takes a while for many.
        lists = [(id(group["params"]), len(group["params"])) for group in optimizer.param_groups]
        if known is None or known.train_step != self._train_steps or known.lists != lists:
            held = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
            if known is None or not _are_same(known.held, held):
                ids = set(map(id, held))
                own = [each for each in self.parameters if id(each) in ids]
                own = self.parameters if len(own) == len(self.parameters) else own
            else:
                own = known.own
            known = self._own[optimizer] = _Holding(self._train_steps, lists, held, own)
        return known.own

    def shares(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer holds parameters of the model."""
        return bool(self.parameters_of(optimizer))

    def backward_ended(self, task: int, reached: Set[int], running: Set[int]) -> Set[int] | None:
        """A backward has reached parameters of the model.

        Args:
            task: number of the backward.
            reached: ids of the parameters.
            running: numbers of those around it.

        Returns:
            The ids of the parameters whose gradients it may have changed; None if they have not been reduced, under
            ``no_sync()``.
        """
        self.reduced = all(replica.require_backward_grad_sync for replica in self._replicas)
        # DistributedDataParallel gives a rank gradients of what only others have reached.
        changed = {id(parameter) for parameter in self.parameters} if self._replicas else reached
        for observer in self.observers:
            observer.backward_ended(task, changed, running)
        return changed if self.reduced else None

    def lacks_any(self, reached: Iterable[Set[int]]) -> bool:
        """Whether any parameters, of which the ids are given, are not the model's, which others may be wrapped in."""
        own = {id(parameter) for parameter in self.parameters}
        return not all(each <= own for each in reached)

    def accumulation_probe(self, optimizer: Optimizer | None) -> AccumulationProbe:
        """A probe of the gradients that an optimizer uses; None for all of the model's."""
        return AccumulationProbe(self.model, self.parameters_of(optimizer), self.observers)


class _Holding(NamedTuple):
    train_step: int
    lists: list[tuple[int, int]]
    held: list[nn.Parameter]
    own: list[nn.Parameter]


def _values(registries: Iterable[dict[str, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, registries)))


def _are_same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
