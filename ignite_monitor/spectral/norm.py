"""Spectral norms of matrices, with bounds of their errors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.modes import full_precision

METHODS = ("power", "ns5-fast", "ns3-accurate")
TOLERANCE = 1e-3

_WIDTH = 8  # vectors that are multiplied at once
_SMALL, _SMALL_ON_DEVICE = 224, 1024  # up to this order powers of WWᵀ itself are faster
_MOST_STEPS = 64
_DEVICE_STEPS = 24  # where reading the bound would synchronize
_SQUARINGS = 15


class SpectralNorms(NamedTuple):
    """Spectral norms of a batch of B matrices."""

    norms: Tensor  # (B,); NaN for a matrix that is not finite
    errors: Tensor  # (B,), bounds of relative errors; NaN where there is none
    frobenius: Tensor  # (B,), Frobenius norms


def measure(matrices: Tensor, method: str, seed: int) -> SpectralNorms:
    """Measure the spectral norms of real matrices (B, rows, columns); ``seed`` is that of the methods' random start."""
    with full_precision(matrices.device):
        matrices = matrices if matrices.dtype == torch.float64 else matrices.float()
        generator = torch.Generator(matrices.device).manual_seed(seed % 2**63)
        # Scaled so that squares neither overflow nor vanish.
        largest = matrices.abs().amax((1, 2))
        is_finite = largest.isfinite()
        unit = torch.where((largest > 0) & is_finite, largest, 1.0)
        scaled = (matrices / unit[:, None, None]).masked_fill_(~is_finite[:, None, None], 0.0)
        wide = wide_dtype(matrices.device)
        frobenius = torch.linalg.vector_norm(torch.linalg.vector_norm(scaled, dim=2).to(wide), dim=1)
        scaled /= torch.where(frobenius > 0, frobenius, 1.0).to(scaled.dtype)[:, None, None]
        scaled = scaled.mT if scaled.shape[1] > scaled.shape[2] else scaled
        is_power = method == "power"
        norms, errors = _power(scaled, generator) if is_power else _newton_schulz(scaled, method, generator)
        whole = torch.where(is_finite, unit.to(wide) * frobenius, torch.nan)
        return SpectralNorms(norms.to(wide) * whole, errors.to(wide) + 0 * whole, whole)


def _random_rows(scaled: Tensor, count: int, generator: torch.Generator) -> Tensor:
    shape = (len(scaled), count, scaled.shape[1])
    return torch.randn(shape, generator=generator, dtype=scaled.dtype, device=scaled.device)


