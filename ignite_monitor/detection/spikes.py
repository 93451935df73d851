"""Spike detection: compare values with a threshold, and update its statistics."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.thresholds import MeanStdThreshold, StaticThreshold, ThresholdRule, loaded
from ignite_monitor.model.devices import move, move_like


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


class SpikeDetector:
    """Detects spikes by a threshold rule, and updates the rule with the other values.

    - A value is a spike if it exceeds the rule's threshold, or is not finite.
    - Of consecutive spikes only the first updates the statistics, clipped to the threshold. Non-finite values, and
      those equal to ``ignored``, update nothing.
    - A count rises by 1 at each finite spike and falls by 1/4 at each other value, not below 0. When it reaches
      ``max_consecutive_spikes`` a regime change is assumed: the rule is reset, and starts with this value. A rule with
      a shorter warm-up than that, or than 10, pauses until a value falls below its threshold.

    Nothing is read on the host. Tensors are 0-dim, or have the shape of several values compared side by side.
    A non-finite value is no spike if a GradScaler handles it; ``ignored`` is 0 for norms, and NaN for no value.
    """

    _DECREASE = 0.25

    def __init__(
        self,
        rule: ThresholdRule,
        *,
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
        self._state: dict[str, Tensor] = {}  # the count, and two flags: of the value before, and of the pause
        self.reset_threshold()

    def detect(self, value: Tensor, normalized: Tensor | None = None) -> Detection:
        """Compare a value, or a normalized one in its place, with the threshold; updates nothing."""
        normalized = value if normalized is None else normalized
        score = self._state["spike_score"]
        if value.device != score.device or value.dtype != score.dtype or value.shape != score.shape:
            self.to(value)
            score = self._state["spike_score"]
        rule_threshold, mean, std = self.rule.statistics()
        if self._masks:
            rule_threshold = rule_threshold.masked_fill(rule_threshold <= 0.0, math.nan)
        threshold = rule_threshold
        if self._suspends:
            threshold = threshold.masked_fill(self._state["awaits_normal_value"], math.nan)
        comparable = normalized.nan_to_num(nan=self.ignored, posinf=self.ignored, neginf=-math.inf)
        nonfinite = comparable != normalized
        above = comparable > threshold
        spike = above | nonfinite if self.overflow_is_spike else above
        reset = above & (score >= self.max_consecutive_spikes - 1)
        return Detection(value, comparable, threshold, rule_threshold, mean, std, spike, nonfinite, above, reset)

    @property
    def was_normal(self) -> Tensor:
        """True if the value before was no spike, or the first one of another level."""
        return self._state["was_normal"]

    def observe(self, detection: Detection, when: Tensor | None = None) -> None:
        """Update the statistics with a detection, if a 0-dim bool tensor is True; None for True."""
        state, value, above, reset = self._state, detection.comparable, detection.above, detection.threshold_reset
        counted = value != self.ignored
        if when is not None:
            counted, above, reset = counted & when, above & when, reset & when
        is_normal = ~above | reset  # or the first value of another level
        entry = torch.where(is_normal, value, self.rule.entry(detection.rule_threshold))
        updates = torch.where(is_normal, counted, state["was_normal"])
        if entry.is_cpu or entry.dtype != torch.float64:  # elsewhere only float64 models could exceed it
            updates = updates & (entry <= largest_usable(entry))
        self.rule.observe(entry, updates, reset)
        score = torch.add(state["spike_score"], counted, alpha=-self._DECREASE)
        score = torch.add(score, above, alpha=1.0 + self._DECREASE).clamp(min=0.0)
        was_normal = is_normal if when is None else torch.where(when, is_normal, state["was_normal"])
        self._state = {"spike_score": score.masked_fill(reset, 0.0), "was_normal": was_normal}
        if self._suspends:
            is_within = counted & (value <= detection.rule_threshold)
            self._state["awaits_normal_value"] = (state["awaits_normal_value"] & ~is_within) | reset

    def reset_threshold(self) -> None:
        """Discard all earlier values."""
        self.rule.reset()
        score = torch.zeros_like(self.rule.state["count"])
        self._state = {"spike_score": score, "was_normal": score == 0}
        if self._suspends:
            self._state["awaits_normal_value"] = score > 0

    def snapshot(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the state for :meth:`restore`; its tensors are never changed in place."""
        return self.rule._rows, self._state

    def restore(self, earlier: tuple[Tensor, dict[str, Tensor]], when: Tensor | None = None) -> None:
        """Return to an earlier state, if a 0-dim bool tensor is True; None for True."""
        rows, state = earlier
        if when is not None:
            rows = torch.where(when, rows, self.rule._rows)
            state = {name: torch.where(when, value, self._state[name]) for name, value in state.items()}
        self.rule._rows, self._state = rows, state

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors and a dict of tensors."""
        return {name: value.clone() for name, value in self._state.items()} | {"rule": self.rule.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; a ValueError if it is of another kind, and nothing has changed then."""
        parts = dict(state_dict) if isinstance(state_dict, Mapping) else {}
        rule = parts.pop("rule", None)
        values = loaded(self._state, parts)
        self.rule.load_state_dict(rule)
        self._state = values

    def to(self, reference: Tensor) -> None:
        """Move the state to the device, dtype and shape of a tensor."""
        self.rule.to(reference)
        self._state = dict(self._state)  # snapshots keep the former one
        for name, value in self._state.items():
            moved = move(value, reference.device) if value.dtype == torch.bool else move_like(value, reference)
            self._state[name] = moved.expand(reference.shape)


def largest_usable(value: Tensor) -> float:
    """The largest value whose sums of cubes are finite in its dtype: 5e101 in float64."""
    return float(torch.finfo(value.dtype).max ** 0.33)


def may_be_true(flag: Tensor) -> bool:
    """Return False if a 0-dim bool tensor is known to be False without synchronization."""
    return not flag.is_cpu or torch.is_nonzero(flag)
