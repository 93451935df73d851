"""Judging values one after the other: what is a spike, and what enters the statistics."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.checks import check_count, check_type
from ignite_monitor.detection.thresholds import ThresholdRule
from ignite_monitor.model.devices import move, move_like
from ignite_monitor.monitor import publisher


class Detection(NamedTuple):
    """What a :class:`SpikeDetector` says of one value, all tensors of its shape on its device.

    Attributes:
        norm: the value.
        threshold: what it was compared with, inf where nothing was judged.
        limit: the rule's threshold, whether it was applied or not.
        mean: mean of the values that the threshold was derived from, NaN before the first.
        std: their sample standard deviation, NaN before the second.
        spike: whether it is a spike.
        nonfinite: whether it is inf or NaN.
        threshold_reset: whether the rule starts afresh from it.
        kind: where it lies, see :class:`Kind`.
        state: the detector's state that it was judged in.
        counted: what is added to the detector's counts for it: 1 or 0 for a spike, in its first row.
        clip: the most that enters the statistics, see :class:`Outcome`.
        after: the detector's state after it.
        given: the value as it came, where it is not judged as it is.
        others: detections on other values of the same step, which make it a spike too; of the norm alone speaks
            :attr:`counted`.
    """

    norm: Tensor
    threshold: Tensor
    limit: Tensor
    mean: Tensor
    std: Tensor
    spike: Tensor
    nonfinite: Tensor
    threshold_reset: Tensor
    kind: Tensor
    state: Tensor
    counted: Tensor
    clip: Tensor
    after: Tensor
    given: Tensor
    others: tuple[Detection, ...] = ()

    def where(self, flag: Tensor, other: Detection) -> Detection:
        """This detection where a 0-dim bool tensor is True, else another one."""
        mixed: Any = [torch.where(flag, own, its) for own, its in zip(self[:-1], other[:-1], strict=True)]
        others = tuple(own.where(flag, its) for own, its in zip(self.others, other.others, strict=True))
        return Detection._make([*mixed, others])


class Kind(IntEnum):
    """Where a value lies. The rule may have no limit for it, which is a limit of inf."""

    WITHOUT_LIMIT = 0
    WITHIN = 1
    ABOVE = 2
    NONFINITE = 3


# Between which numbers the difference of value and limit lies; what is NaN comes last.
_KINDS = (-torch.finfo(torch.float64).max, 0.0, torch.finfo(torch.float64).max)


class Outcome(NamedTuple):
    """What follows from a value.

    Attributes:
        spike: 1 or 0.
        nonfinite: 1 or 0.
        threshold_reset: 1 or 0: the rule forgets what it knew.
        threshold: what the limit is raised by for it, 0 or inf.
        entry: what enters the statistics is the value, at most the limit plus this: 0, inf, or NaN, nothing enters.
        state: the state after it, see :func:`outcome`.
    """

    spike: float
    nonfinite: float
    threshold_reset: float
    threshold: float
    entry: float
    state: float


def outcome(state: int, kind: Kind, patience: int, overflow_is_spike: bool) -> Outcome:
    """What follows from a value.

    Args:
        state: how many values before it were spikes in a row. At ``patience`` the rule has started afresh, and judges
            again once a value has been within its limit.
        kind: where the value lies.
        patience: how many spikes in a row mean a new level.
        overflow_is_spike: whether a value that is not finite is a spike. It breaks no row, and is none.
    """
    suspended = state == patience
    raised = math.inf if suspended else 0.0
    if kind == Kind.NONFINITE:
        return Outcome(overflow_is_spike, True, False, raised, math.nan, state)
    if kind == Kind.ABOVE and not suspended:
        changed = state + 1 == patience
        entry = math.inf if changed else math.nan if state else 0.0
        return Outcome(True, False, changed, raised, entry, state + 1)
    return Outcome(False, False, False, raised, math.inf, state if suspended and kind != Kind.WITHIN else 0)


class SpikeDetector:
    """Judges values by a threshold rule and feeds the rule so that neither a spike nor a new level can blind it.

    A value is a spike if it exceeds the threshold that the rule derives from earlier ones, or if it is non-finite.
    Of finite spikes in a row the first enters the rule's statistics, clipped to the threshold it exceeded, and the
    others do not: a row must not widen its own threshold. Neither does a non-finite value.
    At the ``max_consecutive_spikes``-th finite spike in a row the level has changed: the rule forgets what it knew,
    takes that value whole, and judges again once a value has been within its new threshold.

    Everything is a tensor on the values' device, and nothing is read on the host. What follows from a value is looked
    up in a table of :func:`outcome`, so that it takes as few operations as it can. All tensors are 0-dim, or of the
    values' shape where several are judged side by side, each by its own statistics.

    Args:
        max_consecutive_spikes: how many finite spikes in a row mean a new level.
        overflow_is_spike: whether a non-finite value is a spike; False where a GradScaler looks after it.

    Attributes:
        counts: spikes, values that were not finite, and changes of level so far, side by side.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if ``max_consecutive_spikes`` is less than 1.
    """

    _COUNTS = ("spike_count", "nonfinite_count", "restarts")

    def __init__(
        self, rule: ThresholdRule, *, max_consecutive_spikes: int = 10, overflow_is_spike: bool = True
    ) -> None:
        check_type("rule", rule, ThresholdRule, "ThresholdRule")
        check_type("overflow_is_spike", overflow_is_spike, bool, "bool")
        self.rule = rule
        self.max_consecutive_spikes = check_count("max_consecutive_spikes", max_consecutive_spikes, least=1)
        self.overflow_is_spike = overflow_is_spike
        self._outcomes = self._table(torch.float64)
        self._after_none: dict[int, tuple[Tensor, ...]] = {}  # what is in its first rows, where there was no spike
        self._kinds = torch.tensor(_KINDS, dtype=torch.float64, device="cpu")
        self._state = torch.zeros((), dtype=torch.int64, device="cpu")
        self.counts = torch.zeros(len(self._COUNTS), dtype=torch.float64, device="cpu")

    def judge(self, norm: Tensor) -> Detection:
        """Compare a value with what earlier ones allow; changes nothing.

        Args:
            norm: the value, floating point; a number, inf or NaN, but not -inf.
        """
        if norm.device != self.counts.device or norm.dtype != self.counts.dtype or norm.shape != self._state.shape:
            self.to(norm)
        limit, mean, std = self.rule.statistics()
        kind = torch.bucketize(norm - limit, self._kinds)
        after, counted, raised, spike, nonfinite, threshold_reset = self._outcome(kind)
        threshold, clip = (limit + raised).unbind()
        flags = (spike, nonfinite, threshold_reset)
        return Detection(norm, threshold, limit, mean, std, *flags, kind, self._state, counted, clip, after, norm)

    def observe(self, detection: Detection, when: Tensor | None = None) -> None:
        """Let a judged value enter the counts and the statistics, where a bool tensor is True; None is true."""
        state, counted, clip, threshold_reset = (
            detection.after,
            detection.counted,
            detection.clip,
            detection.threshold_reset,
        )
        if detection.state is not self._state:
            state, counted, raised, *_, threshold_reset = self._outcome(detection.kind)
            clip = detection.limit + raised[1]
        entry = torch.minimum(detection.norm, self.rule.entry(clip))
        counts = self.counts + counted
        if when is not None:
            entry, threshold_reset = torch.where(when, entry, math.nan), threshold_reset & when
            counts, state = torch.where(when, counts, self.counts), torch.where(when, state, self._state)
        self.counts, self._state = counts, state
        self.rule.observe(entry, restart=threshold_reset)

    def _table(self, dtype: torch.dtype) -> Tensor:
        """A row for each state and kind: the bytes of the outcome's state, numbers, and counts as bools."""
        patience = self.max_consecutive_spikes
        rows = [
            outcome(state, kind, patience, self.overflow_is_spike) for state in range(patience + 1) for kind in Kind
        ]
        states = torch.tensor([[row.state] for row in rows], dtype=torch.int64, device="cpu")
        numbers = torch.tensor([row[:-1] for row in rows], dtype=dtype, device="cpu")
        flags = numbers[:, : len(self._COUNTS)].bool()
        padding = flags.new_zeros(len(rows), dtype.itemsize - len(self._COUNTS))
        return torch.cat([part.view(torch.uint8) for part in (states, numbers, flags, padding)], 1)

    def _outcome(self, kind: Tensor) -> tuple[Tensor, ...]:
        """The state after it, what is added to the counts and to the limit, and the counts as three bools."""
        index = torch.add(kind, self._state, alpha=len(Kind))
        if index.ndim or not publisher.is_on_host(index):
            return self._look_up(index)
        row = int(index)
        found = self._after_none.get(row)
        if found is None:
            found = self._look_up(index)
            if row < len(Kind):
                self._after_none[row] = found
        return found

    def _look_up(self, index: Tensor) -> tuple[Tensor, ...]:
        rows = torch.embedding(self._outcomes, index)
        dtype = self.counts.dtype
        size, counts = dtype.itemsize, len(self._COUNTS)
        state, counted, raised, flags, _ = rows.split_with_sizes(
            (8, counts * size, 2 * size, counts, size - counts), -1
        )
        counted, raised = counted.view(dtype), raised.view(dtype)
        if index.ndim:
            counted, raised = counted.movedim(-1, 0), raised.movedim(-1, 0)
        return state.view(torch.int64).squeeze(-1), counted, raised, *flags.view(torch.bool).unbind(-1)

    def reset_threshold(self) -> None:
        """Forget the level; the counts go on."""
        self.rule.forget()
        self._state = torch.zeros_like(self._state)

    def go_back(self, earlier: SpikeDetector, when: Tensor) -> None:
        """Forget what has been observed since a copy was made, where a 0-dim bool tensor is True."""
        if not may_be_true(when):
            return
        self.counts = torch.where(when, earlier.counts.to(self.counts), self.counts)
        self._state = torch.where(when, earlier._state.to(self._state.device), self._state)
        self.rule.go_back(earlier.rule, when)

    def __copy__(self) -> SpikeDetector:
        twin = object.__new__(type(self))
        vars(twin).update(vars(self), rule=copy.copy(self.rule))
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Counts and the rule's state: tensors and a dict of tensors."""
        suspended = self._state == self.max_consecutive_spikes
        row = self._state.to(self.counts.dtype)
        return {
            "spike_count": self.counts[0].clone(),
            "nonfinite_count": self.counts[1].clone(),
            "consecutive": row.masked_fill(suspended, 0.0),
            "restarts": self.counts[2].clone(),
            "suspended": suspended.to(row.dtype),
            "rule": self.rule.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            ValueError: if it is not of a detector with a rule of the same kind.
        """
        names = ["spike_count", "nonfinite_count", "consecutive", "restarts", "suspended"]
        if set(state_dict) != {*names, "rule"}:
            raise ValueError(f"Argument state_dict should hold {[*names, 'rule']}, but given {[*state_dict]}")
        like = self.counts
        counts = {name: torch.as_tensor(state_dict[name], dtype=like.dtype, device=like.device) for name in names}
        wrong = [name for name, count in counts.items() if count.shape != self._state.shape]
        if wrong:
            raise ValueError(f"Argument state_dict should hold a number as {wrong[0]}, but given {counts[wrong[0]]}")
        self.rule.load_state_dict(state_dict["rule"])
        self.counts = torch.stack([counts[name] for name in self._COUNTS])
        # Saved with another patience, the row may be longer than this one's.
        row = counts["consecutive"].clamp(max=self.max_consecutive_spikes - 1)
        self._state = row.masked_fill(counts["suspended"] > 0, self.max_consecutive_spikes).long()

    def to(self, reference: Tensor) -> None:
        """Move the state to where a tensor is.

        Args:
            reference: a floating-point tensor of the values' device, dtype and shape.
        """
        self.rule.to(reference)
        numbers = torch.finfo(reference.dtype)
        self._kinds = move_like(self._kinds.clamp(numbers.min, numbers.max), reference)
        if reference.dtype != self.counts.dtype:
            self._outcomes = self._table(reference.dtype)
        self._outcomes, counts = move(self._outcomes, reference.device), move_like(self.counts, reference)
        self._after_none = {}
        state = move(self._state, reference.device)
        if reference.shape != state.shape:
            counts = counts.view(-1, *(1,) * reference.ndim).expand(-1, *reference.shape)
            state = state.expand(reference.shape)
        self.counts, self._state = counts, state


def may_be_true(flag: Tensor) -> bool:
    """Whether a 0-dim bool tensor is True, as far as that is known without waiting for a device."""
    return not flag.is_cpu or torch.is_nonzero(flag)
