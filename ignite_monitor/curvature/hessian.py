"""Products with the Hessian of a loss, and its largest eigenvalue by Lanczos' recurrence."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Hessian:
    """The Hessian of a loss at the weights that it was computed with, of which products are taken through its graph.

    Nothing is added to gradients, and the graph stays for a backward pass. After an error all numbers are NaN: ranks
    that wait for each other take the same products, whatever has happened on one of them.

    Args:
        loss: gives the loss, with one element, and its graph.
        parameters: what to differentiate by.
        factor: what the loss is multiplied by.
        over_ranks: gives the mean of a vector over ranks.

    Attributes:
        parameters: these.
        reached: whether the loss depends on any of them.
        error: the first, in a line; None as long as there was none.
    """

    def __init__(
        self,
        loss: Callable[[], Tensor],
        parameters: Sequence[Tensor],
        factor: float | Tensor = 1.0,
        over_ranks: Callable[[Tensor], Tensor] = lambda vector: vector,
    ) -> None:
        self.parameters = list(parameters)
        self.error: str | None = None
        self._factor = factor
        self._over_ranks = over_ranks
        self._gradients: Sequence[Tensor | None] = []
        try:
            value = loss().reshape(())
            _check_graph(value)
            self._gradients = torch.autograd.grad(value, self.parameters, create_graph=True, allow_unused=True)
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self.error = _line(error)
        self.reached = any(each is not None for each in self._gradients)

    def gradient(self) -> Tensor:
        """The gradient of the loss, flat."""
        return self._flat(lambda: self._gradients)

    def times(self, vector: Tensor) -> Tensor:
        """The product with a flat vector."""
        return self._flat(lambda: self._products(vector))

    def _products(self, vector: Tensor) -> Sequence[Tensor | None]:
        parts = vector.split([each.numel() for each in self.parameters])
        curved = [
            (gradient, part.view_as(gradient).to(gradient.dtype))
            for gradient, part in zip(self._gradients, parts, strict=True)
            if gradient is not None and gradient.requires_grad
        ]
        if not curved:
            return [None] * len(parts)
        gradients, shaped = zip(*curved, strict=True)
        return torch.autograd.grad(gradients, self.parameters, shaped, retain_graph=True, allow_unused=True)

    def _flat(self, make: Callable[[], Sequence[Tensor | None]]) -> Tensor:
        flat = _joined(self.parameters, [None] * len(self.parameters))
        try:
            if self.error is None:
                flat = _joined(self.parameters, make())
        except Exception as error:  # noqa: BLE001
            self.error = _line(error)
        return self._over_ranks(flat * (self._factor if self.error is None else math.nan))


def _joined(parameters: Sequence[Tensor], parts: Sequence[Tensor | None]) -> Tensor:
    full = [torch.zeros_like(each) if part is None else part for each, part in zip(parameters, parts, strict=True)]
    return torch.cat([each.detach().flatten().to(torch.promote_types(each.dtype, torch.float32)) for each in full])


def _check_graph(value: Tensor) -> None:
    """Refuse a graph that hides parameters, whose gradients would be taken for zero.

    Raises:
        RuntimeError: if there is a reentrant checkpoint in it.
    """
    nodes = {value.grad_fn}
    waiting = [*nodes]
    while waiting:
        node = waiting.pop()
        if node is not None:
            if node.name().startswith("CheckpointFunction"):
                raise RuntimeError("torch.utils.checkpoint has to be given use_reentrant=False")
            new = {each for each, _ in node.next_functions} - nodes
            nodes |= new
            waiting += new


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]


class Tridiagonal(NamedTuple):
    """What Lanczos' recurrence makes of a symmetric matrix.

    Attributes:
        diagonal: of shape (steps,).
        beside: what stands beside it, the last of which stands outside, of shape (steps,).
    """

    diagonal: Tensor
    beside: Tensor


def lanczos(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> Tridiagonal:
    """Lanczos' three-term recurrence (C. Lanczos, 1950), which keeps three vectors and waits for nothing.

    Vectors lose their orthogonality only to those of eigenvalues that have been found, so the largest is right all the
    same (C. C. Paige, 1971).

    Args:
        product: multiplies the matrix by a flat vector.
        start: where to start.
        steps: how many products.
    """
    current, before = start / start.norm(), torch.zeros_like(start)
    diagonal, beside = [], []
    norm = torch.zeros_like(start[0])
    for _ in range(steps):
        new = product(current) - norm * before
        along = torch.dot(new, current)
        new = new - along * current
        norm = new.norm()
        diagonal.append(along)
        beside.append(norm)
        before, current = current, new / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    return Tridiagonal(torch.stack(diagonal), torch.stack(beside))


def largest_eigenvalue(diagonal: Sequence[float], beside: Sequence[float]) -> tuple[float, float]:
    """The largest eigenvalue that a recurrence has found, and how far one of the matrix is from it at most."""
    size = len(diagonal)
    for i, each in enumerate(beside):  # from where nothing new came
        if each <= 1e-12 * max(map(abs, (*diagonal[: i + 1], 1e-300))):
            size = i + 1
            break
    matrix = torch.diag(torch.tensor(diagonal[:size], dtype=torch.float64))
    edge = torch.tensor(beside[: size - 1], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(matrix + torch.diag(edge, 1) + torch.diag(edge, -1))
    return float(values[-1]), float(abs(beside[size - 1] * vectors[-1, -1]))
