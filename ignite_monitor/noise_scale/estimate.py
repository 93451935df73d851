"""Gradient noise scale from the norms of gradients of independent micro-batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ignite_monitor.model.devices import move_like

_Z = 1.959963984540054  # 97.5th percentile of the normal distribution
FEWEST = 20  # effective observations, from which on the normal distribution is used in place of Student's


def noise_and_signal(square_sum: Tensor, weighted_sum: Tensor, items: Tensor, total: Tensor, count: Tensor) -> Tensor:
    r"""Estimate the trace of the covariance of single gradients, and the squared true gradient, without bias: (2,).

    For k = ``count`` independent gradients :math:`d_i` of the mean loss over :math:`n_i` items each, with
    ``square_sum`` :math:`\sum_i |d_i|^2`, ``weighted_sum`` :math:`\sum_i n_i |d_i|^2`, ``items`` :math:`\sum_i n_i`
    and ``total`` :math:`|\sum_i d_i|^2`:

    .. math::
        |G|^2 \approx \frac{|\sum_i d_i|^2 - \sum_i |d_i|^2}{k (k - 1)}, \qquad
        \mathrm{tr}\,\Sigma \approx \frac{1}{k} \sum_i n_i \left(|d_i|^2 - |G|^2\right).

    For equal :math:`n_i` these are the estimates of arXiv:1812.06162, appendix A.1.
    """
    signal = (total - square_sum) / (count * (count - 1))
    return torch.stack([(weighted_sum - items * signal) / count, signal])


class RatioOfMeans:
    r"""Ratio of the exponentially weighted means of two numbers, with its 95 % interval.

    The interval is Fieller's (E. C. Fieller, "Some problems in interval estimation", 1954). Unlike one from the
    ratio's standard error it is right if the denominator is hardly distinguishable from 0, and has no end then. The
    effective number of observations :math:`(\sum w)^2 / \sum w^2` tends to ``(1 + decay) / (1 - decay)``.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        # Weighted sums of 1, x, y, x^2, xy, y^2, and the sum of the squared weights.
        self.moments = torch.zeros(7, dtype=torch.float64, device="cpu")

    def observe(self, pair: Tensor) -> None:
        """Update the means by numerator and denominator, unless one is not finite."""
        x, y = pair.unbind()
        one = torch.ones_like(x)
        new = torch.stack([one, x, y, x * x, x * y, y * y, one])
        decays = torch.full_like(new, self.decay)
        decays[-1:] *= self.decay
        old = move_like(self.moments, new)
        self.moments = torch.where(new.isfinite().all(), old * decays + new, old)

    def interval(self) -> Tensor:
        """Return the ratio, and the ends of its interval: (3,).

        NaN if the interval has no end, or there are fewer than 20 effective observations.
        """
        weight, x, y, xx, xy, yy, squares = self.moments.unbind()
        x, y, xx, xy, yy = (moment / weight for moment in (x, y, xx, xy, yy))
        share = squares / weight**2  # 1 / effective number of observations
        z2 = _Z**2 * share / (1 - share)
        a, b, c = y * y - z2 * (yy - y * y), x * y - z2 * (xy - x * y), x * x - z2 * (xx - x * x)
        root = (b * b - a * c).clamp(min=0).sqrt()
        values = torch.stack([x / y, (b - root) / a, (b + root) / a])
        return torch.where((share * FEWEST <= 1) & (a > 0) & (y > 0), values, math.nan)
