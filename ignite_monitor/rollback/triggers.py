"""Triggers of a rollback: the loss, the monitors' spikes, and requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.detection.monitor import CountingMonitor
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.monitor.ranks import Ranks
from ignite_monitor.monitor.transfer import transfer
from ignite_monitor.rollback import limits


class LossStatistics(NamedTuple):
    r"""Statistics of losses, and their threshold: the smaller one of those for jumps and for slow growth.

    Jumps: :math:`\mu + \max(2\sigma, \mu/2)`. Growth: :math:`l + \max(4\sigma, f/4, l/2)`, for the mean :math:`f`
    after the warm-up and the lowest mean :math:`l` since then. Mean and standard deviation are exponentially weighted,
    as in ``ThresholdRule``, but on the host.
    """

    number: float = 0.0  # of losses
    weight: float = 0.0
    mean: float = 0.0
    spread: float = 0.0
    first: float = math.inf  # mean after the warm-up
    lowest: float = math.inf  # lowest mean since then

    @property
    def limit(self) -> float:
        """The largest healthy loss; NaN before the warm-up is over."""
        if self.number < limits.MEMORY:
            return math.nan
        sigma = math.sqrt(self.spread / (self.weight - 1.0))
        jump = max(2.0 * sigma, limits.JUMP * self.mean)
        growth = max(4.0 * sigma, self.first / 4.0, limits.JUMP * self.lowest)
        return min(self.mean + jump, self.lowest + growth)

    @property
    def has_fallen(self) -> bool:
        """True if the mean has fallen by a tenth since the warm-up."""
        return self.lowest < (1.0 - limits.NOISE) * self.first

    def after(self, loss: float) -> LossStatistics:
        """Return the statistics after one more loss."""
        decay, delta = 1.0 - 1.0 / limits.MEMORY, loss - self.mean
        number, weight = self.number + 1.0, decay * self.weight + 1.0
        mean = self.mean + delta / weight
        spread = decay * self.spread + delta * (loss - mean) * (1.0 + decay) / 2.0
        first, lowest = (mean, mean) if number <= limits.MEMORY else (self.first, min(self.lowest, mean))
        return LossStatistics(number, weight, mean, spread, first, lowest)


@dataclass
class Signals:
    """Signals of an iteration, the same on all ranks."""

    is_above: bool = False  # a threshold
    is_nonfinite: bool = False  # the loss or a gradient, and no GradScaler handles it
    ruin: str = ""  # what is not finite in the state
    is_usual: bool = False  # the loss is within the threshold from before the data changed
    level: float = math.nan  # the loss, without one a norm
    age: int = 1  # iterations since the first sign of instability
    reasons: list[str] = field(default_factory=list)  # of instability

    @property
    def is_healthy(self) -> bool:
        """True if nothing is unusual."""
        return not (self.is_above or self.is_nonfinite or self.reasons)

    def add(self, reason: str, age: int) -> None:
        """Add a reason of instability; the one with the latest first sign counts."""
        self.age = min(age, self.age) if self.reasons else age
        self.reasons.append(reason)


class Triggers:
    """Collects the signals of every iteration, in one transfer from each device."""

    def __init__(self, patience: int) -> None:
        self._patience, self._window = patience, (3 * patience + 1) // 2
        self.counts: dict[str, list[float]] = {}  # of each monitor, after the last iteration
        self.start_run()

    def start_run(self) -> None:
        """Forget everything but the monitors' counts."""
        self.is_signed = False  # whether the loss has been negative
        self.measures_progress = False  # whether the loss has fallen since the start
        self.reset()

    def reset(self) -> None:
        """Forget signs, the statistics of the loss, and accepted losses."""
        self.loss = [*LossStatistics()]  # a list, as in a checkpoint
        # Prefix, "" for the loss -> of each of the last iterations 0, 1 if the value is unhealthy, 2 if it is far above
        # the threshold.
        self.signs: dict[str, list[int]] = {}
        self.former_limit = math.nan  # threshold of the loss from before the data changed
        self.accepted, self.accepted_until = -math.inf, 0  # losses up to it are healthy until that iteration

    @property
    def usable(self) -> bool:
        """True if a rise of the loss is a sign of instability."""
        return self.measures_progress and not self.is_signed

    def start_regime(self) -> None:
        """Continue with new statistics of the loss: the data have changed."""
        self.former_limit, self.loss = LossStatistics(*self.loss).limit, [*LossStatistics()]

    def accept(self, levels: Sequence[float], iteration: int) -> None:
        """Accept losses up to those of the failed tests and half of their excess, until 1,000 iterations have none."""
        limit = self.former_limit
        near = [level + (level - limit) / 2.0 for level in levels if level <= limits.FAR * limit]
        self.accepted, self.accepted_until = max(near, default=-math.inf), iteration + limits.WINDOW

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
        for signs in self.signs.values():
            signs[:] = [*signs[1:], 0]
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
        signals = Signals()
        if losses:
            self._note_loss(signals, total / losses, iteration)
        has_measure = bool(losses) and self.usable
        for i, monitor in enumerate(monitors):
            self._note_monitor(signals, monitor.prefix, published[5 * i : 5 * i + 5], has_measure)
        if requests:
            signals.add(request or "requested by another rank", 1)
            signals.level = math.nan  # no state is worse
        return signals

    def _note_loss(self, signals: Signals, loss: float, iteration: int) -> None:
        statistics = LossStatistics(*self.loss)
        limit = statistics.limit
        if is_accepted := limit < loss <= self.accepted and iteration < self.accepted_until:
            self.accepted_until = iteration + limits.WINDOW
        is_unhealthy = self.usable and loss > limit and not is_accepted
        signs = self._note(signals, "", is_unhealthy and math.isfinite(loss), loss, limit, True)
        if not math.isfinite(loss):
            signals.is_nonfinite = True
            return
        signals.level, signals.is_usual = loss, loss <= self.former_limit
        if not all(signs[-2:]):  # only the first of several consecutive spikes
            statistics = statistics.after(min(loss, limit) if is_unhealthy else loss)
            self.loss = [*statistics]
        self.is_signed |= loss < 0.0
        # Since the start, not on changed data.
        self.measures_progress |= statistics.has_fallen and math.isnan(self.former_limit)
        if age := _lasts(signs, 1, self._patience, self._window):
            signals.add(f"the loss exceeded its threshold in {self._patience} iterations", age)

    def _note_monitor(self, signals: Signals, name: str, published: Sequence[float], has_measure: bool) -> None:
        *counts, value, threshold = published
        spike, nonfinite, reset = (a > b for a, b in zip(counts, self.counts.get(name, counts), strict=True))
        self.counts[name] = counts
        signals.is_nonfinite |= nonfinite and spike  # an overflow that a GradScaler handles is no spike
        # A norm alone is no instability where a loss tells whether there is one.
        is_confirmed = not has_measure or any(self.signs[""][-limits.FAR_PATIENCE :])
        signs = self._note(signals, name, spike or reset, value, threshold, is_confirmed)
        if reset and is_confirmed and not self.is_signed:
            signals.add(f"the statistics of {name} were reset", _lasts(signs, 1, 1, self._window))
        if not has_measure and math.isnan(signals.level):
            signals.level = value

    def _note(
        self, signals: Signals, name: str, is_unhealthy: bool, value: float, threshold: float, is_confirmed: bool
    ) -> list[int]:
        """Note an iteration of a loss or a norm; ``is_confirmed``: it may be a sign of instability."""
        signs = self.signs.setdefault(name, [0] * max(self._window, limits.PROBATION))
        signs[-1] = is_unhealthy + (is_unhealthy and math.inf > value > limits.FAR * threshold > 0.0)
        signals.is_above |= is_unhealthy and is_confirmed
        if is_confirmed and (age := _lasts(signs, 2, limits.FAR_PATIENCE, limits.PROBATION)):
            text = f"{name or 'loss'} exceeded {limits.FAR:g} times its threshold in {limits.FAR_PATIENCE} iterations"
            signals.add(text, age)
        return signs


def _lasts(signs: Sequence[int], least: int, count: int, window: int) -> int:
    """Iterations since the first sign if the newest and ``count`` of the last ``window`` reach ``least``, else 0."""
    recent = [sign >= least for sign in signs[-window:]]
    return len(recent) - recent.index(True) if recent[-1] and sum(recent) >= count else 0
