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

    square: Tensor  # its squared norm; NaN if it is not known
    before: Tensor  # squared norm of the gradients before it
    after: Tensor  # squared norm of the gradients after it
    is_reduced: bool = False  # the gradients are reduced over ranks
    scale: Tensor | None = None  # of a GradScaler; None for 1
    items: float | None = None  # number of items it is the gradient of; None until known, NaN if it can't be known


def sums_of(increments: Sequence[Increment]) -> Tensor:
    """Return what :func:`noise_and_signal` needs, and 1 if gradients were changed in between, and the total is NaN."""
    squares = torch.stack([increment.square for increment in increments])
    counts = torch.tensor([increment.items for increment in increments], dtype=squares.dtype, device="cpu")
    items = move(counts, squares.device)
    before = torch.stack([increment.before for increment in increments])
    after = torch.stack([torch.zeros_like(before[0]), *(increment.after for increment in increments)])
    adds_up = torch.isclose(before, after[:-1], atol=0.0)
    changed = (~adds_up & (before - after[:-1]).isfinite()).any().to(squares.dtype)
    total = torch.where(adds_up.all(), after[-1], math.nan)
    count = torch.ones_like(squares).sum()
    return torch.stack([squares.sum(), (items * squares).sum(), items.sum(), count, total, changed])


class IncrementObserver:
    """Context in which every backward pass that reaches the parameters appends its increment to a list.

    Hooks on the gradients see them before ranks reduce them. A backward pass that finds no gradients clears the list.
    """

    def __init__(
        self, tracker: GradientTracker, parameters: Sequence[nn.Parameter], increments: list[Increment]
    ) -> None:
        self._tracker, self._parameters, self._increments = tracker, parameters, increments
        # By number of the backward pass: the squared norm before it, and norms of its gradients, in order.
        self._passes: dict[int, tuple[Tensor | None, list[tuple[int, Tensor]]]] = {}
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
        number = backward_number()
        with hidden_from_user_modes():
            if number not in self._passes:
                self._passes[number] = self._square(), []
            self._passes[number][1].append((index, _norms([gradient.detach()])[0]))

    def backward_ended(self, numbers: Set[int], reached: Set[int]) -> None:
        """Append the increment of a backward pass and those inside of it; ``autograd.grad`` makes none."""
        passes = [self._passes[number] for number in self._passes if number in numbers]
        self._passes.clear()
        with hidden_from_user_modes():
            after = self._square()
            if not passes or after is None:
                return
            before, norms = passes[0][0], [pair for _, pairs in passes for pair in pairs]
            if before is None:
                self._increments.clear()
                before = torch.zeros_like(after)
            square = torch.stack([norm for _, norm in norms]).square().sum()
            if len(dict(norms)) < len(norms):  # two of its gradients of one parameter add up
                square = square * math.nan
            self._increments.append(Increment(square, before, after))

    def _square(self) -> Tensor | None:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return torch.stack(_norms(gradients)).square().sum() if gradients else None


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Return the norms in the widest dtype, since differences of their squares are used."""
    plain = [summed_values(tensor) if tensor.is_sparse else tensor for tensor in tensors]
    real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in plain]
    return foreach_norm(real, 2.0, dtype=wide_dtype(tensors[0].device))
