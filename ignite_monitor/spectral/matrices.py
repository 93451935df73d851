"""Matrices of one shape, scaled so that their numbers can be squared, and products with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.sharding import all_reduce
from ignite_monitor.model.updates import row_norms

# Between these Frobenius norms float32's products need no other scaling than a division by the norm.
_SAFE = (1e-9, 1e15)

# So many elements stay in the cache of a CPU's core from the first product of two to the second.
_CACHED = 1 << 18


class Matrices:
    """A batch of matrices W of one shape, divided by their Frobenius norms; a zero matrix stays one.

    Args:
        matrices: of shape (B, rows, columns), float32 or float64.
        groups: of processes, over whose ranks the rows are shared out; none where they are all here.
    """

    def __init__(self, matrices: Tensor, groups: Sequence[Any] = ()) -> None:
        self._groups = groups
        self.dtype, self.device = matrices.dtype, matrices.device
        self.batch, rows, columns = matrices.shape
        # Shared rows are never the narrow side: then everything but products would have to be shared out as well.
        self._by_columns = columns <= rows or bool(groups)
        self.n = columns if self._by_columns else rows  # the order of WᵀW, or of WWᵀ where that is smaller
        self.rounding = 64 * torch.finfo(self.dtype).eps  # what float arithmetic may add to relative errors of norms
        frobenius = self._frobenius(matrices)
        largest = torch.ones_like(frobenius)
        if not self._is_tame(frobenius):
            finite = matrices.isfinite()
            largest = torch.where(finite, matrices, 0.0).abs().flatten(1)
            largest = largest.amax(1) if largest.shape[1] else matrices.new_zeros(self.batch)
            largest = self._all_reduce(largest, True)
            largest = torch.where(largest > 0, largest, 1.0)
            damaged = self._all_reduce((~finite).flatten(1).any(1).to(frobenius.dtype), True) > 0
            matrices = torch.where(damaged[:, None, None], 0.0, matrices / largest[:, None, None])
            frobenius = self._frobenius(matrices)
            largest = torch.where(damaged, torch.nan, largest.to(frobenius.dtype))
        self._matrices = matrices
        self._divisor = torch.where(frobenius > 0, frobenius, 1.0).to(self.dtype)[:, None, None]
        self.frobenius = frobenius * largest  # wide, of shape (B,); NaN for a matrix that is not finite
        self._part = max(1, _CACHED // max(self.n, 1)) if self.device.type == "cpu" else max(rows, columns)
        self._unit = self._divisor.flatten().to(frobenius.dtype) * largest

    def gram(self, vectors: Tensor) -> Tensor:
        """VWᵀW, or VWWᵀ, for V of shape (B, any, n)."""
        # Of the ways to order these products the ones that the CPU is quick at.
        parts: tuple[Tensor, ...] = self._matrices.split(self._part, 1 if self._by_columns else 2)
        if not self._by_columns:
            product = parts[0] @ (vectors @ parts[0]).mT
            for part in parts[1:]:
                product.baddbmm_(part, (vectors @ part).mT)
            return product.mT / self._divisor**2
        columns = vectors.mT.contiguous()
        product = (parts[0] @ columns).mT @ parts[0]
        for part in parts[1:]:
            product.baddbmm_((part @ columns).mT, part)
        return self._all_reduce(product / self._divisor**2)

    def whole_gram(self) -> Tensor:
        """WᵀW, or WWᵀ, of shape (B, n, n)."""
        scaled = self.whole()
        if not self._by_columns:
            return scaled @ scaled.mT
        return self._all_reduce(scaled.mT @ scaled)

    def whole(self) -> Tensor:
        """The scaled matrices, of shape (B, rows, columns); where rows are shared out, this rank's."""
        return self._matrices / self._divisor

    def lengths(self, vectors: Tensor) -> Tensor:
        """How long W, or Wᵀ, makes a unit vector for each, of shape (B, n); a lower bound of the spectral norm."""
        if self._by_columns:
            images = (self._matrices @ vectors.unsqueeze(2)).squeeze(2)
        else:
            images = (vectors.unsqueeze(1) @ self._matrices).squeeze(1)
        images = (images / self._divisor.squeeze(2)).to(self.frobenius.dtype)
        return self._all_reduce(images.square().sum(1)).sqrt()

    def unscaled(self, norms: Tensor) -> Tensor:
        """Norms of the matrices as they were given, of those of the scaled ones; NaN for one that is not finite."""
        return norms.to(self._unit.dtype) * self._unit

    def _frobenius(self, matrices: Tensor) -> Tensor:
        norms = row_norms(matrices.flatten(1)).to(wide_dtype(self.device))
        return self._all_reduce(norms.square()).sqrt() if self._groups else norms

    def _all_reduce(self, values: Tensor, largest: bool = False) -> Tensor:
        for group in self._groups:
            values = all_reduce(values, largest, group)
        return values

    def _is_tame(self, norms: Tensor) -> bool:
        """Whether it is known, without waiting, that no matrix needs another scaling."""
        if self.device.type != "cpu":
            return False
        return len((~((norms > _SAFE[0]) & (norms < _SAFE[1]))).nonzero()) == 0


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What products with matrices of a dtype are made in."""
    return dtype if dtype == torch.float64 else torch.float32
