"""The contract's threshold rules and statistics, in Python floats over the whole history of norms."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from ignite_monitor import MeanStdThreshold, RobustThreshold, StaticThreshold

# Squares and cubes of deviations this small, or of norms this large, leave float64's range.
SMALLEST, LARGEST = 1e-100, 5e101


@dataclasses.dataclass
class Rule:
    """A threshold rule of the package, and what it is defined as, over the norms that update it."""

    make: Callable[[], Any]
    limit: Callable[[list[float], float, float], float]
    warmup: int
    decay: float = 1.0
    halves: bool = False  # whether a spike updates it by the value halfway between mean and threshold


def mean_std(k: float, warmup: int, decay: float | None) -> Rule:
    return Rule(
        lambda: MeanStdThreshold(k=k, warmup=warmup, decay=decay),
        lambda history, mean, std: mean + k * std if std > 1e-6 * abs(mean) else math.inf,
        warmup,
        decay or 1.0,
    )


def static(value: float) -> Rule:
    return Rule(lambda: StaticThreshold(value), lambda history, mean, std: value, 0)


def function(factor: float) -> Rule:
    def limit(mean: Any, std: Any, count: Any) -> Any:
        return factor * mean + std

    return Rule(lambda: limit, lambda history, mean, std: limit(mean, std, len(history)), 2)


def robust(k: float, warmup: int, decay: float | None, least: float) -> Rule:
    def upper(history: list[float]) -> float:
        """The cube root of the upper partial moment, each norm measured from the mean of those before it."""
        d = decay or 1.0
        excess = [max(x - mean_of(history[:i], d), 0.0) ** 3 if i else 0.0 for i, x in enumerate(history)]
        return weighted(excess, d) ** (1 / 3)

    def limit(history: list[float], mean: float, std: float) -> float:
        value = max(mean + k * upper(history), least * mean)
        return value if value - mean > 1e-6 * abs(mean) else math.inf

    make = lambda: RobustThreshold(k=k, warmup=warmup, decay=decay, least=least)  # noqa: E731
    return Rule(make, limit, warmup, decay or 1.0, halves=True)


def weighted(values: list[float], decay: float) -> float:
    weights = [decay ** (len(values) - 1 - i) for i in range(len(values))]
    return math.fsum(w * x for w, x in zip(weights, values, strict=True)) / math.fsum(weights)


def mean_of(history: list[float], decay: float = 0.99) -> float:
    return weighted(history, decay) if history else math.nan


def std_of(history: list[float], decay: float) -> float:
    if len(history) < 2:
        return math.nan
    if decay == 1.0:
        return statistics.stdev(history)
    weights = [decay ** (len(history) - 1 - i) for i in range(len(history))]
    mean, total = weighted(history, decay), math.fsum(weights)
    spread = math.fsum(w * (x - mean) ** 2 for w, x in zip(weights, history, strict=True))
    return math.sqrt(spread / (total - math.fsum(w * w for w in weights) / total))


@dataclasses.dataclass
class Detection:
    """Values to publish with one norm."""

    norm: float
    mean: float
    std: float
    limit: float  # the rule's
    threshold: float  # what the norm is compared with
    spike: bool

    def statistics(self) -> dict[str, float]:
        """Return the statistics by name, without those that do not exist yet."""
        values = {"mean": self.mean, "std": self.std, "threshold": self.threshold}
        return {"norm": self.norm, "spike": float(self.spike)} | {
            name: value for name, value in values.items() if math.isfinite(value)
        }


class Oracle:
    """Compares norms one after the other, and updates the statistics with them.

    Attributes:
        unsure: whether rounding decides which norms update them, so that later ones are not known.
    """

    def __init__(self, rule: Rule | None = None, max_consecutive: int = 10, overflow_is_spike: bool = True) -> None:
        self.rule = rule or mean_std(6.0, 20, 0.99)  # the default
        self.max_consecutive = max_consecutive
        self.overflow_is_spike = overflow_is_spike
        self.history: list[float] = []
        self.recent, self.spike_count, self.nonfinite_count = 0.0, 0, 0
        self.previous = self.suspended = self.unsure = False

    def copy(self) -> Oracle:
        duplicate = copy.copy(self)
        duplicate.history = list(self.history)
        return duplicate

    def expect(self, norm: float) -> dict[str, float]:
        """Detect and observe a norm; return the values to publish with it."""
        detection = self.detect(norm, reported=False)
        self.observe(detection)
        return detection.statistics()

    def detect(self, norm: float, reported: bool) -> Detection:
        """Compare a norm; if it equals the threshold but for rounding, the reported result is right."""
        mean, std = mean_of(self.history, self.rule.decay), std_of(self.history, self.rule.decay)
        limit = self.rule.limit(self.history, mean, std) if len(self.history) >= self.rule.warmup else math.inf
        limit = math.inf if math.isnan(limit) else limit
        threshold = math.inf if self.suspended else limit
        spike = norm > threshold or not math.isfinite(norm)
        if not math.isfinite(norm):
            spike = self.overflow_is_spike
        elif math.isclose(norm, threshold, rel_tol=1e-9, abs_tol=SMALLEST):
            spike = reported
        return Detection(norm, mean, std, limit, threshold, spike)

    def observe(self, detection: Detection) -> None:
        norm, limit, spike = detection.norm, detection.limit, detection.spike
        self.spike_count += spike
        if not math.isfinite(norm) or norm == 0.0:
            self.nonfinite_count += norm != 0.0
            self.previous = False
            return
        self.unsure |= 0 < max(norm, limit) < SMALLEST
        if limit < math.inf and (norm <= limit or math.isclose(norm, limit)):
            self.suspended = False
        repeated, self.previous = self.previous, spike
        self.recent = self.recent + 1.0 if spike else max(self.recent - 0.25, 0.0)
        entering = min(norm, detection.threshold) if spike else norm
        if self.rule.halves and spike:
            entering = (detection.mean + entering) / 2
        if spike and self.recent >= self.max_consecutive:
            self.history, self.recent, self.previous = [], 0.0, False
            self.suspended = self.rule.warmup < max(self.max_consecutive, 10)
            entering = norm
        elif spike and repeated:  # a row must not widen its own threshold
            return
        if entering <= LARGEST:
            self.history.append(entering)


def shared_growth(row: Iterable[float], means: Iterable[float]) -> float:
    """Return the divisor of all norms of a row: the 0.7th power of the median of norm / mean."""
    ratios = sorted(x / mean for x, mean in zip(row, means, strict=True) if x > 0 and mean > 0)
    return max(1.0, ratios[(len(ratios) - 1) // 2]) ** 0.7 if ratios else 1.0


def spikes_in_losses(
    losses: Iterable[float], k: float = 4.5, decay: float = 0.99, warmup: int = 20
) -> tuple[list[bool], float]:
    """Return whether each loss is a spike, and the threshold for the logarithm of the next one."""
    logs, spikes, row = [], [], 0
    for loss in [*losses, math.e]:
        if not math.isfinite(loss) or loss <= 0:
            spikes.append(not math.isfinite(loss))
            continue
        limit = math.inf
        if len(logs) >= warmup:
            weights = decay ** np.arange(len(logs) - 1, -1, -1.0)
            # weights[-n:] are those of the first n when they were all
            levels = [np.average(logs[:n], weights=weights[-n:]) for n in range(1, len(logs) + 1)]
            steps = np.array([0.0, *(np.array(logs[1:]) - levels[:-1])])
            drift = np.average(steps, weights=weights)
            unbiased = weights.sum() - (weights**2).sum() / weights.sum()
            limit = levels[-1] + drift + k * math.sqrt((weights * (steps - drift) ** 2).sum() / unbiased)
        spikes.append(math.log(loss) > limit)
        row = row + 1 if spikes[-1] else 0
        if row < 2:
            logs.append(min(math.log(loss), limit))
    return spikes[:-1], limit
