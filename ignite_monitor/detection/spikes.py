"""Spike detection: compare values with a threshold, and update its statistics."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.state import Statistics
from ignite_monitor.detection.thresholds import MeanStdThreshold, StaticThreshold, ThresholdRule


class Detection(NamedTuple):
    """Result for one value; all tensors have its shape and device."""

    value: Tensor
    comparable: Tensor  # the value, or for single tensors a normalized one; ``ignored`` if it is not finite
    applied_threshold: Tensor  # what it was compared with; NaN or inf if it was not compared
    rule_threshold: Tensor  # the threshold of the rule, compared or not
    mean: Tensor  # mean of the values that the threshold was estimated from; NaN before the first
    std: Tensor  # their sample standard deviation; NaN before the second
    spike: Tensor  # whether it is a spike
    nonfinite: Tensor  # whether it is inf or NaN
    above: Tensor  # whether it is finite and above the threshold
    threshold_reset: Tensor  # whether it resets the rule


class SpikeDetector(Statistics):
    """Detects spikes by a threshold rule, and updates its statistics with the other values.

    - A value is a spike if it exceeds the rule's threshold, or is not finite.
    - Of consecutive spikes only the first updates the statistics, clipped to the threshold. Non-finite values, and
      those equal to ``ignored``, update nothing.
    - A count rises by 1 at each finite spike and falls by 1/4 at each other value, not below 0. When it reaches
      ``max_consecutive_spikes`` a regime change is assumed: the statistics are reset, and start with this value. A rule
      with a shorter warm-up than that, or than 10, pauses until a value falls below its threshold.

    Nothing is read on the host. Tensors have the shape of the values that are compared side by side, 0-dim by default.
    A non-finite value is no spike if a GradScaler handles it; ``ignored`` is 0 for norms, and NaN for no value.
    """

    _DECREASE = 0.25

    def __init__(
        self,
        rule: ThresholdRule,
        *,
        shape: tuple[int, ...] = (),
        max_consecutive_spikes: int = 10,
        overflow_is_spike: bool = True,
        ignored: float = 0.0,
    ) -> None:
        self.rule = rule
        self.max_consecutive_spikes = max_consecutive_spikes
        self.overflow_is_spike = overflow_is_spike
        self.ignored = -math.inf if math.isnan(ignored) else ignored
        # No threshold of a norm is 0 or less, and those of these rules never are.
        self._masks = ignored == 0.0 and type(rule) not in (MeanStdThreshold, RobustThreshold, StaticThreshold)
        self._suspends = rule.warmup < max(self.max_consecutive_spikes, 10)
        self.start(shape)

    def start(self, shape: tuple[int, ...]) -> None:
        """Begin anew with values of a shape."""
        zeros = torch.zeros(shape, dtype=torch.float64, device="cpu")
        initial = {name: value.expand(shape) for name, value in self.rule.empty().items()}
        self._rule_names = tuple(initial)
        # The count, and two flags: the value before was a spike that did not reset; the rule pauses.
        names = ("spike_score", "after_spike", "awaits_normal_value")[: 2 + self._suspends]
        super().__init__(initial | dict.fromkeys(names, zeros))

    def detect(self, value: Tensor, normalized: Tensor | None = None) -> Detection:
        """Compare a value, or a normalized one in its place, with the threshold; updates nothing."""
        normalized = value if normalized is None else normalized
        self.move_like(value)
        state = self.named(self.rows)
        count = state["count"]
        known = self.named(self.rows.masked_fill(count < 1, math.nan))
        mean, std = known["mean"], (known["spread"] / (known["weight"] - 1.0)).sqrt()
        limit = self.rule.limit(state, mean, std)
        limit = limit.to(mean) if isinstance(limit, Tensor) else torch.full_like(mean, float(limit))
        limit = limit.masked_fill(count < self.rule.warmup, math.nan)
        if self._masks:
            limit = limit.masked_fill(limit <= 0.0, math.nan)
        threshold = limit.masked_fill(state["awaits_normal_value"] > 0, math.nan) if self._suspends else limit
        comparable = normalized.nan_to_num(nan=self.ignored, posinf=self.ignored, neginf=-math.inf)
        nonfinite = comparable != normalized
        above = comparable > threshold
        spike = above | nonfinite if self.overflow_is_spike else above
        reset = above & (state["spike_score"] >= self.max_consecutive_spikes - 1)
        return Detection(value, comparable, threshold, limit, mean, std, spike, nonfinite, above, reset)

    @property
    def was_normal(self) -> Tensor:
        """True if the value before was no spike, or the first one of another level."""
        return self.named(self.rows)["after_spike"] == 0

    def observe(self, detection: Detection, when: Tensor | None = None) -> None:
        """Update the statistics with a detection, if a bool tensor is True; None for True."""
        value, reset = detection.comparable, detection.threshold_reset
        counted = value != self.ignored
        raised = detection.above.masked_fill(reset, False)  # else it is normal, or the first value of another level
        rows = torch.where(reset, self._initial, self.rows)
        state = self.named(rows)
        entry = torch.where(raised, self.rule.entry(state, detection.rule_threshold), value)
        updates = torch.where(raised, state["after_spike"] == 0, counted)
        if entry.is_cpu or entry.dtype != torch.float64:  # elsewhere only float64 models could exceed it
            updates = updates & (entry <= largest_usable(entry))
        after = self.rule.include(state, entry)
        statistics = torch.stack([*map(after.__getitem__, self._rule_names)])
        score = torch.add(state["spike_score"], counted, alpha=-self._DECREASE)
        score = torch.add(score, raised, alpha=1.0 + self._DECREASE).clamp(min=0.0)
        parts = [torch.where(updates, statistics, rows[: len(statistics)]), score[None], raised[None]]
        if self._suspends:
            is_within = counted & (value <= detection.rule_threshold)
            parts.append((((state["awaits_normal_value"] > 0) & ~is_within) | reset)[None])
        rows = torch.cat(parts)
        self.rows = rows if when is None else torch.where(when, rows, self.rows)


def largest_usable(value: Tensor) -> float:
    """The largest value whose sums of cubes are finite in its dtype: 5e101 in float64."""
    return float(torch.finfo(value.dtype).max ** 0.33)


def may_be_true(flag: Tensor) -> bool:
    """Return False if a 0-dim bool tensor is known to be False without synchronization."""
    return not flag.is_cpu or torch.is_nonzero(flag)
