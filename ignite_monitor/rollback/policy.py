"""When to go back, when to leave a batch undone, and when to give in: one small state machine."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Event(Enum):
    """What an iteration was."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"  # something exceeds its threshold, and all is finite
    NONFINITE = "nonfinite"  # the loss or a gradient is not finite, the state is: that is the batch's
    TROUBLE = "trouble"  # a level has changed, or somebody asks to go back
    RUINED = "ruined"  # the state is not finite


class Action(Enum):
    """What to do after it."""

    NONE = "none"
    GO_BACK = "go back"
    UNDO = "undo"  # put the same snapshot back: the iteration is left out
    ACCEPT = "accept"  # put it back a last time, and let all rules start afresh
    END = "end"  # put it back, and end the run


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


@dataclass
class RecoveryPolicy:
    """Decides after every iteration, by a table of state and event.

    While it watches, too long means ``max_rollbacks`` in ``window`` iterations. While it heals, it means ``hold``
    iterations, and to end the run that the last ``patience`` were not finite. Going back begins the healing, and
    ``probation`` healthy iterations in a row end it. What was too long ends it too, and what was counted is forgotten.
    """

    patience: int
    probation: int
    hold: int
    max_rollbacks: int
    window: int

    _STATE = ("healing", "undone", "age", "healthy", "nonfinite", "went_back")

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start as at the beginning."""
        self.healing = WATCHING
        self.undone = 0  # iterations that have been left out since it went back
        self.age = 0  # iterations of healing
        self.healthy = 0  # in a row
        self.nonfinite = 0  # in a row
        self.went_back: list[int] = []  # in which iterations

    def next(self, event: Event, iteration: int) -> Action:
        """What to do after an iteration, of which it is known what it was."""
        self.nonfinite = self.nonfinite + 1 if event in (Event.NONFINITE, Event.RUINED) else 0
        self.healthy = self.healthy + 1 if event == Event.HEALTHY else 0
        self.age += 1
        if event == Event.NONFINITE and self.nonfinite >= self.patience:
            event = Event.RUINED
        action, instead = _ACTIONS[self.healing, event]
        if action != instead and self._is_too_long(instead, iteration):
            self.forget()
            return instead
        if action == Action.GO_BACK:
            self.went_back.append(iteration)
            self.healing, self.undone, self.age = HEALING, 0, 0
        elif action == Action.UNDO:
            self.undone += 1
        elif self.healthy >= self.probation:
            self.healing = WATCHING
        return action

    def _is_too_long(self, instead: Action, iteration: int) -> bool:
        if self.healing == HEALING:
            return self.age > self.hold and (instead == Action.ACCEPT or self.nonfinite >= self.patience)
        self.went_back = [each for each in self.went_back if 0 <= iteration - each < self.window]
        return len(self.went_back) >= self.max_rollbacks

    def state_dict(self) -> dict[str, Any]:
        """Where it is: numbers and a list of numbers."""
        return {name: copy(getattr(self, name)) for name in self._STATE}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for name in self._STATE:
            setattr(self, name, copy(state_dict[name]))
