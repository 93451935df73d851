"""Judging a step by more than the norm of its gradient."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.gradient.loss_signal import LossSignal
from ignite_monitor.judging.judge import NormJudge
from ignite_monitor.judging.spikes import SpikeDetector, Verdict
from ignite_monitor.model.devices import move_like


class StepJudge(NormJudge):
    """A step is a spike if the norm of its gradient is one, or its loss.

    Both are judged by their own earlier values. The loss's verdict is the last of a verdict's ``others``.

    Args:
        detector: of the norm.
        loss: of the loss.
    """

    def __init__(self, detector: SpikeDetector, loss: LossSignal) -> None:
        super().__init__(detector)
        self.loss = loss
        self._by_loss_alone = torch.zeros((), dtype=torch.float64, device="cpu")

    def with_loss(self, verdict: Verdict, loss: Tensor) -> Verdict:
        """The verdict on a step whose loss is known too."""
        other = self.loss.judge(loss)
        return verdict._replace(spike=verdict.spike | other.spike, others=(other,))

    def observe(self, verdict: Verdict, when: Tensor | None = None) -> None:
        super().observe(verdict, when)
        alone = verdict.spike & (verdict.outcome[0] == 0)
        self._by_loss_alone = move_like(self._by_loss_alone, verdict.norm) + (alone if when is None else alone & when)
        for other in verdict.others:
            self.loss.observe(other, when)

    def known_now(self) -> Any:
        return super().known_now(), copy.copy(self.loss), self._by_loss_alone

    def go_back(self, before: Any, when: Tensor | None = None) -> None:
        known, loss, by_loss_alone = before
        super().go_back(known, when)
        if when is None:
            self.loss, self._by_loss_alone = loss, by_loss_alone
            return
        self.loss.detector.go_back(loss.detector, when)
        earlier = move_like(by_loss_alone, self._by_loss_alone)
        self._by_loss_alone = torch.where(when, earlier, self._by_loss_alone)

    def statistics(self, verdict: Verdict) -> dict[str, Tensor]:
        values = super().statistics(verdict)
        values["spike_count"] = values["spike_count"] + move_like(self._by_loss_alone, values["spike_count"])
        [other] = verdict.others
        return values | {"loss_spike": other.spike.to(verdict.norm.dtype)}

    def counts(self) -> Tensor:
        counts = super().counts()
        alone = move_like(self._by_loss_alone, counts)
        return counts + torch.stack((alone, torch.zeros_like(alone), torch.zeros_like(alone)))

    def start_afresh(self) -> None:
        super().start_afresh()
        self.loss.detector.start_afresh()

    def state_dict(self) -> dict[str, Any]:
        loss = {"detector": self.loss.state_dict(), "alone": self._by_loss_alone}
        return super().state_dict() | {"loss": loss}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if "loss" in state_dict:
            self.loss.load_state_dict(state_dict["loss"]["detector"])
            self._by_loss_alone = torch.as_tensor(state_dict["loss"]["alone"], dtype=torch.float64)
