"""When to go back, when to leave a batch undone, and when to give in: one small state machine."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any


class Event(Enum):
    """What an iteration was."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    """Something exceeds its threshold, and all is finite."""
    NONFINITE = "nonfinite"
    """The loss or a gradient is not finite, the state is: that is the batch's."""
    TROUBLE = "trouble"
    """A level has changed, or somebody asks to go back."""
    RUINED = "ruined"
    """The state is not finite."""


class Action(Enum):
    """What to do after it."""

    NONE = "none"
    GO_BACK = "go back"
    UNDO = "undo"
    """Put the same snapshot back: the iteration is left out."""
    ACCEPT = "accept"
    """Put it back a last time, and let all rules start afresh."""
    END = "end"
    """Put it back, and end the run."""


class Course:
    r"""Decides after every iteration.

    ========  =================  ========================================================  ========
    state     event              action                                                    state
    ========  =================  ========================================================  ========
    watching  healthy            none                                                      watching
    watching  unhealthy          none                                                      watching
    watching  nonfinite          none; the ``patience``-th in a row like *ruined*
    watching  trouble            go back                                                   healing
    \                            accept after ``max_rollbacks`` in ``window`` iterations   watching
    watching  ruined             go back                                                   healing
    \                            end after ``max_rollbacks`` in ``window`` iterations      watching
    healing   healthy            none; after ``probation`` in a row                        watching
    healing   unhealthy,         undo                                                      healing
              trouble            accept after ``hold`` iterations of healing               watching
    healing   nonfinite,         undo                                                      healing
              ruined             end after ``hold`` iterations, the last ``patience``      watching
                                 of them not finite
    ========  =================  ========================================================  ========

    What is not finite is never accepted.

    Attributes:
        healing: whether it has gone back and is not yet well.
        undone: how many iterations have been left out since it went back.
    """

    def __init__(self, *, patience: int, probation: int, hold: int, max_rollbacks: int, window: int) -> None:
        self.patience = patience
        self.probation = probation
        self.hold = hold
        self.max_rollbacks = max_rollbacks
        self.window = window
        self.forget()

    def forget(self) -> None:
        """Start as at the beginning."""
        self.healing = False
        self.undone = 0
        self._age = 0  # iterations of healing
        self._healthy = 0  # in a row
        self._nonfinite = 0  # in a row
        self._went_back: list[int] = []

    def next(self, event: Event, iteration: int) -> Action:
        """What to do after an iteration.

        Args:
            event: what the iteration was.
            iteration: its number.
        """
        self._nonfinite = self._nonfinite + 1 if event in (Event.NONFINITE, Event.RUINED) else 0
        return self._heal(event) if self.healing else self._watch(event, iteration)

    def _watch(self, event: Event, iteration: int) -> Action:
        if event == Event.NONFINITE and self._nonfinite >= self.patience:
            event = Event.RUINED
        if event not in (Event.TROUBLE, Event.RUINED):
            return Action.NONE
        self._went_back = [each for each in self._went_back if 0 <= iteration - each < self.window]
        if len(self._went_back) >= self.max_rollbacks:
            self.forget()
            return Action.END if event == Event.RUINED else Action.ACCEPT
        self._went_back.append(iteration)
        self.healing, self.undone, self._age, self._healthy = True, 0, 0, 0
        return Action.GO_BACK

    def _heal(self, event: Event) -> Action:
        self._age += 1
        if event == Event.HEALTHY:
            self._healthy += 1
            self.healing = self._healthy < self.probation
            return Action.NONE
        self._healthy = 0
        self.undone += 1
        if self._age > self.hold:
            if not self._nonfinite:
                self.forget()
                return Action.ACCEPT
            if self._nonfinite >= self.patience:
                self.forget()
                return Action.END
        return Action.UNDO

    def state_dict(self) -> dict[str, Any]:
        """Where it is: numbers and a list of numbers."""
        return {
            "healing": self.healing,
            "undone": self.undone,
            "age": self._age,
            "healthy": self._healthy,
            "nonfinite": self._nonfinite,
            "went_back": list(self._went_back),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: what :meth:`state_dict` returned.
        """
        self.healing, self.undone = bool(state_dict["healing"]), int(state_dict["undone"])
        self._age, self._healthy = int(state_dict["age"]), int(state_dict["healthy"])
        self._nonfinite = int(state_dict["nonfinite"])
        self._went_back = [int(each) for each in state_dict["went_back"]]
