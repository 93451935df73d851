"""Spike detection: compare values with a threshold, and update its statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.checks import check_count, check_type
from ignite_monitor.detection.thresholds import ThresholdRule
from ignite_monitor.model.devices import move, move_like


class Detection(NamedTuple):
    """Result for one value; all tensors have its shape and device.

    Attributes:
        value: the value.
        threshold: what it was compared with; NaN if it was not compared.
        mean: mean of the values that the threshold was estimated from; NaN before the first.
        std: their sample standard deviation; NaN before the second.
        spike: whether it is a spike.
        nonfinite: whether it is inf or NaN.
        above: whether it is finite and above the threshold.
        threshold_reset: whether it resets the rule.
        limit: the threshold of the rule, compared or not; NaN if there is none.
        given: the value before it was normalized, as for single tensors.
    """

    value: Tensor
    threshold: Tensor
    mean: Tensor
    std: Tensor
    spike: Tensor
    nonfinite: Tensor
    above: Tensor
    threshold_reset: Tensor
    limit: Tensor
    given: Tensor

    def where(self, flag: Tensor, other: Detection) -> Detection:
        """Select this detection where a flag is True, else another one."""
        return Detection(*(torch.where(flag, own, its) for own, its in zip(self, other, strict=True)))


class SpikeDetector:
    """Detects spikes by a threshold rule, and updates the rule so that neither a spike nor a regime change blinds it.

    - A value is a spike if it exceeds the rule's threshold, or is not finite.
    - Only the first of several consecutive spikes updates the statistics, clipped to the threshold: they must not widen
      their own threshold. Non-finite values, and those equal to ``ignored``, update nothing.
    - A count rises by 1 at each finite spike and falls by 1/4 at each other value, not below 0. When it reaches
      ``max_consecutive_spikes`` a regime change is assumed: the rule is reset, starts with this value, and is applied
      again once a value is within its new threshold. So no more than 1 in 5 values can stay spikes.

    All state is tensors on the values' device, and nothing is read on the host. All tensors are 0-dim, or have the
    values' shape if several are compared side by side, each with its own statistics.

    Args:
        max_consecutive_spikes: number of consecutive finite spikes that reset the rule.
        overflow_is_spike: whether a non-finite value is a spike; False if a GradScaler handles it.
        ignored: value that is not compared and updates nothing; for norms 0, as of an unused model; NaN for none.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if ``max_consecutive_spikes`` is less than 1.
    """

    _DECREASE = 0.25
    _STATE = ("recent", "previous", "suspended")

    def __init__(
        self,
        rule: ThresholdRule,
        *,
        max_consecutive_spikes: int = 10,
        overflow_is_spike: bool = True,
        ignored: float = 0.0,
    ) -> None:
        check_type("rule", rule, ThresholdRule, "ThresholdRule")
        check_type("overflow_is_spike", overflow_is_spike, bool, "bool")
        self.rule = rule
        self.max_consecutive_spikes = check_count("max_consecutive_spikes", max_consecutive_spikes, least=1)
        self.overflow_is_spike = overflow_is_spike
        self.ignored = ignored
        self._recent = torch.zeros((), dtype=torch.float64, device="cpu")  # the count of recent spikes
        self._previous = torch.zeros((), dtype=torch.bool, device="cpu")  # whether the previous value was a spike
        self._suspended = self._previous  # whether the rule is not applied, since a reset

    def detect(self, value: Tensor) -> Detection:
        """Compare a value with the threshold; updates nothing.

        Args:
            value: the value, floating point.
        """
        known = self._recent
        if value.device != known.device or value.dtype != known.dtype or value.shape != known.shape:
            self.to(value)
        limit, mean, std = self.rule.statistics()
        threshold = limit.masked_fill(self._suspended, math.nan)
        finite = value < math.inf
        above = (value > threshold) & finite
        nonfinite = ~finite
        spike = above | nonfinite if self.overflow_is_spike else above
        reset = above & (self._recent >= self.max_consecutive_spikes - 1)
        return Detection(value, threshold, mean, std, spike, nonfinite, above, reset, limit, value)

    def observe(self, detection: Detection, when: Tensor | None = None) -> None:
        """Update the statistics with a detection.

        Args:
            detection: the detection.
            when: bool tensor: do so only where it is True; None for True.
        """
        value, above, reset = detection.value, detection.above, detection.threshold_reset
        if when is None and is_false(above) and is_false(detection.nonfinite) and self._is_calm():
            if not is_false(value != self.ignored):
                self.rule.observe(value)
            return
        if not math.isnan(self.ignored):
            value = value.masked_fill(value == self.ignored, math.nan)
        if when is not None:
            value, above, reset = value.masked_fill(~when, math.nan), above & when, reset & when
        updates = value < math.inf  # not NaN, as what updates nothing
        clipped = above > reset
        entry = self.rule.entry(detection.limit).masked_fill(self._previous, math.nan)
        self.rule.observe(torch.where(clipped, entry, value), reset=reset)
        recent = torch.add(self._recent, updates, alpha=-self._DECREASE)
        recent = torch.add(recent, above, alpha=1.0 + self._DECREASE).clamp(min=0.0)
        self._recent = recent.masked_fill(reset, 0.0)
        self._previous = torch.where(updates, clipped, self._previous)
        self._suspended = (self._suspended > (value <= detection.limit)) | reset

    def _is_calm(self) -> bool:
        return is_false(self._recent > 0) and is_false(self._suspended)  # then the previous value was no spike either

    def reset_threshold(self) -> None:
        """Discard all earlier values."""
        self.rule.reset()
        self._recent = torch.zeros_like(self._recent)
        self._previous = self._suspended = torch.zeros_like(self._suspended)

    def __copy__(self) -> SpikeDetector:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), rule=copy.copy(self.rule))
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors and a dict of tensors."""
        own = {name: getattr(self, f"_{name}").clone() for name in self._STATE}
        return own | {"rule": self.rule.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: the :meth:`state_dict` of a detector with a rule of the same kind.

        Raises:
            ValueError: if it is of another one; nothing has changed then.
        """
        names = (*self._STATE, "rule")
        if not isinstance(state_dict, Mapping) or set(state_dict) != set(names):
            raise ValueError(f"Argument state_dict should hold {', '.join(names)}, but given {state_dict}")
        values = {}
        for name in self._STATE:
            own = getattr(self, f"_{name}")
            values[f"_{name}"] = torch.as_tensor(state_dict[name], dtype=own.dtype, device=own.device)
            if values[f"_{name}"].shape != own.shape:
                raise ValueError(f"Argument state_dict should hold a number as {name}, but given {state_dict[name]}")
        self.rule.load_state_dict(state_dict["rule"])
        vars(self).update(values)

    def to(self, reference: Tensor) -> None:
        """Move the state to the device, dtype and shape of a tensor."""
        self.rule.to(reference)
        self._recent = move_like(self._recent, reference).expand(reference.shape)
        self._previous = move(self._previous, reference.device).expand(reference.shape)
        self._suspended = move(self._suspended, reference.device).expand(reference.shape)


def is_false(flag: Tensor) -> bool:
    """Return True if a bool tensor is known to be False without synchronization."""
    return flag.is_cpu and not flag.ndim and not torch.is_nonzero(flag)


def may_be_true(flag: Tensor) -> bool:
    """Return False if a 0-dim bool tensor is known to be False without synchronization."""
    return not flag.is_cpu or torch.is_nonzero(flag)
