"""Evidence of faults, from the first iterations of a training run."""

from __future__ import annotations

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


class Numbers(NamedTuple):
    """Numbers that stay on the device until the check ends; the first three are 1 or 0."""

    batch_repeats: float  # all batches are bitwise those of the first iteration
    rate_is_zero: float  # all learning rates, in all steps
    keeps_gradients: float  # the first backward after each step finds its gradients, and no other one finds zeros
    discarded: float  # backward passes after the first one that find zeros
    held_change: float  # 1 if the norm of the optimizer's parameters has changed
    others_change: float  # of the others


@dataclass
class Step:
    """A step of the optimizer."""

    norm: Any  # maximum norm of its gradients
    is_rate_zero: list[Any]  # by group
    initial_norms: list[Tensor] = field(default_factory=list)  # of the gradients before each backward pass after it


@dataclass(eq=False)
class Evidence:
    """Evidence since a check began."""

    model: nn.Module
    optimizer: Optimizer
    numbers: Numbers = field(init=False)  # when the check ends
    epoch_length: int | None = None
    iterations: int = 0
    stepped: int = 0  # iterations with a step of the optimizer
    seen: set[int] = field(default_factory=set)  # ids of the parameters that had a gradient
    steps: list[Step] = field(default_factory=list)
    is_torch: bool = True  # whether all steps were made by a class of torch
    calls: list[bool] = field(default_factory=list)  # True for one of DistributedDataParallel, False for its module
    initial_norms: list[Tensor] = field(default_factory=list)  # as those of a step, before the first one
    first_batch: list[Any] = field(default_factory=list)  # what is compared of it
    same: list[Any] = field(default_factory=list)  # of each batch after the first, whether it is bitwise equal to it

    def __post_init__(self) -> None:
        ids = held_by(self.optimizer)
        self.names = {id(parameter): name for name, parameter, _ in named_parameters(self.model)}
        self.parameters: list[Any] = [parameter for _, parameter, _ in named_parameters(self.model)]
        self.held = [item for item in self.parameters if id(item) in ids]
        rest = [item for item in self.parameters if id(item) not in ids and item.requires_grad and is_measurable(item)]
        self.others = [item for item in rest if local(item).numel()]
        self._norms = total_norm(self.held), total_norm(self.others)

    def start(self, batch: Any, most: int, epoch_length: int | None) -> None:
        """Note the start of an iteration, and compare batches up to a number of iterations."""
        try:
            if self.iterations >= most:
                self.first_batch = []
            elif self.iterations:
                self.same.append(is_same(self.first_batch, leaves_of(batch)))
            else:
                self.first_batch = leaves_of(batch)
        except Exception:  # noqa: BLE001 - a batch may hold objects of any kind, and training continues
            self.same.append(False)
        self.iterations += 1
        self.epoch_length = epoch_length

    def note_gradients(self) -> None:
        """Note the parameters that have a gradient."""
        self.seen.update(id(item) for item in (*self.held, *self.others) if item.grad is not None)

    def note_backward(self, initial_norm: Tensor) -> None:
        """Note the norm of the gradients before a backward."""
        (self.steps[-1] if self.steps else self).initial_norms.append(initial_norm)

    @torch.no_grad()
    def note_step(self, loss_scale: Tensor | None) -> None:
        """Note the gradients and learning rates that a step is about to use."""
        gradients = [item.grad for item in self.held if item.grad is not None]
        norm: Any = math.nan
        if gradients and not any_dtensor(gradients):
            norm = total_norm(gradients, math.inf)
            norm = norm if loss_scale is None else norm / loss_scale.to(norm)  # a fused step unscales in place
        self.steps.append(Step(norm, [rate == 0 for rate in learning_rates(self.optimizer)]))

    def end(self) -> Tensor:
        """Return the :class:`Numbers` as a tensor."""
        device = device_of(self.model)

        def all_of(flags: Iterable[Any]) -> Tensor:
            return torch.stack([move(torch.as_tensor(flag), device).bool() for flag in (True, *flags)]).all()

        followed = [step for step in self.steps if step.initial_norms]
        kept = (all_of([step.initial_norms[0] == step.norm, *step.initial_norms]) for step in followed)
        discarded = sum((norm == 0 for norm in self.initial_norms[1:]), torch.zeros((), device=device))
        norms = zip((total_norm(self.held), total_norm(self.others)), self._norms, strict=True)
        numbers = [all_of(self.same), all_of(flag for step in self.steps for flag in step.is_rate_zero), all_of(kept)]
        numbers += [discarded, *(now != before for now, before in norms)]
        return torch.stack([move(number, device).float() for number in numbers])
