"""Products with the Hessian of a loss, and its largest eigenvalue by Lanczos' recurrence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Hessian:
    """The Hessian of a loss at the weights that it was computed with, of which products are taken through its graph.

    Nothing is added to gradients, and the graph stays for a backward pass.

    Args:
        loss: 0-dim, with its graph.
        parameters: what to differentiate by; those that the loss does not depend on are left out.
        factor: what the loss is multiplied by.
        over_ranks: gives the mean of a vector over ranks.

    Attributes:
        parameters: those that the loss depends on.
        gradient: of the loss, flat; empty where it depends on none.
    """

    def __init__(
        self,
        loss: Tensor,
        parameters: Sequence[Tensor],
        factor: float | Tensor = 1.0,
        over_ranks: Callable[[Tensor], Tensor] = lambda vector: vector,
    ) -> None:
        found = torch.autograd.grad(loss, list(parameters), create_graph=True, allow_unused=True)
        pairs = [(each, grad) for each, grad in zip(parameters, found, strict=True) if grad is not None]
        self.parameters = [parameter for parameter, _ in pairs]
        self._gradients = [gradient for _, gradient in pairs]
        self._factor = factor
        self._over_ranks = over_ranks
        self.gradient = self._flat(self._gradients) if pairs else loss.new_zeros(0)

    def times(self, vector: Tensor) -> Tensor:
        """The product with a flat vector."""
        parts = vector.split([each.numel() for each in self.parameters])
        shaped = [part.view_as(each) for part, each in zip(parts, self.parameters, strict=True)]
        curved = [i for i, each in enumerate(self._gradients) if each.requires_grad]
        if not curved:
            return torch.zeros_like(self.gradient)
        products = torch.autograd.grad(
            [self._gradients[i] for i in curved],
            self.parameters,
            [shaped[i].to(self._gradients[i].dtype) for i in curved],
            retain_graph=True,
            allow_unused=True,
        )
        return self._flat(
            torch.zeros_like(parameter) if product is None else product
            for parameter, product in zip(self.parameters, products, strict=True)
        )

    def _flat(self, tensors: Iterable[Tensor]) -> Tensor:
        return self._over_ranks(torch.cat([each.detach().flatten() for each in tensors]) * self._factor)


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
