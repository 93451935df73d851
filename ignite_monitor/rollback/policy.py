"""Recovery policy: when to roll back, discard an iteration, continue with changed data, or end the run."""

from __future__ import annotations

import math
from enum import Enum
from statistics import fmean

from ignite_monitor.rollback import limits
from ignite_monitor.rollback.triggers import Signals


class Action(Enum):
    """Reaction to an iteration."""

    NONE = "none"
    ROLL_BACK = "roll back"  # set the state aside, and restore a snapshot
    DISCARD = "discard"  # restore a snapshot again: the iteration has no effect
    ADAPT = "adapt"  # train on changed data, from the snapshot or from the state set aside
    PROBE = "probe"  # set the state aside, and test the snapshot again
    RESUME = "resume"  # restore the state set aside
    END = "end"  # restore a snapshot, and end the run


WATCHING, RECOVERING, ADAPTING = "watching", "recovering", "adapting"


class RecoveryPolicy:
    """State machine that chooses an :class:`Action` after every iteration.

    The first iteration after a restore tests the snapshot: its loss is that of the restored weights on a new batch. A
    failed test adds 1 to a count, a passed one takes 1/4 off. At four the new batches are held for other data, and
    training continues with them. While the loss is unusual then, the snapshot is tested again from time to time: if it
    passes four iterations, the earlier data have returned. In time the changed data are final, sooner if the loss on
    them is usual.
    """

    def __init__(self, patience: int, max_rollbacks: int) -> None:
        self._patience, self._max_rollbacks = patience, max_rollbacks
        self.rollbacks: list[int] = []  # iterations of the last rollbacks
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, but count earlier rollbacks."""
        self.phase = WATCHING
        self.first_sign = 0  # iteration in which the current instability began
        self.healthy = self.nonfinite = self.usual = 0  # consecutive iterations
        self.recent: list[float] = []  # levels before the rollback, later those on changed data
        self._start_recovery()

    def _start_recovery(self) -> None:
        self.is_test = True  # True in the first iteration after a restore
        self.failures = 0.0  # count of failed tests
        self.failed: list[float] = []  # levels of the last ones
        self.retries = 0  # trainings from a snapshot that failed
        self.since = self.probe_at = 0  # iterations in which training on changed data began, and of the next probe

    @property
    def candidate(self) -> int:
        """Number of the snapshot to restore, 0 for the newest one: two tests and four trainings from each may fail."""
        return int(self.failures) // 2 + self.retries // limits.TESTS

    @property
    def keeps_current(self) -> bool:
        """True if the state set aside does at least as well on the changed data as the snapshot."""
        mean = fmean(self.failed)
        return fmean(self.recent) <= mean + limits.NOISE * abs(mean)

    def next(self, signals: Signals, iteration: int) -> Action:
        """Choose the action for an iteration."""
        self.healthy = self.healthy + 1 if signals.is_healthy else 0
        self.nonfinite = self.nonfinite + 1 if signals.is_nonfinite else 0
        self.usual = self.usual + 1 if signals.is_usual else 0
        self.rollbacks = [at for at in self.rollbacks if 0 <= iteration - at < limits.WINDOW]
        if self.phase == RECOVERING:
            return self._recover(signals, iteration)
        is_ruined = bool(signals.ruin) or self.nonfinite >= self._patience
        is_unstable = is_ruined or bool(signals.reasons) or 2 * self.nonfinite >= self._patience
        if self.phase == ADAPTING:
            return self._adapt(signals, iteration, is_unstable)
        self.recent = [*self.recent[1 - limits.TESTS :], math.nan if self.nonfinite else signals.level]
        if not is_unstable:
            return Action.NONE
        is_exhausted = len(self.rollbacks) >= self._max_rollbacks
        self.first_sign = iteration + 1 - signals.age
        if is_exhausted and (self.nonfinite or not signals.reasons):
            return Action.END if is_ruined else Action.NONE
        self.phase = RECOVERING
        self._start_recovery()
        if is_exhausted:
            return Action.DISCARD
        self.rollbacks.append(iteration)
        return Action.ROLL_BACK

    def _recover(self, signals: Signals, iteration: int) -> Action:
        was_test, self.is_test = self.is_test, not signals.is_healthy
        is_probe = self.since > 0
        if signals.is_healthy:
            self.failures = max(0.0, self.failures - 0.25 * was_test)
            if self.healthy >= limits.TESTS:
                self.since = 0
            if self.healthy >= limits.PROBATION:
                self.phase, self.recent = WATCHING, []
            return Action.NONE
        if is_probe:
            self.phase, self.probe_at = ADAPTING, iteration + max(limits.PROBATION, (iteration - self.since) // 3)
            return Action.RESUME
        if self.nonfinite:
            is_final = self.nonfinite >= self._patience and iteration - self.first_sign >= limits.LASTING
            return Action.END if is_final else Action.DISCARD
        if not was_test or math.isnan(signals.level):  # a request tests nothing
            self.retries += 1
            return Action.DISCARD
        self.failures += 1.0
        self.failed = [*self.failed[1 - limits.TESTS :], signals.level]
        if self.failures < limits.TESTS:
            return Action.DISCARD
        self.failures, self.retries = 0.0, 0  # training continues from the newest snapshot
        self.phase, self.since, self.probe_at = ADAPTING, iteration, iteration + limits.TRIAL
        return Action.ADAPT

    def _adapt(self, signals: Signals, iteration: int, is_unstable: bool) -> Action:
        lasts = iteration - self.first_sign
        if math.isfinite(signals.level):
            self.recent = [*self.recent[1 - limits.PROBATION :], signals.level]
        if is_unstable:
            self.phase = RECOVERING
            self._start_recovery()
            return Action.DISCARD
        if lasts >= limits.LASTING or (lasts >= limits.LEARNT and self.usual >= limits.PROBATION):
            self.phase, self.recent = WATCHING, []
        elif iteration >= self.probe_at and not self.usual:
            self.phase, self.healthy, self.is_test, self.failures = RECOVERING, 0, True, 0.0
            return Action.PROBE
        return Action.NONE
