"""Judging a gradient: by its norm, and by the loss and the norm of each tensor, where those are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_type
from ignite_monitor.detection.judge import NormJudge
from ignite_monitor.detection.spikes import Detection, SpikeDetector
from ignite_monitor.gradient.loss import Losses, LossSignal, LossSource
from ignite_monitor.gradient.per_parameter import PerParameterJudge
from ignite_monitor.model.norms import norm_of_each
from ignite_monitor.monitor.ranks import (
    all_take_part,
    gradient_norm,
    max_over_ranks,
    norm_of_parts,
    reduction_of,
    world_size,
)


class GradientJudge(NormJudge):
    """Judges the gradients of a model, the same on every rank.

    Args:
        detector: of the norm.
        loss: where the losses come from; None judges none.
        per_parameter: whether to judge each tensor.
        norm_type: p of the norm.
        reduction: what the ranks' gradients are to each other.

    Attributes:
        losses: those of the step.
        tensors: what judges each tensor, if that is asked for.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if ``reduction`` is not that of the model's wrapper.
    """

    def __init__(
        self,
        model: nn.Module,
        detector: SpikeDetector,
        *,
        loss: LossSource | None,
        per_parameter: bool,
        norm_type: float,
        reduction: str,
    ) -> None:
        check_type("per_parameter", per_parameter, bool, "bool")
        self._model, self._norm_type, self._reduction = model, norm_type, reduction_of(model, reduction)
        patience, overflow_is_spike = detector.max_consecutive_spikes, detector.overflow_is_spike
        self.losses = Losses(loss, model)
        signals: dict[str, Any] = {}
        self.tensors = self._loss_signal = None
        if loss is not None:
            self._loss_signal = LossSignal(max_consecutive_spikes=patience, overflow_is_spike=overflow_is_spike)
            signals["loss"] = self._loss_signal
        if per_parameter:
            self.tensors = PerParameterJudge(max_consecutive_spikes=patience, overflow_is_spike=overflow_is_spike)
            signals["per_parameter"] = self.tensors
        super().__init__(detector, signals)

    def judge(self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], scale: Tensor | None) -> Detection:
        """A detection on gradients, which nobody waits for.

        Args:
            parameters: those that are looked at, the same list as long as they are the same.
            gradients: of those that have one, at least one.
            scale: what they are scaled by, 0-dim; None for 1.
        """
        others: list[Detection] = []
        spikes: list[Tensor] = []
        if self.tensors is None:
            norm = _divided(gradient_norm(gradients, self._norm_type, self._reduction), scale)
        else:
            norms = _divided(norm_of_each(gradients, self._norm_type), scale)
            others = [self.tensors.judge_gradients(self._model, parameters, norms)]
            spike = others[0].spike.any()
            norm, spike = norm_of_parts(gradients, norms, self._norm_type, self._reduction, spike)
            spikes = [spike]
        if self._loss_signal is not None:
            of_loss = self._loss_signal.judge(self.losses.mean(norm.device))
            others, spikes = [of_loss, *others], [of_loss.spike, *spikes]
        detection = self.detector.judge(norm)
        for spike in spikes:
            detection = detection._replace(spike=detection.spike | spike)
        return detection._replace(others=tuple(others)) if others else detection

    def has_grown(self, found: Tensor | None, device: torch.device) -> Tensor:
        """Whether a backward has added to a gradient on any rank, a 0-dim bool tensor.

        Args:
            found: whether it has on this rank; None if that is not known.
        """
        grows = torch.zeros((), dtype=torch.bool, device=device) if found is None else found
        if world_size() > 1 and all_take_part(self._model):
            grows = max_over_ranks(grows.to(torch.float32)) > 0
        self.losses.decided(grows)
        return grows

    def of_spike(self, detection: Detection) -> Tensor:
        """What there is to tell of a spike, in a vector that :meth:`told` takes, without waiting."""
        others = list(detection.others)
        loss = None if self._loss_signal is None else others.pop(0)
        seen = torch.stack([detection.counted[0] > 0, *(other.spike.any() for other in others)]).any()
        numbers, by_loss = torch.stack((detection.norm, detection.threshold)), torch.zeros_like(seen)
        if loss is not None:
            by_loss, seen = loss.spike & ~seen, loss.spike | seen
            numbers = torch.where(by_loss, torch.stack((loss.norm, loss.threshold)).exp(), numbers)
        parts = [by_loss.view(1).to(numbers.dtype), numbers]
        if self.tensors is not None:
            # Nothing where only what another rank holds is above its threshold.
            parts.append(self.tensors.culprits(others[-1], seen))
        return torch.cat(parts)

    def told(self, numbers: Sequence[float]) -> tuple[str, float, float, list[float]]:
        """What is a spike, "norm", or "loss" where nothing else is one; its value and threshold; the culprits."""
        by_loss, value, threshold, *culprits = numbers
        return "loss" if by_loss else "norm", value, threshold, culprits

    def named(self, culprits: Sequence[float]) -> dict[str, float]:
        """Parameter -> share of the excess, of what :meth:`told` gave."""
        return {} if self.tensors is None else self.tensors.named(culprits)

    def forget(self) -> None:
        """Let go of what belongs to a run; statistics stay."""
        self.losses.forget()
        if self.tensors is not None:
            self.tensors.forget()


def _divided(values: Tensor, scale: Tensor | None) -> Tensor:
    return values if scale is None else values / scale.to(values.device)
