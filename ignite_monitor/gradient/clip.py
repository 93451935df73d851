"""Scaling a gradient in place, wherever it lies, without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.judging.spikes import Verdict
from ignite_monitor.model._torch import foreach_scale, sparse_parts
from ignite_monitor.model.devices import move
from ignite_monitor.model.norms import is_sharded


def exceeds(verdict: Verdict) -> Tensor:
    """Whether a finite norm is a spike above its threshold, and by scaling the gradient can be brought down to it."""
    return verdict.spike & ~verdict.nonfinite & (verdict.norm > verdict.threshold)


def clip(gradients: Sequence[Tensor], verdict: Verdict) -> None:
    """Scale gradients so that their norm is the threshold, where it exceeds it.

    Args:
        gradients: the gradients; DTensors and sparse ones too.
        verdict: of their norm.
    """
    scale(gradients, torch.where(exceeds(verdict), verdict.threshold / verdict.norm, 1.0))


def scale(gradients: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place, which by 1 changes no bit of them.

    Args:
        factor: 0-dim.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    with torch.no_grad():
        for gradient in gradients:
            values = _values(gradient)
            by_device.setdefault(values.device, []).append(values)
        for device, group in by_device.items():
            foreach_scale(group, move(factor, device))


def _values(gradient: Any) -> Tensor:
    """What a gradient's numbers lie in: of a DTensor this rank's part, of a sparse tensor its values."""
    if is_sharded(gradient):
        gradient = gradient.to_local()
    if gradient.layout == torch.sparse_coo:
        return sparse_parts(gradient)[1]
    values: Tensor = gradient if gradient.layout == torch.strided else gradient.values()
    return values
