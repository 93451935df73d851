"""Which detection speaks of the gradient that an optimizer's step uses.

A window opens with the first backward that reaches the monitor's parameters after its last optimizer step, and closes
when its next one has completed. Every backward in it is judged when it ends, and the newest detection is the window's,
whatever becomes of the gradient before the step. In an iteration a window is in one of these states:

- CLOSED: there was no backward since the last step;
- LEFT: its backward was in an earlier iteration;
- OPEN: its newest backward was in this iteration;
- ASIDE: that backward reached other monitored models too, and another optimizer has made its step with it: it is this
  one's leftover, unless this one makes its step in the same iteration.

====================  =================  =================  ===================  ================
event                 CLOSED             LEFT               OPEN                 ASIDE
====================  =================  =================  ===================  ================
iteration started     CLOSED             LEFT               LEFT                 CLOSED
… after unseen ones   CLOSED             CLOSED             CLOSED               CLOSED
backward              judge; OPEN        judge; OPEN        judge; OPEN          judge; OPEN
… in an own step (1)  judge              judge              judge                judge
another one's step    CLOSED             LEFT               if shared (2) ASIDE  ASIDE
own step              judge or last (3)  judge or last (3)  take the newest      take the newest
… without a gradient  CLOSED             CLOSED             CLOSED               CLOSED
… completed (4)       CLOSED             CLOSED             CLOSED               CLOSED
train step returned   publish the last   publish the last   publish newest (5)   publish the last
====================  =================  =================  ===================  ================

1. In an own step that has taken its detection: what a closure evaluates after its first time.
2. If the newest backward reached other monitored models too.
3. The detection that the last own step of this iteration took, if that was of a backward; it does not enter again. Else
   the step uses gradients set by hand, or left from an earlier iteration, and they are judged, each time.
4. The detection that the step took enters the statistics, in place of a tentative entry. A monitor that is given no
   optimizer has every optimizer that shares parameters for its own, and one detection per iteration enters, when the
   train step returns: that which is published.
5. If there was no own step in this iteration, or the newest detection is a spike of a backward that reached no other
   monitored model, else the last. It enters tentatively if it is a spike or not finite, and is else not published: it
   is of a gradient that more is to be added to.

"The last" is the detection of this iteration's last own step; where there was none nothing is published. A tentative
entry stands until the next own step, in whose place its detection enters, or the next backward. That decides by whether
it found any gradient other than zero: then it has added to it, and the entry is taken back.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

V = TypeVar("V")
B = TypeVar("B")


class State(enum.Enum):
    """What is known of the gradient, see the table above."""

    CLOSED = enum.auto()
    LEFT = enum.auto()
    OPEN = enum.auto()
    ASIDE = enum.auto()


class Taken(NamedTuple, Generic[V]):
    """The detection that a step takes; whether it is of a backward, and whether it enters the statistics."""

    detection: V
    of_backward: bool
    enters: bool


class GradientWindow(Generic[V, B]):
    """Follows the detections on one monitor's gradient, of a type V, from iteration to iteration.

    Attributes:
        state: where it is.
        newest: the detection of the newest backward in the window.
        last: what the last own step of this iteration took; None if there was none.
        before: what was known before a tentative entry, of a type B; None if there is none.
        announced: whether the gradient has been announced as a spike.
    """

    def __init__(self) -> None:
        self.state = State.CLOSED
        self.newest: V | None = None
        self.last: Taken[V] | None = None
        self.before: B | None = None
        self.announced = False
        self._shared = False
        self._taken: Taken[V] | None = None  # by the own step that is going on

    def iteration_started(self, unseen: bool) -> None:
        """An iteration starts whose train step is looked at; with others before it, or without knowing that."""
        self.last = self._taken = None
        if unseen or self.state is State.ASIDE:
            self.close()
        elif self.state is State.OPEN:
            self.state = State.LEFT

    def decided(self, is_new: bool) -> B | None:
        """A backward has decided on the tentative entry; what was known before it."""
        before, self.before = self.before, None
        self.announced &= not is_new
        return before

    def backward(self, detection: V, shared: bool) -> bool:
        """A backward has been judged, which reached other monitored models too or not: whether to announce it now."""
        if self._taken is not None:
            return False
        self.state, self.newest, self._shared = State.OPEN, detection, shared
        return not shared

    def others_step_started(self) -> bool:
        """Another optimizer is about to make its step: whether the newest detection is no longer to be shown."""
        if self.state is not State.OPEN or not self._shared:
            return False
        self.state = State.ASIDE
        return True

    def step_started(self, judge: Callable[[], V]) -> Taken[V]:
        """The own optimizer is about to make its step with gradients that ``judge`` would judge now."""
        if self.newest is not None and self.state in (State.OPEN, State.ASIDE):
            self._taken = Taken(self.newest, of_backward=True, enters=True)
        elif self.last is not None and self.last.of_backward:
            self._taken = self.last._replace(enters=False)
        else:
            self._taken = Taken(judge(), of_backward=False, enters=True)
        return self._taken

    def step_completed(self) -> Taken[V] | None:
        """The own optimizer has made its step; what it took, None if there was no gradient."""
        taken, self._taken = self._taken, None
        if taken is not None:
            self.last = taken
            self.close()
        return taken

    def returned(self) -> V | None:
        """The train step has returned: the newest detection if it is to be published, where it is a spike at least."""
        if self.state is State.OPEN and (self.last is None or not self._shared):
            return self.newest
        return None

    def close(self) -> None:
        """Nothing is known any more of the gradient that is there."""
        self.state, self.newest, self.announced, self._taken = State.CLOSED, None, False, None
