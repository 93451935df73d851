"""Products with the Hessian of a loss, and its largest eigenvalue by the Lanczos recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ignite_monitor.model.norms import wide_norms

Product = Callable[[Tensor], Tensor]


class Hessian:
    """Hessian of a 0-dim loss, multiplied by flat vectors through the graph of the loss; no gradients are accumulated.

    A RuntimeError if a parameter is complex, or the loss reaches none.
    """

    def __init__(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        if any(parameter.is_complex() for parameter in parameters):
            raise RuntimeError("a parameter is complex")
        self._parameters = list(parameters)
        self._gradients = torch.autograd.grad(loss, self._parameters, create_graph=True, allow_unused=True)
        if all(gradient is None for gradient in self._gradients):
            raise RuntimeError("the loss reaches no parameter of the optimizer")

    def gradient(self) -> Tensor:
        """Return the gradient of the loss, in float32 or wider."""
        return self._flat(self._gradients)

    def times(self, vector: Tensor) -> Tensor:
        """Return the product with a vector."""
        parts = vector.split([parameter.numel() for parameter in self._parameters])
        pairs = zip(self._gradients, parts, strict=True)
        curved = [(gradient, part) for gradient, part in pairs if gradient is not None and gradient.requires_grad]
        if not curved:
            return torch.zeros_like(vector)
        gradients = [gradient for gradient, _ in curved]
        shaped = [part.view_as(gradient).to(gradient.dtype) for gradient, part in curved]
        return self._flat(
            torch.autograd.grad(gradients, self._parameters, shaped, retain_graph=True, allow_unused=True)
        )

    def _flat(self, parts: Sequence[Tensor | None]) -> Tensor:
        pairs = zip(self._parameters, parts, strict=True)
        full = [torch.zeros_like(parameter) if part is None else part for parameter, part in pairs]
        return torch.cat([part.detach().flatten().to(flat_dtype(self._parameters)) for part in full])


def flat_dtype(parameters: Sequence[Tensor]) -> torch.dtype:
    """Dtype of flat vectors: float64 if a parameter has it, else float32."""
    return torch.float64 if torch.float64 in {parameter.dtype for parameter in parameters} else torch.float32


def length(vector: Tensor) -> Tensor:
    """The l2 norm of a flat vector, whose squares may leave the range of its dtype."""
    return wide_norms([vector])[0].to(vector.dtype)


def curvatures(gradient: Tensor, product: Product, steps: int) -> tuple[Tensor, Tensor]:
    """Return the curvature along the gradient, and what :func:`lanczos` returns, flat."""
    unit = gradient / length(gradient)
    return unit @ product(unit), lanczos(product, start_vector(gradient, seed=0), steps).flatten()


def start_vector(direction: Tensor, seed: int) -> Tensor:
    """Unit vector along a direction plus a random one, which has a part along every eigenvector."""
    generator = torch.Generator(direction.device).manual_seed(seed)
    noise = torch.randn(direction.shape, generator=generator, dtype=direction.dtype, device=direction.device)
    tiny = torch.finfo(direction.dtype).tiny
    return torch.add(direction / length(direction).clamp(min=tiny), noise / noise.norm())


def lanczos(product: Product, start: Tensor, steps: int) -> Tensor:
    """Run the Lanczos three-term recurrence (C. Lanczos, 1950) for a symmetric matrix, without synchronization.

    Diagonal and off-diagonal of a tridiagonal matrix, of shape (2, steps); the last element is of the next step. Lost
    orthogonality adds copies of converged eigenvalues and leaves the largest one right (C. C. Paige, 1971).
    """
    current, previous = start / length(start), torch.zeros_like(start)
    rows = []
    norm = torch.zeros_like(start[0])
    for _ in range(steps):
        following = product(current) - norm * previous
        projection = torch.dot(following, current)
        following = following - projection * current
        norm = length(following)
        rows.append(torch.stack([projection, norm]))
        previous, current = current, following / norm.clamp(min=torch.finfo(norm.dtype).tiny)
    return torch.stack(rows, 1)


def largest_eigenvalue(diagonal: Sequence[float], off_diagonal: Sequence[float]) -> tuple[float, float]:
    """Largest eigenvalue of what :func:`lanczos` returned, and its residual.

    The matrix has an eigenvalue within the residual of this value, and may have a larger one.
    """
    size = len(diagonal)
    for step, norm in enumerate(off_diagonal):
        if norm <= 1e-12 * max(map(abs, (*diagonal[: step + 1], 1e-300))):  # the Krylov space is complete
            size = step + 1
            break
    matrix = torch.diag(torch.tensor(diagonal[:size], dtype=torch.float64))
    edge = torch.tensor(off_diagonal[: size - 1], dtype=torch.float64)
    values, vectors = torch.linalg.eigh(matrix + torch.diag(edge, 1) + torch.diag(edge, -1))
    return float(values[-1]), float(abs(off_diagonal[size - 1] * vectors[-1, -1]))
