"""Norms of what every backward pass adds to the gradients of an optimizer step."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.events.gradient_tracker import GradientTracker
from ignite_monitor.model._torch import backward_number, foreach_norm
from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.model.modes import hidden_from_user_modes
from ignite_monitor.model.norms import summed_values


@dataclass
class Increment:
    """Contribution of one backward pass to the gradients."""

    square: Tensor  # its squared norm
    before: Tensor | None  # squared norm of the gradients before it; None if there were none
    after: Tensor  # squared norm of the gradients after it
    is_reduced: bool = False  # the gradients are reduced over ranks
    scale: Tensor | None = None  # of a GradScaler; None for 1
    items: float | None = None  # number of items it is the gradient of; None until known, NaN if it can't be known


def sums_of(increments: Sequence[Increment]) -> Tensor:
    """Return what :func:`noise_and_signal` needs, the total last: NaN if gradients were changed in between."""
    squares = torch.stack([increment.square for increment in increments])
    counts = torch.tensor([increment.items for increment in increments], dtype=squares.dtype, device="cpu")
    items = move(counts, squares.device)
    zero = squares.new_zeros(())
    before = torch.stack([zero if increment.before is None else increment.before for increment in increments])
    after = torch.stack([zero, *(increment.after for increment in increments)])
    adds_up = torch.isclose(before, after[:-1], atol=0.0).all()
    total = torch.where(adds_up, after[-1], math.nan)
    return torch.stack([squares.sum(), (items * squares).sum(), items.sum(), torch.ones_like(squares).sum(), total])


class IncrementObserver:
    """Context in which every backward pass that reaches the parameters appends its increment to a list.

    Hooks on the gradients see them before ranks reduce them. A backward pass that finds no gradients clears the list.
    """

    def __init__(
        self, tracker: GradientTracker, parameters: Sequence[nn.Parameter], increments: list[Increment]
    ) -> None:
        self._tracker, self._parameters, self._increments = tracker, parameters, increments
        self._before: dict[int, Tensor | None] = {}  # by number of the backward pass, in order
        self._norms: dict[int, dict[int, Tensor]] = {}  # by index of the parameter
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        hook = torch.compiler.disable(IncrementObserver.before_adding)
        self._handles = [
            parameter.register_hook(functools.partial(hook, self, index))
            for index, parameter in enumerate(self._parameters)
        ]
        self._tracker.observers.append(self)

    def __exit__(self, *exception: object) -> None:
        self._tracker.observers.remove(self)
        for handle in self._handles:
            handle.remove()

    def before_adding(self, index: int, gradient: Tensor) -> None:
        """Add the norm of a gradient to those of its backward pass."""
        task = backward_number()
        with hidden_from_user_modes():
            if task not in self._norms:
                self._before[task] = self._square()
                self._norms[task] = {}
            (self._norms[task][index],) = _norms([gradient.detach()])

    def backward_ended(self, numbers: Set[int], reached: Set[int]) -> None:
        """Append the increment of a backward pass and those inside of it; ``autograd.grad`` makes none."""
        tasks = [task for task in self._norms if task in numbers]
        parts = [norms for task in tasks for norms in self._norms[task].items()]
        with hidden_from_user_modes():
            after = self._square()
            if parts and after is not None:
                before = self._before[tasks[0]]
                if before is None:
                    self._increments.clear()
                square = torch.stack([norm for _, norm in parts]).square().sum()
                if len(dict(parts)) < len(parts):  # two of its gradients of one parameter add up
                    square = square * math.nan
                self._increments.append(Increment(square, before, after))
        self._norms.clear()
        self._before.clear()

    def _square(self) -> Tensor | None:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return torch.stack(_norms(gradients)).square().sum() if gradients else None


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norms in the widest dtype, since differences of their squares are used."""
    plain = [summed_values(tensor) if tensor.is_sparse else tensor for tensor in tensors]
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in plain]
    return foreach_norm(real, 2.0, dtype=wide_dtype(tensors[0].device))
