"""Whether numbers exceed their levels, judged on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ignite_monitor.judging.spikes import Kind, outcome


class Levels:
    """Which of some numbers exceed their levels: a ``SpikeDetector`` for each, in Python's floats.

    Args:
        limit: function of mean and deviation of the earlier ones, exponentially weighted with 0.95: the largest that
            is no spike.
        patience: how many spikes in a row mean trouble.
    """

    _WARMUP, _DECAY = 20, 0.95
    _START = (0.0,) * 6  # count, weight, squared weight, mean, spread (see ``Moments``), and the state of ``outcome``

    def __init__(self, limit: Callable[[float, float], float], patience: int) -> None:
        self._limit = limit
        self.patience = patience
        self._rows: list[tuple[float, ...]] = []

    def observe(self, values: Sequence[float]) -> tuple[bool, bool]:
        """Whether any is above its level, and whether any has been so often enough in a row; takes all of them in."""
        if len(values) != len(self._rows):
            self._rows = [self._START] * len(values)
        spike = trouble = False
        for place, value in enumerate(values):
            *moments, state = self._rows[place]
            limit = self._limit_of(moments)
            found = outcome(int(state), _kind(value, limit), self.patience, overflow_is_spike=False)
            spike, trouble = spike or bool(found.spike), trouble or bool(found.level_changed)
            if found.level_changed:
                moments = [0.0] * 5
            if not math.isnan(found.entry):
                moments = self._with(moments, min(value, limit + found.entry))
            self._rows[place] = (*moments, found.state)
        return spike, trouble

    def _limit_of(self, moments: list[float]) -> float:
        count, weight, weight_squared, mean, spread = moments
        if count < self._WARMUP:
            return math.inf
        return self._limit(mean, math.sqrt(spread / (weight - weight_squared / weight)))

    def _with(self, moments: list[float], value: float) -> list[float]:
        count, weight, weight_squared, mean, spread = moments
        weight, weight_squared = self._DECAY * weight + 1.0, self._DECAY**2 * weight_squared + 1.0
        delta = value - mean
        mean += delta / weight
        return [count + 1.0, weight, weight_squared, mean, self._DECAY * spread + delta * (value - mean)]

    def start_afresh(self) -> None:
        """Forget the levels."""
        self._rows = [self._START] * len(self._rows)

    def state(self) -> Tensor:
        """What is known of each number, a row of a tensor."""
        return torch.tensor(self._rows, dtype=torch.float64, device="cpu").view(-1, len(self._START))

    def load(self, state: Tensor) -> None:
        """Continue from a saved state."""
        self._rows = [tuple(row) for row in state.tolist()]


def _kind(value: float, limit: float) -> Kind:
    if not math.isfinite(value):
        return Kind.NONFINITE
    if limit == math.inf:
        return Kind.WITHOUT_LIMIT
    return Kind.ABOVE if value > limit else Kind.WITHIN


def loss_levels(patience: int) -> Levels:
    """Of a loss's logarithm: it may be two deviations, or log 1.5, above its mean."""
    return Levels(lambda mean, std: mean + max(2.0 * std, math.log(1.5)), patience)


def statistics_levels() -> Levels:
    """Of second moments: they may be three times their mean, and are trouble three times in a row above."""
    return Levels(lambda mean, std: 3.0 * mean, patience=3)
