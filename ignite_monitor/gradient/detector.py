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
from ignite_monitor.gradient.per_parameter import PerParameterDetector, culprits, described
from ignite_monitor.model._torch import foreach_add
from ignite_monitor.model.devices import move_like
from ignite_monitor.model.names import named_parameters
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


class SpikeNumbers(NamedTuple):
    """Numbers of a spike on the host: by what it was detected, value, threshold, and shares of the excess.

    ``culprits`` has the shares by the name of the parameter, ``keys`` by the published key.
    """

    name: str
    value: float
    threshold: float
    culprits: dict[str, float]
    keys: dict[str, float]

    def __str__(self) -> str:
        what = "loss" if self.name == "loss" else "gradient norm"
        return described(what, self.value, self.threshold, self.culprits)


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
        self._detectors: dict[str, Any] = {"detector": SpikeDetector(rule, **options)}
        if loss is not None:
            self._detectors["loss"] = LossDetector(**options)
        if per_parameter:
            self._detectors["per_parameter"] = PerParameterDetector(**options)
        self._named: tuple[Sequence[nn.Parameter], tuple[str, ...]] = ((), ())  # the last parameters and their names
        self.pending: tuple[GradientDetection, Tensor] | None = None
        self._counts = torch.zeros(3, dtype=torch.float64, device="cpu").unbind()

    def detect(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], scale: Tensor | None
    ) -> GradientDetection:
        """Compare gradients, at least one, with their thresholds; updates nothing.

        Args:
            parameters: the parameters, the same list as long as they are the same.
            scale: factor of all gradients, 0-dim; None for 1.
        """
        of_parameters, of_loss = self._detectors.get("per_parameter"), self._detectors.get("loss")
        loss = parameter = None
        if of_parameters is None:
            norm = _divided(gradient_norm(gradients, self._norm_type, self._reduction), scale)
        else:
            parts = _divided(norms(gradients, self._norm_type), scale)
            parameter = of_parameters.detect(self._names(parameters), _with_zeros(parts, parameters))
            any_spike = parameter.spike.any()
            norm, any_spike = norm_of_parts(gradients, parts, self._norm_type, self._reduction, any_spike)
        detection = self._detectors["detector"].detect(norm)
        spike, reset = detection.spike, detection.threshold_reset
        if parameter is not None:
            spike, reset = spike | any_spike, reset | parameter.threshold_reset.any()
        if of_loss is not None:
            loss = of_loss.detect(self.losses.mean(norm.device))
            spike, reset = spike | loss.spike, reset | loss.threshold_reset
        return GradientDetection(detection, loss, parameter, spike, reset)

    def _names(self, parameters: Sequence[nn.Parameter]) -> tuple[str, ...]:
        if self._named[0] is not parameters:
            name_of = {id(parameter): name for name, parameter, _ in named_parameters(self._model)}
            self._named = parameters, tuple(name_of[id(parameter)] for parameter in parameters)
        return self._named[1]

    def observe(self, detection: GradientDetection, when: Tensor | None = None) -> None:
        """Update statistics and counts with a detection, where a 0-dim bool tensor is True; None for True."""
        parts = {"detector": detection.norm, "loss": detection.loss, "per_parameter": detection.parameters}
        for name, detector in self._detectors.items():
            detector.observe(parts[name], when)
        self._counts = self._counts_with(detection, when)

    def resolve(self, accumulated: Tensor | None, device: torch.device) -> Tensor:
        """Let the pending detection update the statistics, unless a backward has accumulated into its gradient.

        Args:
            accumulated: whether it has on this rank, a 0-dim bool tensor; None if unknown.

        Returns:
            Whether it has on any rank.
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

    def counts(self) -> Sequence[Tensor]:
        """Number of spikes, of non-finite norms, and of resets so far, the pending detection included."""
        return self._counts if self.pending is None else self._counts_with(*self.pending)

    def _counts_with(self, detection: GradientDetection, when: Tensor | None) -> Any:
        flags = [detection.spike, detection.norm.nonfinite, detection.threshold_reset]
        if when is not None:
            flags = [flag & when for flag in flags]
        if self._counts[0].device != flags[0].device:
            self._counts = tuple(move_like(count, detection.norm.value) for count in self._counts)
        return foreach_add(self._counts, flags)

    def spike_numbers(self, detection: GradientDetection) -> Tensor:
        """Collect what is reported of a spike in a vector for :meth:`read`, without synchronization."""
        norm, loss, parameters = detection.norm, detection.loss, detection.parameters
        by_gradient = norm.spike if parameters is None else norm.spike | parameters.spike.any()
        numbers, by_loss = torch.stack((norm.value, norm.threshold)), torch.zeros_like(by_gradient)
        if loss is not None:
            by_loss, by_gradient = loss.spike & ~by_gradient, loss.spike | by_gradient
            numbers = torch.where(by_loss, torch.stack((loss.value, loss.threshold)).exp(), numbers)
        parts = [by_loss.view(1).to(numbers.dtype), numbers]
        if parameters is not None:  # none is named if only those of another rank are above their thresholds
            parts.append(culprits(parameters, by_gradient))
        return torch.cat(parts)

    def read(self, numbers: Sequence[float]) -> SpikeNumbers:
        """Convert :meth:`spike_numbers`, read on the host; without a threshold it is inf."""
        by_loss, value, threshold, *shares = numbers
        threshold = math.inf if math.isnan(threshold) else threshold
        of_parameters = self._detectors.get("per_parameter")
        named = of_parameters.named(shares) if of_parameters is not None else {}
        keys = of_parameters.keys(shares) if of_parameters is not None else {}
        return SpikeNumbers("loss" if by_loss else "norm", value, threshold, named, keys)

    def release(self) -> None:
        """Drop everything that belongs to a run; statistics stay."""
        self.losses.clear()
        self._named = (), ()

    def reset_threshold(self) -> None:
        """Discard all earlier values; counts stay."""
        self.settle()
        for detector in self._detectors.values():
            detector.reset_threshold()

    def _copy(self) -> GradientDetector:
        twin = copy.copy(self)
        twin._detectors = {name: detector.copy() for name, detector in self._detectors.items()}
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return statistics and counts, as if the gradient of the pending detection had been discarded."""
        twin = self._copy()
        twin.settle()
        state = {name: detector.state_dict() for name, detector in twin._detectors.items()}
        return state | {"counts": torch.stack([*twin._counts])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; a ValueError if it is not of this kind, and nothing has changed then."""
        counts = torch.as_tensor(state_dict["counts"], dtype=torch.float64, device="cpu")
        if counts.shape != (3,):
            raise ValueError(f"Argument state_dict should hold three numbers as counts, but given {counts}")
        twin = self._copy()
        for name in twin._detectors.keys() & state_dict.keys():
            twin._detectors[name].load_state_dict(state_dict[name])
        self._detectors = twin._detectors
        self._counts, self.pending = counts.clone().unbind(), None


def _divided(values: Tensor, scale: Tensor | None) -> Tensor:
    return values if scale is None else values / scale.to(values.device)


def _with_zeros(norms_given: Tensor, parameters: Sequence[nn.Parameter]) -> Tensor:
    """Norms of all parameters from the norms of those that have a gradient."""
    if len(norms_given) == len(parameters):
        return norms_given
    given, none = iter(norms_given.unbind()), torch.zeros_like(norms_given[0])
    return torch.stack([none if parameter.grad is None else next(given) for parameter in parameters])
