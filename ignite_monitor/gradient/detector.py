"""Spikes of a gradient: of its norm, and if requested of the norm of each parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_choice, check_type
from ignite_monitor.detection.spikes import SpikeDetector, may_be_true
from ignite_monitor.detection.thresholds import ThresholdRule, loaded
from ignite_monitor.events.accumulation import AccumulationProbe
from ignite_monitor.events.gradient_tracker import GradientTracker
from ignite_monitor.gradient.detection import GradientDetection
from ignite_monitor.gradient.per_parameter import PerParameterDetector
from ignite_monitor.model._torch import foreach_add
from ignite_monitor.model.devices import device_of, move, move_like, wide_dtype
from ignite_monitor.model.names import named_parameters
from ignite_monitor.model.norms import norms
from ignite_monitor.monitor.ranks import RankNorm, Ranks


def has_gradients(parameters: Sequence[nn.Parameter]) -> bool:
    """Return True if one of the parameters has a gradient."""
    return any(map(is_not, map(attrgetter("grad"), parameters), repeat(None)))


@dataclass(eq=False)
class PendingSpike:
    """A spike that no step has used: it is observed if the next backward does not accumulate into its gradient."""

    detection: GradientDetection
    flag: Tensor  # False if it is no spike after all
    probe: AccumulationProbe | None = None


class GradientDetector:
    """Detects spikes of a model's gradients, the same on every rank; arguments are those of the monitor."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        rule: ThresholdRule,
        *,
        per_parameter: bool,
        norm_type: float,
        reduction: str | None,
        **options: Any,
    ) -> None:
        check_type("per_parameter", per_parameter, bool, "bool")
        if reduction is not None:
            check_choice("reduction", reduction, "mean", "sum")
        self._model, self._ranks, self._norm_type, self._reduction = model, ranks, float(norm_type), reduction
        self.of_norm = SpikeDetector(rule, **options)
        self._detectors: dict[str, Any] = {"detector": self.of_norm}
        if per_parameter:
            self._detectors["per_parameter"] = PerParameterDetector(**options)
        self._named: tuple[Sequence[nn.Parameter], tuple[str, ...]] = ((), ())  # the last parameters and their names
        self.pending: PendingSpike | None = None
        self.reset_by: GradientDetection | None = None  # the last one that may have reset a threshold
        self._counts: Sequence[Tensor] = torch.zeros(3, dtype=torch.float64, device="cpu").unbind()

    def detect(self, parameters: Sequence[nn.Parameter], scale: Tensor | None) -> GradientDetection:
        """Compare the gradients of parameters, times 0-dim ``scale``, with their thresholds; updates nothing."""
        of_parameters = self._detectors.get("per_parameter")
        parameter, names = None, ()
        if of_parameters is None:
            norm, _, origin = self.norm(parameters, scale)
        else:
            parts, all_parts = self._norms_of(parameters, scale)
            parameter = of_parameters.detect(self._names(parameters), all_parts)
            any_flags = torch.stack((parameter.spike, parameter.threshold_reset)).any(1)
            names = of_parameters.names
            norm, any_flags, origin = self._ranks.norm(parameters, self._norm_type, self._reduction, parts, any_flags)
        detection = self.of_norm.detect(norm)
        spike, reset = detection.spike, detection.threshold_reset
        if parameter is not None:
            spike, reset = (torch.stack((spike, reset)) | any_flags).unbind()
        return GradientDetection(detection, parameter, spike, reset, names, origin)

    def _norms_of(self, parameters: Sequence[nn.Parameter], scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """The norms of all gradients, and those of all parameters, 0 without a gradient."""
        places = [place for place, parameter in enumerate(parameters) if parameter.grad is not None]
        if not places:
            device = device_of(self._model)
            every = torch.zeros(len(parameters), dtype=wide_dtype(device), device=device)
            return every[:0], every
        parts = norms([parameters[place].grad for place in places], self._norm_type)  # type: ignore[misc]
        parts = parts if scale is None else parts / scale.to(parts.device)
        if len(places) == len(parameters):
            return parts, parts
        index = move(torch.tensor(places, device="cpu"), parts.device)
        return parts, parts.new_zeros(len(parameters)).index_copy(0, index, parts)

    def norm(self, parameters: Sequence[nn.Parameter], scale: Tensor | None) -> RankNorm:
        """The norm of the gradients of parameters over all ranks, times 0-dim ``scale``."""
        norm = self._ranks.norm(parameters, self._norm_type, self._reduction)
        return norm if scale is None else norm._replace(value=norm.value / scale.to(norm.value.device))

    def _names(self, parameters: Sequence[nn.Parameter]) -> tuple[str, ...]:
        if parameters is not self._named[0]:  # the tracker keeps the list while they are the same
            name_of = {id(parameter): name for name, parameter, _ in named_parameters(self._model)}
            # The train step may have replaced a module.
            self._named = parameters, tuple(name_of.get(id(parameter), "") for parameter in parameters)
        return self._named[1]

    def observe(self, detection: GradientDetection, when: Tensor | None = None) -> None:
        """Update statistics and counts, if a 0-dim bool tensor is True; None for True."""
        parts = {"detector": detection.norm, "per_parameter": detection.parameters}
        for name, detector in self._detectors.items():
            detector.observe(parts[name], when)
        if may_be_true(detection.threshold_reset):
            self.reset_by = detection
        self._counts = self._counts_with(detection, when)

    def _counts_with(self, detection: GradientDetection, when: Tensor | None) -> Sequence[Tensor]:
        flags = [detection.spike, detection.norm.nonfinite, detection.threshold_reset]
        if when is not None:
            flags = [flag & when for flag in flags]
        if self._counts[0].device != flags[0].device:
            self._counts = [move_like(count, detection.norm.value) for count in self._counts]
        return foreach_add(self._counts, flags)

    @property
    def counts(self) -> Sequence[Tensor]:
        """Numbers of spikes, non-finite norms and resets so far, a pending spike included, each 0-dim."""
        pending = self.pending
        return self._counts if pending is None else self._counts_with(pending.detection, pending.flag)

    @property
    def resets(self) -> Tensor:
        """Number of resets so far, without that of a pending spike, 0-dim."""
        return self._counts[2]

    def contexts(self, tracker: GradientTracker, optimizer: Optimizer | None) -> list[AbstractContextManager[Any]]:
        """Contexts of a train step that show whether it accumulates into the gradient of a pending spike."""
        pending = self.pending
        # It may have been measured in a backward under no_sync().
        if pending is None or (pending.probe is not None and pending.probe.accumulates is not None):
            return []
        pending.probe = AccumulationProbe(tracker, optimizer)
        return [pending.probe]

    def decide(self, pending: PendingSpike) -> Tensor:
        """A backward has come: observe the pending spike unless that of any rank accumulates into its gradient."""
        accumulated = None if pending.probe is None else pending.probe.accumulates
        discarded = ~self._ranks.any(torch.zeros_like(pending.flag) if accumulated is None else accumulated)
        self.pending = None
        self.observe(pending.detection, pending.flag & discarded)
        return discarded

    def _snapshot(self) -> tuple[list[Any], Sequence[Tensor]]:
        return [detector.snapshot() for detector in self._detectors.values()], self._counts

    def _restore(self, before: tuple[list[Any], Sequence[Tensor]]) -> None:
        states, self._counts = before
        for detector, state in zip(self._detectors.values(), states, strict=True):
            detector.restore(state)

    def release(self) -> None:
        """Drop everything that belongs to a run; statistics stay."""
        self._named, self.reset_by = ((), ()), None

    def reset_threshold(self) -> None:
        """Discard all earlier values; counts stay."""
        self._counts, self.pending = self.counts, None
        for detector in self._detectors.values():
            detector.reset_threshold()

    def threshold_state(self) -> dict[str, Any]:
        """Return statistics, as if the gradient of a pending spike had been discarded."""
        before = self._snapshot()
        if self.pending is not None:
            self.observe(self.pending.detection, self.pending.flag)
        state = {name: detector.state_dict() for name, detector in self._detectors.items()}
        self._restore(before)
        return state

    def restore_threshold(self, state: Mapping[str, Any]) -> None:
        """Continue from earlier statistics; a ValueError if they are not of this kind, and nothing has changed then."""
        before = self._snapshot()
        try:
            for name, detector in self._detectors.items():  # that of parameters last: its names have changed then
                if name in state:
                    detector.load_state_dict(state[name])
        except Exception:
            self._restore(before)
            raise
        self._counts, self.pending = self.counts, None

    def state_dict(self) -> dict[str, Any]:
        """Return statistics and counts."""
        return self.threshold_state() | {"counts": torch.stack([*self.counts])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; a ValueError if it is not of this kind, and nothing has changed then."""
        counts = loaded({"counts": torch.stack([*self.counts])}, {"counts": state_dict["counts"]})["counts"]
        self.restore_threshold(state_dict)
        self._counts = counts.clone().unbind()
