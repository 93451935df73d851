"""Isolated spikes that recur at a similar size: rare data, which a skipped step would never learn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

_COUNT = 5  # isolated spikes of a similar size that are data
_RATIO = 2.0  # largest by smallest of them
_WINDOW = 1000  # iterations in which they occur, and after the last of which they are forgotten


class RecurringSpikes:
    """Recognizes isolated spikes of a similar size, five within 1,000 iterations. Spikes in a row do not count.

    Attributes:
        spikes: iterations and sizes of the isolated spikes of the last 1,000 iterations.
        sizes: smallest and largest size of spikes that recur; empty if none do.
    """

    def __init__(self) -> None:
        self.spikes: list[tuple[int, float]] = []
        self.sizes: list[float] = []
        self._last = -2  # iteration of the latest spike

    def observe(self, iteration: int, size: float) -> list[int]:
        """Note a spike; return the iterations of those that recur, when this one is the first to show it."""
        follows, self._last = iteration - self._last == 1, iteration
        self.spikes = [(at, other) for at, other in self.spikes if 0 <= iteration - at < _WINDOW]
        if follows:
            self.spikes = [(at, other) for at, other in self.spikes if at != iteration - 1]
            return []
        known = bool(self.sizes)
        if not self.spikes:
            self.sizes = []
        self.spikes.append((iteration, size))
        by_size = sorted(self.spikes, key=lambda spike: spike[1])
        for group in zip(*(by_size[place:] for place in range(_COUNT)), strict=False):
            smallest, largest = group[0][1], group[-1][1]
            if largest <= _RATIO * smallest:
                self.sizes = [min([smallest, *self.sizes]), max([largest, *self.sizes])]
                return [] if known else sorted(at for at, _ in group)
        return []

    @property
    def largest(self) -> float:
        """The largest of the spikes that recur; inf if none do."""
        return self.sizes[1] if self.sizes else math.inf

    def covers(self, size: Tensor) -> Tensor:
        """Return whether a spike is one of those that recur: within a factor of two of their sizes."""
        smallest, largest = self.sizes or (1.0, 0.0)
        return (size >= smallest / _RATIO) & (size <= largest * _RATIO)

    def state_dict(self) -> dict[str, Any]:
        """Return the state: lists of numbers."""
        return {"spikes": [list(spike) for spike in self.spikes], "sizes": [*self.sizes], "last": self._last}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.spikes = [(int(at), float(size)) for at, size in state_dict["spikes"]]
        self.sizes, self._last = [*state_dict["sizes"]], int(state_dict["last"])
