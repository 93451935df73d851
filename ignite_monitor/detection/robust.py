"""A threshold rule for noisy, skewed and drifting norms."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ignite_monitor.checks import check_count, check_real
from ignite_monitor.detection.thresholds import Moments, State, ThresholdRule


class RobustThreshold(ThresholdRule):
    r"""A norm above :math:`\max(\mu + k s,\ r \mu)` is a spike, with a spread :math:`s` of the upper side alone.

    :math:`\mu` is the exponentially weighted mean of the norms so far, and

    .. math::
        s = \Bigl(\frac{\sum_i w_i \max(x_i - \mu_{i-1}, 0)^3}{\sum_i w_i}\Bigr)^{1/3}

    the cube root of their upper partial moment of order 3 (P. C. Fishburn, "Mean-risk analysis with risk associated
    with below-target returns", American Economic Review 67(2), 1977, mirrored), each norm measured from the mean of
    those before it, with weights :math:`w_i = d^{\,n-i}` of the decay d; the first norm counts as no deviation. What
    norms do below the mean, a falling trend included, does not widen :math:`s`, and a heavy upper tail widens it more
    than a standard deviation.

    A spike enters halfway between the mean and the threshold it exceeded. A single one hardly moves the statistics;
    single ones that are more than :math:`(2/k)^3` of all norms (6 in 100) widen :math:`s` until they are none.

    The threshold scales with the norms. As long as all of them are zero, nothing is judged.

    Args:
        k: how many upper spreads above the mean.
        warmup: how many norms go in before any is judged, 2 at least.
        decay: weight of the past at every new norm, in (0, 1); None weighs all norms the same.
        least: r, how many times the mean a spike is at least, however even the norms; 1 or less asks for nothing.

    Raises:
        TypeError: if an argument is not a number of the kind it should be.
        ValueError: if an argument is out of its range.
    """

    _ORDER = 3
    _is_number = True

    def __init__(self, k: float = 5.25, warmup: int = 20, decay: float | None = 0.99, least: float = 2.0) -> None:
        self.k = check_real("k", k, above=0.0)
        self.least = check_real("least", least, above=0.0)
        super().__init__(warmup=check_count("warmup", warmup, least=2), decay=decay)

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        spread = (self.state["upper"] / self.state["weight"]) ** (1 / self._ORDER)
        limit = torch.maximum(torch.add(mean, spread, alpha=self.k), self.least * mean)
        return torch.threshold(limit, 0.0, math.inf)

    def empty(self) -> State:
        return super().empty() | {"upper": torch.zeros((), dtype=torch.float64, device="cpu")}

    def entry(self, limit: Tensor) -> Tensor:
        return torch.lerp(limit, self.state["mean"], 0.5)  # inf stays inf, which the other way round is NaN

    def include(self, state: State, norm: Tensor) -> State:
        at_most = state["count"] * torch.finfo(norm.dtype).max  # 0 for the first norm
        delta = norm - state["mean"]
        excess = delta.clamp(self._empty[0], at_most)
        upper = torch.add(excess**self._ORDER, state["upper"], alpha=self.decay)
        return Moments.of(state).include(norm, self.decay, delta)._asdict() | {"upper": upper}
