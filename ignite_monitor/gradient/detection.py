"""The result for one gradient, and its description as a spike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.detection.spikes import Detection
from ignite_monitor.monitor.ranks import Ranks


class GradientDetection(NamedTuple):
    """Result for one gradient."""

    norm: Detection  # of its norm over all ranks
    loss: Detection | None  # of its loss; None if losses are not compared
    parameters: Detection | None  # of the norm of each parameter; None if these are not compared
    # The same on every rank, 0-dim:
    by_gradient: Tensor  # whether the norm, or that of a parameter, is a spike
    above: Tensor  # whether one of these norms is finite and above its threshold
    spike: Tensor  # whether any of them is a spike
    threshold_reset: Tensor  # whether it resets any of their rules
    names: tuple[str, ...] = ()  # those of the parameters
    origin: Tensor | None = None  # as of a RankNorm

    @property
    def exceeds(self) -> Tensor:
        """True if the norm is finite, and it or that of a parameter is above its threshold; 0-dim."""
        return self.above & ~self.norm.nonfinite

    def values(self) -> dict[str, Tensor]:
        """Published values by name, but for counts."""
        norm, loss = self.norm, self.loss
        values = {"norm": norm.value, "threshold": norm.threshold, "mean": norm.mean, "std": norm.std}
        values["spike"] = self.spike
        if loss is not None:  # a loss without a logarithm is not compared
            values["loss_spike"] = loss.spike.to(norm.value.dtype).masked_fill(loss.value.isneginf(), math.nan)
        return values

    def numbers(self) -> Tensor:
        """Collect the numbers of a :class:`SpikeNumbers` in a vector, without synchronization."""
        norm, loss, parameters = self.norm, self.loss, self.parameters
        numbers, by_loss = torch.stack((norm.value, norm.threshold)), torch.zeros_like(self.by_gradient)
        if loss is not None:
            by_loss = loss.spike & ~self.by_gradient
            numbers = torch.where(by_loss, torch.stack((loss.value, loss.threshold)).exp(), numbers)
        origin = () if self.origin is None else (self.origin.view(1),)
        parts = [by_loss.view(1).to(numbers.dtype), numbers, *origin]
        if parameters is not None:  # none is named if only those of another rank are above their thresholds
            parts.append(culprits(parameters) * (self.spike & (norm.spike | parameters.spike.any() | by_loss)))
        return torch.cat(parts)


class SpikeNumbers(NamedTuple):
    """Numbers of a spike on the host."""

    name: str  # "norm", or "loss" if the gradient is within its threshold
    value: float
    threshold: float  # inf for none
    culprits: dict[str, float]  # parameters with the largest excess over their thresholds -> share of it
    rank: int | None = None  # with the largest part of the norm; None if all ranks have the same
    stage: int | None = None  # of this rank, if the group has several

    @classmethod
    def from_host(cls, numbers: Sequence[float], detection: GradientDetection, ranks: Ranks) -> SpikeNumbers:
        """Convert :meth:`GradientDetection.numbers`, read on the host."""
        by_loss, value, threshold, *shares = numbers
        threshold = math.inf if math.isnan(threshold) else threshold
        place = (None, None) if detection.origin is None else ranks.place(shares.pop(0))
        name, place = ("loss", (None, None)) if by_loss else ("norm", place)
        return cls(name, value, threshold, named(shares, detection.names), *place)

    def __str__(self) -> str:
        text = f"{'loss' if self.name == 'loss' else 'gradient norm'} {self.value:.3g}"
        if 0 < self.threshold < self.value < math.inf:
            text += f", {self.value / self.threshold:.3g} x its threshold"
        if self.rank is not None:
            text += f", most of it on rank {self.rank}" + ("" if self.stage is None else f" (stage {self.stage})")
        shares = ", ".join(f"{100 * share:.0f} % of the excess in {name}" for name, share in self.culprits.items())
        return f"{text}; {shares}" if shares else text


def culprits(detection: Detection) -> Tensor:
    """Return the three largest shares in the excess of all norms over their thresholds, then the parameters' indices.

    Norms that are not finite share it equally. If all norms are within their thresholds, it is the excess over the
    means.
    """
    huge = torch.finfo(detection.value.dtype).max ** 0.5
    bounds = torch.stack((detection.threshold, detection.mean)).nan_to_num(math.inf)
    excess, beyond = (detection.value - bounds).nan_to_num(nan=huge, posinf=huge).clamp(min=0.0).unbind()
    excess = torch.where(excess.any(), excess, beyond)
    shares, indices = (excess / excess.sum()).topk(min(3, len(excess)))
    return torch.cat((shares, indices))


def named(culprits: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Convert :func:`culprits`, read on the host, to name -> share; shares below 5 % are omitted."""
    half = len(culprits) // 2
    shares = zip(culprits[half:], culprits[:half], strict=True)
    return {names[int(index)]: share for index, share in shares if share >= 0.05}
