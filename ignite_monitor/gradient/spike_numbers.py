"""Numbers of a gradient spike for event and log: value, threshold, and the parameters with the largest excess."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.detection.spikes import Detection
from ignite_monitor.gradient.detector import GradientDetection

_MOST, _LEAST = 3, 0.05  # number of culprits, and the smallest share of one


class SpikeNumbers(NamedTuple):
    """Numbers of a spike on the host; ``culprits`` are the parameters' shares of the excess, by name."""

    name: str  # "norm" or "loss"
    value: float
    threshold: float  # inf for none
    culprits: dict[str, float]

    @classmethod
    def from_host(cls, numbers: Sequence[float], names: Sequence[str]) -> SpikeNumbers:
        """Convert :func:`spike_numbers`, read on the host, of parameters with these names."""
        by_loss, value, threshold, *shares = numbers
        threshold = math.inf if math.isnan(threshold) else threshold
        return cls("loss" if by_loss else "norm", value, threshold, named(shares, names))

    def __str__(self) -> str:
        text = f"{'loss' if self.name == 'loss' else 'gradient norm'} {self.value:.3g}"
        if self.value <= self.threshold < math.inf:
            text += f", within its threshold {self.threshold:.3g}"
        elif 0 < self.threshold < math.inf > self.value:
            text += f", {self.value / self.threshold:.3g} x its threshold"
        shares = ", ".join(f"{100 * share:.0f} % of the excess in {name}" for name, share in self.culprits.items())
        return f"{text}; {shares}" if shares else text


def spike_numbers(detection: GradientDetection) -> Tensor:
    """Collect what is reported of a spike in a vector, without synchronization."""
    norm, loss, parameters = detection.norm, detection.loss, detection.parameters
    by_gradient = norm.spike if parameters is None else norm.spike | parameters.spike.any()
    numbers, by_loss = torch.stack((norm.value, norm.threshold)), torch.zeros_like(by_gradient)
    if loss is not None:
        by_loss, by_gradient = loss.spike & ~by_gradient, loss.spike | by_gradient
        numbers = torch.where(by_loss, torch.stack((loss.value, loss.threshold)).exp(), numbers)
    parts = [by_loss.view(1).to(numbers.dtype), numbers]
    if parameters is not None:  # none is named if only those of another rank are above their thresholds
        parts.append(culprits(parameters, by_gradient))
    return torch.cat(parts)


def excess_shares(detection: Detection) -> Tensor:
    """Share of each parameter in the excess of all norms over their thresholds; NaN if there is none.

    Norms that are not finite share it equally. If all norms are within their thresholds, it is the share in the excess
    over the means.
    """
    huge = torch.finfo(detection.value.dtype).max ** 0.5
    bounds = torch.stack((detection.threshold, detection.mean)).nan_to_num(math.inf)
    excess, beyond = (detection.value - bounds).nan_to_num(nan=huge, posinf=huge).clamp(min=0.0).unbind()
    excess = torch.where(excess.any(), excess, beyond)
    return excess / excess.sum()


def culprits(detection: Detection, spike: Tensor | bool = True) -> Tensor:
    """Return the largest shares of the excess if a 0-dim bool is True, then the parameters' indices, in one vector."""
    shares, indices = excess_shares(detection).topk(min(_MOST, len(detection.value)))
    return torch.cat((shares * spike, indices))


def named(culprits: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Convert :func:`culprits`, read on the host, to name -> share; small shares are omitted."""
    half = len(culprits) // 2
    shares = zip(culprits[half:], culprits[:half], strict=True)
    return {names[int(index)]: share for index, share in shares if share >= _LEAST}
