"""Running mean and standard deviation, Welford's way, without waiting for a device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model._torch import foreach_add, foreach_addcdiv, foreach_mul


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

    @classmethod
    def of(cls, state: Mapping[str, Tensor]) -> Moments:
        """Those in a rule's state."""
        return cls(*(state[name] for name in cls._fields))

    def include(self, x: Tensor, decay: float = 1.0, delta: Tensor | None = None) -> Moments:
        """The state after one more number.

        Args:
            x: the number, a finite 0-dim tensor; or one number each for as many moments as there are.
            decay: what the weight of every earlier number is multiplied by.
            delta: x less the mean, where that is known.
        """
        count, weight, weight_squared, mean, spread = self
        if decay != 1.0:
            earlier = (weight, weight_squared, spread)
            weight, weight_squared, spread = foreach_mul(earlier, (decay, decay**2, decay))
        count, weight, weight_squared = foreach_add((count, weight, weight_squared), 1.0)
        delta = x - mean if delta is None else delta
        mean = torch.addcdiv(mean, delta, weight)
        return Moments(count, weight, weight_squared, mean, torch.addcmul(spread, delta, x - mean))

    def mean_and_std(self) -> tuple[Tensor, Tensor]:
        r"""The mean, NaN before the first number, and the sample standard deviation, NaN before the second.

        The latter is :math:`\sqrt{\sum w_i (x_i - \mu)^2 / (\sum w_i - \sum w_i^2 / \sum w_i)}`, which for equal
        weights divides by :math:`n - 1`.
        """
        _, weight, weight_squared, mean, spread = self
        # 0 / 0 where there is no number.
        freedom, mean = foreach_addcdiv((weight, mean), (weight_squared, mean), (weight, weight), (-1.0, 0.0))
        return mean, (spread / freedom).sqrt()

    @property
    def std(self) -> Tensor:
        """The sample standard deviation, see :meth:`mean_and_std`."""
        return self.mean_and_std()[1]
