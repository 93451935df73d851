"""Spectral norms of the weights of a model, small ones of one shape together."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload
from ignite_monitor.model.sampling import fnv1a_64
from ignite_monitor.monitor.transfer import DeferredFlag
from ignite_monitor.spectral.effective_weights import Weight
from ignite_monitor.spectral.norm import SpectralNorms, measure

# Matrices with at most so many elements are stacked, up to so many in all.
_SMALL, _LARGEST_STACK = 1 << 16, 1 << 24


class Spectra(NamedTuple):
    """Norms of some weights, in their order.

    Attributes:
        names: of the weights.
        scales: of the weights, see :class:`Weight`.
        norms: spectral norms; NaN for a weight that is not finite.
        errors: bounds of their relative errors; NaN where there is none.
        frobenius: Frobenius norms.
    """

    names: list[str]
    scales: list[float]
    norms: Tensor
    errors: Tensor
    frobenius: Tensor


class SpectralMeter:
    """Measures spectral norms by one of ``METHODS``, and replaces a method that fails.

    Attributes:
        method: the method in use.
        steps: how many steps "power" made in the last measurement for the weight that needed most.
    """

    def __init__(self, method: str, logger: logging.Logger, about: str) -> None:
        self.method = method
        self.steps = 0
        self._logger, self._about = logger, about
        self._failed, self._nonfinite = DeferredFlag(), DeferredFlag()
        self._warned = False

    def measure(self, weights: Iterable[Weight]) -> Spectra:
        """The norms of all weights, at least one; a large weight is not kept longer than needed."""
        self.steps = 0
        scales: dict[str, float] = {}
        names: list[str] = []
        found: list[SpectralNorms] = []
        for batch in _batches(_noted(weights, scales)):
            found.append(
                self._measure(torch.stack([each.matrix for each in batch]), "\n".join(each.name for each in batch))
            )
            names += [each.name for each in batch]
            self.steps = max(self.steps, found[-1].steps)
        device = found[0].norms.device
        norms, errors, frobenius = (
            torch.cat([column.to(device, non_blocking=device.type != "cpu") for column in columns])
            for columns in zip(*(each[:3] for each in found), strict=True)
        )
        places = {name: place for place, name in enumerate(names)}
        at = upload(torch.tensor([places[name] for name in scales], device="cpu"), device)
        spectra = Spectra([*scales], [*scales.values()], norms[at], errors[at], frobenius[at])
        self._nonfinite.set(spectra.norms.isnan().any())
        self.warn()
        return spectra

    def warn(self, wait: bool = False) -> None:
        """Warn once of weights that are not finite, when that is known on the host."""
        if self._nonfinite.take(wait) and not self._warned:
            self._warned = True
            self._logger.warning("%s that are not finite are not reported", self._about)

    def _measure(self, matrices: Tensor, names: str) -> SpectralNorms:
        seed = fnv1a_64(names)
        if self.method == "power":
            return measure(matrices, "power", seed)
        found = measure(matrices, self.method, seed)
        failed = found.errors.isinf()
        self._failed.set(failed.any())
        if not self._failed.take():
            norms = found.norms.masked_fill(failed, torch.nan)
            return found._replace(norms=norms, errors=found.errors.masked_fill(failed, torch.nan))
        self._logger.warning(
            '%s: method "%s" gives an impossible norm; "power" replaces it from now on', self._about, self.method
        )
        self.method = "power"
        return measure(matrices, "power", seed)


def _noted(weights: Iterable[Weight], scales: dict[str, float]) -> Iterator[Weight]:
    for weight in weights:
        scales[weight.name] = weight.scale
        yield weight


def _batches(weights: Iterable[Weight]) -> Iterator[list[Weight]]:
    """Small weights of one shape, dtype and device together; each large one alone, as soon as it is there."""
    alike: dict[object, list[Weight]] = {}
    for weight in weights:
        size = weight.matrix.numel()
        if size > _SMALL:
            yield [weight]
            continue
        members = alike.setdefault((weight.matrix.shape, weight.matrix.dtype, weight.matrix.device), [])
        members.append(weight)
        if len(members) * size >= _LARGEST_STACK:
            yield members.copy()
            members.clear()
    yield from filter(None, alike.values())
