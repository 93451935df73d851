"""The contract's threshold rules and statistics, in Python floats over the whole history of norms."""

from __future__ import annotations

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from ignite_monitor import MeanStdThreshold, RobustThreshold, StaticThreshold
from tests._truth import Event, Values

Moment = tuple[bool, float | None]

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


@dataclasses.dataclass(eq=False)
class Window:
    """The latest detection since the last own step."""

    detection: Detection
    iteration: int


@dataclasses.dataclass(eq=False)
class Taken:
    """The detection that a step took."""

    detection: Detection
    of_backward: bool
    again: bool = False


class WindowTruth:
    """Expected results of GradMonitor by the window rule; numbers in comments are those below its table.

    Args:
        rule: its threshold rule.
        own: names of the parameters that count.
        makes_step: whether a step of an optimizer is its own.
        others: names of the parameters of other monitored models.
        reported: flag and norm that the monitor reports at each moment, for where rounding decides.

    Attributes:
        moments: flag and norm at each moment.
        published: of each iteration.
        announced: the iterations in which a spike was announced.
    """

    def __init__(
        self,
        rule: Rule,
        own: Iterable[str],
        makes_step: Callable[[int], bool],
        others: Iterable[str] = (),
        reported: Iterable[Moment] = (),
    ) -> None:
        self.own, self.others, self.makes_step = set(own), set(others), makes_step
        self.oracle, self.reported = Oracle(rule), list(reported)
        self.moments: list[Moment] = []
        self.published: list[Values] = []
        self.announced: list[int] = []
        self.window: Window | None = None
        self.is_mixed = False  # whether a backward that reached other models too has changed the gradient since
        self.was_announced = False  # the gradient of the window
        self.without_update: Oracle | None = None  # what was known before a provisional update
        self.iteration = 0
        self.has_detected = False  # in this iteration

    def follow(self, events: Iterable[Event], monitored: Callable[[int], bool] = lambda _: True) -> WindowTruth:
        for event in events:
            if event.kind == "iteration":
                self.iteration += 1
                self.is_monitored = monitored(self.iteration)
                self.reported_now: Detection | None = None
                self.taken: Taken | None = None
                self.made: Taken | None = None
                self.has_detected = False
                self.is_mixed = False
                if not self.is_monitored:
                    self._close()
                    self.published.append({})
            elif event.kind == "moment":
                now = self.reported_now
                self.moments.append((False, None) if now is None else (now.spike, now.norm))
            elif self.is_monitored:
                getattr(self, f"_{event.kind}")(event)
        return self

    def _detected(self, event: Event) -> Detection:
        self.has_detected = True
        place = len(self.moments)
        reported = self.reported[place][0] if place < len(self.reported) else False
        norm = math.sqrt(math.fsum(event.norms[name] ** 2 for name in self.own if name in event.norms))
        return self.oracle.detect(norm, reported)

    def _close(self) -> None:
        self.window = None
        self.is_mixed = False
        self.was_announced = False

    def _announce(self, detection: Detection) -> None:
        if detection.spike and not self.was_announced:
            self.was_announced = True
            self.announced.append(self.iteration)

    def _backward(self, event: Event) -> None:
        if not self.own.intersection(event.reached):
            return
        self.has_detected = True
        if self.without_update is not None:  # 6
            if self.own.intersection(event.before):
                self.oracle = self.without_update
            else:
                self.was_announced = False
            self.without_update = None
        if self.others.intersection(event.reached):  # 3
            self.is_mixed = True
            return
        detection = self.reported_now = self._detected(event)
        if self.taken is not None and event.optimizer is not None:  # 2: inside of the own step
            return
        self.window, self.is_mixed = Window(detection, self.iteration), False
        self._announce(detection)

    def _step(self, event: Event) -> None:
        now = self.window if self.window is not None and self.window.iteration == self.iteration else None
        if not self.makes_step(event.optimizer):
            return
        if not any(name in event.norms for name in self.own):
            self._close()
            self.reported_now = None if self.made is None else self.made.detection
            return
        if now is not None and not self.is_mixed:
            self.taken = Taken(now.detection, of_backward=True)
        elif self.made is not None and self.made.of_backward and not self.is_mixed:  # 4
            self.taken = Taken(self.made.detection, of_backward=True, again=True)
        else:
            if self.without_update is not None:  # in place of the provisional update
                self.oracle, self.without_update = self.without_update, None
            self.taken = Taken(self._detected(event), of_backward=False)
        self.reported_now = self.taken.detection
        if not self.taken.again:
            self._announce(self.taken.detection)

    def _stepped(self, event: Event) -> None:
        if not self.makes_step(event.optimizer) or self.taken is None:
            return
        if not self.taken.again:
            self.oracle.observe(self.taken.detection)
        self.made, self.taken = self.taken, None
        self._close()

    def _returned(self, event: Event) -> None:
        now = self.window if self.window is not None and self.window.iteration == self.iteration else None
        final = None if self.made is None else self.made.detection
        if now is not None:  # 6
            detection = now.detection
            if detection.spike or not math.isfinite(detection.norm):
                self.without_update = self.oracle.copy()
                self.oracle.observe(detection)
                self._announce(detection)
                final = final or detection
        if final is None:
            # That an iteration with a gradient had no step is published.
            self.published.append({"stepped": 0.0} if self.has_detected else {})
            return
        values = final.statistics() | {
            "spike_count": float(self.oracle.spike_count),
            "skipped_count": 0.0,
            "nonfinite_count": float(self.oracle.nonfinite_count),
            "stepped": float(self.made is not None),
        }
        self.published.append(values)


def shared_growth(row: Iterable[float], means: Iterable[float]) -> float:
    """Return the divisor of all norms of a row: the 0.7th power of the median of norm / mean."""
    ratios = sorted(x / mean for x, mean in zip(row, means, strict=True) if x > 0 and mean > 0)
    return max(1.0, ratios[(len(ratios) - 1) // 2]) ** 0.7 if ratios else 1.0
