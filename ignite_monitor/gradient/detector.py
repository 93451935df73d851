"""Spikes of a gradient: of its norm, and if requested of the loss and of the norm of each parameter."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_choice, check_type
from ignite_monitor.detection.spikes import Detection, SpikeDetector
from ignite_monitor.detection.thresholds import ThresholdRule, loaded
from ignite_monitor.events.gradient_tracker import AccumulationProbe, GradientTracker
from ignite_monitor.gradient.loss import LossCollector, LossDetector, LossSource
from ignite_monitor.gradient.per_parameter import PerParameterDetector
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
    """Result for one gradient."""

    norm: Detection  # of its norm over all ranks
    loss: Detection | None  # of its loss; None if losses are not compared
    parameters: Detection | None  # of the norm of each parameter; None if these are not compared
    spike: Tensor  # whether any of them is a spike, on any rank
    threshold_reset: Tensor  # whether it resets any of their rules
    names: tuple[str, ...] = ()  # those of the parameters

    @property
    def exceeds(self) -> Tensor:
        """Whether a finite norm is above its threshold, of the gradient or of a parameter, 0-dim."""
        above = self.norm.above if self.parameters is None else self.norm.above | self.parameters.above.any()
        return above & ~self.norm.nonfinite

    def values(self) -> dict[str, Tensor]:
        """Published values by name, but for counts."""
        norm, loss = self.norm, self.loss
        values = {"norm": norm.value, "threshold": norm.threshold, "mean": norm.mean, "std": norm.std}
        values["spike"] = self.spike
        if loss is not None:  # a loss without a logarithm is not compared
            values["loss_spike"] = loss.spike.to(norm.value.dtype).masked_fill(loss.value.isneginf(), math.nan)
        return values

    def numbers(self) -> Tensor:
        """Collect the numbers of a :class:`SpikeNumbers` in a vector, without synchronization."""
        norm, loss, parameters = self.norm, self.loss, self.parameters
        by_gradient = norm.spike if parameters is None else norm.spike | parameters.spike.any()
        numbers, by_loss = torch.stack((norm.value, norm.threshold)), torch.zeros_like(by_gradient)
        if loss is not None:
            by_loss, by_gradient = loss.spike & ~by_gradient, loss.spike | by_gradient
            numbers = torch.where(by_loss, torch.stack((loss.value, loss.threshold)).exp(), numbers)
        parts = [by_loss.view(1).to(numbers.dtype), numbers]
        if parameters is not None:  # none is named if only those of another rank are above their thresholds
            parts.append(culprits(parameters) * by_gradient)
        return torch.cat(parts)


class SpikeNumbers(NamedTuple):
    """Numbers of a spike on the host."""

    name: str  # "norm", or "loss" if the gradient is within its threshold
    value: float
    threshold: float  # inf for none
    culprits: dict[str, float]  # parameters with the largest excess over their thresholds -> share of it

    @classmethod
    def from_host(cls, numbers: Sequence[float], names: Sequence[str]) -> SpikeNumbers:
        """Convert :meth:`GradientDetection.numbers`, read on the host, of parameters with these names."""
        by_loss, value, threshold, *shares = numbers
        threshold = math.inf if math.isnan(threshold) else threshold
        return cls("loss" if by_loss else "norm", value, threshold, named(shares, names))

    def __str__(self) -> str:
        text = f"{'loss' if self.name == 'loss' else 'gradient norm'} {self.value:.3g}"
        if 0 < self.threshold < self.value < math.inf:
            text += f", {self.value / self.threshold:.3g} x its threshold"
        shares = ", ".join(f"{100 * share:.0f} % of the excess in {name}" for name, share in self.culprits.items())
        return f"{text}; {shares}" if shares else text


def culprits(detection: Detection) -> Tensor:
    """Return the three largest shares in the excess of all norms over their thresholds, then the parameters' indices.

    Norms that are not finite share it equally. If all norms are within their thresholds, it is the excess over the
    means.
    """
    huge = torch.finfo(detection.value.dtype).max ** 0.5
    bounds = torch.stack((detection.threshold, detection.mean)).nan_to_num(math.inf)
    excess, beyond = (detection.value - bounds).nan_to_num(nan=huge, posinf=huge).clamp(min=0.0).unbind()
    excess = torch.where(excess.any(), excess, beyond)
    shares, indices = (excess / excess.sum()).topk(min(3, len(excess)))
    return torch.cat((shares, indices))


def named(culprits: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Convert :func:`culprits`, read on the host, to name -> share; shares below 5 % are omitted."""
    half = len(culprits) // 2
    shares = zip(culprits[half:], culprits[:half], strict=True)
    return {names[int(index)]: share for index, share in shares if share >= 0.05}


