"""Judging a gradient's norm, and the statistics that it enters, for good or tentatively."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.checks import check_count
from ignite_monitor.judging.spike_score import SpikeScore
from ignite_monitor.judging.spikes import SpikeDetector, Verdict, may_be_true
from ignite_monitor.monitor.deferred_flag import DeferredFlag

Known = tuple[SpikeDetector, int, SpikeScore]


class NormJudge:
    """A spike detector whose latest entry can be taken back.

    Attributes:
        detector: the detector.
        known: how many norms are known to have gone into its rule, without waiting for a device.
        score: how often there were spikes lately.
    """

    def __init__(self, detector: SpikeDetector) -> None:
        self.detector = detector
        self.known = 0
        self.score = SpikeScore()
        self._restarts = DeferredFlag()

    def observe(self, verdict: Verdict, when: Tensor | None = None) -> None:
        """Let a judged norm enter, where a 0-dim bool tensor is True; None is true."""
        self.detector.observe(verdict, when)
        self.score.observe(verdict.spike, when)
        self._restarts.set(verdict.level_changed if when is None else verdict.level_changed & when)
        if verdict.norm.device.type == "cpu":
            self.known += may_be_true(~verdict.nonfinite if when is None else when & ~verdict.nonfinite)
        elif when is None:
            self.known += 1

    def known_now(self) -> Known:
        """What :meth:`go_back` goes back to."""
        return copy.copy(self.detector), self.known, copy.copy(self.score)

    def go_back(self, before: Known, when: Tensor | None = None) -> None:
        """Take back what has entered since.

        Args:
            when: 0-dim bool tensor: whether to; None is true.
        """
        if when is None:
            self.detector, self.known, self.score = before
            return
        self.detector.go_back(before[0], when)
        self.score.go_back(before[2], when)
        # On other devices than the CPU what may be taken back is not among the known ones.
        if when.device.type == "cpu" and may_be_true(when):
            self.known = before[1]

    def counts(self) -> Tensor:
        """Spikes, norms that are not finite and fresh starts so far, side by side."""
        return self.detector.counts

    def start_afresh(self) -> None:
        """Forget the level; the counts go on."""
        self.detector.start_afresh()
        self.known = 0

    def has_restarted(self, wait: bool) -> bool:
        """Whether the rule has started afresh since this was last true, as far as is known by now, or with waiting."""
        return self._restarts.take(wait)

    def statistics(self, verdict: Verdict) -> dict[str, Tensor]:
        """What is published of a verdict, name -> 0-dim tensor; what there is not yet is left out."""
        values = {"norm": verdict.norm, "spike": verdict.spike.to(verdict.norm.dtype)}
        for name, value, least in (
            ("threshold", verdict.threshold, self.detector.rule.warmup),
            ("mean", verdict.mean, 1),
            ("std", verdict.std, 2),
        ):
            # What lies on the CPU can be looked at without waiting for anything.
            if may_be_true(torch.isfinite(value)) if value.device.type == "cpu" else self.known >= least:
                values[name] = value
        return values | {
            "spike_count": self.detector.spike_count,
            "spike_score": self.score.value(),
            "nonfinite_count": self.detector.nonfinite_count,
        }

    def state_dict(self) -> dict[str, Any]:
        """Statistics and counts: tensors, dicts of tensors and a number."""
        return {"detector": self.detector.state_dict(), "known": self.known, "score": self.score.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned; without a score from before there was one.

        Raises:
            TypeError: if what should be a number is none.
            ValueError: if it is of a judge with another kind of rule.
        """
        known = check_count("state_dict['known']", state_dict["known"])
        score = SpikeScore()
        if "score" in state_dict:
            score.load_state_dict(state_dict["score"])
        self.detector.load_state_dict(state_dict["detector"])
        self.known, self.score = known, score
