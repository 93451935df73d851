"""Evidence of faults, from the first iterations of a training run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.dtensor import any_dtensor, local
from ignite_monitor.model.names import held_by, learning_rates, named_parameters
from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.sampling import is_measurable
from ignite_monitor.setup_check.batches import is_same, leaves_of

COMPARED = 3  # batches


class Numbers(NamedTuple):
    """Numbers that stay on the device until the check ends; all but the last are 1 or 0."""

    rate_is_zero: float  # all learning rates, in all steps
    keeps_gradients: float  # the first backward after each step finds its gradients, and no other one finds zeros
    held_change: float  # the norm of the optimizer's parameters has changed
    others_change: float  # that of the others
    discarded: float  # backward passes that find zeros, before the first step and without the first backward


class Step(NamedTuple):
    """A step of the optimizer."""

    iteration: int  # of the check
    is_torch: bool  # the optimizer is one of torch
    is_rate_zero: list[Any]  # by group
    norm: Any  # maximum norm of its gradients
    initial_norms: list[Tensor]  # of the gradients before each backward after it


@dataclass(eq=False)
class Evidence:
    """Evidence since a check began."""

    model: nn.Module
    optimizer: Optimizer
    numbers: Numbers = field(init=False)
    iterations: int = 0
    seen: set[int] = field(default_factory=set)  # ids of the parameters that had a gradient
    steps: list[Step] = field(default_factory=list)
    calls: list[bool] = field(default_factory=list)  # True for one of DistributedDataParallel, False for its module
    initial_norms: list[Tensor] = field(default_factory=list)  # as those of a step, before the first one
    batch: list[Any] = field(default_factory=list)  # what is compared of the last one
    repeats: int = 0  # number of batches that equal the one before

    def __post_init__(self) -> None:
        ids = held_by(self.optimizer)
        self.names = {id(parameter): name for name, parameter, _ in named_parameters(self.model)}
        self.parameters: list[Any] = [parameter for _, parameter, _ in named_parameters(self.model)]
        self.held = [item for item in self.parameters if id(item) in ids]
        rest = [item for item in self.parameters if id(item) not in ids and item.requires_grad and is_measurable(item)]
        self.others = [item for item in rest if local(item).numel()]
        self._norms = total_norm(self.held), total_norm(self.others)

    @property
    def stepped(self) -> int:
        """Number of iterations with a step of the optimizer."""
        return len({step.iteration for step in self.steps})

    def note_batch(self, batch: Any) -> None:
        """Compare each of the first batches with the one before."""
        with contextlib.suppress(Exception):  # a batch may hold objects of any kind, and training continues
            before, self.batch = self.batch, leaves_of(batch) if self.iterations <= COMPARED else []
            self.repeats += is_same(before, self.batch)

    def note_gradients(self) -> None:
        """Note the parameters that have a gradient."""
        self.seen.update(id(item) for item in (*self.held, *self.others) if item.grad is not None)

    def note_backward(self, initial_norm: Tensor) -> None:
        """Note the norm of the gradients before a backward."""
        (self.steps[-1] if self.steps else self).initial_norms.append(initial_norm)

    def note_step(self, is_torch: bool) -> None:
        """Note a step, after which gradients are as it leaves them: a fused optimizer has unscaled them."""
        gradients = [item.grad for item in self.held if item.grad is not None]
        is_known = gradients and not any_dtensor(gradients)
        norm: Any = total_norm(gradients, math.inf) if is_known else math.nan
        rates = [rate == 0 for rate in learning_rates(self.optimizer)]
        self.steps.append(Step(self.iterations, is_torch, rates, norm, []))

    def end(self) -> Tensor:
        """Return the :class:`Numbers` as a tensor."""
        device = device_of(self.model)

        def all_of(flags: Iterable[Any]) -> Tensor:
            return torch.stack([move(torch.as_tensor(flag), device).bool() for flag in (True, *flags)]).all()

        followed = [step for step in self.steps if step.initial_norms]
        kept = (all_of([step.initial_norms[0] == step.norm, *step.initial_norms]) for step in followed)
        norms = zip((total_norm(self.held), total_norm(self.others)), self._norms, strict=True)
        numbers = [all_of(flag for step in self.steps for flag in step.is_rate_zero), all_of(kept)]
        numbers += [now != before for now, before in norms]
        numbers += [sum((norm == 0 for norm in self.initial_norms[1:]), torch.zeros((), device=device))]
        return torch.stack([move(number, device).float() for number in numbers])
