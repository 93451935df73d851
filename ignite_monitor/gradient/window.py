"""Detection that describes the gradient of an optimizer step.

A train step may clip, add noise or replace gradients between backward and step, so the detection of a gradient is that
of its latest backward. A window opens with the first backward that reaches the monitor's parameters after its
optimizer's last step, and closes when the next step has completed.

========================  =====================  ========================
event                     since_step is None     since_step is set
========================  =====================  ========================
iteration started (1)     -                      drop since_step
backward (2)              detect; since_step     detect; since_step
shared backward (3)       is_mixed               is_mixed
own step                  detect, or last (4)    take since_step
... if is_mixed           detect                 detect
... without a gradient    -                      drop since_step
... completed (5)         -                      drop since_step
train step returned (6)   publish last           publish last, or since_step
========================  =====================  ========================

1. The gradient is reported at most once until a step has used it, or iterations were not monitored.
2. If a closure is evaluated again inside the own step, its gradient is detected only.
3. A backward that reaches other monitored models too, as in a GAN, may be for another optimizer: its gradient is
   detected if the own optimizer steps with it.
4. ``last_step``, if an own step of this iteration took the detection of a backward. Otherwise the gradients were set by
   hand or are of an earlier iteration; they are detected at each step.
5. The detection that the step took updates the statistics.
6. ``since_step`` is published if it is a spike and there was no own step: without a spike the gradient is incomplete.
   It updates the statistics; this is reverted if the next backward accumulates into its gradient, or 4. detects.

``tests/_oracle.py`` implements the same rule independently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ignite_monitor.gradient.detector import GradientDetection
from ignite_monitor.monitor.transfer import is_cpu

_PATIENCE = 50  # consecutive spikes without a step
_UNSEEN = 20  # consecutive iterations without a gradient
NO_GRADIENT = (
    f"{_UNSEEN} iterations had no gradient of the model, so nothing is published. Check that GradMonitor has the train "
    "step's model and optimizer, and that backward() is called in the train step; attach with a filter if the model is "
    "not trained in every iteration."
)
NO_STEP = (
    f"{_PATIENCE} consecutive spikes, and the optimizer made no step during them. If the train step returns at a "
    "spike, call optimizer.zero_grad() before that return: gradients that stay make all later ones spikes too."
)


class StepDetection(NamedTuple):
    """The detection that a step took; whether it is of a backward, and whether it updates the statistics."""

    detection: GradientDetection
    of_backward: bool
    updates: bool


@dataclass
class GradientWindow:
    """The detections of one monitor's gradient."""

    since_step: GradientDetection | None = None  # of this iteration's latest backward since the own step
    is_mixed: bool = False  # whether a shared backward has changed the gradient since then
    in_step: StepDetection | None = None  # of the own step that runs
    last_step: StepDetection | None = None  # of the last own step of this iteration
    is_reported: bool = False  # whether the gradient has been reported as a spike
    spikes_without_step: int = 0
    unseen: int = 0  # consecutive iterations without a gradient, in which none accumulates under no_sync()

    def iteration_started(self, unseen: bool) -> None:
        """A monitored iteration starts, after others that were not monitored or directly after the last one."""
        is_reported = self.is_reported and not unseen
        self.close()
        self.last_step, self.is_reported = None, is_reported

    def backward(self, detection: GradientDetection) -> None:
        """A backward has ended, after a step that has completed or raised an error."""
        self.since_step, self.in_step, self.is_mixed = detection, None, False

    def step_started(self, detect: Callable[[], GradientDetection]) -> StepDetection:
        """The own optimizer starts its step; ``detect`` is called if no backward of its own made the gradient."""
        if self.since_step is not None and not self.is_mixed:
            self.in_step = StepDetection(self.since_step, of_backward=True, updates=True)
        elif self.last_step is not None and self.last_step.of_backward and not self.is_mixed:
            self.in_step = self.last_step._replace(updates=False)
        else:
            self.in_step = StepDetection(detect(), of_backward=False, updates=True)
        return self.in_step

    def step_completed(self) -> StepDetection | None:
        """The own optimizer has stepped: return what the step took; None if there was no gradient."""
        taken = self.in_step
        if taken is not None:
            self.last_step = taken
            self.close()
        return taken

    def is_unseen(self, is_reduced: bool) -> bool:
        """The train step has returned without a gradient: return True at the 20th such iteration in a row."""
        # A replay buffer that fills, or a loss that is not finite, leaves out single iterations.
        self.unseen += is_reduced
        return self.unseen == _UNSEEN

    def is_stuck(self, detection: GradientDetection | None) -> bool:
        """The train step has returned: return True at the 50th consecutive spike without an own step, on the CPU."""
        self.unseen = 0
        is_spike = self.last_step is None and detection is not None and is_cpu(detection.spike) and detection.spike
        self.spikes_without_step = self.spikes_without_step + 1 if is_spike else 0
        return self.spikes_without_step == _PATIENCE

    def close(self) -> None:
        """Nothing is known of the gradients any more."""
        self.since_step = self.in_step = None
        self.is_mixed = self.is_reported = False
