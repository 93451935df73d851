"""Detection that describes the gradient of an optimizer step.

A train step may clip, add noise or replace gradients between backward and step, so the detection of a gradient is that
of its newest backward. A window opens with the first backward that reaches the monitor's parameters after its
optimizer's last step, and closes when the next step has completed.

========================  =====================  ========================
event                     newest is None         newest is set
========================  =====================  ========================
iteration started (1)     -                      drop newest
backward (2)              detect; newest         detect; newest
another optimizer's step  -                      used_by_other if shared
own step                  detect, or last (3)    take newest
... without a gradient    -                      drop newest
... completed (4)         -                      drop newest
train step returned (5)   publish last           publish last, or newest
========================  =====================  ========================

1. The gradient is announced at most once until a step has used it, or iterations were not monitored.
2. If a closure is evaluated again inside the own step, its gradient is detected only.
3. ``last``, if an own step of this iteration took the detection of a backward. Otherwise the gradients were set by
   hand or are of an earlier iteration; they are detected at each step.
4. The detection that the step took updates the statistics.
5. ``newest`` is published if it is a spike and there was no own step: without a spike the gradient is incomplete. If
   it is ``used_by_other``, the detection of the last backward that was not shared takes its place. A spike is
   postponed: the next backward shows whether its gradient was discarded, and it updates the statistics, or was
   accumulated into.

A backward is shared if it reached other monitored models too, as in a GAN. Another optimizer that steps then may have
been the one that the backward was for. ``tests/_oracle.py`` implements the same rule independently.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch.optim import Optimizer

from ignite_monitor.gradient.detector import GradientDetection
from ignite_monitor.monitor.transfer import is_cpu

_PATIENCE = 50  # consecutive gradients without a step
_NO_STEP = (
    "%d gradients in a row met no step of %s, so the model is not trained and the threshold statistics are not "
    "updated. Likely cause: %s."
)
_ACCUMULATED_SPIKE = (
    "the train step returns at a spike while gradients accumulate, so that all later ones are spikes too: call "
    "optimizer.zero_grad() before that return"
)
_OTHER_CAUSES = (
    "step() is not called; or only in iterations that the filter given to attach() excludes; or all gradients overflow"
)


class Taken(NamedTuple):
    """The detection that a step took; whether it is of a backward, and whether it updates the statistics."""

    detection: GradientDetection
    of_backward: bool
    updates: bool


class GradientWindow:
    """Follows the detections of one monitor's gradient, and counts gradients without a step."""

    def __init__(self) -> None:
        self.newest: GradientDetection | None = None  # of this iteration's newest backward since the own step
        self.shared = False  # whether it reached other monitored models too
        self.used_by_other = False  # whether another optimizer has stepped since then, with a shared backward
        self.unshared: GradientDetection | None = None  # of this iteration's last backward that was not shared
        self.last: Taken | None = None  # by the last own step of this iteration
        self.announced = False  # whether the gradient has been announced as a spike
        self.other_optimizer: str | None = None  # name of one that has stepped since the own one
        self._taken: Taken | None = None  # by the own step in progress
        self._unstepped = 0  # consecutive gradients without an own step

    def iteration_started(self, unseen: bool) -> None:
        """A monitored iteration starts, after others that were not monitored or directly after the last one."""
        self.newest = self.unshared = self.last = self._taken = None
        self.used_by_other = False
        self.announced = self.announced and not unseen

    def backward(self, detection: GradientDetection, shared: bool) -> bool:
        """A backward has ended: return whether to announce its spike now."""
        if self._taken is not None:
            return False
        self.newest, self.shared, self.used_by_other = detection, shared, False
        self.unshared = self.unshared if shared else detection
        return not shared

    def other_step_started(self) -> bool:
        """Another optimizer starts its step: return whether ``newest`` is no longer that of this model's gradient."""
        if self.newest is None or not self.shared or self.used_by_other:
            return False
        self.used_by_other = True
        return True

    def step_started(self, detect: Callable[[], GradientDetection]) -> Taken:
        """The own optimizer starts its step; ``detect`` is called if no backward made the gradient."""
        if self.newest is not None:
            self._taken = Taken(self.newest, of_backward=True, updates=True)
        elif self.last is not None and self.last.of_backward:
            self._taken = self.last._replace(updates=False)
        else:
            self._taken = Taken(detect(), of_backward=False, updates=True)
        return self._taken

    def step_completed(self) -> Taken | None:
        """The own optimizer has stepped: return what the step took; None if there was no gradient."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self.last = taken
            self.close()
        return taken

    def returned(self) -> GradientDetection | None:
        """The train step has returned: return the newest detection that may be published."""
        if self.last is None or not self.shared:
            return self.unshared if self.used_by_other else self.newest
        return None

    def missing_step(self, detection: GradientDetection | None, optimizer: Optimizer | None) -> str | None:
        """The train step has returned after a backward: return a warning if 50 gradients in a row met no own step."""
        if self.last is not None:
            self._unstepped, self.other_optimizer = 0, None
            return None
        self._unstepped += 1
        if self._unstepped != _PATIENCE:
            return None
        cause = _OTHER_CAUSES
        if self.other_optimizer is not None:
            cause = f"{self.other_optimizer}, which holds parameters of the model too, makes the steps"
        elif detection is not None and is_cpu(detection.spike) and detection.spike:
            cause = _ACCUMULATED_SPIKE
        return _NO_STEP % (_PATIENCE, "an optimizer" if optimizer is None else type(optimizer).__name__, cause)

    def close(self) -> None:
        """Nothing is known of the gradients any more."""
        self.newest = self.unshared = self._taken = None
        self.used_by_other = self.announced = False
