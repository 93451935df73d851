"""What was seen in the first iterations of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.dtensor import any_dtensor, local
from ignite_monitor.model.names import held_by, learning_rates, named_parameters, unwrapped
from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.sampling import is_measurable
from ignite_monitor.model.tensors import is_same, leaves_of


@dataclass
class Iteration:
    """What was seen in one iteration.

    Attributes:
        is_training: True if a module was in training mode at any event.
        has_step: True if the optimizer made a step.
        calls: for each forward pass of DistributedDataParallel or its module, True if of the former.
        numbers: numbers by name, 0-dim tensors until the check ends. ``same``: the batch is bitwise equal to the first
            one. Of the last step: ``norm_at_step``, the maximum norm of its gradients; ``rate``, the largest learning
            rate; ``lost``, the fraction of the updates of low-precision weights that rounding has lost.
        norms_before: of each backward that reached the optimizer's parameters, the maximum norm of the gradients that
            it found; as ``numbers``.
    """

    is_training: bool = False
    has_step: bool = False
    calls: list[bool] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    norms_before: list[Any] = field(default_factory=list)


class Evidence:
    """What was seen since a check began.

    Attributes:
        first: the number of the first iteration.
        iterations: the checked iterations.
        names: names of the model's parameters, by id.
        held: the model's parameters that the optimizer holds.
        others: other parameters with ``requires_grad``, and with data on this rank.
        seen: ids of the parameters that had a gradient.
        kinds: classes of the optimizers that made a step.
        moved: whether ``held`` and ``others`` have changed, when the check ends.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, parameters: Iterable[Any], state: Any) -> None:
        self.model, self.optimizer, ids = model, optimizer, held_by(optimizer)
        self.first, self._batch = state.iteration, leaves_of(state.batch)
        self.names = {id(parameter): name for name, parameter, _ in named_parameters(model)}
        self.parameters = list(parameters)
        self.held = [item for item in self.parameters if id(item) in ids]
        others = [
            item for item in self.parameters if id(item) not in ids and item.requires_grad and is_measurable(item)
        ]
        self.others = [item for item in others if local(item).numel()]
        self.iterations: list[Iteration] = []
        self.seen: set[int] = set()
        self.kinds: set[type[Optimizer]] = set()
        self._norms = [total_norm(self.held), total_norm(self.others)]
        self.moved: list[Any] = []

    @property
    def steps(self) -> list[Iteration]:
        """The iterations in which the optimizer made a step."""
        return [iteration for iteration in self.iterations if iteration.has_step]

    @property
    def trained(self) -> list[Any]:
        """The optimizer's parameters that require gradients."""
        return [item for item in self.held if item.requires_grad]

    def start(self, batch: Any, is_compared: bool) -> Iteration:
        """Note the start of an iteration."""
        self.iterations.append(Iteration())
        if is_compared:
            self.iterations[-1].numbers["same"] = is_same(self._batch, leaves_of(batch))
        else:
            self._batch = []
        self.note()
        return self.iterations[-1]

    def note(self) -> None:
        """Note the mode, and the parameters that have a gradient."""
        self.iterations[-1].is_training |= any(module.training for module in unwrapped(self.model).modules())
        self.seen.update(id(item) for item in (*self.held, *self.others) if item.grad is not None)

    @torch.no_grad()
    def note_step(self, loss_scale: Tensor | None) -> None:
        """Note the gradients and learning rates that a step is about to use."""
        gradients = [item.grad for item in self.held if item.grad is not None]
        if gradients and not any_dtensor(gradients):
            norm = total_norm(gradients, math.inf)  # a fused step unscales gradients in place
            self.iterations[-1].numbers["norm_at_step"] = norm if loss_scale is None else norm / loss_scale.to(norm)
        rates: list[Any] = learning_rates(self.optimizer)
        if all(rate is not None for rate in rates):
            device = next((rate.device for rate in rates if isinstance(rate, Tensor)), "cpu")
            every = [rate if isinstance(rate, Tensor) else torch.full((), rate, device=device) for rate in rates]
            self.iterations[-1].numbers["rate"] = torch.stack(every).max()

    def end(self) -> None:
        """Note what has changed."""
        self.moved = [total_norm(self.held) != self._norms[0], total_norm(self.others) != self._norms[1]]

    def tensors(self) -> list[tuple[Any, Any, Tensor]]:
        """Return the tensors that the host has to know, each after its container and its place there."""
        owners: list[Any] = [
            self.moved,
            *(owner for item in self.iterations for owner in (item.numbers, item.norms_before)),
        ]
        places = [(owner, key) for owner in owners for key in (owner if isinstance(owner, dict) else range(len(owner)))]
        return [(owner, key, owner[key]) for owner, key in places if isinstance(owner[key], Tensor)]
