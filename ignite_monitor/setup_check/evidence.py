"""What was seen in the first iterations of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.dtensor import any_dtensor, local
from ignite_monitor.model.names import held_by, learning_rates, named_parameters, unwrapped
from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.sampling import is_measurable
from ignite_monitor.model.tensors import is_same, leaves_of


class Evidence:
    """What was seen since a check began.

    Attributes:
        iterations: the number of checked iterations; ``steps`` of those with a step of the optimizer.
        is_training: True if a module was in training mode at any event.
        parameters: the model's; ``held`` those that the optimizer holds, ``others`` of the rest those with
            ``requires_grad`` and data on this rank.
        names: names of the parameters, by id.
        seen: ids of the parameters that had a gradient.
        events: kinds and numbers in order, tensors until :meth:`resolve`. ``"same"``: whether a batch is bitwise equal
            to the first one. ``"call"``: True for DistributedDataParallel, False for the module in it. ``"backward"``
            that reached ``held``: the maximum norm of the gradients that it found. ``"step"``: that of the gradients it
            is about to use. ``"rate"``: the learning rate of a group in it. ``"made"``: whether the class that made the
            step is torch's. ``"held"``, ``"others"``: whether they have changed, when the check ends.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
        self.model, self.optimizer, ids = model, optimizer, held_by(optimizer)
        self.iterations = self.steps = 0
        self.is_training = self.has_stepped = False
        self.parameters: list[Any] = [parameter for _, parameter, _ in named_parameters(model)]
        self.names = {id(parameter): name for name, parameter, _ in named_parameters(model)}
        self.held = [item for item in self.parameters if id(item) in ids]
        rest = [item for item in self.parameters if id(item) not in ids and item.requires_grad and is_measurable(item)]
        self.others = [item for item in rest if local(item).numel()]
        self.seen: set[int] = set()
        self.events: list[tuple[str, Any]] = []
        self._batch = leaves_of(batch)
        self._norms = {"held": total_norm(self.held), "others": total_norm(self.others)}

    def values(self, kind: str) -> list[Any]:
        """The numbers of a kind of event."""
        return [value for other, value in self.events if other == kind]

    def start(self, batch: Any, most: int) -> None:
        """Note the start of an iteration, and compare batches up to a number of iterations."""
        if 0 < self.iterations < most:
            self.events.append(("same", is_same(self._batch, leaves_of(batch))))
        elif self.iterations:
            self._batch = []
        self.iterations += 1
        self.has_stepped = False
        self.note()

    def note(self) -> None:
        """Note the mode, and the parameters that have a gradient."""
        self.is_training |= any(module.training for module in unwrapped(self.model).modules())
        self.seen.update(id(item) for item in (*self.held, *self.others) if item.grad is not None)

    @torch.no_grad()
    def note_step(self, loss_scale: Tensor | None) -> None:
        """Note the gradients and learning rates that a step is about to use."""
        gradients = [item.grad for item in self.held if item.grad is not None]
        norm: Any = math.nan
        if gradients and not any_dtensor(gradients):
            norm = total_norm(gradients, math.inf)
            norm = norm if loss_scale is None else norm / loss_scale.to(norm)  # a fused step unscales in place
        self.events.append(("step", norm))
        for rate in learning_rates(self.optimizer):
            self.events.append(("rate", rate.clone() if isinstance(rate, Tensor) else rate))

    def end(self) -> list[Tensor]:
        """Note what has changed; return the numbers that the host has to know."""
        self.events += [(kind, total_norm(getattr(self, kind)) != norm) for kind, norm in self._norms.items()]
        return [value for _, value in self.events if isinstance(value, Tensor)]

    def resolve(self, numbers: Iterable[float]) -> None:
        """Replace these numbers by those on the host."""
        known = iter(numbers)
        self.events = [(kind, next(known) if isinstance(value, Tensor) else value) for kind, value in self.events]
