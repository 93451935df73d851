"""Recovery policy: when to roll back, discard an iteration, continue with changed data, or end the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from statistics import fmean

from ignite_monitor.rollback import limits
from ignite_monitor.rollback.triggers import Signals


class Event(Enum):
    """Classification of an iteration."""

    HEALTHY = "healthy"
    ABOVE_THRESHOLD = "above threshold"  # a signal exceeds its threshold, and everything is finite
    TRIGGERED = "triggered"  # a signal stayed above its threshold, or request() was called
    NONFINITE = "nonfinite"  # the loss or a gradient is not finite, but the state is: the batch is the cause
    PERSISTENT = "persistent"  # half of ``patience`` iterations in a row were NONFINITE
    RUINED = "ruined"  # the state is not finite, or ``patience`` iterations in a row were NONFINITE


class Action(Enum):
    """Reaction to an iteration."""

    NONE = "none"
    ROLL_BACK = "roll back"  # set the state aside, and restore a snapshot
    DISCARD = "discard"  # restore a snapshot again: the iteration has no effect
    ADAPT = "adapt"  # the data have changed: train on them, from the snapshot or from the state set aside
    ACCEPT = "accept"  # training on the changed data does not diverge
    PROBE = "probe"  # set the state aside, and restore the snapshot for an iteration
    RESUME = "resume"  # restore the state set aside
    END = "end"  # restore a snapshot, and end the run


WATCHING, RECOVERING, ADAPTING, PROBING = "watching", "recovering", "adapting", "probing"


class RecoveryPolicy:
    """State machine that chooses an :class:`Action` after every iteration.

    The first iteration after a restore tests the snapshot: its loss is that of the restored weights on a new batch. If
    one test is passed, training is the fault, and nothing is accepted. If all tests in a row fail, older snapshots
    included, the data have changed, and training continues with them. The snapshot is probed from time to time: if it
    passes, the earlier data have returned, and training continues from it. It is probed a last time when the loss has
    become usual; after a second rollback it is not, since data that change again and again do not return for good.
    """

    def __init__(self, patience: int, max_rollbacks: int) -> None:
        self._patience, self._max_rollbacks = patience, max_rollbacks
        self.rollbacks: list[int] = []  # of the last rollbacks
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, but count earlier rollbacks."""
        self.phase = WATCHING
        self.first_sign = 0  # iteration in which the current instability began
        self.healthy = 0  # consecutive healthy iterations
        self.calm = 0  # healthy iterations since the last recovery
        self.nonfinite = 0  # consecutive non-finite iterations
        self.discarded = 0  # iterations discarded in the current recovery
        self.is_test = False  # True in the first iteration after a restore
        self.failed_tests = self.all_failed = self.tests = self.retries = self.trials = 0
        self.recent: list[float] = []  # levels before the rollback, later those of the trial
        self.test_levels: list[float] = []
        self.since = self.probe_at = self.passed = 0
        self.probation = limits.PROBATION
        self.settles = False  # True if the probe that is in progress ends the recovery
        self.may_continue = False  # True if the state before the rollback may be better than the snapshot

    @property
    def watching(self) -> bool:
        """True if no recovery is in progress."""
        return self.phase == WATCHING

    @property
    def candidate(self) -> int:
        """Number of the snapshot to restore: 0 for the newest healthy one, 1 for the one before, 2 for the oldest."""
        if self.trials:
            return 0
        if self.failed_tests:
            return limits.TESTS[min(self.failed_tests, len(limits.TESTS) - 1)]
        return self.retries // limits.RETRIES if self.retries < 3 * limits.RETRIES else 0

    @property
    def keeps_current(self) -> bool:
        """True if the state set aside does at least as well on the changed data as the snapshot."""
        return self.may_continue and _mean(self.recent) <= limits.NOT_WORSE * _mean(self.test_levels)

    def next(self, event: Event, iteration: int, signals: Signals) -> Action:
        """Choose the action for an iteration, from its classification, number and signals."""
        level, is_usual = signals.level, signals.is_usual
        streak, is_healthy = self.healthy, event == Event.HEALTHY
        self.healthy, self.calm = (streak + 1, self.calm + 1) if is_healthy else (0, self.calm)
        self.nonfinite = self.nonfinite + 1 if event in (Event.NONFINITE, Event.RUINED) else 0
        if self.nonfinite >= self._patience:
            event = Event.RUINED
        elif event == Event.NONFINITE and 2 * self.nonfinite >= self._patience:
            event = Event.PERSISTENT
        elif event == Event.RUINED and self.phase == RECOVERING:
            event = Event.NONFINITE
        self.rollbacks = [at for at in self.rollbacks if 0 <= iteration - at < limits.WINDOW]
        if self.phase == WATCHING:
            return self._watch(event, iteration, signals)
        if self.phase == RECOVERING:
            return self._recover(event, iteration, streak, level)
        if self.phase == ADAPTING:
            return self._adapt(event, iteration, level, is_usual)
        return self._probe(is_usual and self.nonfinite == 0, iteration)

    def _watch(self, event: Event, iteration: int, signals: Signals) -> Action:
        self.recent = [*self.recent[1 - len(limits.TESTS) :], signals.level]
        if event not in (Event.TRIGGERED, Event.PERSISTENT, Event.RUINED):
            return Action.NONE
        is_exhausted = len(self.rollbacks) >= self._max_rollbacks
        self.first_sign = iteration + 1 - signals.age
        if is_exhausted and event != Event.TRIGGERED:
            return Action.END if event == Event.RUINED else Action.NONE
        self.phase, self.is_test = RECOVERING, True
        self.may_continue = event == Event.TRIGGERED and not signals.is_requested
        self.discarded = self.failed_tests = self.all_failed = self.tests = self.retries = self.trials = self.calm = 0
        self.test_levels, self.settles = [], False
        self.probation = limits.LONG_PROBATION if is_exhausted else limits.PROBATION
        if is_exhausted:
            return Action.DISCARD
        self.rollbacks.append(iteration)
        return Action.ROLL_BACK

    def _recover(self, event: Event, iteration: int, streak: int, level: float) -> Action:
        was_test, self.is_test = self.is_test, True
        self.tests += was_test
        if event == Event.HEALTHY:
            self.is_test = False
            if was_test:
                self.failed_tests, self.test_levels = 0, []
            if self.healthy >= self.probation:
                self.phase, self.recent = WATCHING, []
            return Action.NONE
        if event == Event.RUINED and iteration - self.first_sign >= limits.HOLD:
            return Action.END
        if event == Event.ABOVE_THRESHOLD and not was_test and streak >= limits.PROBATION:
            self.is_test = False  # in a long probation one such iteration is no sign
            return Action.NONE
        self.discarded += 1
        if event not in (Event.ABOVE_THRESHOLD, Event.TRIGGERED):
            return Action.DISCARD
        if not was_test:
            self.retries += 1
            return Action.DISCARD
        self.failed_tests += 1
        self.all_failed += 1
        self.test_levels.append(level)
        is_noise = self.all_failed >= limits.NOISY and limits.NOISY * self.all_failed >= self.tests
        if self.failed_tests < (limits.HOLD if self.trials else len(limits.TESTS)) and not is_noise:
            return Action.DISCARD
        self.phase, self.since, self.passed, self.trials = ADAPTING, iteration, 0, self.trials + 1
        self.probe_at = iteration + limits.TRIAL
        return Action.ADAPT

    def _adapt(self, event: Event, iteration: int, level: float, is_usual: bool) -> Action:
        self.recent = [*self.recent[1 - limits.TRIAL // 2 :], level]
        self.passed = self.passed + 1 if is_usual else 0
        is_over = iteration - self.since == limits.TRIAL
        is_worse = is_over and _mean(self.recent) > limits.WORSE * _mean(self.test_levels)
        if self.trials == 1 and (event not in (Event.HEALTHY, Event.ABOVE_THRESHOLD, Event.NONFINITE) or is_worse):
            self.phase, self.is_test, self.failed_tests = RECOVERING, True, 0
            self.discarded += 1
            return Action.DISCARD
        if event == Event.RUINED:
            return Action.END
        age, is_first = iteration - self.first_sign, len(self.rollbacks) == 1
        if age >= limits.SETTLED or (self.passed >= limits.PROBATION and not is_first):
            self.phase, self.recent, self.calm = WATCHING, [], 0
        elif self.passed >= limits.PROBATION and age >= limits.RETURNS:
            # The changed data are learnt, or the earlier ones have returned.
            self.phase, self.passed, self.settles = PROBING, 0, True
            self.discarded += 1
            return Action.PROBE
        elif iteration >= self.probe_at and not self.passed and iteration - self.since > limits.TRIAL:
            self.phase = PROBING
            self.discarded += 1
            return Action.PROBE
        return Action.ACCEPT if is_over else Action.NONE

    def _probe(self, is_passed: bool, iteration: int) -> Action:
        self.discarded += 1
        self.passed = self.passed + 1 if is_passed else 0
        if not is_passed and self.settles:
            self.phase, self.recent, self.calm = WATCHING, [], 0
            return Action.RESUME
        if not is_passed:
            self.phase, self.probe_at = ADAPTING, iteration + max(limits.PROBE_EVERY, (iteration - self.since) // 3)
            return Action.RESUME
        if self.passed > 1:
            self.settles = False
            self.phase, self.is_test, self.failed_tests, self.healthy = RECOVERING, True, 0, 0
        return Action.DISCARD


def _mean(levels: Sequence[float]) -> float:
    return fmean(levels) if levels else math.nan
