"""Triggers of a rollback: the loss, the monitors' spikes, and requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.detection.monitor import CountingMonitor
from ignite_monitor.detection.spikes import largest_usable
from ignite_monitor.detection.thresholds import State, ThresholdRule
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.monitor.ranks import Ranks
from ignite_monitor.monitor.transfer import transfer
from ignite_monitor.rollback import limits

_EXTREMES = ("first", "lowest", "smallest")  # mean after the warm-up, lowest one since then, smallest loss


class LossThreshold(ThresholdRule):
    r"""Threshold of the loss, the smaller one of a threshold for jumps and one for slow growth.

    Jumps: :math:`\mu + \max(2\sigma, \mu/2)`. Growth: :math:`l + \max(4\sigma, f/4, l/2)`, for the mean :math:`f`
    after the warm-up and the lowest mean :math:`l` since then. Of a loss that has been negative, :math:`4\sigma`
    replaces the first maximum, and :math:`\max(4\sigma, (f - l)/4)` the second one.
    """

    def __init__(self) -> None:
        super().__init__(warmup=limits.MEMORY, decay=1.0 - 1.0 / limits.MEMORY)

    reset_threshold = ThresholdRule.reset

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> float:
        *_, mu, _, first, lowest, smallest = self._rows.tolist()
        sigma = std.item()
        if smallest < 0.0:
            jump, growth = 4.0 * sigma, (first - lowest) / 4.0
        else:
            jump, growth = max(2.0 * sigma, limits.JUMP * mu), max(first / 4.0, limits.JUMP * lowest)
        return float(min(mu + jump, lowest + max(4.0 * sigma, growth)))

    def empty(self) -> State:
        return super().empty() | {name: torch.tensor(math.inf, dtype=torch.float64, device="cpu") for name in _EXTREMES}

    def include(self, state: State, value: Tensor) -> State:
        moments = super().include(state, value)
        mean = moments["mean"]
        first, lowest = (state["first"], state["lowest"]) if moments["count"] > self.warmup else (mean, mean)
        extremes = first, torch.minimum(lowest, mean), torch.minimum(state["smallest"], value)
        return moments | dict(zip(_EXTREMES, extremes, strict=True))


@dataclass
class Signals:
    """Signals of an iteration, the same on all ranks."""

    is_above: bool = False  # a threshold
    is_nonfinite: bool = False  # the loss or a gradient, and no GradScaler handles it
    ruin: str = ""  # what is not finite in the state
    is_requested: bool = False
    is_usual: bool = False  # the loss is within the threshold from before the data changed
    level: float = math.nan  # the loss, without one a norm
    age: int = 1  # iterations since the first sign of instability
    margin: int = 0  # iterations before that sign whose weights may be damaged already
    reasons: list[str] = field(default_factory=list)  # of instability

    @property
    def is_healthy(self) -> bool:
        """True if nothing is unusual."""
        return not (self.is_above or self.is_nonfinite or self.reasons)

    def add(self, reason: str, age: int, margin: int = 0) -> None:
        """Add a reason of instability; the one with the latest first sign counts."""
        if not self.reasons or age < self.age:
            self.age, self.margin = age, margin
        self.reasons.append(reason)


class Triggers:
    """Collects the signals of every iteration, in one transfer from each device."""

    def __init__(self, patience: int, rule: LossThreshold) -> None:
        self._patience, self._rule = patience, rule
        self.counts: dict[str, list[float]] = {}  # of each monitor, after the last iteration
        self.start_run()

    def start_run(self) -> None:
        """Forget everything but the monitors' counts."""
        self.reset()
        self.signs = [False, False]  # whether losses have been negative, positive
        self.measures_progress = False  # whether the loss has fallen since the start

    def reset(self) -> None:
        """Forget signs, thresholds and accepted losses."""
        self._rule.reset()
        # Name -> one bit for each of the last iterations, the newest lowest.
        self.unhealthy: dict[str, int] = {}
        self.far: dict[str, int] = {}  # far above the threshold
        self.former_limit = math.nan  # threshold of the loss from before the data changed
        self.accepted = [-math.inf, 0.0]  # losses up to the first number are healthy until the iteration that follows

    @property
    def usable(self) -> bool:
        """True if a rise of the loss is a sign of instability."""
        return self.measures_progress and not all(self.signs)

    def accept(self, levels: Sequence[float], iteration: int) -> None:
        """Accept losses up to those of the failed tests and half of their excess, until 1,000 iterations have none."""
        limit = self.former_limit
        near = [level + (level - limit) / 2.0 for level in levels if level <= limits.FAR * abs(limit)]
        self.accepted = [max(near, default=-math.inf), float(iteration + limits.WINDOW)]

    def collect(
        self,
        loss: float | Tensor | None,
        monitors: Sequence[CountingMonitor],
        ranks: Ranks,
        device: torch.device,
        iteration: int,
        request: str = "",
    ) -> Signals:
        """Collect the signals of the iteration that ends; ``device`` is that of collectives."""
        if iteration >= self.accepted[1]:
            self.accepted = [-math.inf, 0.0]
        for history in (self.unhealthy, self.far):
            history.update({name: 2 * bits % 2 ** (2 * self._patience + 5) for name, bits in history.items()})
        numbers: list[Any] = [0.0 if loss is None else loss, float(loss is not None), float(bool(request))]
        for monitor in monitors:
            metrics, prefix = monitor.metrics, monitor.prefix
            value = metrics.get(f"{prefix}/norm", metrics.get(f"{prefix}/value", math.nan))
            numbers += [monitor.counts(), value, metrics.get(f"{prefix}/threshold", math.inf)]
        arrived = iter(transfer([[n for n in numbers if isinstance(n, Tensor)]])[0])
        numbers = [number for n in numbers for number in (next(arrived) if isinstance(n, Tensor) else [n])]
        if ranks.size > 1:
            numbers = ranks.sum(torch.tensor(numbers, dtype=wide_dtype(device), device=device)).tolist()
        total, losses, requests, *published = numbers
        signals = Signals(is_requested=bool(requests))
        if losses:
            self._note_loss(signals, total / losses, iteration)
        has_measure = bool(losses) and self.usable
        for i, monitor in enumerate(monitors):
            *counts, value, threshold = published[5 * i : 5 * i + 5]
            self._note_monitor(signals, monitor.prefix, counts, value, threshold, has_measure)
        if requests:
            signals.add(request or "requested by another rank", 1)
        return signals

    def _note_monitor(
        self, signals: Signals, name: str, counts: list[float], value: float, threshold: float, has_measure: bool
    ) -> None:
        spike, nonfinite, reset = (a > b for a, b in zip(counts, self.counts.get(name, counts), strict=True))
        self.counts[name] = counts
        signals.is_nonfinite |= nonfinite and spike  # an overflow that a GradScaler handles is no spike
        # A norm alone is no instability where a loss tells whether there is one.
        is_confirmed = not has_measure or bool(self.unhealthy.get("loss", 0) % 2**limits.FAR_PATIENCE)
        self._note(signals, name, spike or reset, value, threshold, is_confirmed)
        if reset and is_confirmed and not all(self.signs):
            delay = self.unhealthy[name].bit_length() - 1
            signals.add(f"the statistics of {name} were reset", delay + 1, limits.MARGIN * delay)
        if not has_measure and math.isnan(signals.level):
            signals.level = value

    def _note_loss(self, signals: Signals, loss: float, iteration: int) -> None:
        self.unhealthy.setdefault("loss", 0)
        if not math.isfinite(loss):
            signals.is_nonfinite = True
            return
        signals.level, signals.is_usual = loss, loss <= self.former_limit
        limit = self._rule.statistics()[0].item()
        is_unhealthy = self.usable and loss > max(limit, self.accepted[0])
        if limit < loss <= self.accepted[0]:
            self.accepted[1] = float(iteration + limits.WINDOW)
        self._note(signals, "loss", is_unhealthy, loss, limit, True)
        bits = self.unhealthy["loss"]
        entry = torch.tensor(min(loss, limit) if is_unhealthy else loss, dtype=torch.float64, device="cpu")
        # Only the first of several consecutive spikes updates the statistics.
        if bits & 3 != 3 and abs(loss) <= largest_usable(entry):
            self._rule.observe(entry)
        if not is_unhealthy:
            self.signs = [self.signs[0] or loss < 0.0, self.signs[1] or loss > 0.0]
        first, lowest = (self._rule.state[name].item() for name in ("first", "lowest"))
        has_fallen = lowest < first - limits.NOISE * abs(first)
        self.measures_progress |= has_fallen and math.isnan(self.former_limit)  # since the start, not on changed data
        if age := _lasts(bits, self._patience, (3 * self._patience + 1) // 2):
            text = f"the loss exceeded its threshold in {self._patience} iterations"
            signals.add(text, age, limits.MARGIN * (age - 1))

    def _note(
        self, signals: Signals, name: str, is_unhealthy: bool, value: float, threshold: float, is_confirmed: bool
    ) -> None:
        is_far = is_unhealthy and math.inf > value > limits.FAR * threshold > 0.0
        self.unhealthy[name] = self.unhealthy.get(name, 0) | is_unhealthy
        far = self.far[name] = self.far.get(name, 0) | is_far
        signals.is_above |= is_unhealthy and is_confirmed
        if is_far and is_confirmed and _lasts(far, limits.FAR_PATIENCE, limits.PROBATION):
            text = f"{name} exceeded {limits.FAR:g} times its threshold in {limits.FAR_PATIENCE} iterations"
            signals.add(text, far.bit_length(), max(map(len, f"{far:b}".split("1"))))  # longest gap between signs


def _lasts(bits: int, count: int, window: int) -> int:
    """Iterations since the first sign if the newest and ``count`` of the last ``window`` are set, else 0."""
    recent = bits % 2**window
    return recent.bit_length() if bits & 1 and recent.bit_count() >= count else 0
