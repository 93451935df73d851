"""Isolated spikes that recur at a similar size: rare data, which a skipped step would never learn."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ignite_monitor.detection.state import Statistics

_COUNT = 5  # isolated spikes of a similar size that are data
_RATIO = 2.0  # between similar sizes
_WINDOW = 1000  # iterations in which they occur
_KEPT = 16  # of the latest isolated spikes


class RecurringSpikes(Statistics):
    """Recognizes isolated spikes like those before: five, within 1,000 iterations and a factor of two of the latest.

    Of spikes in a row only the first is isolated, and the last 16 are kept, latest first. Nothing is read on the host.
    """

    def __init__(self) -> None:
        none = torch.full((_KEPT,), math.nan, dtype=torch.float64, device="cpu")
        super().__init__({"iterations": none, "norms": none})

    def observe(self, iteration: int, norm: Tensor, is_isolated: Tensor) -> Tensor:
        """Note the norm of an iteration if it is an isolated spike, 0-dim; return whether it is, and recurs."""
        self.move_like(norm)
        spikes = self.rows.masked_fill(self.rows[0] > iteration, math.nan)  # of an earlier run
        first = torch.stack((torch.full_like(norm, iteration), norm)).view(2, 1)
        self.rows = torch.where(is_isolated, torch.cat((first, spikes[:, :-1]), 1), spikes)
        return is_isolated & (self._similar(iteration).sum() >= _COUNT)

    def iterations(self, iteration: int) -> Tensor:
        """The iterations of the spikes like the latest one, if that recurs; NaN for others."""
        similar = self._similar(iteration)
        return self.rows[0].masked_fill(~(similar & (similar.sum() >= _COUNT)), math.nan)

    def _similar(self, iteration: int) -> Tensor:
        at, norms = self.rows.unbind()
        return torch.stack((at > iteration - _WINDOW, norms <= _RATIO * norms[0], norms >= norms[0] / _RATIO)).all(0)

    def reset_threshold(self) -> None:
        """Keep the spikes: they are of the data."""
