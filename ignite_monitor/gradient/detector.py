"""Spikes of a gradient: of its norm, and if requested of the loss and of the norm of each parameter."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_type
from ignite_monitor.detection.spikes import Detection, SpikeDetector
from ignite_monitor.detection.thresholds import ThresholdRule
from ignite_monitor.gradient.loss import LossCollector, LossDetector, LossSource
from ignite_monitor.gradient.per_parameter import PerParameterDetector
from ignite_monitor.model.devices import move_like
from ignite_monitor.model.norms import norms
from ignite_monitor.monitor.ranks import (
    all_take_part,
    gradient_norm,
    max_over_ranks,
    norm_of_parts,
    reduction_of,
    world_size,
)


class GradientDetection(NamedTuple):
    """Result for one gradient.

    Attributes:
        norm: of its norm over all ranks.
        loss: of its loss; None if losses are not compared.
        parameters: of the norm of each parameter; None if these are not compared.
        spike: whether any of them is a spike, on any rank.
        threshold_reset: whether it resets any of their rules.
    """

    norm: Detection
    loss: Detection | None
    parameters: Detection | None
    spike: Tensor
    threshold_reset: Tensor

    def where(self, flag: Tensor, other: GradientDetection) -> GradientDetection:
        """Select this detection where a 0-dim bool tensor is True, else another one."""
        fields: Any = (_selected(flag, own, its) for own, its in zip(self, other, strict=True))
        return GradientDetection._make(fields)


class SpikeNumbers(NamedTuple):
    """Numbers of a spike on the host: by what it was detected, value, threshold, and culprits."""

    name: str
    value: float
    threshold: float
    culprits: list[float]


class GradientDetector:
    """Detects spikes of a model's gradients, the same on every rank.

    The detection of a gradient that no step has used may be postponed: its gradient was either discarded, or the next
    backward accumulates into it. It then updates the statistics only in the first case.

    Args:
        loss: the source of losses; None for none.
        per_parameter: whether to compare the norm of each parameter.
        norm_type: p of the norm.
        reduction: relation of the ranks' gradients, "mean" or "sum".
        options: those of :class:`SpikeDetector`.

    Attributes:
        norm: detector of the norm.
        loss: detector of the loss, or None.
        parameters: detector of the parameters, or None.
        losses: the collected losses.
        pending: the postponed detection, and whether it counts, a 0-dim bool tensor; None for none.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if ``reduction`` is not that of the model's wrapper.
    """

    def __init__(
        self,
        model: nn.Module,
        rule: ThresholdRule,
        *,
        loss: LossSource | None,
        per_parameter: bool,
        norm_type: float,
        reduction: str,
        **options: Any,
    ) -> None:
        check_type("per_parameter", per_parameter, bool, "bool")
        self._model, self._norm_type, self._reduction = model, norm_type, reduction_of(model, reduction)
        self.losses = LossCollector(loss, model)
        self.norm = SpikeDetector(rule, **options)
        self.loss = None if loss is None else LossDetector(**options)
        self.parameters = PerParameterDetector(**options) if per_parameter else None
        self.pending: tuple[GradientDetection, Tensor] | None = None
        self._counts = torch.zeros(3, dtype=torch.float64, device="cpu")

    def detect(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], scale: Tensor | None
    ) -> GradientDetection:
        """Compare gradients with their thresholds; updates nothing.

        Args:
            parameters: the parameters, the same list as long as they are the same.
            gradients: of those that have one, at least one.
            scale: factor of all gradients, 0-dim; None for 1.
        """
        of_parameters = of_loss = None
        if self.parameters is None:
            norm = _divided(gradient_norm(gradients, self._norm_type, self._reduction), scale)
        else:
            tensor_norms = _divided(norms(gradients, self._norm_type), scale)
            of_parameters = self.parameters.detect_gradients(self._model, parameters, tensor_norms)
            norm, any_spike = norm_of_parts(
                gradients, tensor_norms, self._norm_type, self._reduction, of_parameters.spike.any()
            )
        of_norm = self.norm.detect(norm)
        spike, reset = of_norm.spike, of_norm.threshold_reset
        if of_parameters is not None:
            spike, reset = spike | any_spike, reset | of_parameters.threshold_reset.any()
        if self.loss is not None:
            of_loss = self.loss.detect(self.losses.mean(norm.device))
            spike, reset = spike | of_loss.spike, reset | of_loss.threshold_reset
        return GradientDetection(of_norm, of_loss, of_parameters, spike, reset)

    def observe(self, detection: GradientDetection, when: Tensor | None = None) -> None:
        """Update statistics and counts with a detection, where a 0-dim bool tensor is True; None for True."""
        self.norm.observe(detection.norm, when)
        if self.loss is not None and detection.loss is not None:
            self.loss.observe(detection.loss, when)
        if self.parameters is not None and detection.parameters is not None:
            self.parameters.observe(detection.parameters, when)
        self._counts = self._counts_with(detection, when)

    def resolve(self, accumulated: Tensor | None, device: torch.device) -> Tensor:
        """A backward has ended: let the pending detection update the statistics, unless it was accumulated into.

        Args:
            accumulated: whether a gradient on this rank was accumulated into, a 0-dim bool tensor; None if unknown.

        Returns:
            Whether any was on any rank.
        """
        if accumulated is None:
            accumulated = torch.zeros((), dtype=torch.bool, device=device)
        if world_size() > 1 and all_take_part(self._model):
            accumulated = max_over_ranks(accumulated.to(torch.float32)) > 0
        self.losses.resolve(accumulated)
        self.settle(~accumulated)
        return accumulated

    def settle(self, when: Tensor | None = None) -> None:
        """Let the pending detection update the statistics where a 0-dim bool tensor is True; None for True."""
        if self.pending is not None:
            (detection, counts), self.pending = self.pending, None
            self.observe(detection, counts if when is None else counts & move_like(when, counts))

    def counts(self) -> Tensor:
        """Number of spikes, of non-finite norms, and of resets so far, the pending detection included."""
        return self._counts if self.pending is None else self._counts_with(*self.pending)

    def _counts_with(self, detection: GradientDetection, when: Tensor | None) -> Tensor:
        flags = torch.stack((detection.spike, detection.norm.nonfinite, detection.threshold_reset))
        return move_like(self._counts, detection.norm.value) + (flags if when is None else flags & when)

    def spike_numbers(self, detection: GradientDetection) -> Tensor:
        """Collect what is reported of a spike in a vector for :meth:`read`, without synchronization."""
        norm, loss, parameters = detection.norm, detection.loss, detection.parameters
        by_gradient = norm.spike if parameters is None else norm.spike | parameters.spike.any()
        numbers, by_loss = torch.stack((norm.value, norm.threshold)), torch.zeros_like(by_gradient)
        if loss is not None:
            by_loss, by_gradient = loss.spike & ~by_gradient, loss.spike | by_gradient
            numbers = torch.where(by_loss, torch.stack((loss.value, loss.threshold)).exp(), numbers)
        parts = [by_loss.view(1).to(numbers.dtype), numbers]
        if self.parameters is not None and parameters is not None:
            # None if only parameters of another rank are above their thresholds.
            parts.append(self.parameters.culprits(parameters, by_gradient))
        return torch.cat(parts)

    def read(self, numbers: Sequence[float]) -> SpikeNumbers:
        """Convert :meth:`spike_numbers`, read on the host; without a threshold it is inf."""
        by_loss, value, threshold, *culprits = numbers
        return SpikeNumbers(
            "loss" if by_loss else "norm", value, math.inf if math.isnan(threshold) else threshold, culprits
        )

    def named(self, culprits: Sequence[float]) -> dict[str, float]:
        """Parameter -> share of the excess."""
        return {} if self.parameters is None else self.parameters.named(culprits)

    def forget(self) -> None:
        """Drop everything that belongs to a run; statistics stay."""
        self.losses.forget()
        if self.parameters is not None:
            self.parameters.forget()

    def reset_threshold(self) -> None:
        """Discard all earlier values; counts stay."""
        self.settle()
        for detector in self._detectors().values():
            detector.reset_threshold()

    def _detectors(self) -> dict[str, Any]:
        every = {"detector": self.norm, "loss": self.loss, "per_parameter": self.parameters}
        return {name: detector for name, detector in every.items() if detector is not None}

    def _copy(self) -> GradientDetector:
        twin = copy.copy(self)
        twin.norm, twin.loss, twin.parameters = copy.copy(self.norm), copy.copy(self.loss), copy.copy(self.parameters)
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return statistics and counts, as if the gradient of the pending detection had been discarded."""
        twin = self._copy()
        twin.settle()
        return {name: detector.state_dict() for name, detector in twin._detectors().items()} | {"counts": twin._counts}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            ValueError: if it is not of this kind; nothing has changed then.
        """
        counts = torch.as_tensor(state_dict["counts"], dtype=torch.float64, device="cpu")
        if counts.shape != (3,):
            raise ValueError(f"Argument state_dict should hold three numbers as counts, but given {counts}")
        twin = self._copy()
        for name, detector in twin._detectors().items():
            if name in state_dict:
                detector.load_state_dict(state_dict[name])
        self.norm, self.loss, self.parameters = twin.norm, twin.loss, twin.parameters
        self._counts, self.pending = counts.clone(), None


def _selected(flag: Tensor, own: Any, its: Any) -> Any:
    if own is None:
        return None
    return torch.where(flag, own, its) if isinstance(own, Tensor) else own.where(flag, its)


def _divided(values: Tensor, scale: Tensor | None) -> Tensor:
    return values if scale is None else values / scale.to(values.device)
