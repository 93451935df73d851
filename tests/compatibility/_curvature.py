"""The curvature of a loss in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn

from tests.compatibility._attention import eager
from tests.compatibility._truth import Iteration, call, doubled


class Curvature:
    """Of the loss of an iteration's first batch, as a function of all weights.

    Attributes:
        gradient: the gradient, flat.
    """

    def __init__(self, initial: nn.Module, iteration: Iteration, loss: Callable[[Any], Tensor]) -> None:
        model = eager(initial, iteration)
        self._parameters = list(model.parameters())
        before = torch.get_rng_state()
        torch.set_rng_state(iteration.rng)
        value = loss(call(model, doubled(iteration.x[0])))
        torch.set_rng_state(before)
        self._gradient = self._flat(value, create_graph=True)
        self.gradient = self._gradient.detach()

    def along(self, direction: Tensor) -> Tensor:
        """The Hessian's product with a direction."""
        return self._flat(self._gradient @ direction, retain_graph=True)

    def largest(self, scales: Tensor | None = None) -> float:
        """The Hessian's largest eigenvalue, with rows and columns divided by the roots of scales."""
        root = torch.ones_like(self.gradient) if scales is None else scales.sqrt()
        operator = LinearOperator(
            (len(root), len(root)),
            matvec=lambda vector: (self.along(torch.from_numpy(vector.ravel().copy()) / root) / root).numpy(),
            dtype=float,
        )
        return float(eigsh(operator, k=1, which="LA", tol=1e-3, return_eigenvectors=False)[0])

    def _flat(self, value: Tensor, **kwargs: bool) -> Tensor:
        found = torch.autograd.grad(value, self._parameters, materialize_grads=True, allow_unused=True, **kwargs)
        return torch.cat([each.flatten() for each in found])
