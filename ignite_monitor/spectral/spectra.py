"""Spectral norms of the weights of a model, small ones of one shape together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ignite_monitor.model.devices import move
from ignite_monitor.model.sampling import fnv1a_64
from ignite_monitor.spectral.effective_weights import Weight
from ignite_monitor.spectral.norm import SpectralNorms, measure

# Matrices with at most so many elements are stacked, up to so many in all. A device takes longest to launch.
_SMALL, _SMALL_ON_DEVICE, _LARGEST_STACK = 1 << 16, 1 << 20, 1 << 24


def measure_all(weights: Iterable[Weight], method: str) -> tuple[list[str], list[float], SpectralNorms]:
    """Names and scales of all weights, at least one, and their norms; large weights are released one by one."""
    names: list[str] = []
    scales: list[float] = []
    batches: dict[object, list[tuple[int, Tensor]]] = {}
    order: list[int] = []
    results: list[SpectralNorms] = []

    def finish(batch: list[tuple[int, Tensor]]) -> None:
        places, matrices = zip(*batch, strict=True)
        order.extend(places)
        seed = fnv1a_64("\n".join(names[place] for place in places))
        results.append(measure(torch.stack(matrices), method, seed))

    for place, (name, matrix, scale) in enumerate(weights):
        names.append(name)
        scales.append(scale)
        is_small = matrix.numel() <= (_SMALL if matrix.device.type == "cpu" else _SMALL_ON_DEVICE)
        key = (matrix.shape, matrix.dtype, matrix.device) if is_small else place
        batch = batches.setdefault(key, [])
        batch.append((place, matrix))
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
    return names, scales, SpectralNorms(norms, errors, frobenius, max(result.steps for result in results))
