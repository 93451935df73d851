"""Spikes of a gradient: of its norm, and if requested of the norm of each parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_real, check_type
from ignite_monitor.detection.monitor import COUNTS, count
from ignite_monitor.detection.recurring import RecurringSpikes
from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import Detection, SpikeDetector, may_be_true
from ignite_monitor.detection.state import Statistics
from ignite_monitor.detection.thresholds import ThresholdRule
from ignite_monitor.events.accumulation import AccumulationProbe
from ignite_monitor.events.gradient_tracker import GradientTracker
from ignite_monitor.model.devices import device_of, move_like
from ignite_monitor.model.names import named_parameters
from ignite_monitor.model.norms import norms
from ignite_monitor.monitor.ranks import Ranks

_SHARED = 0.7  # power of the growth that most parameters share


class GradientDetection(NamedTuple):
    """Result for one gradient; its flags are the same on every rank, 0-dim."""

    norm: Detection  # of its norm over all ranks
    parameters: Detection | None  # of the norm of each parameter; None if these are not compared
    spike: Tensor  # whether any of them is a spike
    threshold_reset: Tensor  # whether it resets any of their rules
    names: tuple[str, ...] = ()  # those of the parameters


@dataclass(eq=False)
class ProvisionalUpdate:
    """The update with a spike that no step has used: reverted if the next backward accumulates into its gradient."""

    before: dict[str, Tensor]  # statistics and counts
    probe: AccumulationProbe | None = None


def has_gradients(parameters: Sequence[nn.Parameter]) -> bool:
    """Return True if one of the parameters has a gradient."""
    return any(map(is_not, map(attrgetter("grad"), parameters), repeat(None)))


class PerParameterDetector(SpikeDetector):
    r"""Compares one gradient norm per parameter with its own :class:`RobustThreshold`, all in one vector.

    A change that all parameters share is no fault of one of them. So if most norms are above their means, each is
    divided by :math:`\max(1, m)^{0.7}` first, with the median m of norm / mean (``docs/detection.md``). A norm of zero,
    as of a parameter without a gradient, updates nothing. ``options`` are those of :class:`SpikeDetector`.
    """

    def __init__(self, k: float = 8.0, **options: Any) -> None:
        super().__init__(RobustThreshold(k=k), shape=(0,), **options)
        self.names: tuple[str, ...] = ()  # of the parameters, in the order of the state

    def detect(self, names: tuple[str, ...], norms: Tensor) -> Detection:  # type: ignore[override]
        """Compare the norms of the named parameters, a vector with 0 for no gradient; other names begin anew."""
        if names != self.names:
            self._begin(names)
        self.move_like(norms)
        means = self.named(self.rows)["mean"]  # 0 before the first
        ratios = (norms / means).masked_fill(torch.minimum(norms, means) <= 0.0, math.nan)
        common = ratios.nanmedian().nan_to_num(1.0).clamp(min=1.0)
        return super().detect(norms, norms / common**_SHARED)

    def state_dict(self) -> dict[str, Any]:
        """Return the names of the parameters, and their statistics: vectors."""
        return super().state_dict() | {"names": list(self.names)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        state = dict(state_dict) if isinstance(state_dict, Mapping) else {}
        self._begin(tuple(state.pop("names", ())))
        super().load_state_dict(state)

    def _begin(self, names: tuple[str, ...]) -> None:
        self.start((len(names),))
        self.names = names


class GradientDetector:
    """Detects spikes of a model's gradients, the same on every rank; arguments are those of the monitor."""

    def __init__(
        self,
        model: nn.Module,
        ranks: Ranks,
        rule: ThresholdRule,
        counts: list[Tensor],
        per_parameter: bool,
        norm_type: float,
        **options: Any,
    ) -> None:
        check_type("per_parameter", per_parameter, bool, "bool")
        if norm_type != math.inf and check_real("norm_type", norm_type) not in (1.0, 2.0):
            raise ValueError(f"Argument norm_type should be 1, 2 or math.inf, but given {norm_type}")
        self._model, self._ranks, self._norm_type, self._counts = model, ranks, float(norm_type), counts
        self.of_norm, self.recurring = SpikeDetector(rule, **options), RecurringSpikes()
        self._of_parameters = PerParameterDetector(**options) if per_parameter else None
        self.statistics: dict[str, Statistics] = {"detector": self.of_norm, "recurring": self.recurring}
        if self._of_parameters is not None:
            self.statistics["per_parameter"] = self._of_parameters
        self.provisional: ProvisionalUpdate | None = None
        self.reset_by: GradientDetection | None = None  # the last one that may have reset a threshold
        self._named: tuple[Sequence[nn.Parameter], tuple[str, ...]] = ((), ())  # the last parameters and their names

    def detect(self, parameters: Sequence[nn.Parameter], scale: Tensor | None) -> GradientDetection:
        """Compare the gradients of parameters, times 0-dim ``scale``, with their thresholds; updates nothing."""
        if self._of_parameters is None:
            norm = self.of_norm.detect(self.norm(parameters, scale))
            return GradientDetection(norm, None, norm.spike, norm.threshold_reset)
        gradients: list[Any] = [*map(attrgetter("grad"), parameters)]
        if not all(map(is_not, gradients, repeat(None))):
            zero = torch.zeros(1, device=device_of(self._model))
            gradients = [zero if gradient is None else gradient for gradient in gradients]
        parts = norms(gradients, self._norm_type)
        parts = parts if scale is None else _unscaled(parts, scale)
        parameter = self._of_parameters.detect(self._names(parameters), parts)
        flags = torch.stack((parameter.spike, parameter.threshold_reset)).any(1)
        value, flags = self._ranks.norm(parameters, self._norm_type, parts, flags)
        norm = self.of_norm.detect(value)
        spike, reset = (torch.stack((norm.spike, norm.threshold_reset)) | flags).unbind()
        return GradientDetection(norm, parameter, spike, reset, self._of_parameters.names)

    def norm(self, parameters: Sequence[nn.Parameter], scale: Tensor | None) -> Tensor:
        """The norm of the gradients of parameters over all ranks, divided by 0-dim ``scale``."""
        norm = self._ranks.norm(parameters, self._norm_type)[0]
        return norm if scale is None else _unscaled(norm, scale)

    def observe(self, detection: GradientDetection, when: Tensor | None = None) -> None:
        """Update statistics and counts, if a 0-dim bool tensor is True; None for True."""
        norm, flags = detection.norm, (detection.spike, detection.norm.nonfinite, detection.threshold_reset)
        self.of_norm.observe(norm, when)
        if self._of_parameters is not None and detection.parameters is not None:
            self._of_parameters.observe(detection.parameters, when)
        if may_be_true(detection.threshold_reset):
            self.reset_by = detection
        count(self._counts, norm.value, *(flags if when is None else (flag & when for flag in flags)))

    def observe_provisionally(self, detection: GradientDetection, when: Tensor | None) -> None:
        """Observe a spike that no step has used."""
        self._counts[:] = [move_like(item, detection.norm.value) for item in self._counts]
        self.provisional = ProvisionalUpdate(self._snapshot())
        self.observe(detection, when)

    def contexts(self, tracker: GradientTracker, optimizer: Optimizer | None) -> list[AbstractContextManager[Any]]:
        """Contexts of a train step that show whether it accumulates into the gradient of a provisional update."""
        provisional = self.provisional
        # A backward under no_sync() may have shown it already.
        if provisional is None or (provisional.probe is not None and provisional.probe.accumulates is not None):
            return []
        provisional.probe = AccumulationProbe(tracker, optimizer)
        return [provisional.probe]

    def revert(self, when: Tensor | None = None) -> None:
        """Revert the provisional update, if a 0-dim bool tensor is True; None for True."""
        if self.provisional is None:
            return
        before, now, self.provisional = self.provisional.before, self._snapshot(), None
        if when is not None:
            changed = [name for name, value in now.items() if value is not before[name]]
            before = before | {name: torch.where(when, before[name], now[name]) for name in changed}
        for name, part in self.statistics.items():
            part.rows = before[name]
        self._counts[:] = [before[name] for name in COUNTS]

    def decide(self) -> Tensor:
        """A backward has come: revert the provisional update if that of any rank accumulates; return whether."""
        probe = None if self.provisional is None else self.provisional.probe
        accumulates = None if probe is None else probe.accumulates
        none = torch.zeros_like(self._counts[0], dtype=torch.bool)
        self.revert(accumulated := self._ranks.any(none if accumulates is None else accumulates))
        return accumulated

    @property
    def resets(self) -> Tensor:
        """The number of resets that no accumulation can revert, 0-dim."""
        return self._counts[2] if self.provisional is None else self.provisional.before["reset_count"]

    def recurs(self, detection: GradientDetection, iteration: int) -> Tensor:
        """Note a spike if it is an isolated one; return whether it is, and is like those before."""
        norm = detection.norm
        return self.recurring.observe(iteration, norm.value, norm.above & self.of_norm.was_normal)

    def release(self) -> None:
        """Drop everything that belongs to a run; statistics stay."""
        self._named, self.reset_by = ((), ()), None

    def _snapshot(self) -> dict[str, Tensor]:
        rows = {name: part.rows for name, part in self.statistics.items()}
        return rows | dict(zip(COUNTS, self._counts, strict=True))

    def _names(self, parameters: Sequence[nn.Parameter]) -> tuple[str, ...]:
        if parameters is not self._named[0]:  # the tracker keeps the list while they are the same
            name_of = {id(parameter): name for name, parameter, _ in named_parameters(self._model)}
            # The train step may have replaced a module.
            self._named = parameters, tuple(name_of.get(id(parameter), "") for parameter in parameters)
        return self._named[1]


def _unscaled(norms: Tensor, scale: Tensor) -> Tensor:
    return norms / scale.to(norms.device)
