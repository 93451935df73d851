"""Detection that describes the gradient of an optimizer step.

A train step may do anything between backward and step: clip, add noise, replace gradients. So the detection of a
gradient is that of its newest backward. A window opens with the first backward that reaches the monitor's parameters
after its optimizer's last step, and closes when the next step has completed. ``docs/architecture.md`` has the table of
events and states.

A backward is shared if it reached other monitored models too, as in a GAN. Another optimizer that steps then may have
been the one that the backward was for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

D = TypeVar("D")


class Taken(NamedTuple, Generic[D]):
    """The detection that a step took; whether it is of a backward, and whether it updates the statistics."""

    detection: D
    of_backward: bool
    updates: bool


class GradientWindow(Generic[D]):
    """Follows the detections of one monitor's gradient.

    Attributes:
        newest: detection of the newest backward since the last own step.
        is_current: whether that backward was in this iteration.
        shared: whether it reached other monitored models too.
        used_by_other: whether another optimizer has stepped since then, with a shared backward.
        last: what the last own step of this iteration took.
        announced: whether the gradient has been announced as a spike.
    """

    def __init__(self) -> None:
        self.newest: D | None = None
        self.is_current = self.shared = self.used_by_other = self.announced = False
        self.last: Taken[D] | None = None
        self._taken: Taken[D] | None = None  # by the own step in progress

    def iteration_started(self, unseen: bool) -> None:
        """A monitored iteration starts, after others that were not monitored or directly after the last one."""
        self.last = self._taken = None
        self.is_current = False
        if unseen or self.used_by_other:
            self.close()

    def backward(self, detection: D, shared: bool) -> bool:
        """A backward has ended: return whether to announce its spike now."""
        if self._taken is not None:
            return False
        self.newest, self.shared, self.is_current, self.used_by_other = detection, shared, True, False
        return not shared

    def other_step_started(self) -> bool:
        """Another optimizer starts its step: return whether ``newest`` is no longer that of this model's gradient."""
        if self.newest is None or not (self.is_current and self.shared) or self.used_by_other:
            return False
        self.used_by_other = True
        return True

    def step_started(self, detect: Callable[[], D]) -> Taken[D]:
        """The own optimizer starts its step; ``detect`` is called if no backward made the gradient."""
        if self.newest is not None and self.is_current:
            self._taken = Taken(self.newest, of_backward=True, updates=True)
        elif self.last is not None and self.last.of_backward:
            self._taken = self.last._replace(updates=False)
        else:
            self._taken = Taken(detect(), of_backward=False, updates=True)
        return self._taken

    def step_completed(self) -> Taken[D] | None:
        """The own optimizer has stepped: return what the step took; None if there was no gradient."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self.last = taken
            self.close()
        return taken

    def returned(self) -> D | None:
        """The train step has returned: return the newest detection if it may be published."""
        if self.is_current and not self.used_by_other and (self.last is None or not self.shared):
            return self.newest
        return None

    def close(self) -> None:
        """Nothing is known of the gradients any more."""
        self.newest, self._taken = None, None
        self.is_current = self.used_by_other = self.announced = False
