"""Recovery policy: when to roll back, discard an iteration, accept a new regime or end the run."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from typing import Any

PROBATION = 5  # consecutive healthy iterations that end a recovery
HOLD = 50  # iterations since the first sign of instability after which it is accepted as a new regime
WINDOW = 1000  # iterations within which rollbacks are counted
LONG = 10  # discarded iterations from which on the values of a recovery are accepted when it ends


class Event(Enum):
    """Classification of an iteration."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"  # a signal exceeds its threshold, and everything is finite
    NONFINITE = "nonfinite"  # the loss or a gradient is not finite, but the state is: the batch is the cause
    UNSTABLE = "unstable"  # a signal stayed above its threshold, or request() was called
    RUINED = "ruined"  # the state is not finite


class Action(Enum):
    """Reaction to an iteration."""

    NONE = "none"
    ROLL_BACK = "roll back"
    DISCARD = "discard"  # restore the same snapshot: the iteration has no effect
    ACCEPT = "accept"  # restore a snapshot a last time, and reset all thresholds
    END = "end"  # restore it, and end the run


WATCHING, RECOVERING = False, True

# (state, event) -> the action, and the action in its place once the first one has been taken for too long.
# A state that is not finite is never accepted.
_ACTIONS: dict[tuple[bool, Event], tuple[Action, Action]] = {
    (WATCHING, Event.HEALTHY): (Action.NONE, Action.NONE),
    (WATCHING, Event.UNHEALTHY): (Action.NONE, Action.NONE),
    (WATCHING, Event.NONFINITE): (Action.NONE, Action.NONE),  # ``patience`` of them in a row are RUINED
    (WATCHING, Event.UNSTABLE): (Action.ROLL_BACK, Action.ACCEPT),
    (WATCHING, Event.RUINED): (Action.ROLL_BACK, Action.END),
    (RECOVERING, Event.HEALTHY): (Action.NONE, Action.NONE),
    (RECOVERING, Event.UNHEALTHY): (Action.DISCARD, Action.ACCEPT),
    (RECOVERING, Event.UNSTABLE): (Action.DISCARD, Action.ACCEPT),
    (RECOVERING, Event.NONFINITE): (Action.DISCARD, Action.END),
    (RECOVERING, Event.RUINED): (Action.DISCARD, Action.END),
}


@dataclass
class RecoveryPolicy:
    """State machine that chooses an :class:`Action` after every iteration.

    "Too long" means ``max_rollbacks`` within ``WINDOW`` iterations while watching, and ``HOLD`` iterations since the
    first sign while recovering; the run ends only if the last ``patience`` iterations were not finite as well.
    """

    patience: int
    max_rollbacks: int

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Return to the initial state."""
        self.recovering = WATCHING
        self.age = 0  # iterations since the first sign of the current instability
        self.healthy = 0  # consecutive healthy iterations
        self.nonfinite = 0  # consecutive non-finite iterations
        self.discarded = 0  # iterations discarded in the current recovery
        self.rollbacks: list[int] = []  # iterations of the rollbacks within WINDOW

    def next(self, event: Event, iteration: int) -> Action:
        """Choose the action for an iteration."""
        self.nonfinite = self.nonfinite + 1 if event in (Event.NONFINITE, Event.RUINED) else 0
        self.healthy = self.healthy + 1 if event == Event.HEALTHY else 0
        self.age = self.age + 1 if self.recovering or event != Event.HEALTHY else 0
        if event == Event.NONFINITE and self.nonfinite >= self.patience:
            event = Event.RUINED
        self.rollbacks = [at for at in self.rollbacks if 0 <= iteration - at < WINDOW]
        action, instead = _ACTIONS[self.recovering, event]
        if action != instead and self._is_too_long(instead):
            action = instead
        if action in (Action.ACCEPT, Action.END):
            self.reset()
        elif action == Action.ROLL_BACK:
            self.rollbacks.append(iteration)
            self.recovering, self.discarded = RECOVERING, 0
        elif action == Action.DISCARD:
            self.discarded += 1
        elif self.healthy >= PROBATION:
            self.recovering = WATCHING
        return action

    def _is_too_long(self, instead: Action) -> bool:
        if self.recovering:
            return self.age > HOLD and (instead == Action.ACCEPT or self.nonfinite >= self.patience)
        return len(self.rollbacks) >= self.max_rollbacks

    def state_dict(self) -> dict[str, Any]:
        """Numbers and a list of numbers."""
        return deepcopy(vars(self))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state, with this policy's arguments."""
        own = {"patience": self.patience, "max_rollbacks": self.max_rollbacks}
        vars(self).update(deepcopy(dict(state_dict)) | own)
