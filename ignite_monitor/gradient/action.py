"""The action at a spike: skip the optimizer step, or clip its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.checks import check_function
from ignite_monitor.detection.recurring import RecurringSpikes
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.step_owner import hides_gradients, skippable, skips_on_device
from ignite_monitor.gradient.detection import GradientDetection
from ignite_monitor.gradient.window import StepDetection
from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.monitor.ranks import Ranks

_CHOICES = "None, 'skip', 'clip' or a function of the engine and the norm"
_DONE = {"skipped_count": "optimizer step skipped", "clipped_count": "gradient scaled to its threshold"}


class SpikeAction:
    """Asks to skip steps or to scale their gradients, and counts it.

    "clip" multiplies the gradients of a step by the smallest ratio threshold / norm. A non-finite gradient cannot
    be clipped: its step is skipped if that takes no synchronization, on the CPU and in fused optimizers of
    ``torch.optim``. "skip" does not skip isolated spikes that recur at a similar size.
    """

    def __init__(self, on_spike: Any, optimizer: Optimizer | None, ranks: Ranks) -> None:
        self._ranks = ranks
        self.acts_on: Optimizer | None = None
        self.kind = on_spike if isinstance(on_spike, str) else None  # "skip", "clip" or None
        if self.kind is None:
            check_function("on_spike", on_spike, "the engine", "the norm", described=_CHOICES)
        elif self.kind not in ("skip", "clip"):
            raise ValueError(f"Argument on_spike should be {_CHOICES}, but given {on_spike!r}")
        elif optimizer is None:
            raise ValueError(f"on_spike={self.kind!r} requires the argument optimizer, in whose step it acts")
        elif self.kind == "skip":
            self.acts_on = skippable(optimizer)
        elif hides_gradients(optimizer):  # others cannot be stopped inside of "clip", which allows for closures
            self.acts_on = optimizer
        names = ["skipped_count", "clipped_count"] if self.kind == "clip" else ["skipped_count"]
        self.counts: dict[str, Any] = dict.fromkeys(names, 0.0)  # steps so far: numbers, or 0-dim on a device
        self.recurring = RecurringSpikes()
        self._read, self._in_run = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)  # counts as last read

    def ask(
        self, step: OptimizerStep, taken: StepDetection, is_known: bool | None, norm: Callable[[], Tensor], at: int
    ) -> None:
        """Ask for what is to be done with a step that starts, at an iteration.

        ``is_known`` says whether it is a spike, if that has been read; ``norm`` computes the norm that the step uses.
        """
        detection, spike = taken.detection, taken.detection.spike
        if self.kind == "skip" and is_known is not False and may_be_true(spike):
            spike = spike & ~self.recurring.observe(at, detection.norm.value, detection.norm.above)
            step.skip(spike)
            self._count("skipped_count", spike)
        elif self.kind == "clip":
            if taken.updates and may_be_true(detection.exceeds):
                factor = self._smallest(clip_factor(detection, norm()), detection)
                step.scale(factor)
                self._count("clipped_count", factor < 1.0)
            lost = detection.norm.spike & detection.norm.nonfinite
            if skips_on_device(step.optimizer) or (lost.is_cpu and hides_gradients(step.optimizer)):
                step.skip(lost)
                self._count("skipped_count", lost)

    def _smallest(self, factor: Tensor, detection: GradientDetection) -> Tensor:
        has_own = detection.origin is not None and detection.parameters is not None  # ratios of this rank alone
        return -self._ranks.max(-factor) if has_own else factor

    def start_run(self) -> None:
        """Count the log lines of a run from zero."""
        self._in_run = dict.fromkeys(self.counts, 0.0)

    def message(self, counts: Sequence[float]) -> str | None:
        """Describe the skips and clips since the last call, from :attr:`counts` on the host: ten, then each 100th."""
        parts = []
        for name, count in zip(self.counts, counts, strict=True):
            before = self._in_run[name]
            now = self._in_run[name] = before + count - self._read[name]
            if now > before and (before < 10 or now // 100 > before // 100):
                parts.append(f"{_DONE[name]} ({now:.0f} in this run).")
            self._read[name] = count
        return " ".join(parts) or None

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        counts = {name: float(state_dict.get(name, 0.0)) for name in self.counts}
        self.recurring.load_state_dict(state_dict["recurring"])
        self.counts, self._read = counts, dict(counts)

    def _count(self, name: str, flag: Tensor) -> None:
        if may_be_true(flag):
            self.counts[name] = self.counts[name] + (1.0 if flag.is_cpu else flag.to(wide_dtype(flag.device)))


def clip_factor(detection: GradientDetection, norm: Tensor) -> Tensor:
    """Factor of the gradient that a step uses, of this norm, after which no norm is above its threshold.

    A 0-dim tensor from 0 to 1; 1 for a non-finite gradient, and where no norm of the backward was above its threshold.
    """
    parts = [part for part in (detection.norm, detection.parameters) if part is not None]
    ratios = [torch.where(part.above, part.threshold / part.comparable, math.inf).amin() for part in parts]
    factor = torch.stack(ratios).amin() * (detection.norm.comparable / norm)
    return torch.where(detection.exceeds & (norm < math.inf), factor.nan_to_num(1.0).clamp(0.0, 1.0), 1.0)
