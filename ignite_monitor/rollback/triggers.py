"""Triggers of a rollback: the loss, the monitors' spikes, and requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.detection.spikes import largest_usable
from ignite_monitor.detection.thresholds import State, ThresholdRule
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.ranks import sum_over_ranks, world_size
from ignite_monitor.monitor.transfer import transfer

_FAR = 10.0  # times the threshold
_FAR_PATIENCE, _FAR_WINDOW = 3, 10  # iterations far above the threshold, of the last ones, that trigger a rollback
_MARGIN = 2  # times the delay of a slow detection
_EXTREMES = ("first", "lowest", "smallest")  # mean after the warm-up, lowest one since then, smallest loss


class LossThreshold(ThresholdRule):
    r"""Threshold of the loss, the smaller one of a threshold for jumps and one for slow growth.

    Jumps: :math:`\mu + \max(2\sigma, \mu/2)`. Growth: :math:`l + \max(4\sigma, f/4, l/2)`, for the mean :math:`f`
    after the warm-up and the lowest mean :math:`l` since then. Of a loss that has been negative, :math:`4\sigma`
    replaces the first maximum, and :math:`\max(4\sigma, (f - l)/4)` the second one.
    """

    def __init__(self) -> None:
        super().__init__(warmup=20, decay=0.95)

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> float:
        *_, mu, _, first, lowest, smallest = self._rows.tolist()
        sigma = std.item()
        if smallest < 0.0:
            jump, growth = 4.0 * sigma, (first - lowest) / 4.0
        else:
            jump, growth = max(2.0 * sigma, 0.5 * mu), max(first / 4.0, 0.5 * lowest)
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
class Findings:
    """Findings of an iteration, the same on all ranks."""

    is_unhealthy: bool = False
    is_nonfinite: bool = False  # the loss or a gradient, and no GradScaler handles it
    age: int = 1  # iterations since the first sign of instability
    margin: int = 0  # iterations before that sign whose weights may be damaged already
    reasons: list[str] = field(default_factory=list)  # of instability

    def add(self, reason: str, age: int, margin: int = 0) -> None:
        """Add a reason of instability; the one with the latest first sign counts."""
        if not self.reasons or age < self.age:
            self.age, self.margin = age, margin
        self.reasons.append(reason)


class Triggers:
    """Collects the findings of every iteration, in one transfer from each device."""

    SAVED = ("unhealthy", "far", "peak", "accepted")

    def __init__(self, patience: int) -> None:
        self._patience, self.loss = patience, LossThreshold()
        self._counts: dict[str, list[float]] = {}  # of each monitor, after the last iteration
        self._limits: dict[str, float] = {}  # thresholds of the last iteration
        # Name -> one bit for each of the last iterations, the newest lowest.
        self.unhealthy: dict[str, int] = {}
        self.far: dict[str, int] = {}  # far above the threshold
        self.peak: dict[str, float] = {}  # largest unhealthy values of this instability, with the same weights
        self.accepted: dict[str, float] = {}  # values up to these are healthy
        self.request: str | None = None

    def accept_peak(self, even_far: bool) -> None:
        """Accept values up to the peak and half of its excess more; monitors reset their own threshold."""
        for name, peak in self.peak.items():
            limit = self._limits.get(name, math.nan)
            if even_far or peak <= _FAR * limit:
                self.accepted[name] = max(self.accepted.get(name, -math.inf), peak + (peak - limit) / 2.0)

    def collect(self, loss: float | Tensor | None, monitors: Sequence[Monitor], device: torch.device) -> Findings:
        """Findings of the iteration that ends; ``device`` is that of collectives."""
        for history in (self.unhealthy, self.far):
            history.update({name: 2 * bits % 2 ** (2 * self._patience + 5) for name, bits in history.items()})
        numbers: list[Any] = [0.0 if loss is None else loss, float(loss is not None), float(self.request is not None)]
        for monitor in monitors:
            metrics, prefix = monitor.metrics, monitor.prefix
            value = metrics.get(f"{prefix}/norm", metrics.get(f"{prefix}/value", math.nan))
            numbers += [monitor.counts(), value, metrics.get(f"{prefix}/threshold", math.inf)]
        arrived = iter(transfer([[n for n in numbers if isinstance(n, Tensor)]])[0])
        numbers = [number for n in numbers for number in (next(arrived) if isinstance(n, Tensor) else [n])]
        if world_size() > 1:
            numbers = sum_over_ranks(torch.tensor(numbers, dtype=wide_dtype(device), device=device)).tolist()
        total, losses, requests, *published = numbers
        findings = Findings()
        if requests:
            findings.add(self.request or "requested by another rank", 1)
            self.request = None
        for i, monitor in enumerate(monitors):
            self._note_monitor(findings, monitor.prefix, *published[5 * i : 5 * i + 5])
        if losses:
            self._detect(findings, total / losses)
        return findings

    def _note_monitor(self, findings: Findings, name: str, *numbers: float) -> None:
        *counts, value, threshold = numbers
        spike, nonfinite, reset = (a > b for a, b in zip(counts, self._counts.get(name, counts), strict=True))
        self._counts[name] = counts
        findings.is_nonfinite |= nonfinite and spike  # an overflow that a GradScaler handles is no spike
        bits = self._note(findings, name, spike or reset, value, threshold)
        if reset and bits & 1:
            findings.add(f"the statistics of {name} were reset", bits.bit_length(), _MARGIN * (bits.bit_length() - 1))

    def _detect(self, findings: Findings, loss: float) -> None:
        if not math.isfinite(loss):
            findings.is_nonfinite = True
            return
        limit = self.loss.statistics()[0].item()
        bits = self._note(findings, "loss", loss > limit, loss, limit)
        entry = torch.tensor(min(loss, limit) if bits & 1 else loss, dtype=torch.float64, device="cpu")
        # Only the first of several consecutive spikes updates the statistics.
        if bits & 3 != 3 and abs(loss) <= largest_usable(entry):
            self.loss.observe(entry)
        if age := _lasts(bits, self._patience, (3 * self._patience + 1) // 2):
            findings.add(f"the loss exceeded its threshold in {self._patience} iterations", age, _MARGIN * (age - 1))

    def _note(self, findings: Findings, name: str, is_unhealthy: bool, value: float, threshold: float) -> int:
        self._limits[name] = threshold
        is_unhealthy &= not value <= self.accepted.get(name, -math.inf)
        if is_unhealthy and math.isfinite(value):
            self.peak[name] = max(self.peak.get(name, -math.inf), value)
        is_far = is_unhealthy and math.inf > value > _FAR * threshold > 0.0
        bits = self.unhealthy[name] = self.unhealthy.get(name, 0) | is_unhealthy
        far = self.far[name] = self.far.get(name, 0) | is_far
        findings.is_unhealthy |= is_unhealthy
        if is_far and _lasts(far, _FAR_PATIENCE, _FAR_WINDOW):
            text = f"{name} exceeded {_FAR:g} times its threshold in {_FAR_PATIENCE} iterations"
            findings.add(text, far.bit_length(), max(map(len, f"{far:b}".split("1"))))  # longest gap between signs
        return bits


def _lasts(bits: int, patience: int, window: int) -> int:
    """Iterations since the first sign if the newest and ``patience`` of the last ``window`` are set, else 0."""
    recent = bits % 2**window
    return recent.bit_length() if bits & 1 and recent.bit_count() >= patience else 0
