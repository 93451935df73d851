"""Judging gradient norms one after the other: what is a spike, and what enters the statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.checks import check_count, check_type
from ignite_monitor.gradient.thresholds import ThresholdRule
from ignite_monitor.model.devices import move_like


class Verdict(NamedTuple):
    """What a :class:`SpikeDetector` says of one norm, all 0-dim tensors on its device.

    Attributes:
        norm: the norm.
        threshold: what it was compared with, inf where nothing was judged.
        limit: the rule's threshold, whether it was applied or not.
        mean: mean of the norms that the threshold was derived from, NaN before the first.
        std: their sample standard deviation, NaN before the second.
        spike: whether it is a spike.
        nonfinite: whether it is inf or NaN.
    """

    norm: Tensor
    threshold: Tensor
    limit: Tensor
    mean: Tensor
    std: Tensor
    spike: Tensor
    nonfinite: Tensor

    def where(self, flag: Tensor, other: Verdict) -> Verdict:
        """This verdict where a 0-dim bool tensor is True, else another one."""
        return Verdict(*(torch.where(flag, own, its) for own, its in zip(self, other, strict=True)))


class SpikeDetector:
    """Judges norms by a threshold rule and feeds the rule so that neither a spike nor a new level can blind it.

    A norm is a spike if it exceeds the threshold that the rule derives from earlier norms, or if it is non-finite.
    A finite spike enters the rule's statistics clipped to the threshold it exceeded; a non-finite norm does not enter.
    At the ``max_consecutive_spikes``-th finite spike in a row the level has changed: the rule forgets what it knew,
    takes that norm whole, and judges again once a norm has been under its new threshold.

    Everything is a tensor on the norms' device, and nothing is read on the host.

    Args:
        max_consecutive_spikes: how many finite spikes in a row mean a new level.
        overflow_is_spike: whether a non-finite norm is a spike; False where a GradScaler looks after it.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if ``max_consecutive_spikes`` is less than 1.
    """

    _COUNTS = ("spike_count", "nonfinite_count", "consecutive", "restarts", "suspended")

    def __init__(
        self, rule: ThresholdRule, *, max_consecutive_spikes: int = 10, overflow_is_spike: bool = True
    ) -> None:
        check_type("rule", rule, ThresholdRule, "ThresholdRule")
        check_type("overflow_is_spike", overflow_is_spike, bool, "bool")
        self.rule = rule
        self.max_consecutive_spikes = check_count("max_consecutive_spikes", max_consecutive_spikes, least=1)
        self.overflow_is_spike = overflow_is_spike
        self.spike_count, self.nonfinite_count, self.consecutive, self.restarts, self.suspended = torch.zeros(
            len(self._COUNTS), dtype=torch.float64, device="cpu"
        ).unbind()

    def judge(self, norm: Tensor) -> Verdict:
        """Compare a norm with what earlier norms allow; changes nothing.

        Args:
            norm: the norm, 0-dim floating point.
        """
        if norm.device != self.suspended.device or norm.dtype != self.suspended.dtype:
            self._to(norm)
        limit, mean, std = self.rule.statistics()
        threshold = torch.where(self.suspended > 0, math.inf, limit) if may_be_true(self.suspended) else limit
        nonfinite = ~norm.isfinite()
        spike = norm > threshold
        spike = spike | nonfinite if self.overflow_is_spike else spike & ~nonfinite
        return Verdict(norm, threshold, limit, mean, std, spike, nonfinite)

    def observe(self, verdict: Verdict, when: Tensor | None = None) -> None:
        """Let a judged norm enter the counts and the statistics.

        Args:
            verdict: what :meth:`judge` said of it.
            when: 0-dim bool: whether to; None is true.
        """
        norm, threshold, limit, _, _, spike, nonfinite = verdict
        if when is not None:
            norm = torch.where(when, norm, math.nan)  # which no statistics take in
            spike, nonfinite = spike & when, nonfinite & when
        self.nonfinite_count = self.nonfinite_count + nonfinite
        finite = norm.isfinite()
        if may_be_true(self.suspended):
            self.suspended = self.suspended * ~((norm <= limit) & (limit < math.inf))
        if not may_be_true(spike):
            if may_be_true(self.consecutive):
                self.consecutive = self.consecutive * ~finite
            self.rule.observe(norm)
            return
        self.spike_count = self.spike_count + spike
        exceeded = spike & finite
        consecutive = torch.where(finite, (self.consecutive + 1.0) * exceeded, self.consecutive)
        new_level = consecutive >= self.max_consecutive_spikes
        self.consecutive = consecutive * ~new_level
        self.restarts = self.restarts + new_level
        self.suspended = torch.maximum(self.suspended, new_level.to(self.suspended.dtype))
        self.rule.observe(torch.where(exceeded & ~new_level, threshold, norm), restart=new_level)

    def go_back(self, earlier: SpikeDetector, when: Tensor) -> None:
        """Forget what has been observed since a copy was made.

        Args:
            earlier: the copy.
            when: 0-dim bool: whether to.
        """
        if not may_be_true(when):
            return
        for name in self._COUNTS:
            own = getattr(self, name)
            setattr(self, name, torch.where(when, getattr(earlier, name).to(own), own))
        self.rule.go_back(earlier.rule, when)

    def __copy__(self) -> SpikeDetector:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), rule=copy.copy(self.rule))
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Counts and the rule's state: tensors and a dict of tensors."""
        return {name: getattr(self, name) for name in self._COUNTS} | {"rule": self.rule.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: if it is not of a detector with a rule of the same kind.
        """
        if set(state_dict) != {*self._COUNTS, "rule"}:
            raise ValueError(f"Argument state_dict should hold {[*self._COUNTS, 'rule']}, but given {[*state_dict]}")
        counts = {name: torch.as_tensor(state_dict[name], dtype=torch.float64) for name in self._COUNTS}
        wrong = [name for name, count in counts.items() if count.ndim]
        if wrong:
            raise ValueError(f"Argument state_dict should hold a number as {wrong[0]}, but given {counts[wrong[0]]}")
        self.rule.load_state_dict(state_dict["rule"])
        for name, count in counts.items():
            setattr(self, name, count)

    def _to(self, reference: Tensor) -> None:
        self.rule.to(reference)
        for name in self._COUNTS:
            setattr(self, name, move_like(getattr(self, name), reference))


def may_be_true(flag: Tensor) -> bool:
    """Whether a 0-dim bool tensor is True, as far as that is known without waiting for a device."""
    return flag.device.type != "cpu" or len(flag.nonzero()) > 0
