"""The result for one gradient, and its description as a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.detection.spikes import Detection
from ignite_monitor.events.monitor_events import NonFiniteSource, Spike


class GradientDetection(NamedTuple):
    """Result for one gradient; its flags are the same on every rank, 0-dim."""

    norm: Detection  # of its norm over all ranks
    parameters: Detection | None  # of the norm of each parameter; None if these are not compared
    spike: Tensor  # whether any of them is a spike
    threshold_reset: Tensor  # whether it resets any of their rules
    names: tuple[str, ...] = ()  # those of the parameters
    origin: Tensor | None = None  # as of a RankNorm

    def numbers(self) -> Tensor:
        """Collect the numbers that :meth:`to_spike` needs in a vector, without synchronization."""
        norm, parameters = self.norm, self.parameters
        parts = [torch.stack((norm.value, norm.applied_threshold))]
        if self.origin is not None:
            parts.append(self.origin.view(1))
        if parameters is not None:  # none is named if only those of another rank are above their thresholds
            parts.append(culprits(parameters) * (self.spike & (norm.spike | parameters.spike.any())))
        return torch.cat(parts)

    def to_spike(self, numbers: Sequence[float], monitor: Any, source: NonFiniteSource | None) -> Spike:
        """Convert :meth:`numbers`, read on the host; the largest part is on a rank if the ranks' gradients differ."""
        value, threshold, *shares = numbers
        rank = None if self.origin is None else int(shares.pop(0))
        threshold = math.inf if math.isnan(threshold) else threshold
        return Spike(monitor, f"{monitor.prefix}/norm", value, threshold, named(shares, self.names), source, rank)


def describe(spike: Spike) -> str:
    """Describe a spike of a gradient in words."""
    text = f"gradient norm {spike.value:.3g}"
    if 0 < spike.threshold < spike.value < math.inf:
        text += f", {spike.value / spike.threshold:.3g} x its threshold"
    if spike.rank is not None:
        text += f", most of it on rank {spike.rank}"
    shares = ", ".join(f"{100 * share:.0f} % of the excess in {name}" for name, share in spike.culprits.items())
    return f"{text}; {shares}" if shares else text


def culprits(detection: Detection) -> Tensor:
    """Return the three largest shares in the excess of all norms over their thresholds, then the parameters' indices.

    Norms that are not finite share it equally. If all norms are within their thresholds, it is the excess over the
    means.
    """
    huge = torch.finfo(detection.value.dtype).max ** 0.5
    bounds = torch.stack((detection.applied_threshold, detection.mean)).nan_to_num(math.inf)
    excess, beyond = (detection.value - bounds).nan_to_num(nan=huge, posinf=huge).clamp(min=0.0).unbind()
    excess = torch.where(excess.any(), excess, beyond)
    shares, indices = (excess / excess.sum()).topk(min(3, len(excess)))
    return torch.cat((shares, indices))


def named(culprits: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Convert :func:`culprits`, read on the host, to name -> share; shares below 5 % are omitted."""
    half = len(culprits) // 2
    shares = zip(culprits[half:], culprits[:half], strict=True)
    return {names[int(index)]: share for index, share in shares if share >= 0.05}
