"""Spectral norms of the weights of a model, small ones of one shape together."""

from __future__ import annotations

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

    def __init__(self, method: str, about: str) -> None:
        self.method = method
        self.steps = 0  # of "power" in the last measurement, for the weight that needed most
        self._about = about
        self._failed, self._nonfinite = DeferredFlag(), DeferredFlag()
        self._failures: list[tuple[str, str]] = []

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
        return Spectra(names, scales, norms, errors, frobenius)

    def failures(self, wait: bool = False) -> list[tuple[str, str]]:
        """Return what has failed since the last call, as kinds and texts, when it is known on the host."""
        if self._nonfinite.take(wait):
            self._failures.append((f"nonfinite_{self._about}", f"{self._about} that are not finite are not reported"))
        failures, self._failures = self._failures, []
        return failures

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
        text = f'{self._about}: method "{self.method}" gives an impossible norm; "power" replaces it from now on'
        self._failures.append((f"replaced_method_{self._about}", text))
        self.method = "power"
        return measure(matrices, "power", seed)
