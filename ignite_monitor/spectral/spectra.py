"""Spectral norms of the weights of a model, small ones of one shape together."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import move
from ignite_monitor.model.sampling import fnv1a_64
from ignite_monitor.monitor.transfer import DeferredFlag
from ignite_monitor.spectral.effective_weights import Weight
from ignite_monitor.spectral.norm import SpectralNorms, measure

# Matrices with at most so many elements are stacked, up to so many in all.
_SMALL, _LARGEST_STACK = 1 << 16, 1 << 24


class Spectra(NamedTuple):
    """Norms of some weights, in their order; errors and Frobenius norms as in :class:`SpectralNorms`."""

    names: list[str]
    scales: list[float]
    norms: Tensor
    errors: Tensor
    frobenius: Tensor


class SpectralMeter:
    """Measures spectral norms by one of ``METHODS``, and replaces a method that fails."""

    def __init__(self, method: str, logger: logging.Logger, about: str) -> None:
        self.method = method
        self.steps = 0  # of "power" in the last measurement, for the weight that needed most
        self._logger, self._about = logger, about
        self._failed, self._nonfinite = DeferredFlag(), DeferredFlag()
        self._warned = False

    def measure(self, weights: Iterable[Weight]) -> Spectra:
        """The norms of all weights, at least one; a large weight is not kept longer than needed."""
        names: list[str] = []
        scales: list[float] = []
        batches: dict[object, list[tuple[int, Weight]]] = {}
        order: list[int] = []
        results: list[SpectralNorms] = []

        def finish(batch: list[tuple[int, Weight]]) -> None:
            order.extend(place for place, _ in batch)
            text = "\n".join(weight.name for _, weight in batch)
            results.append(self._measure(torch.stack([weight.matrix for _, weight in batch]), text))

        for place, weight in enumerate(weights):
            names.append(weight.name)
            scales.append(weight.scale)
            matrix = weight.matrix
            is_small = matrix.numel() <= _SMALL
            key = (matrix.shape, matrix.dtype, matrix.device) if is_small else place
            batch = batches.setdefault(key, [])
            batch.append((place, weight))
            if not is_small or len(batch) * matrix.numel() >= _LARGEST_STACK:
                finish(batches.pop(key))
        for batch in batches.values():
            finish(batch)
        self.steps = max(result.steps for result in results)
        device = results[0].norms.device
        at = move(torch.tensor(order, device="cpu").argsort(), device)
        norms, errors, frobenius = (
            torch.cat([column.to(device, non_blocking=device.type != "cpu") for column in columns])[at]
            for columns in list(zip(*results, strict=True))[:3]
        )
        self._nonfinite.set(norms.isnan().any())
        self.warn()
        return Spectra(names, scales, norms, errors, frobenius)

    def warn(self, wait: bool = False) -> None:
        """Warn once of weights that are not finite, when that is known on the host."""
        if self._nonfinite.take(wait) and not self._warned:
            self._warned = True
            self._logger.warning("%s that are not finite are not reported", self._about)

    def _measure(self, matrices: Tensor, names: str) -> SpectralNorms:
        seed = fnv1a_64(names)
        result = measure(matrices, self.method, seed)
        if self.method == "power":
            return result
        failed = result.errors.isinf()
        self._failed.set(failed.any())
        if not self._failed.take():
            norms = result.norms.masked_fill(failed, torch.nan)
            return result._replace(norms=norms, errors=result.errors.masked_fill(failed, torch.nan))
        self._logger.warning(
            '%s: method "%s" gives an impossible norm; "power" replaces it from now on', self._about, self.method
        )
        self.method = "power"
        return measure(matrices, "power", seed)
