"""Triggers of a rollback: the loss, running statistics, the monitors' spikes, and requests."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.detection.thresholds import State, ThresholdRule
from ignite_monitor.model.devices import device_of, wide_dtype
from ignite_monitor.model.norms import norms
from ignite_monitor.model.samples import local
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.ranks import sum_over_ranks, world_size
from ignite_monitor.monitor.transfer import transfer

FAR = 10.0  # times the threshold
_PATIENCE = 3  # iterations far above the threshold that trigger a rollback, or with ruined running statistics
_LARGEST = 1e100  # its powers are finite


class LossRule(ThresholdRule):
    r"""Threshold of the loss, the smaller one of a threshold for jumps and one for slow growth.

    Jumps: :math:`\mu + \max(2\sigma, \mu/2)`, or :math:`\mu + 4\sigma` of a loss that has been negative. Growth:
    a quarter of the descent from the first mean to the lowest one, at least :math:`4\sigma`, above the lowest mean.
    """

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        first, lowest, smallest = self.state["first"], self.state["lowest"], self.state["smallest"]
        if smallest < 0.0:
            jump, growth = 4.0 * std, (first - lowest) / 4.0
        else:
            jump, growth = torch.maximum(2.0 * std, 0.5 * mean), torch.maximum(first / 4.0, 0.5 * lowest)
        return torch.fmin(mean + jump, lowest + torch.maximum(4.0 * std, growth))

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
    """History of one number: one bit for each of the last iterations, the newest lowest."""

    unhealthy: int = 0
    far: int = 0  # far above the threshold
    peak: float = -math.inf  # largest unhealthy value since the last healthy iteration or rollback
    threshold: float = math.inf  # in the last iteration
    accepted: float = -math.inf  # values up to this one are healthy

    def lasts(self, patience: int, far: bool = False) -> int:
        """Iterations since the first sign if ``patience`` of the last ``1.5 * patience`` were unhealthy, else 0.

        The newest one has to be among them.
        """
        bits = (self.far if far else self.unhealthy) % 2 ** _window(patience)
        return bits.bit_length() if bits & 1 and bits.bit_count() >= patience else 0


def _window(patience: int) -> int:
    return (3 * patience + 1) // 2


@dataclass
class Findings:
    """Findings of an iteration, on one rank or on all of them."""

    loss: float = 0.0  # sum over ranks
    losses: float = 0.0  # number of ranks that have one
    is_unhealthy: bool = False
    is_nonfinite: bool = False  # the loss or a gradient, and no GradScaler handles it
    check_state: bool = False  # something is not finite: is the state?
    age: int = 0  # iterations since the first sign of instability
    reasons: list[str] = field(default_factory=list)  # of instability

    def over_ranks(self, device: torch.device) -> Findings:
        """Combine the findings of all ranks in one sum."""
        *numbers, reasons = vars(self).values()
        own = torch.tensor([*numbers, bool(reasons)], dtype=wide_dtype(device), device=device)
        loss, losses, unhealthy, nonfinite, check, age, unstable = sum_over_ranks(own).tolist()
        reasons = reasons or ["another rank is unstable"] * bool(unstable)
        age = math.ceil(age / max(unstable, 1.0))
        return Findings(loss, losses, bool(unhealthy), bool(nonfinite), bool(check), age, reasons)

    def add(self, reason: str, age: int) -> None:
        """Add a reason of instability; the one that was detected first counts."""
        self.reasons.append(reason)
        self.age = min(self.age or age, age)


class Triggers:
    """Collects the findings of every iteration, in one transfer from each device."""

    def __init__(self, patience: int, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._patience = {"loss": patience, "statistics": _PATIENCE}
        self._window = _window(max(self._patience.values()))
        self._counts: dict[str, list[float]] = {}  # of each monitor, at the last iteration
        self._signals: dict[str, Signal] = {}
        self.request: str | None = None
        self.has_any = False  # whether there has ever been a value to detect instability by
        self.reset_threshold()

    def reset_threshold(self) -> None:
        """Forget the baselines of loss and running statistics; accepted values stay accepted."""
        self._rules: dict[str, ThresholdRule] = {"loss": LossRule(decay=0.95), "statistics": StatisticsRule(decay=0.95)}

    def accept_peaks(self, limit: float = math.inf) -> None:
        """Accept values since the last rollback, up to a multiple of the thresholds, as those of a regime.

        A monitor's values are not accepted: it resets its own threshold.
        """
        for signal in (self._signals[name] for name in self._rules if name in self._signals):
            signal.accepted = max(signal.accepted, min(signal.peak, limit * signal.threshold))

    def forget_peaks(self) -> None:
        """Start to note values again: no instability is going on, or weights have been restored."""
        for signal in self._signals.values():
            signal.peak = -math.inf

    def collect(self, loss: float | Tensor | None, monitors: Sequence[Monitor]) -> Findings:
        """Findings of the iteration that ends, the same on every rank but for the reasons."""
        for signal in self._signals.values():
            signal.unhealthy, signal.far = (2 * bits % 2**self._window for bits in (signal.unhealthy, signal.far))
        on_device = [loss] if isinstance(loss, Tensor) else []
        tensors = [on_device, second_moments(self._modules), *map(_counts_value_threshold, monitors)]
        self.has_any = self.has_any or loss is not None or any(tensors)
        losses, moments, *published = transfer(tensors)
        number = losses[0][0] if isinstance(loss, Tensor) else loss
        findings = Findings() if number is None else Findings(number, 1.0)
        if self.request is not None:
            findings.add(self.request, 1)
            self.request = None
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
        signal = self._note(findings, name, math.inf if math.isnan(value) else value, threshold, spike or reset)
        if reset and signal.unhealthy & 1:
            findings.add(f"the statistics of {name} were reset", signal.unhealthy.bit_length())

    def _detect(self, findings: Findings, name: str, numbers: float | list[float]) -> None:
        values = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        if not bool(values.isfinite().all()):
            findings.check_state = True
            findings.is_nonfinite |= name == "loss"
            return
        values = values.clamp(-_LARGEST, _LARGEST)
        rule, patience = self._rules[name], self._patience[name]
        rule.to(values)
        limit = rule.statistics()[0]
        value, threshold = float(values.max()), float(limit.max())
        if name == "statistics":
            value, threshold = float((values / limit).nan_to_num(0.0).max()), 1.0
        signal = self._note(findings, name, value, threshold, value > threshold)
        if not signal.unhealthy & 1:
            rule.observe(values)
        elif not signal.unhealthy & 2:  # only the first of several consecutive spikes updates the statistics
            rule.observe(torch.fmin(values, limit))
        if age := signal.lasts(patience):
            findings.add(f"the {name} exceeded its threshold in {patience} iterations", age)

    def _note(self, findings: Findings, name: str, value: float, threshold: float, is_spike: bool) -> Signal:
        """Note a value, which is unhealthy if it is a spike above everything that was accepted."""
        signal = self._signals.setdefault(name, Signal())
        signal.threshold = threshold
        if is_spike and value > signal.accepted:
            findings.is_unhealthy = True
            signal.unhealthy |= 1
            if math.isfinite(value):
                signal.peak = max(signal.peak, value)
                signal.far |= value > FAR * threshold > 0.0
            if age := signal.lasts(_PATIENCE, far=True):
                findings.add(f"{name} exceeded {FAR:g} times its threshold in {_PATIENCE} iterations", age)
        return signal

    def state_dict(self) -> dict[str, Any]:
        """Baselines and signals: tensors, numbers and dicts."""
        return {
            "rules": {name: rule.state_dict() for name, rule in self._rules.items()},
            "signals": {name: dict(vars(signal)) for name, signal in self._signals.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], baselines_only: bool = False) -> None:
        """Continue from a saved state; with ``baselines_only`` the signals stay as they are."""
        if not baselines_only:
            self._signals = {name: Signal(**saved) for name, saved in state_dict["signals"].items()}
        self.reset_threshold()
        for name, saved in state_dict["rules"].items():
            self._rules[name].to(saved["count"])  # of the same shape
            self._rules[name].load_state_dict(saved)


def second_moments(modules: Sequence[nn.Module]) -> list[Tensor]:
    r"""Second moments :math:`\lVert\mu\rVert_2^2 + \lVert\sigma^2\rVert_1` of all running statistics; empty without."""
    inner = {id(module): module for model in modules for module in model.modules()}.values()
    kept = [m for m in inner if isinstance(getattr(m, "running_mean", None), Tensor) and m.running_var is not None]
    if not kept:
        return []
    means, variances = ([local(getattr(m, name)) for m in kept] for name in ("running_mean", "running_var"))
    mean = norms(means)
    return [torch.addcmul(norms(variances, 1.0), mean, mean)]


def _counts_value_threshold(monitor: Monitor) -> list[Tensor]:
    metrics, prefix = monitor.metrics, monitor.prefix
    value = metrics.get(f"{prefix}/norm", metrics.get(f"{prefix}/value", math.nan))
    numbers = monitor.counts(), value, metrics.get(f"{prefix}/threshold", math.inf)
    return [torch.as_tensor(number, dtype=torch.float64) for number in numbers]
