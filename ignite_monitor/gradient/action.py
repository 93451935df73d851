"""The action at a spike: skip the optimizer step, or clip its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.checks import check_function
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.events.gradient_tracker import OptimizerStep
from ignite_monitor.events.step_owner import allows_closures, skippable, skips_on_device
from ignite_monitor.gradient.window import StepDetection
from ignite_monitor.model.devices import wide_dtype

_NOT_SKIPPED = (
    "the steps are those of %s, which holds the parameter groups of the given optimizer: none is skipped. Give this "
    "optimizer instead, or skip the step in the train step, if engine.state.unhealthy_spike is True after backward."
)
_CHOICES = "None, 'skip', 'clip' or a function of the engine and the norm"


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

    def ask(
        self, monitor: Any, step: OptimizerStep, taken: StepDetection, parameters: Sequence[nn.Parameter]
    ) -> dict[str, Tensor]:
        """Ask for what is to be done with a step that starts; return it: name of the count -> 0-dim flag."""
        detection, spike, asked = taken.detection.norm, taken.detection.spike, dict[str, Tensor]()
        if self.kind == "skip" and not step.requests.may_skip:  # it runs within the step of another optimizer
            monitor.report("not_skipped", _NOT_SKIPPED % type(step.optimizer).__name__, severity="problem")
        elif self.kind == "skip" and may_be_true(spike):
            asked["skipped_count"] = spike & ~monitor._detector.recurs(taken.detection, monitor._now.number)
            step.skip(asked["skipped_count"])
        elif self.kind == "clip":
            if taken.updates and may_be_true(detection.above):
                used = monitor._detector.norm(parameters, step.loss_scale)
                ratio = (detection.applied_threshold / used).clamp(max=1.0)
                factor = torch.where(detection.above & (used < torch.inf), ratio, 1.0)
                step.scale(factor)
                asked["clipped_count"] = factor < 1.0
            lost = detection.spike & detection.nonfinite
            if step.optimizer is self.acts_on and (lost.is_cpu or skips_on_device(step.optimizer)):
                step.skip(lost)
                asked["skipped_count"] = lost
        for name, flag in asked.items():
            number = float(torch.is_nonzero(flag)) if flag.is_cpu else flag.to(wide_dtype(flag.device))
            self.counts[name] = self.counts[name] + number
        return asked