class GradientDetector:
    """Detects spikes of a model's gradients, the same on every rank.

    The detection of a gradient that no step has used may be postponed: its gradient was either discarded, or the next
    backward accumulates into it. It then updates the statistics only in the first case.

    Arguments are those of the monitor, and as options those of :class:`SpikeDetector`.

    Attributes:
        losses: the collected losses.
        pending: the postponed detection, and whether it counts, a 0-dim bool tensor; None for none.
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
        check_choice("reduction", reduction, "mean", "sum")
        self._model, self._norm_type, self._reduction = model, float(norm_type), reduction_of(model, reduction)
        self.losses = LossCollector(loss, model)
        self._detectors: dict[str, Any] = {"detector": SpikeDetector(rule, **options)}
        if loss is not None:
            self._detectors["loss"] = LossDetector(**options)
        if per_parameter:
            self._detectors["per_parameter"] = PerParameterDetector(**options)
        self._named: tuple[Sequence[nn.Parameter], tuple[str, ...]] = ((), ())  # the last parameters and their names
        self.pending: tuple[GradientDetection, Tensor] | None = None
        self._probe: AccumulationProbe | None = None  # of the pending detection's gradient
        self._counts: Sequence[Tensor] = torch.zeros(3, dtype=torch.float64, device="cpu").unbind()

    def detect(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor], scale: Tensor | None
    ) -> GradientDetection:
        """Compare the gradients of parameters, times 0-dim ``scale``, with their thresholds; updates nothing."""
        of_parameters, of_loss = self._detectors.get("per_parameter"), self._detectors.get("loss")
        loss, parameter, names = None, None, ()
        if of_parameters is None:
            norm = self.norm(gradients, scale)
        else:
            parts = norms(gradients, self._norm_type)
            parts = parts if scale is None else parts / scale.to(parts.device)
            all_parts = parts
            if len(parts) < len(parameters):  # 0 for a parameter without a gradient
                given, none = iter(parts.unbind()), torch.zeros_like(parts[0])
                all_parts = torch.stack([none if item.grad is None else next(given) for item in parameters])
            parameter = of_parameters.detect(self._names(parameters), all_parts)
            names, any_spike = of_parameters.names, parameter.spike.any()
            norm, any_spike = norm_of_parts(gradients, parts, self._norm_type, self._reduction, any_spike)
        detection = self._detectors["detector"].detect(norm)
        spike, reset = detection.spike, detection.threshold_reset
        if parameter is not None:
            spike, reset = spike | any_spike, reset | parameter.threshold_reset.any()
        if of_loss is not None:
            loss = of_loss.detect(self.losses.mean(norm.device))
            spike, reset = spike | loss.spike, reset | loss.threshold_reset
        return GradientDetection(detection, loss, parameter, spike, reset, names)

    def norm(self, gradients: Sequence[Tensor], scale: Tensor | None) -> Tensor:
        """The norm of gradients over all ranks, times 0-dim ``scale``."""
        norm = gradient_norm(gradients, self._norm_type, self._reduction)
        return norm if scale is None else norm / scale.to(norm.device)

    def _names(self, parameters: Sequence[nn.Parameter]) -> tuple[str, ...]:
        if parameters is not self._named[0]:  # the tracker keeps the list while they are the same
            name_of = {id(parameter): name for name, parameter, _ in named_parameters(self._model)}
            self._named = parameters, tuple(name_of[id(parameter)] for parameter in parameters)
        return self._named[1]

    def observe(self, detection: GradientDetection, when: Tensor | None = None) -> None:
        """Update statistics and counts with a detection, where a 0-dim bool tensor is True; None for True."""
        parts = {"detector": detection.norm, "loss": detection.loss, "per_parameter": detection.parameters}
        for name, detector in self._detectors.items():
            detector.observe(parts[name], when)
        self._counts = self._counts_with(detection, when)

    def probe_contexts(self, tracker: GradientTracker, optimizer: Optimizer | None) -> list[AccumulationProbe]:
        """Contexts of a train step that measure whether it accumulates into the pending detection's gradient."""
        # It may have measured already, in a backward under no_sync().
        if self.pending is None or (self._probe is not None and self._probe.accumulates is not None):
            return []
        self._probe = AccumulationProbe(tracker, optimizer)
        return [self._probe]

    def resolve(self, pending: GradientDetection) -> Tensor:
        """Let the pending detection update the statistics, unless a backward has accumulated into its gradient.

        Returns:
            Whether it has on any rank, a 0-dim bool tensor.
        """
        accumulated = None if self._probe is None else self._probe.accumulates
        if accumulated is None:
            accumulated = torch.zeros_like(pending.spike)
        if world_size() > 1 and all_take_part(self._model):
            accumulated = max_over_ranks(accumulated.to(torch.float32)) > 0
        self.losses.resolve(accumulated)
        self.settle(~accumulated)
        return accumulated

    def settle(self, when: Tensor | None = None) -> None:
        """Let the pending detection update the statistics where a 0-dim bool tensor is True; None for True."""
        if self.pending is not None:
            detection, counts = self.pending
            self.drop_pending()
            self.observe(detection, counts if when is None else counts & move_like(when, counts))

    def drop_pending(self) -> None:
        """Forget the pending detection."""
        self.pending = self._probe = None

    def counts(self) -> Sequence[Tensor]:
        """Number of spikes, of non-finite norms, and of resets so far, the pending detection included."""
        return self._counts if self.pending is None else self._counts_with(*self.pending)

    def _counts_with(self, detection: GradientDetection, when: Tensor | None) -> list[Tensor]:
        flags = [detection.spike, detection.norm.nonfinite, detection.threshold_reset]
        if self._counts[0].device != flags[0].device:
            self._counts = [move_like(count, detection.norm.value) for count in self._counts]
        return foreach_add(self._counts, flags if when is None else [flag & when for flag in flags])

    def release(self) -> None:
        """Drop everything that belongs to a run; statistics stay."""
        self.losses.clear()
        self._named = (), ()

    def reset_threshold(self) -> None:
        """Discard all earlier values; counts stay."""
        self.settle()
        for detector in self._detectors.values():
            detector.reset_threshold()

    def state_dict(self) -> dict[str, Any]:
        """Return statistics and counts, as if the gradient of the pending detection had been discarded."""
        settled = self
        if self.pending is not None:
            settled = copy.copy(self)
            settled._detectors = {name: detector.copy() for name, detector in self._detectors.items()}
            settled.settle()
        state = {name: detector.state_dict() for name, detector in settled._detectors.items()}
        return state | {"counts": torch.stack([*settled._counts])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; a ValueError if it is not of this kind, and nothing has changed then."""
        counts = loaded({"counts": torch.stack([*self._counts])}, {"counts": state_dict["counts"]})["counts"]
        detectors = {name: detector.copy() for name, detector in self._detectors.items()}
        for name in detectors.keys() & state_dict.keys():
            detectors[name].load_state_dict(state_dict[name])
        self._detectors, self._counts = detectors, counts.clone().unbind()
        self.drop_pending()


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients of parameters that have one."""
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
