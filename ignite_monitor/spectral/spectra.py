"""Spectral norms of the weights of a model, small ones of one shape together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ignite_monitor.model.devices import move
from ignite_monitor.model.sampling import fnv1a_64
from ignite_monitor.spectral.matrices import Label
from ignite_monitor.spectral.norm import SpectralNorms, measure

# Matrices with at most so many elements are stacked, up to so many in all. A device takes longest to launch.
_SMALL, _SMALL_ON_DEVICE, _LARGEST_STACK = 1 << 16, 1 << 20, 1 << 24


def measure_all(matrices: Iterable[tuple[Label, Tensor]], method: str) -> tuple[list[Label], SpectralNorms]:
    """Measure matrices, at least one; large ones are released one by one. The labels are in the order of the norms."""
    labels: list[Label] = []
    results: list[SpectralNorms] = []
    stacks: dict[object, list[tuple[Label, Tensor]]] = {}

    def measure_stack(key: object) -> None:
        members, parts = zip(*stacks.pop(key), strict=True)
        labels.extend(members)
        results.append(measure(torch.stack(parts), method, fnv1a_64("\n".join(label.name for label in members))))

    for label, matrix in matrices:
        is_small = matrix.numel() <= (_SMALL if matrix.device.type == "cpu" else _SMALL_ON_DEVICE)
        key: object = (matrix.shape, matrix.dtype, matrix.device) if is_small else label.name
        stacks.setdefault(key, []).append((label, matrix))
        if not is_small or len(stacks[key]) * matrix.numel() >= _LARGEST_STACK:
            measure_stack(key)
    for key in list(stacks):
        measure_stack(key)
    device = results[0].norms.device
    columns = zip(*results, strict=True)
    return labels, SpectralNorms(*(torch.cat([move(part, device) for part in column]) for column in columns))
