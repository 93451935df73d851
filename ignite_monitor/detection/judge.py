"""Judging a value, alone or with others of its step, and the statistics it enters, for good or tentatively."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.checks import check_count
from ignite_monitor.detection.spikes import Detection, SpikeDetector, may_be_true
from ignite_monitor.model.devices import move, move_like
from ignite_monitor.monitor.deferred_flag import DeferredFlag


class SpikeScore:
    """The share of spikes among the last thousand values, OLMo's measure of a run's stability.

    (Team OLMo, "2 OLMo 2 Furious", arXiv:2501.00656, section 3.1.) Tensors on the flags' device; nothing is read on
    the host.
    """

    WINDOW = 1000

    def __init__(self) -> None:
        self._one = torch.ones(1, dtype=torch.float64, device="cpu")
        # In turn whether a value was a spike, and 1 for a value; zeros as long as there are fewer.
        self._recent = torch.zeros(2 * self.WINDOW, dtype=torch.float64, device="cpu")

    def observe(self, spike: Tensor, when: Tensor | None = None) -> None:
        """Count one value, a spike or not, where a 0-dim bool tensor is True; None is true."""
        if spike.device != self._recent.device:
            self._one, self._recent = move(self._one, spike.device), move(self._recent, spike.device)
        recent = torch.cat((self._recent[2:], spike.view(1), self._one))
        self._recent = recent if when is None else torch.where(when, recent, self._recent)

    def value(self) -> Tensor:
        """The share, 0-dim; NaN before the first value."""
        spikes, values = self._recent.view(-1, 2).sum(0).unbind()
        return spikes / values

    def go_back(self, earlier: SpikeScore, when: Tensor) -> None:
        """Forget the values since a copy was made, where a 0-dim bool tensor is True."""
        self._recent = torch.where(when, move(earlier._recent, self._recent.device), self._recent)

    def state_dict(self) -> dict[str, Tensor]:
        """The last values, a tensor."""
        return {"recent": self._recent}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Continue from a saved state; another one is a ValueError."""
        recent = torch.as_tensor(state_dict["recent"], dtype=torch.float64) if set(state_dict) == {"recent"} else None
        if recent is None or recent.shape != self._recent.shape:
            raise ValueError(
                f"Argument state_dict should hold {2 * self.WINDOW} numbers as recent, but given {state_dict}"
            )
        self._one, self._recent = move(self._one, recent.device), recent


class Known(NamedTuple):
    """What :meth:`NormJudge.go_back` goes back to."""

    detector: SpikeDetector
    known: int
    score: SpikeScore
    signals: dict[str, Any]
    alone: Tensor


class NormJudge:
    """A spike detector whose latest entry can be taken back, and what else makes a step a spike.

    A detection's ``others`` are those of the signals, in their order.

    Args:
        detector: of the value.
        signals: name in the state_dict -> what else judges the step by its own earlier values. It observes, goes back,
            starts afresh and has a state as this one does.

    Attributes:
        detector: the detector.
        known: how many norms are known to have gone into its rule, without waiting for a device.
        score: how often there were spikes lately.
        restarts: whether the rule has started afresh.
    """

    def __init__(self, detector: SpikeDetector, signals: Mapping[str, Any] | None = None) -> None:
        self.detector = detector
        self.signals = signals or {}
        self.known = 0
        self.score = SpikeScore()
        self.restarts = DeferredFlag()
        self._alone = torch.zeros(3, dtype=torch.float64, device="cpu")  # what the signals alone add to the counts

    def observe(self, detection: Detection, when: Tensor | None = None) -> None:
        """Let a judged norm enter, where a 0-dim bool tensor is True; None is true."""
        self.detector.observe(detection, when)
        self.score.observe(detection.spike, when)
        threshold_reset = detection.threshold_reset
        if self.signals:
            for signal, other in zip(self.signals.values(), detection.others, strict=True):
                signal.observe(other, when)
                threshold_reset = threshold_reset | other.threshold_reset.any()
            of_all = torch.stack((detection.spike, detection.nonfinite, threshold_reset)).to(detection.counted.dtype)
            alone = of_all - detection.counted
            self._alone = move_like(self._alone, detection.norm) + (alone if when is None else alone * when)
        self.restarts.set(threshold_reset if when is None else threshold_reset & when)
        if detection.norm.is_cpu:
            self.known += not torch.is_nonzero(detection.nonfinite if when is None else detection.nonfinite | ~when)
        elif when is None:
            self.known += 1

    def known_now(self) -> Known:
        """What :meth:`go_back` goes back to."""
        signals = {name: copy.copy(signal) for name, signal in self.signals.items()}
        return Known(copy.copy(self.detector), self.known, copy.copy(self.score), signals, self._alone)

    def go_back(self, before: Known, when: Tensor | None = None) -> None:
        """Take back what has entered since, where a 0-dim bool tensor is True; None is true."""
        for name, signal in self.signals.items():
            signal.go_back(before.signals[name], when)
        if when is None:
            self.detector, self.known, self.score, _, self._alone = before
            return
        self.detector.go_back(before.detector, when)
        self.score.go_back(before.score, when)
        if self.signals:
            self._alone = torch.where(when, move_like(before.alone, self._alone), self._alone)
        # On other devices than the CPU what may be taken back is not among the known ones.
        if when.device.type == "cpu" and may_be_true(when):
            self.known = before.known

    def counts(self) -> Tensor:
        """Spikes, norms that are not finite and iterations with a fresh start so far, side by side."""
        counts = self.detector.counts
        return counts + move_like(self._alone, counts) if self.signals else counts

    def reset_threshold(self) -> None:
        """Forget the level; the counts go on."""
        self.detector.reset_threshold()
        for signal in self.signals.values():
            signal.reset_threshold()
        self.known = 0

    def statistics(self, detection: Detection) -> dict[str, Any]:
        """What is published of a detection, name -> number or 0-dim tensor; what there is not yet is left out."""
        least = {"threshold": self.detector.rule.warmup, "mean": 1, "std": 2}
        spikes, nonfinite, _ = self.counts().unbind()
        return {
            "norm": detection.norm,
            # What is counted is the spike, unless something else may make one.
            "spike": detection.spike.to(detection.norm.dtype) if detection.others else detection.counted[0],
            **{name: getattr(detection, name) for name, count in least.items() if self.known >= count},
            "spike_count": spikes,
            "spike_score": self.score.value(),
            "nonfinite_count": nonfinite,
        }

    def state_dict(self) -> dict[str, Any]:
        """Statistics and counts: tensors, dicts of tensors and a number."""
        state = {"detector": self.detector.state_dict(), "known": self.known, "score": self.score.state_dict()}
        if not self.signals:
            return state
        return state | {"alone": self._alone} | {name: each.state_dict() for name, each in self.signals.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned; without what is newer than it.

        Raises:
            TypeError: if what should be a number is none.
            ValueError: if it is of a judge with another kind of rule.
        """
        known = check_count("state_dict['known']", state_dict["known"])
        score = SpikeScore()
        if "score" in state_dict:
            score.load_state_dict(state_dict["score"])
        self.detector.load_state_dict(state_dict["detector"])
        for name, signal in self.signals.items():
            if name in state_dict:
                signal.load_state_dict(state_dict[name])
        self._alone = torch.as_tensor(state_dict.get("alone", [0.0] * 3), dtype=torch.float64, device="cpu")
        self.known, self.score = known, score
