"""Threshold rules: the largest value that is no spike, estimated from earlier values."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from ignite_monitor.checks import check_count, check_function, check_real
from ignite_monitor.detection.state import State
from ignite_monitor.model._torch import foreach_add, foreach_mul

_MOMENTS = ("count", "weight", "mean", "spread")

NEGLIGIBLE = 1e-6
"""A standard deviation below this times the mean is rounding: in float32 norms have a relative error of about 1e-7."""


class ThresholdRule:
    r"""Base class of threshold rules: pure functions of the statistics of earlier values, a dict of tensors.

    A rule holds its settings alone, so monitors may share it. A subclass overrides :meth:`__call__`; one that needs
    more than the moments also extends :meth:`empty` and :meth:`include`, and may override :meth:`limit` and
    :meth:`entry`. All numbers are 0-dim tensors on the device of the values, or vectors if many values are followed
    side by side, and nothing reads them on the host.

    The statistics are ``count`` n, ``weight`` :math:`\sum w_i`, ``mean`` :math:`\mu`, ``spread``
    :math:`\frac{1 + d}{2} \sum w_i (x_i - \mu)^2`, and those of a subclass.

    The moments weigh the i-th of n values by :math:`w_i = d^{\,n-i}` with the decay d (Welford 1962, in the weighted
    form of D. H. D. West, "Updating mean and variance estimates: an improved method", CACM 22(9), 1979). The divisor
    of the sample variance, :math:`\sum w_i - \sum w_i^2 / \sum w_i`, equals :math:`2 (\sum w_i - 1) / (1 + d)`.

    Args:
        warmup: number of values before the first threshold.
        decay: factor of all earlier weights at every new value, in (0, 1); None gives all values the same weight.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument is out of its range.
    """

    def __init__(self, *, warmup: int = 20, decay: float | None = None) -> None:
        self.warmup = check_count("warmup", warmup)
        self.decay = 1.0 if decay is None else check_real("decay", decay, above=0.0, below=1.0)

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor | float:
        """Compute the largest value that is no spike; NaN or inf for no threshold, and of a norm also 0 and less.

        Args:
            mean: weighted mean of the earlier values, 0-dim.
            std: their weighted sample standard deviation, 0-dim; NaN before the second.
            count: their number, 0-dim.
        """
        return math.nan

    def limit(self, state: State, mean: Tensor, std: Tensor) -> Tensor | float:
        """Compute the largest value that is no spike from all statistics; that of :meth:`__call__` by default.

        Args:
            state: the statistics, as :meth:`include` returned them.
            mean: weighted mean of the earlier values; NaN before the first.
            std: their weighted sample standard deviation; NaN before the second.
        """
        return self(mean, std, state["count"])

    def empty(self) -> State:
        """Create the statistics before the first value: name -> 0-dim float64 tensor on the CPU."""
        return {name: torch.zeros((), dtype=torch.float64, device="cpu") for name in _MOMENTS}

    def include(self, state: State, value: Tensor) -> State:
        """Return the statistics after one more value, as new tensors.

        Args:
            state: the statistics before the value.
            value: the value, 0-dim.
        """
        return self._moments(state, value, value - state["mean"])

    def _moments(self, state: State, value: Tensor, delta: Tensor) -> State:
        weight, spread = state["weight"], state["spread"]
        if self.decay != 1.0:
            weight, spread = foreach_mul((weight, spread), self.decay)
        count, weight = foreach_add((state["count"], weight), 1.0)
        mean = torch.addcdiv(state["mean"], delta, weight)
        spread = torch.addcmul(spread, delta, value - mean, value=(1.0 + self.decay) / 2.0)
        return dict(zip(_MOMENTS, (count, weight, mean, spread), strict=True))

    def entry(self, state: State, limit: Tensor) -> Tensor:
        """Return the value that updates the statistics in place of a spike.

        Args:
            state: the statistics before the spike.
            limit: the threshold that the spike exceeds, 0-dim; returned by default.
        """
        return limit


class MeanStdThreshold(ThresholdRule):
    r"""A value above :math:`\mu + k \sigma` is a spike.

    :math:`\mu` and :math:`\sigma` are mean and sample standard deviation of the earlier values, exponentially weighted
    with ``decay``. There is no threshold while :math:`\sigma \le 10^{-6} |\mu|`. ``docs/detection.md`` reports false
    alarms and recall.

    Args:
        k: number of standard deviations above the mean.
        warmup: number of values before the first threshold, at least 2.
        decay: factor of all earlier weights at every new value, in (0, 1); None gives all values the same weight.

    Raises:
        TypeError: if an argument is not a number of the required kind.
        ValueError: if an argument is out of range.
    """

    def __init__(self, k: float = 6.0, warmup: int = 20, decay: float | None = 0.99) -> None:
        self.k = check_real("k", k, above=0.0)
        super().__init__(warmup=check_count("warmup", warmup, least=2), decay=decay)

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        return torch.add(mean, std, alpha=self.k).masked_fill(std <= NEGLIGIBLE * mean.abs(), math.nan)


class StaticThreshold(ThresholdRule):
    """A value above a fixed number is a spike, from the first one on.

    Args:
        value: the number, greater than 0.
    """

    def __init__(self, value: float) -> None:
        self.value = check_real("value", value, above=0.0)
        super().__init__(warmup=0)

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> float:
        return self.value


class CallableThreshold(ThresholdRule):
    """A value above ``rule(mean, std, count)`` is a spike, from the third value on.

    Raises:
        TypeError: if ``rule`` is no function of three 0-dim tensors that returns a number or a 0-dim tensor.
    """

    def __init__(self, rule: Callable[[Tensor, Tensor, Tensor], Tensor | float]) -> None:
        described = "a threshold rule, a number, or a function of mean, std and count that returns a number"
        if isinstance(rule, type):
            raise TypeError(f"Argument threshold should be {described}, but given {rule}: give an instance")
        check_function("threshold", rule, "mean", "std", "count", described=described, optional=False)
        super().__init__(warmup=2)
        answer = rule(*torch.tensor([1.0, 0.1, 100.0], dtype=torch.float64, device="cpu").unbind())
        if not (isinstance(answer, Real) or (isinstance(answer, Tensor) and answer.ndim == 0)):
            raise TypeError(f"Argument threshold should be {described}, but {rule} returned {type(answer)}")
        self.rule = rule

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor | float:
        return self.rule(mean, std, count)


Threshold = ThresholdRule | Callable[[Tensor, Tensor, Tensor], Tensor | float] | float | None


def as_rule(threshold: Threshold) -> ThresholdRule:
    """Make a rule of a ``threshold`` argument."""
    if threshold is None:
        return MeanStdThreshold()
    if isinstance(threshold, Real) and not isinstance(threshold, bool):
        return StaticThreshold(check_real("threshold", threshold, above=0.0))
    if isinstance(threshold, ThresholdRule):
        return threshold
    return CallableThreshold(cast(Any, threshold))