def _power(scaled: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    r"""Block Lanczos on A = WWᵀ: the norm of Wᵀv for the Ritz vector v with the largest Ritz value.

    An eigenvalue of A lies within :math:`r = \lVert Av - \theta v\rVert` of :math:`\theta = v^\top Av`. It is the
    largest one unless the random start has hardly a part of its eigenvector, so the error is bounded by
    :math:`\sqrt{1 + r / \theta} - 1`.
    """
    order, on_host = scaled.shape[1], scaled.device.type == "cpu"
    if order <= (_SMALL if on_host else _SMALL_ON_DEVICE):
        return _with_bound(scaled, dominant(scaled @ scaled.mT))
    most = min(order // _WIDTH - 1, _MOST_STEPS if on_host else _DEVICE_STEPS)
    # Vectors are rows, which the CPU multiplies several times as fast as columns.
    start = _random_rows(scaled, _WIDTH, generator)
    noise = start / order**0.5
    basis = block = _orthonormal(start)
    products = scaled.new_empty(len(scaled), 0, order)
    step, check = 0, 4
    while True:
        step += 1
        block = block @ scaled @ scaled.mT
        products = torch.cat([products, block], 1)
        if step == most or (on_host and step == check):
            projected = basis @ products.mT
            coordinates = dominant((projected + projected.mT) / 2)
            result = _with_bound(scaled, (coordinates[:, None] @ basis).squeeze(1))
            if step == most or not len((result[1] > TOLERANCE).nonzero()):
                return result
            check += max(2, check // 3)
        # Where the space is exhausted only rounding is left: some noise keeps the directions apart.
        scale = torch.linalg.matrix_norm(block, keepdim=True)
        block = block - block @ basis.mT @ basis + 4 * torch.finfo(block.dtype).eps * scale * noise.roll(step, 2)
        for _ in range(2):
            block = _orthonormal(block)
            block = block - block @ basis.mT @ basis
        block = _orthonormal(block)
        basis = torch.cat([basis, block], 1)


def dominant(matrices: Tensor) -> Tensor:
    r"""Unit vectors with nearly the largest Rayleigh quotient of positive semidefinite matrices A; zeros for A = 0.

    The longest column of :math:`A^q`, :math:`q = 2^{15}`. Unlike an eigensolver this synchronizes with no device, and
    repeated eigenvalues do no harm. A has to be finite, with a trace of the order of 1 or less.
    """
    smallest = torch.finfo(matrices.dtype).tiny
    power = matrices
    for i in range(_SQUARINGS + 1):
        if i:
            power = power @ power
        if i % 3 == 0:  # three squarings take a trace of 1 to one of at least 1/n⁷
            trace = power.diagonal(dim1=1, dim2=2).sum(1).clamp(min=smallest)
            power = power / trace[:, None, None]
    longest = power.diagonal(dim1=1, dim2=2).argmax(1)
    column = power.gather(2, longest[:, None, None].expand(-1, power.shape[1], 1)).squeeze(2)
    unit: Tensor = column / torch.linalg.vector_norm(column, dim=1, keepdim=True).clamp(min=smallest)
    return unit


def _orthonormal(rows: Tensor) -> Tensor:
    """Rows with the span of these that are orthonormal, or nearer to it where these are nearly dependent; 0 stays 0.

    On a device CholeskyQR, since QR is slow there. The shift exceeds the rounding of the products, so that the
    decomposition is possible.
    """
    if rows.is_cpu:
        return torch.linalg.qr(rows.mT)[0].mT.contiguous()  # type: ignore[no-any-return]
    wide = rows.to(wide_dtype(rows.device))
    wide = wide / torch.linalg.vector_norm(wide, dim=2, keepdim=True).clamp(min=torch.finfo(rows.dtype).tiny)
    products = wide @ wide.mT
    products.diagonal(dim1=1, dim2=2).add_((rows.shape[2] + 100) * torch.finfo(wide.dtype).eps)
    factor = torch.linalg.cholesky_ex(products)[0]
    orthonormal: Tensor = torch.linalg.solve_triangular(factor, wide, upper=False).to(rows.dtype)
    return orthonormal


def _with_bound(scaled: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Norms of Wᵀv, and bounds of their relative errors by the residual of v."""
    rounding = 64 * torch.finfo(scaled.dtype).eps
    lengths = torch.linalg.vector_norm(vectors, dim=1, keepdim=True)
    rows = (vectors / torch.where(lengths > 0, lengths, 1.0))[:, None]
    images = rows @ scaled
    values = images.square().sum((1, 2))
    residuals = torch.linalg.vector_norm(images @ scaled.mT - values[:, None, None] * rows, dim=(1, 2))
    errors = torch.where(values > 0, (1 + residuals / values).sqrt() - 1 + rounding, 0.0)
    return values.sqrt(), errors


# a, b and c, the number of steps with them, and of power iteration.
_NEWTON_SCHULZ = {"ns5-fast": (3.4445, -4.7750, 2.0315, 5, 7), "ns3-accurate": (1.5, -0.5, 0.0, 8, 10)}


def _newton_schulz(scaled: Tensor, method: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    r"""Biased norms from the polar factor, which Newton-Schulz iterations approximate.

    With W = UΣVᵀ the polar factor is Q = UVᵀ, and WQᵀ = UΣUᵀ has the singular values of W for eigenvalues: power
    iteration gives the largest. The iterations

    .. math:: X \leftarrow aX + (bA + cA^2)X, \quad A = XX^\top,

    start from W/‖W‖_F. They bring small singular values to 1 too slowly, so that the norm is too small: values below
    ‖W‖_F/√n, which no matrix with n rows has, are replaced by it.
    """
    a, b, c, steps, iterations = _NEWTON_SCHULZ[method]
    polar = scaled
    for _ in range(steps):
        gram = polar @ polar.mT
        polar = a * polar + (b * gram + c * gram @ gram if c else b * gram) @ polar
    vector = image = _random_rows(scaled, 1, generator)
    for _ in range(iterations + 1):
        vector = image / torch.linalg.vector_norm(image, dim=2, keepdim=True)
        image = vector @ polar @ scaled.mT
    norms = (vector * image).sum((1, 2)).clamp(scaled.shape[1] ** -0.5, 1.0)
    return torch.where(scaled.flatten(1).any(1), norms, 0.0), torch.full_like(norms, torch.nan)
