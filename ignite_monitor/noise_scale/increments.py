"""Norms of what every backward pass adds to the gradients of an optimizer step."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ignite_monitor.events.gradient_tracker import GradientTracker
from ignite_monitor.model._torch import backward_number, foreach_norm
from ignite_monitor.model.devices import upload, wide_dtype
from ignite_monitor.model.eager import out_of_compiler
from ignite_monitor.model.modes import aside
from ignite_monitor.model.norms import summed_values


class Increment:
    """Contribution of one backward pass to the gradients.

    Attributes:
        square: its squared norm.
        before: squared norm of the gradients before it; None if there were none.
        after: squared norm of the gradients after it.
        is_reduced: the gradients are reduced over ranks.
        items: number of items it is the gradient of; None until known, NaN if it can't be known.
    """

    def __init__(self, square: Tensor, before: Tensor | None, after: Tensor) -> None:
        self.square = square
        self.before = before
        self.after = after
        self.is_reduced = False
        self.items: float | None = None


def sums_of(increments: list[Increment]) -> Tensor:
    """Return what :func:`noise_and_signal` needs, the total last: NaN if gradients were changed in between."""
    squares = torch.stack([increment.square for increment in increments])
    counts = torch.tensor([increment.items for increment in increments], dtype=squares.dtype, device="cpu")
    items = upload(counts, squares.device)
    zero = squares.new_zeros(())
    before = torch.stack([zero if increment.before is None else increment.before for increment in increments])
    after = torch.stack([zero, *(increment.after for increment in increments)])
    adds_up = torch.isclose(before, after[:-1], atol=0.0).all()
    total = torch.where(adds_up, after[-1], math.nan)
    return torch.stack([squares.sum(), (items * squares).sum(), items.sum(), torch.ones_like(squares).sum(), total])


@contextmanager
def observed_increments(
    tracker: GradientTracker, parameters: list[nn.Parameter], add: weakref.WeakMethod[Callable[[Increment], None]]
) -> Iterator[None]:
    """Call ``add`` with the increment of every backward pass that reaches the parameters.

    Hooks on the gradients see them before ranks reduce them.
    """
    observer = _Observer(add, parameters)
    hook = functools.partial(out_of_compiler(_Observer.before_adding), observer)
    handles = [parameter.register_hook(hook) for parameter in parameters]
    tracker.observers.append(observer)
    try:
        yield
    finally:
        tracker.observers.remove(observer)
        for handle in handles:
            handle.remove()


class _Observer:
    """Observer of a tracker; gradients of ``autograd.grad``, which reach no parameter, are dropped."""

    def __init__(self, add: weakref.WeakMethod[Callable[[Increment], None]], parameters: list[nn.Parameter]) -> None:
        self._add = add
        self._parameters = parameters
        self._before: dict[int, Tensor | None] = {}  # by number of the backward pass
        self._norms: dict[int, list[Tensor]] = {}

    def before_adding(self, gradient: Tensor) -> None:
        task = backward_number()
        with aside():
            if task not in self._norms:
                self._before[task] = self._square()
                self._norms[task] = []
            self._norms[task] += _norms([gradient.detach()])

    def backward_ended(self, task: int, reached: Set[int], running: Set[int]) -> None:
        """Report the increment of a backward pass that reached parameters of the model."""
        norms, add = self._norms.pop(task, None), self._add()
        with aside():
            after = self._square()
            if norms and after is not None and add is not None:
                add(Increment(torch.stack(norms).square().sum(), self._before[task], after))
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
