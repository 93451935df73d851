"""Recovery policy: when to roll back, discard an iteration, accept a new regime or end the run."""

from __future__ import annotations

from enum import Enum

PROBATION = 8  # consecutive healthy iterations that end a recovery
HOLD = 48  # iterations since the first sign of instability after which it is accepted as a new regime
WINDOW = 1000  # iterations within which rollbacks are counted
LONG = 10  # discarded iterations from which on the data are the cause: their values are accepted


class Event(Enum):
    """Classification of an iteration."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"  # a signal exceeds its threshold, and everything is finite
    UNSTABLE = "unstable"  # a signal stayed above its threshold, or request() was called
    NONFINITE = "nonfinite"  # the loss or a gradient is not finite, but the state is: the batch is the cause
    PERSISTENT = "persistent"  # half of ``patience`` iterations in a row were NONFINITE
    RUINED = "ruined"  # the state is not finite, or ``patience`` iterations in a row were NONFINITE


class Action(Enum):
    """Reaction to an iteration."""

    NONE = "none"
    ROLL_BACK = "roll back"
    DISCARD = "discard"  # restore a snapshot again: the iteration has no effect
    ACCEPT = "accept"  # restore it a last time, and reset all thresholds
    END = "end"  # restore it, and end the run


# Event -> action while watching, after max_rollbacks within WINDOW, while recovering, HOLD after the first sign.
_ACTIONS = {
    Event.HEALTHY: (Action.NONE, Action.NONE, Action.NONE, Action.NONE),
    Event.UNHEALTHY: (Action.NONE, Action.NONE, Action.DISCARD, Action.ACCEPT),
    Event.UNSTABLE: (Action.ROLL_BACK, Action.ACCEPT, Action.DISCARD, Action.ACCEPT),
    Event.NONFINITE: (Action.NONE, Action.NONE, Action.DISCARD, Action.DISCARD),
    Event.PERSISTENT: (Action.ROLL_BACK, Action.NONE, Action.DISCARD, Action.DISCARD),
    Event.RUINED: (Action.ROLL_BACK, Action.END, Action.DISCARD, Action.END),
}


class RecoveryPolicy:
    """State machine that chooses an :class:`Action` after every iteration."""

    SAVED = ("recovering", "first_sign", "healthy", "nonfinite", "discarded", "rollbacks")

    def __init__(self, patience: int, max_rollbacks: int) -> None:
        self.patience, self.max_rollbacks = patience, max_rollbacks
        self.reset()

    def reset(self) -> None:
        """Return to the initial state."""
        self.recovering = False
        self.first_sign = 0  # iteration in which the current instability began
        self.healthy = 0  # consecutive healthy iterations
        self.nonfinite = 0  # consecutive non-finite iterations
        self.discarded = 0  # iterations discarded in the current recovery
        self.rollbacks: list[int] = []  # iterations of the rollbacks within WINDOW

    def next(self, event: Event, iteration: int, age: int = 1) -> Action:
        """Choose the action for an iteration; a trigger's first sign was in the last ``age`` iterations."""
        self.healthy = self.healthy + 1 if event == Event.HEALTHY else 0
        self.nonfinite = self.nonfinite + 1 if event in (Event.NONFINITE, Event.RUINED) else 0
        if self.nonfinite >= self.patience:
            event = Event.RUINED
        elif event == Event.NONFINITE and 2 * self.nonfinite >= self.patience:
            event = Event.PERSISTENT
        elif self.recovering and event == Event.RUINED:
            event = Event.NONFINITE
        self.rollbacks = [at for at in self.rollbacks if 0 <= iteration - at < WINDOW]
        has_failed, is_too_long = len(self.rollbacks) >= self.max_rollbacks, iteration - self.first_sign >= HOLD
        action = _ACTIONS[event][2 + is_too_long if self.recovering else has_failed]
        if action in (Action.ACCEPT, Action.END):
            self.reset()
        elif action == Action.ROLL_BACK:
            self.rollbacks.append(iteration)
            self.recovering, self.first_sign, self.discarded = True, iteration + 1 - age, 0
        elif action == Action.DISCARD:
            self.discarded += 1
        elif self.healthy >= PROBATION:
            self.recovering = False
        return action
