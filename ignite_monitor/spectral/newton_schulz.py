r"""The spectral norm by way of the polar factor, which Newton-Schulz iterations approximate: quick, and biased.

With W = UΣVᵀ the polar factor is Q = UVᵀ, and QᵀW = VΣVᵀ has the singular values of W for eigenvalues. The iterations
start from W/‖W‖_F and make singular values grow by a constant factor at first, so small ones do not get to 1 in a few
steps: Q is not orthogonal, and the norm comes out too small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ignite_monitor.model.devices import wide_dtype

# Of the quintic X <- aX + (bA + cA²)X, A = XXᵀ.
_QUINTIC = (3.4445, -4.7750, 2.0315)


def ns5_fast(matrices: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    r"""The largest singular values, by five steps of the quintic iteration and seven of power iteration.

    .. math:: X \leftarrow aX + (bA + cA^2)X, \quad A = XX^\top, \quad (a, b, c) = (3.4445, -4.7750, 2.0315)

    On Gaussian matrices from 256² to 2048² the result is off by −34 % to −2 %.

    Args:
        matrices: of shape (B, m, n), divided by their Frobenius norms.
        start: where power iteration starts, of shape (B, min(m, n)).

    Returns:
        Of shape (B,).
    """
    wide = _wide(matrices)
    a, b, c = _QUINTIC
    factor = wide.to(dtype)
    for _ in range(5):
        gram = factor @ factor.mT
        factor = a * factor + (b * gram + c * gram @ gram) @ factor
    return _rayleigh(wide, factor, start, iterations=7)


def ns3_accurate(matrices: Tensor, start: Tensor, dtype: torch.dtype) -> Tensor:
    r"""The largest singular values, by eight steps of the cubic iteration and ten of power iteration.

    .. math:: X \leftarrow X (3I - X^\top X) / 2

    On Gaussian matrices from 256² to 2048² the result is off by −5 % to −21 %.

    Args:
        matrices: of shape (B, m, n), divided by their Frobenius norms.
        start: where power iteration starts, of shape (B, min(m, n)).

    Returns:
        Of shape (B,).
    """
    wide = _wide(matrices)
    factor = wide.to(dtype)
    for _ in range(8):
        factor = (3 * factor - (factor @ factor.mT) @ factor) / 2
    return _rayleigh(wide, factor, start, iterations=10)


def _wide(matrices: Tensor) -> Tensor:
    return matrices if matrices.shape[1] <= matrices.shape[2] else matrices.mT


def _rayleigh(wide: Tensor, factor: Tensor, start: Tensor, iterations: int) -> Tensor:
    """The Rayleigh quotient of W Qᵀ, which has the eigenvalues of QᵀW that are not 0 and is smaller."""
    polar = factor.to(wide.dtype)
    vector = start.unsqueeze(2)
    image = vector
    for _ in range(iterations + 1):
        vector = image / torch.linalg.vector_norm(image, dim=1, keepdim=True)
        image = wide @ (polar.mT @ vector)
    return (vector * image).to(wide_dtype(wide.device)).sum((1, 2))
