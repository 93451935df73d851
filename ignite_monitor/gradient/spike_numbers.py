"""Numbers of a gradient spike for event and log: value, threshold, and the parameters with the largest excess."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.detection.spikes import Detection
from ignite_monitor.gradient.detector import GradientDetection
from ignite_monitor.model.names import tags

_MOST, _LEAST = 3, 0.05  # number of culprits, and the smallest share of one


class SpikeNumbers(NamedTuple):
    """Numbers of a spike on the host; ``culprits`` are the parameters' shares of the excess, by name."""

    name: str  # "norm" or "loss"
    value: float
    threshold: float  # inf for none
    culprits: dict[str, float]

    def __str__(self) -> str:
        what = "loss" if self.name == "loss" else "gradient norm"
        return described(what, self.value, self.threshold, self.culprits)


def spike_numbers(detection: GradientDetection) -> Tensor:
    """Collect what is reported of a spike in a vector for :func:`read_numbers`, without synchronization."""
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


def read_numbers(numbers: Sequence[float], names: Sequence[str]) -> SpikeNumbers:
    """Convert :func:`spike_numbers`, read on the host, of parameters with these names."""
    by_loss, value, threshold, *shares = numbers
    threshold = math.inf if math.isnan(threshold) else threshold
    return SpikeNumbers("loss" if by_loss else "norm", value, threshold, named(shares, names))


def host_numbers(detection: GradientDetection) -> SpikeNumbers:
    """Read the numbers of a spike on the host."""
    return read_numbers(spike_numbers(detection).tolist(), detection.names)


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


def published_shares(shares: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Name the shares of some of the parameters by the published keys."""
    tag_of = dict(zip(names, tags(names), strict=True)) if shares else {}
    return {f"culprit/{tag_of[name]}": share for name, share in shares.items()}


def described(what: str, value: float, threshold: float, shares: Mapping[str, float]) -> str:
    """Describe a spike in words; ``shares`` are those of parameters in the excess, by name."""
    text = f"{what} {value:.3g}"
    if value <= threshold < math.inf:
        text += f", within its threshold {threshold:.3g}"
    elif 0 < threshold < math.inf > value:
        text += f", {value / threshold:.3g} x its threshold"
    listed = ", ".join(f"{100 * share:.0f} % of the excess in {name}" for name, share in shares.items())
    return f"{text}; {listed}" if listed else text
