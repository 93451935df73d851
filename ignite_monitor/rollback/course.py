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


WATCHING, HEALING = False, True

# What to do; and what instead, once that has been done for too long. What is not finite is never accepted.
_ACTIONS: dict[tuple[bool, Event], tuple[Action, Action]] = {
    (WATCHING, Event.HEALTHY): (Action.NONE, Action.NONE),
    (WATCHING, Event.UNHEALTHY): (Action.NONE, Action.NONE),
    (WATCHING, Event.NONFINITE): (Action.NONE, Action.NONE),  # so many in a row are RUINED
    (WATCHING, Event.TROUBLE): (Action.GO_BACK, Action.ACCEPT),
    (WATCHING, Event.RUINED): (Action.GO_BACK, Action.END),
    (HEALING, Event.HEALTHY): (Action.NONE, Action.NONE),
    (HEALING, Event.UNHEALTHY): (Action.UNDO, Action.ACCEPT),
    (HEALING, Event.TROUBLE): (Action.UNDO, Action.ACCEPT),
    (HEALING, Event.NONFINITE): (Action.UNDO, Action.END),
    (HEALING, Event.RUINED): (Action.UNDO, Action.END),
}


class Course:
    """Decides after every iteration, by a table of state and event.

    While it watches, too long means ``max_rollbacks`` in ``window`` iterations. While it heals, it means ``hold``
    iterations, and to end the run that the last ``patience`` were not finite. Going back begins the healing, and
    ``probation`` healthy iterations in a row end it. What was too long ends it too, and what was counted is forgotten.

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
        self.healing = WATCHING
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
        self._healthy = self._healthy + 1 if event == Event.HEALTHY else 0
        self._age += 1
        if event == Event.NONFINITE and self._nonfinite >= self.patience:
            event = Event.RUINED
        action, instead = _ACTIONS[self.healing, event]
        if action != instead and self._is_too_long(instead, iteration):
            self.forget()
            return instead
        if action == Action.GO_BACK:
            self._went_back.append(iteration)
            self.healing, self.undone, self._age = HEALING, 0, 0
        elif action == Action.UNDO:
            self.undone += 1
        elif self._healthy >= self.probation:
            self.healing = WATCHING
        return action

    def _is_too_long(self, instead: Action, iteration: int) -> bool:
        if self.healing == HEALING:
            return self._age > self.hold and (instead == Action.ACCEPT or self._nonfinite >= self.patience)
        self._went_back = [each for each in self._went_back if 0 <= iteration - each < self.window]
        return len(self._went_back) >= self.max_rollbacks

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
