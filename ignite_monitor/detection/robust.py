"""A threshold rule for noisy, skewed and drifting norms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ignite_monitor.checks import check_count, check_real
from ignite_monitor.detection.state import State
from ignite_monitor.detection.thresholds import NEGLIGIBLE, ThresholdRule


class RobustThreshold(ThresholdRule):
    r"""Threshold for noisy, drifting values: :math:`\max(\mu + k s,\ r \mu)` with an upper spread :math:`s`.

    :math:`\mu` is the exponentially weighted mean of the earlier values, and

    .. math::
        s = \Bigl(\frac{\sum_i w_i \max(x_i - \mu_{i-1}, 0)^3}{\sum_i w_i}\Bigr)^{1/3}

    the cube root of their upper partial moment of order 3 (P. C. Fishburn, American Economic Review 67(2), 1977,
    mirrored), with weights :math:`w_i = d^{\,n-i}` for the decay d. Values below the mean, as of a falling trend, do
    not widen :math:`s`, and a heavy upper tail widens it more than a standard deviation.

    A spike updates the statistics with the midpoint of mean and threshold. If more than :math:`(2/k)^3` of all values
    (6 in 100) are isolated spikes, :math:`s` widens until they are none. There is no threshold while it would exceed
    :math:`\mu` by less than :math:`10^{-6} |\mu|`.

    Args:
        k: number of upper spreads above the mean.
        warmup: number of values before the first threshold, at least 2.
        decay: factor of all earlier weights at every new value, in (0, 1); None gives all values the same weight.
        least: r, the least multiple of a positive mean that is a spike.

    Raises:
        TypeError: if an argument is not a number of the required kind.
        ValueError: if an argument is out of range.
    """

    def __init__(self, k: float = 5.25, warmup: int = 20, decay: float | None = 0.99, least: float = 2.0) -> None:
        self.k = check_real("k", k, above=0.0)
        self.least = check_real("least", least, above=0.0)
        super().__init__(warmup=check_count("warmup", warmup, least=2), decay=decay)

    def limit(self, state: State, mean: Tensor, std: Tensor) -> Tensor:
        spread = (state["upper"] / state["weight"]) ** (1 / 3)
        limit = torch.maximum(torch.add(mean, spread, alpha=self.k), max(self.least, 1.0) * mean)
        return limit.masked_fill(limit <= torch.add(mean, mean.abs(), alpha=NEGLIGIBLE), math.nan)

    def empty(self) -> State:
        return super().empty() | {"upper": torch.zeros((), dtype=torch.float64, device="cpu")}

    def entry(self, state: State, limit: Tensor) -> Tensor:
        return torch.lerp(limit, state["mean"], 0.5)

    def include(self, state: State, value: Tensor) -> State:
        delta = value - state["mean"]
        excess = delta.masked_fill(state["count"] < 1, 0.0).clamp(min=0.0)
        upper = torch.add(excess**3, state["upper"], alpha=self.decay)
        return self._moments(state, value, delta) | {"upper": upper}
