"""The gradient noise scale, from the norms of gradients of independent micro-batches."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_Z = 1.959963984540054  # of a normal distribution, 2.5 % lie above it


def noise_and_signal(square_sum: Tensor, weighted_sum: Tensor, items: Tensor, total: Tensor, count: Tensor) -> Tensor:
    r"""Unbiased estimates of the trace of the covariance of single gradients, and of the squared true gradient.

    For independent gradients :math:`d_i` of the mean loss over :math:`n_i` items each, k of them,

    .. math::
        |G|^2 \approx \frac{|\sum_i d_i|^2 - \sum_i |d_i|^2}{k (k - 1)}, \qquad
        \mathrm{tr}\,\Sigma \approx \frac{1}{k} \sum_i n_i \left(|d_i|^2 - |G|^2\right).

    For equal :math:`n_i` these are the estimates of arXiv:1812.06162, appendix A.1. A common factor of all gradients
    comes in as its square in both.

    Args:
        square_sum: :math:`\sum_i |d_i|^2`, 0-dim, as all others.
        weighted_sum: :math:`\sum_i n_i |d_i|^2`.
        items: :math:`\sum_i n_i`.
        total: :math:`|\sum_i d_i|^2`.
        count: k, at least 2.

    Returns:
        The trace and the square, of shape (2,).
    """
    signal = (total - square_sum) / (count * (count - 1))
    return torch.stack([(weighted_sum - items * signal) / count, signal])


class RatioOfMeans:
    r"""The ratio of the means of two numbers that are observed together, and its interval.

    Means, variances and covariance are weighted exponentially, each observation by ``decay`` to the power of its age.
    The interval holds the ratio with a probability of 95 %, by Fieller's theorem (E. C. Fieller, "Some problems in
    interval estimation", 1954) with Student's t for the effective number of observations
    :math:`(\sum w)^2 / \sum w^2`: unlike one from the ratio's standard error it is right where the denominator is
    hardly other than 0, and then has no end.

    Args:
        decay: what an observation's weight is multiplied by at each later one.

    Attributes:
        moments: weighted sums of 1, x, y, x^2, xy, y^2, and the sum of the squared weights, of shape (7,).
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.moments = torch.zeros(7, dtype=torch.float64, device="cpu")

    def observe(self, pair: Tensor) -> None:
        """Take in a numerator and a denominator; nothing happens where one is not finite.

        Args:
            pair: of shape (2,).
        """
        x, y = pair.unbind()
        one = torch.ones_like(x)
        new = torch.stack([one, x, y, x * x, x * y, y * y, one])
        decays = torch.full_like(new, self.decay)
        decays[-1:] *= self.decay
        old = self.moments.to(new, non_blocking=new.device.type != "cpu")
        self.moments = torch.where(new.isfinite().all(), old * decays + new, old)

    def interval(self) -> Tensor:
        """The ratio, and the lower and upper end of its interval, of shape (3,); NaN where they have no end."""
        weight, x, y, xx, xy, yy, squares = self.moments.unbind()
        x, y, xx, xy, yy = (each / weight for each in (x, y, xx, xy, yy))
        share = squares / weight**2  # 1 / effective number
        t2 = _student(1 / share - 1) ** 2 * share / (1 - share)
        a, b, c = y * y - t2 * (yy - y * y), x * y - t2 * (xy - x * y), x * x - t2 * (xx - x * x)
        root = (b * b - a * c).clamp(min=0).sqrt()
        found = torch.stack([x / y, (b - root) / a, (b + root) / a])
        return torch.where((a > 0) & (y > 0), found, math.nan)


def _student(freedom: Tensor) -> Tensor:
    """What 2.5 % of Student's distribution lie above (M. Abramowitz, I. A. Stegun, 1964, 26.7.5)."""
    z = _Z
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + torch.stack([term / freedom ** (i + 1) for i, term in enumerate(terms)]).sum()
