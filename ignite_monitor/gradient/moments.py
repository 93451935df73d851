"""Running mean and standard deviation, Welford's way, without waiting for a device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model._torch import foreach_add, foreach_mul


class Moments(NamedTuple):
    r"""Weighted mean and spread of the numbers seen so far, five tensors of one shape.

    The i-th of n numbers weighs :math:`w_i = d^{\,n-i}` with the decay :math:`d \in (0, 1]`; at
    :math:`d = 1` all weigh the same, and the formulas are Welford's (1962) in West's weighted form
    (D. H. D. West, "Updating mean and variance estimates: an improved method", CACM 22(9), 1979).

    Attributes:
        count: n, how many numbers went in.
        weight: :math:`\sum w_i`.
        weight_squared: :math:`\sum w_i^2`.
        mean: :math:`\mu = \sum w_i x_i / \sum w_i`.
        spread: :math:`\sum w_i (x_i - \mu)^2`.
    """

    count: Tensor  # type: ignore[assignment]  # in place of tuple.count
    weight: Tensor
    weight_squared: Tensor
    mean: Tensor
    spread: Tensor

    @classmethod
    def empty(cls) -> Moments:
        """The state before the first number, on the CPU."""
        return cls(*torch.zeros(len(cls._fields), dtype=torch.float64, device="cpu").unbind())

    def include(self, x: Tensor, decay: float = 1.0) -> Moments:
        """The state after one more number.

        Args:
            x: the number, a finite 0-dim tensor; or one number each for as many moments as there are.
            decay: what the weight of every earlier number is multiplied by.
        """
        count, weight, weight_squared, mean, spread = self
        if decay != 1.0:
            earlier = (weight, weight_squared, spread)
            weight, weight_squared, spread = foreach_mul(earlier, (decay, decay**2, decay))
        count, weight, weight_squared = foreach_add((count, weight, weight_squared), 1.0)
        delta = x - mean
        mean = torch.addcdiv(mean, delta, weight)
        return Moments(count, weight, weight_squared, mean, torch.addcmul(spread, delta, x - mean))

    @property
    def std(self) -> Tensor:
        r"""The sample standard deviation, NaN before the second number.

        :math:`\sqrt{\sum w_i (x_i - \mu)^2 / (\sum w_i - \sum w_i^2 / \sum w_i)}`, which for equal
        weights divides by :math:`n - 1`.
        """
        return (self.spread / torch.addcdiv(self.weight, self.weight_squared, self.weight, value=-1.0)).sqrt()
