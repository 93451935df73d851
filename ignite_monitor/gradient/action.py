"""The action at a spike: skip the optimizer step, or clip its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.checks import check_function
from ignite_monitor.detection.recurring import RecurringSpikes
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.step_owner import allows_closures, skippable, skips_on_device
from ignite_monitor.gradient.window import StepDetection
from ignite_monitor.model.devices import wide_dtype

_CHOICES = "None, 'skip', 'clip' or a function of the engine and the norm"
_DONE = {"skipped_count": "optimizer step skipped", "clipped_count": "gradient scaled to its threshold"}


class SpikeAction:
    """Asks to skip steps or to scale their gradients, and counts it.

    "clip" multiplies the gradients of a step whose norm is a spike by threshold / norm. A non-finite gradient cannot be
    clipped: its step is skipped if that takes no synchronization, on the CPU and in fused optimizers of
    ``torch.optim``. "skip" does not skip isolated spikes that recur at a similar size.
    """

    def __init__(self, on_spike: Any, optimizer: Optimizer | None) -> None:
        self.acts_on: Optimizer | None = None
        self.kind = on_spike if isinstance(on_spike, str) else None  # "skip", "clip" or None
        if self.kind is None:
            check_function("on_spike", on_spike, "the engine", "the norm", described=_CHOICES)
        elif self.kind not in ("skip", "clip"):
            raise ValueError(f"Argument on_spike should be {_CHOICES}, but given {on_spike!r}")
        elif optimizer is None:
            raise ValueError(f"on_spike={self.kind!r} requires `optimizer`")
        elif self.kind == "skip":
            self.acts_on = skippable(optimizer)
        elif allows_closures(optimizer):  # as "clip" does
            self.acts_on = optimizer
        names = ["skipped_count", "clipped_count"] if self.kind == "clip" else ["skipped_count"]
        self.counts: dict[str, Any] = dict.fromkeys(names, 0.0)  # steps so far: numbers, or 0-dim on a device
        self.recurring = RecurringSpikes()
        self._read = dict.fromkeys(names, 0.0)  # counts as last read

    def ask(
        self, step: OptimizerStep, taken: StepDetection, norm: Callable[[], Tensor], at: int, was_normal: Tensor
    ) -> None:
        """Ask for what is to be done with a step that starts; ``norm`` computes the norm that it uses."""
        detection, spike = taken.detection.norm, taken.detection.spike
        if self.kind == "skip" and may_be_true(spike):
            spike = spike & ~self.recurring.observe(at, detection.value, detection.above & was_normal)
            step.skip(spike)
            self._count("skipped_count", spike)
        elif self.kind == "clip":
            if taken.updates and may_be_true(detection.above):
                used = norm()
                ratio = (detection.applied_threshold / used).clamp(max=1.0)
                factor = torch.where(detection.above & (used < torch.inf), ratio, 1.0)
                step.scale(factor)
                self._count("clipped_count", factor < 1.0)
            lost = detection.spike & detection.nonfinite
            if step.optimizer is self.acts_on and (lost.is_cpu or skips_on_device(step.optimizer)):
                step.skip(lost)
                self._count("skipped_count", lost)

    def message(self, counts: Sequence[float]) -> str | None:
        """Describe the skips and clips since the last call, from :attr:`counts` on the host: ten, then each 100th."""
        parts = []
        for name, count in zip(self.counts, counts, strict=True):
            before, self._read[name] = self._read[name], count
            if count > before and (before < 10 or count // 100 > before // 100):
                parts.append(f"{_DONE[name]} ({count:.0f} so far).")
        return " ".join(parts) or None

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        counts = {name: float(state_dict.get(name, 0.0)) for name in self.counts}
        self.recurring.load_state_dict(state_dict["recurring"])
        self.counts, self._read = counts, dict(counts)

    def _count(self, name: str, flag: Tensor) -> None:
        if may_be_true(flag):
            self.counts[name] = self.counts[name] + (1.0 if flag.is_cpu else flag.to(wide_dtype(flag.device)))
