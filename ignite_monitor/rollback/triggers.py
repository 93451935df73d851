"""Triggers of a rollback: the loss, running statistics, the monitors' spikes, and requests."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import ThresholdRule
from ignite_monitor.model._torch import foreach_norm, part_of_rank
from ignite_monitor.model.devices import device_of, wide_dtype
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.ranks import sum_over_ranks
from ignite_monitor.monitor.transfer import transfer

_FAR = 10.0  # times the threshold: so far above it, _FAR_PATIENCE iterations in a row are decisive
_FAR_PATIENCE = 3
_STATISTICS_PATIENCE = 3
_RECURRING = 20  # iterations discarded in a recovery, from which on its level is remembered
_DECAY = 0.95


class LossRule(ThresholdRule):
    r"""Threshold of the loss, the smaller one of a threshold for jumps and one for slow growth.

    Jumps: :math:`\mu + \max(2\sigma, \mu/2)`, or :math:`\mu + 4\sigma` of a loss that has been negative. Growth:
    a quarter of the descent from the first mean to the lowest one, at least :math:`4\sigma`, above the lowest mean.
    """

    def __init__(self) -> None:
        super().__init__(decay=_DECAY)
        self.is_signed = False
        self.first = self.lowest = math.nan  # means

    def __call__(self, mean: Tensor, std: Tensor, count: Tensor) -> Tensor:
        jump = mean + (4.0 * std if self.is_signed else torch.maximum(2.0 * std, 0.5 * mean))
        if math.isnan(self.lowest):
            return jump
        least = (self.first - self.lowest) / 4.0 if self.is_signed else max(self.first / 4.0, 0.5 * self.lowest)
        return torch.minimum(jump, self.lowest + (4.0 * std).clamp(min=least))

    def note(self, mean: float) -> None:
        """Note the mean after the warm-up."""
        self.first, self.lowest = (mean, mean) if math.isnan(self.lowest) else (self.first, min(self.lowest, mean))


class Statistics:
    """Second moments of running statistics beside their exponentially weighted means."""

    def __init__(self) -> None:
        self.count = 0  # iterations that have updated the means
        self.row = 0  # consecutive iterations above three times a mean
        self.means = torch.zeros(0, dtype=torch.float64, device="cpu")

    def observe(self, moments: Tensor) -> float:
        """The largest ratio of a moment to three times its mean; 0 during the warm-up."""
        if self.means.shape != moments.shape:
            self.means, self.count = moments.clone(), 0
        largest = float((moments / (3.0 * self.means)).nan_to_num(math.inf).max())
        is_judged = self.count >= self._WARMUP
        self.row = self.row + 1 if is_judged and largest > 1.0 else 0
        if self.row == 0:
            self.count += 1
            self.means.lerp_(moments, (1.0 - _DECAY) / (1.0 - _DECAY**self.count))
        return largest if is_judged else 0.0

    _WARMUP = 20


@dataclass
class Signal:
    """One number that is compared with a threshold, and the values that turned out to be healthy."""

    far: int = 0  # consecutive iterations far above the threshold
    value: float = -math.inf  # of this iteration, if it is unhealthy
    peak: float = -math.inf  # largest value since the last healthy iteration
    discarded: float = -math.inf  # largest value in this recovery, with restored weights
    recurring: float = -math.inf  # the same in an earlier recovery, which ended
    accepted: float = -math.inf

    def note(self, value: float, threshold: float, is_spike: bool) -> bool:
        """Whether the value is unhealthy: a spike above everything that was accepted."""
        is_unhealthy = is_spike and value > self.accepted
        self.value = value if is_unhealthy else -math.inf
        self.far = self.far + 1 if is_unhealthy and value > _FAR * threshold > 0.0 else 0
        if is_unhealthy and math.isfinite(value):
            self.peak = max(self.peak, value)
        return is_unhealthy


@dataclass
class Findings:
    """Findings of an iteration, on one rank or on all of them."""

    loss: float = 0.0  # sum over ranks
    losses: float = 0.0  # number of ranks that have one
    reasons: list[str] = field(default_factory=list)  # of instability
    is_unhealthy: bool = False
    is_nonfinite: bool = False  # the loss or a gradient, and no GradScaler handles it
    check_state: bool = False  # something is not finite: is the state?
    is_decisive: bool = False  # it is known when the instability began

    def add_decisive(self, reason: str) -> None:
        """Add a reason that tells when the instability began."""
        self.reasons.append(reason)
        self.is_decisive = True

    def over_ranks(self, device: torch.device) -> Findings:
        """Combine the findings of all ranks in one sum."""
        flags = (self.is_unhealthy, self.is_nonfinite, self.check_state, self.is_decisive)
        own = torch.tensor(
            [self.loss, self.losses, bool(self.reasons), *flags], dtype=wide_dtype(device), device=device
        )
        loss, losses, unstable, *flags_of_all = sum_over_ranks(own).tolist()
        reasons = self.reasons or ["another rank is unstable"] * bool(unstable)
        return Findings(loss, losses, reasons, *map(bool, flags_of_all))


class Triggers:
    """Collects the findings of every iteration, in one transfer from each device.

    Args:
        patience: number of consecutive losses above the threshold that count as unstable.
        modules: modules whose running statistics are measured; the first is on the device that communicates.
    """

    def __init__(self, patience: int, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._patience = patience
        self._counts: dict[str, list[float]] = {}  # of each monitor, at the last iteration
        self._signals: dict[str, Signal] = {}
        self._discarded = 0  # iterations in this recovery
        self.request: str | None = None
        self.has_any = False  # whether there has ever been anything to judge by
        self.reset_threshold()

    def reset_threshold(self) -> None:
        """Forget the baselines of loss and running statistics; what was accepted stays accepted."""
        self._loss = SpikeDetector(
            LossRule(), max_consecutive_spikes=self._patience, overflow_is_spike=False, ignored=math.nan
        )
        self._statistics = Statistics()

    def accept(self) -> None:
        """Accept the largest values since the last healthy iteration as those of a healthy regime."""
        for signal in self._signals.values():
            signal.accepted = max(signal.accepted, signal.peak)

    def note_discarded(self) -> None:
        """Note the values of an iteration with restored weights: the data are the cause."""
        self._discarded += 1
        for signal in self._signals.values():
            if math.isfinite(signal.value):
                signal.discarded = max(signal.discarded, signal.value)

    def recovered(self) -> None:
        """Remember the level of a long recovery: if the data cause it again, it is a regime."""
        for signal in self._signals.values():
            if self._discarded >= _RECURRING:
                signal.recurring = max(signal.recurring, signal.discarded)
            signal.discarded = -math.inf
        self._discarded = 0

    def is_known_level(self) -> bool:
        """Whether every unhealthy signal is at a level that an earlier recovery ended at."""
        unhealthy = [signal for signal in self._signals.values() if signal.value > -math.inf]
        return bool(unhealthy) and all(signal.value <= signal.recurring for signal in unhealthy)

    def healthy(self) -> None:
        """Forget the peaks: no instability is going on."""
        for signal in self._signals.values():
            signal.peak = -math.inf

    def collect(self, loss: float | Tensor | None, monitors: Sequence[Monitor], ranks: int = 1) -> Findings:
        """Findings of the iteration that ends, the same on every rank but for the reasons."""
        counted = {monitor: own for monitor in monitors if (own := monitor.counts()) is not None}
        tensors = [
            [loss] if isinstance(loss, Tensor) else [],
            [*counted.values()],
            [number for monitor in counted for number in _value_and_threshold(monitor)],
            second_moments(self._modules),
        ]
        losses, counts, numbers, moments = transfer(tensors) if any(tensors) else [[], [], [], []]
        number = losses[0][0] if isinstance(loss, Tensor) else loss
        self.has_any = self.has_any or number is not None or any(tensors)
        findings = Findings(0.0 if number is None else number, number is not None)
        values, thresholds = ([number[0] for number in numbers[first::2]] for first in (0, 1))
        for judged in zip(counted, counts, values, thresholds, strict=True):
            self._judge_monitor(findings, *judged)
        self._judge_statistics(findings, [moment for group in moments for moment in group])
        if self.request is not None:
            findings.add_decisive(self.request)
            self.request = None
        if ranks > 1:
            findings = findings.over_ranks(device_of(self._modules[0]))
        if findings.losses:
            self._judge_loss(findings, findings.loss / findings.losses)
        return findings

    def _judge_monitor(
        self, findings: Findings, monitor: Monitor, counts: list[float], value: float, threshold: float
    ) -> None:
        name = monitor.prefix
        spikes, nonfinite, resets = (a > b for a, b in zip(counts, self._counts.get(name, counts), strict=True))
        self._counts[name] = counts
        signal = self._signals.setdefault(name, Signal())
        value = math.inf if math.isnan(value) else value
        unhealthy = signal.note(value, threshold, spikes)
        findings.is_unhealthy |= unhealthy
        findings.check_state |= nonfinite
        findings.is_nonfinite |= nonfinite and spikes  # an overflow that a GradScaler handles is no spike
        if resets and value > signal.accepted:
            findings.reasons.append(f"the threshold of {name} was reset after consecutive spikes")
        elif signal.far >= _FAR_PATIENCE and not nonfinite:
            findings.add_decisive(f"{name} exceeded {_FAR:g} times its threshold {signal.far} times in a row")

    def _judge_statistics(self, findings: Findings, moments: list[float]) -> None:
        if not moments:
            return
        if not all(map(math.isfinite, moments)):
            findings.check_state = True
            return
        ratio = self._statistics.observe(torch.tensor(moments, dtype=torch.float64, device="cpu"))
        signal = self._signals.setdefault("statistics", Signal())
        findings.is_unhealthy |= signal.note(ratio, math.inf, ratio > 1.0)
        if self._statistics.row >= _STATISTICS_PATIENCE and ratio > signal.accepted:
            findings.add_decisive("running statistics of a normalization exceed three times their baseline")

    def _judge_loss(self, findings: Findings, loss: float) -> None:
        if not math.isfinite(loss):
            findings.check_state = findings.is_nonfinite = True
            return
        rule: Any = self._loss.rule
        rule.is_signed |= loss < 0.0
        detection = self._loss.detect(torch.tensor(loss, dtype=torch.float64, device="cpu"))
        self._loss.observe(detection)
        if math.isfinite(float(detection.threshold)):
            rule.note(float(detection.mean))
        signal = self._signals.setdefault("loss", Signal())
        findings.is_unhealthy |= signal.note(loss, float(detection.threshold), bool(detection.spike))
        if bool(detection.threshold_reset):
            rule.first = rule.lowest = math.nan
        if bool(detection.threshold_reset) and loss > signal.accepted:
            findings.reasons.append(f"the loss exceeded its threshold {self._patience} times in a row")
        elif signal.far >= _FAR_PATIENCE:
            findings.add_decisive(f"the loss exceeded {_FAR:g} times its threshold {signal.far} times in a row")

    def state_dict(self) -> dict[str, Any]:
        """Baselines and accepted values: tensors, numbers and dicts."""
        rule: Any = self._loss.rule
        return {
            "loss": self._loss.state_dict(),
            "statistics": vars(self._statistics) | {"means": self._statistics.means.clone()},
            "rule": {"is_signed": rule.is_signed, "first": rule.first, "lowest": rule.lowest},
            "discarded": self._discarded,
            "signals": {name: dict(vars(signal)) for name, signal in self._signals.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], baselines_only: bool = False) -> None:
        """Continue from a saved state; with ``baselines_only`` the accepted values stay as they are."""
        self._loss.load_state_dict(state_dict["loss"])
        vars(self._statistics).update(state_dict["statistics"], means=state_dict["statistics"]["means"].clone())
        rule: Any = self._loss.rule
        vars(rule).update(state_dict["rule"])
        if not baselines_only:
            self._discarded = state_dict["discarded"]
            self._signals = {name: Signal(**saved) for name, saved in state_dict["signals"].items()}


def second_moments(modules: Iterable[nn.Module]) -> list[Tensor]:
    r"""Second moments :math:`\lVert\mu\rVert_2^2 + \lVert\sigma^2\rVert_1` of all running statistics, by device."""
    inner = {id(module): module for model in modules for module in model.modules()}.values()
    kept = [m for m in inner if isinstance(getattr(m, "running_mean", None), Tensor) and m.running_var is not None]
    result = []
    for device in dict.fromkeys(module.running_mean.device for module in kept):
        own: list[Any] = [module for module in kept if module.running_mean.device == device]
        means, variances = ([part_of_rank(getattr(m, f"running_{kind}")) for m in own] for kind in ("mean", "var"))
        dtype = max(torch.float32, *(mean.dtype for mean in means), key=lambda dtype: dtype.itemsize)
        norms = [*foreach_norm(means, 2.0, dtype=dtype), *foreach_norm(variances, 1.0, dtype=dtype)]
        mean, variance = torch.stack(norms).to(wide_dtype(device)).chunk(2)
        result.append(torch.addcmul(variance, mean, mean))
    return result


def _value_and_threshold(monitor: Monitor) -> list[Tensor]:
    own = (monitor.metrics.get(f"{monitor.prefix}/{name}") for name in ("norm", "value"))
    value = next((number for number in own if number is not None), math.nan)
    threshold = monitor.metrics.get(f"{monitor.prefix}/threshold", math.inf)
    return [torch.as_tensor(number, dtype=torch.float64) for number in (value, threshold)]
