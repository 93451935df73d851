"""Spectral norms of the weights of a model, small ones of one shape together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import move
from ignite_monitor.model.sampling import fnv1a_64
from ignite_monitor.spectral.effective_weights import Weight
from ignite_monitor.spectral.norm import SpectralNorms, measure

# Matrices with at most so many elements are stacked, up to so many in all.
_SMALL, _LARGEST_STACK = 1 << 16, 1 << 24


class Spectra(NamedTuple):
    """Norms of some weights, in their order; ``norms`` to ``steps`` as in :class:`SpectralNorms`."""

    names: list[str]
    scales: list[float]
    norms: Tensor
    errors: Tensor
    frobenius: Tensor
    steps: int  # for the weight that needed most


def measure_all(weights: Iterable[Weight], method: str) -> Spectra:
    """The norms of all weights, at least one; a large weight is not kept longer than needed."""
    names: list[str] = []
    scales: list[float] = []
    batches: dict[object, list[tuple[int, Weight]]] = {}
    order: list[int] = []
    results: list[SpectralNorms] = []

    def finish(batch: list[tuple[int, Weight]]) -> None:
        order.extend(place for place, _ in batch)
        seed = fnv1a_64("\n".join(weight.name for _, weight in batch))
        results.append(measure(torch.stack([weight.matrix for _, weight in batch]), method, seed))

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
    device = results[0].norms.device
    at = move(torch.tensor(order, device="cpu").argsort(), device)
    norms, errors, frobenius = (
        torch.cat([column.to(device, non_blocking=device.type != "cpu") for column in columns])[at]
        for columns in list(zip(*results, strict=True))[:3]
    )
    return Spectra(names, scales, norms, errors, frobenius, max(result.steps for result in results))
