"""Triggers of a rollback: the loss, running statistics, the monitors' spikes, and requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import State, ThresholdRule
from ignite_monitor.model._torch import part_of_rank
from ignite_monitor.model.devices import device_of, wide_dtype
from ignite_monitor.model.norms import norms
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.ranks import sum_over_ranks, world_size
from ignite_monitor.monitor.transfer import transfer
from ignite_monitor.rollback.policy import PROBATION

_FAR = 10.0  # times the threshold: so far above it, _PATIENCE of PROBATION iterations are decisive
_PATIENCE = 3  # also of running statistics
_STATISTICS = ("running_mean", "running_var")


class LossRule(ThresholdRule):
    r"""Threshold of the loss, the smaller one of a threshold for jumps and one for slow growth.

    Jumps: :math:`\mu + \max(2\sigma, \mu/2)`, or :math:`\mu + 4\sigma` of a loss that has been negative. Growth:
    a quarter of the descent from the first mean to the lowest one, at least :math:`4\sigma`, above the lowest mean.
    It is never below an accepted loss.
    """

    def __init__(self, accepted: float) -> None:
        self.accepted = accepted
        super().__init__(decay=0.95)

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        first, lowest, smallest = self.state["first"], self.state["lowest"], self.state["smallest"]
        if smallest < 0.0:
            jump, growth = 4.0 * std, (first - lowest) / 4.0
        else:
            jump, growth = torch.maximum(2.0 * std, 0.5 * mean), torch.maximum(first / 4.0, 0.5 * lowest)
        limit = torch.fmin(mean + jump, lowest + torch.maximum(4.0 * std, growth))
        return limit.clamp(min=self.accepted)

    def empty(self) -> State:
        own = {"first": math.nan, "lowest": math.nan, "smallest": math.inf}  # the first two are means
        return super().empty() | {name: torch.tensor(value, dtype=torch.float64) for name, value in own.items()}

    def include(self, state: State, value: Tensor) -> State:
        after = super().include(state, value)
        mean = after["mean"].masked_fill(after["count"] < self.warmup, math.nan)
        first = torch.where(state["first"].isnan(), mean, state["first"])
        lowest = torch.fmin(state["lowest"], mean)
        return after | {"first": first, "lowest": lowest, "smallest": torch.minimum(state["smallest"], value)}


class StatisticsRule(ThresholdRule):
    """Threshold of the second moments of running statistics: three times their mean."""

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        return 3.0 * mean


@dataclass
class Signal:
    """Recent and accepted values of one number."""

    far: int = 0  # one bit for each of the last iterations, the newest lowest: was it far above the threshold?
    peak: float = -math.inf  # largest unhealthy value since the last healthy iteration, or with restored weights
    accepted: float = -math.inf


@dataclass
class Findings:
    """Findings of an iteration, on one rank or on all of them."""

    loss: float = 0.0  # sum over ranks
    losses: float = 0.0  # number of ranks that have one
    is_unhealthy: bool = False
    is_nonfinite: bool = False  # the loss or a gradient, and no GradScaler handles it
    check_state: bool = False  # something is not finite: is the state?
    is_decisive: bool = False  # it is known when the instability began
    reasons: list[str] = field(default_factory=list)  # of instability

    def over_ranks(self, device: torch.device) -> Findings:
        """Combine the findings of all ranks in one sum."""
        *numbers, reasons = vars(self).values()
        own = torch.tensor([*numbers, bool(reasons)], dtype=wide_dtype(device), device=device)
        loss, losses, *flags, is_unstable = sum_over_ranks(own).tolist()
        unhealthy, nonfinite, check, decisive = map(bool, flags)
        reasons = reasons or ["another rank is unstable"] * bool(is_unstable)
        return Findings(loss, losses, unhealthy, nonfinite, check, decisive, reasons)


class Triggers:
    """Collects the findings of every iteration, in one transfer from each device."""

    def __init__(self, patience: int, modules: Sequence[nn.Module]) -> None:
        self._modules, self._patience = modules, patience
        self._counts: dict[str, list[float]] = {}  # of each monitor, at the last iteration
        self._signals: dict[str, Signal] = {}
        self.request: str | None = None
        self.has_any = False  # whether there has ever been a value to detect instability by
        self.reset_threshold()

    @property
    def is_suspicious(self) -> bool:
        """True if a signal was far above its threshold lately: the state may be ruined."""
        return any(signal.far for signal in self._signals.values())

    def reset_threshold(self) -> None:
        """Forget the baselines of loss and running statistics; accepted values stay accepted."""
        rules = {"loss": LossRule(self._signal("loss").accepted), "statistics": StatisticsRule(decay=0.95)}
        self._detectors = {
            name: SpikeDetector(rule, max_consecutive_spikes=patience, overflow_is_spike=False, ignored=math.nan)
            for (name, rule), patience in zip(rules.items(), (self._patience, _PATIENCE), strict=True)
        }

    def accept_peaks(self) -> None:
        """Accept the values of the current instability as those of a healthy regime."""
        for signal in self._signals.values():
            signal.accepted = max(signal.accepted, signal.peak)

    def forget_peaks(self) -> None:
        """Start to note values again: no instability is going on, or weights have been restored."""
        for signal in self._signals.values():
            signal.peak = -math.inf

    def collect(self, loss: float | Tensor | None, monitors: Sequence[Monitor]) -> Findings:
        """Findings of the iteration that ends, the same on every rank but for the reasons."""
        for signal in self._signals.values():
            signal.far = (signal.far << 1) % 2**PROBATION
        on_device = [loss] if isinstance(loss, Tensor) else []
        tensors = [on_device, second_moments(self._modules), *map(_counts_value_threshold, monitors)]
        self.has_any = self.has_any or loss is not None or any(tensors)
        losses, moments, *published = transfer(tensors)
        number = losses[0][0] if isinstance(loss, Tensor) else loss
        findings = Findings() if number is None else Findings(number, 1.0)
        if self.request is not None:
            findings.reasons.append(self.request)
            findings.is_decisive, self.request = True, None
        for monitor, (counts, [value], [threshold]) in zip(monitors, published, strict=True):
            self._note_monitor(findings, monitor.prefix, counts, value, threshold)
        if moments:
            self._detect(findings, "statistics", moments[0])
        if world_size() > 1:
            findings = findings.over_ranks(device_of(self._modules[0]))
        if findings.losses:
            self._detect(findings, "loss", findings.loss / findings.losses)
        return findings

    def _note_monitor(self, findings: Findings, name: str, counts: list[float], value: float, threshold: float) -> None:
        spike, nonfinite, reset = (a > b for a, b in zip(counts, self._counts.get(name, counts), strict=True))
        self._counts[name] = counts
        findings.check_state |= nonfinite
        findings.is_nonfinite |= nonfinite and spike  # an overflow that a GradScaler handles is no spike
        value = math.inf if math.isnan(value) else value
        self._note(findings, name, value, threshold, spike, f"the threshold of {name} was reset" * reset)

    def _detect(self, findings: Findings, name: str, numbers: float | list[float]) -> None:
        values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        if not bool(values.isfinite().all()):
            findings.check_state = True
            findings.is_nonfinite |= name == "loss"
            return
        detector = self._detectors[name]
        detection = detector.detect(values)
        detector.observe(detection)
        value, threshold = float(values.max()), float(detection.threshold.max())
        if name == "statistics":
            value, threshold = float((values / detection.limit).nan_to_num(0.0).max()), 1.0
        reason = f"the {name} exceeded its threshold {detector.max_consecutive_spikes} times in a row"
        is_reset = bool(detection.threshold_reset.any())
        self._note(findings, name, value, threshold, bool(detection.spike.any()), reason * is_reset)

    def _note(self, findings: Findings, name: str, value: float, threshold: float, is_spike: bool, reason: str) -> None:
        """Note a value, which is unhealthy if it is a spike above everything that was accepted."""
        signal = self._signal(name)
        if not (is_spike or reason) or value <= signal.accepted:
            return
        findings.is_unhealthy = True
        signal.peak = max(signal.peak, value if math.isfinite(value) else -math.inf)
        is_far = value > _FAR * threshold > 0.0
        signal.far |= is_far
        if reason:
            findings.reasons.append(reason)
            findings.is_decisive |= name == "statistics"
        elif is_far and signal.far.bit_count() >= _PATIENCE and math.isfinite(value):
            findings.reasons.append(f"{name} exceeded {_FAR:g} times its threshold in {_PATIENCE} iterations")
            findings.is_decisive = True

    def _signal(self, name: str) -> Signal:
        return self._signals.setdefault(name, Signal())

    def state_dict(self) -> dict[str, Any]:
        """Baselines and accepted values: tensors, numbers and dicts."""
        return {
            "detectors": {name: detector.state_dict() for name, detector in self._detectors.items()},
            "signals": {name: dict(vars(signal)) for name, signal in self._signals.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], baselines_only: bool = False) -> None:
        """Continue from a saved state; with ``baselines_only`` the accepted values stay as they are."""
        if not baselines_only:
            self._signals = {name: Signal(**saved) for name, saved in state_dict["signals"].items()}
        self.reset_threshold()
        for name, saved in state_dict["detectors"].items():
            self._detectors[name].to(saved["recent"])  # of the same shape
            self._detectors[name].load_state_dict(saved)


def second_moments(modules: Sequence[nn.Module]) -> list[Tensor]:
    r"""Second moments :math:`\lVert\mu\rVert_2^2 + \lVert\sigma^2\rVert_1` of all running statistics; empty without."""
    inner = {id(module): module for model in modules for module in model.modules()}.values()
    kept = [m for m in inner if isinstance(getattr(m, "running_mean", None), Tensor) and m.running_var is not None]
    if not kept:
        return []
    means, variances = ([part_of_rank(getattr(module, name)) for module in kept] for name in _STATISTICS)
    mean = norms(means)
    return [torch.addcmul(norms(variances, 1.0), mean, mean)]


def _counts_value_threshold(monitor: Monitor) -> list[Tensor]:
    metrics, prefix = monitor.metrics, monitor.prefix
    value = metrics.get(f"{prefix}/norm", metrics.get(f"{prefix}/value", math.nan))
    numbers = monitor.counts(), value, metrics.get(f"{prefix}/threshold", math.inf)
    return [torch.as_tensor(number, dtype=torch.float64) for number in numbers]
