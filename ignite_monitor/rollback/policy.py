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
    ADAPT = "adapt"  # the data have changed: train on them, from the snapshot or from the state set aside
    ACCEPT = "accept"  # training on the changed data does not diverge
    PROBE = "probe"  # set the state aside, and restore the snapshot for an iteration
    RESUME = "resume"  # restore the state set aside
    END = "end"  # restore a snapshot, and end the run


# Phases; in the first one no recovery is in progress.
WATCHING, RECOVERING, ADAPTING, PROBING = "watching", "recovering", "adapting", "probing"


class RecoveryPolicy:
    """State machine that chooses an :class:`Action` after every iteration.

    The first iteration after a restore tests the snapshot: its loss is that of the restored weights on a new batch. If
    one test is passed, training is the fault, and nothing is accepted. If all tests in a row fail, older snapshots
    included, the data have changed, and training continues with them. While the loss is unusual, the snapshot is probed
    from time to time: if it passes, the earlier data have returned, and training continues from it. In time the changed
    data are final, sooner if the loss on them is usual.
    """

    def __init__(self, patience: int, max_rollbacks: int) -> None:
        self._patience, self._max_rollbacks = patience, max_rollbacks
        self.rollbacks: list[int] = []  # of the last rollbacks
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, but count earlier rollbacks."""
        self.first_sign = 0  # iteration in which the current instability began
        self.healthy = 0  # consecutive healthy iterations
        self.nonfinite = 0  # consecutive non-finite iterations
        self.recent: list[float] = []  # levels before the rollback, later those on changed data
        self.phase = WATCHING
        self._start_recovery()

    def _start_recovery(self) -> None:
        self.is_test = True  # True in the first iteration after a restore
        self.failed: list[float] = []  # levels of the failed tests in a row
        self.tests = self.all_failed = self.retries = self.usual = 0
        self.since = self.probe_at = 0  # iterations in which training on changed data began, and of the next probe
        self.may_continue = False  # True if the state before the rollback may be better than the snapshot

    @property
    def candidate(self) -> int:
        """Number of the snapshot to restore: 0 for the newest healthy one, 1 for the one before, 2 for the oldest."""
        count = len(limits.TESTS)
        return 0 if self.since else limits.TESTS[(len(self.failed) or self.retries // count) % count]

    @property
    def keeps_current(self) -> bool:
        """True if the state set aside does at least as well on the changed data as the snapshot."""
        mean = fmean(self.failed)
        return self.may_continue and fmean(self.recent) <= mean + limits.NOISE * abs(mean)

    def next(self, signals: Signals, iteration: int) -> Action:
        """Choose the action for an iteration."""
        self.healthy = self.healthy + 1 if signals.is_healthy else 0
        self.nonfinite = self.nonfinite + 1 if signals.is_nonfinite else 0
        self.rollbacks = [at for at in self.rollbacks if 0 <= iteration - at < limits.WINDOW]
        if self.phase == RECOVERING:
            return self._recover(signals, iteration)
        if self.phase == PROBING:
            return self._probe(signals, iteration)
        is_ruined = bool(signals.ruin) or self.nonfinite >= self._patience
        is_unstable = is_ruined or bool(signals.reasons) or 2 * self.nonfinite >= self._patience
        if self.phase == ADAPTING:
            return self._adapt(signals, iteration, is_unstable)
        self.recent = [*self.recent[1 - len(limits.TESTS) :], signals.level]
        if not is_unstable:
            return Action.NONE
        self.first_sign = iteration + 1 - signals.age
        is_exhausted = len(self.rollbacks) >= self._max_rollbacks
        if is_exhausted and (self.nonfinite or not signals.reasons):
            return Action.END if is_ruined else Action.NONE
        self.phase = RECOVERING
        self._start_recovery()
        if is_exhausted:
            return Action.DISCARD
        self.may_continue = not (self.nonfinite or signals.is_requested)
        self.rollbacks.append(iteration)
        return Action.ROLL_BACK

    def _recover(self, signals: Signals, iteration: int) -> Action:
        was_test, self.is_test = self.is_test, not signals.is_healthy
        if self.nonfinite:
            is_final = self.nonfinite >= self._patience and iteration - self.first_sign >= limits.LASTING
            return Action.END if is_final else Action.DISCARD
        self.tests += was_test
        if signals.is_healthy:
            self.failed = [] if was_test else self.failed
            if self.healthy >= limits.PROBATION:
                self.phase, self.recent = WATCHING, []
            return Action.NONE
        if not was_test:
            self.retries += 1
            return Action.DISCARD
        self.all_failed += 1
        self.failed.append(signals.level)
        is_noise = self.all_failed >= limits.NOISY and limits.NOISY * self.all_failed >= self.tests
        if len(self.failed) < len(limits.TESTS) and not is_noise:
            return Action.DISCARD
        self.phase, self.since = ADAPTING, iteration
        return Action.ADAPT

    def _adapt(self, signals: Signals, iteration: int, is_unstable: bool) -> Action:
        age, lasts = iteration - self.since, iteration - self.first_sign
        if math.isfinite(signals.level):
            self.recent = [*self.recent[1 - limits.PROBATION :], signals.level]
        self.usual = self.usual + 1 if signals.is_usual else 0  # in a row
        if is_unstable:
            self.phase, self.is_test, self.failed = RECOVERING, True, []
            return Action.DISCARD
        if age <= limits.TRIAL:
            return Action.ACCEPT if age == limits.TRIAL else Action.NONE
        if lasts >= limits.LASTING or (lasts >= limits.LEARNT and self.usual >= limits.PROBATION):
            self.phase, self.recent = WATCHING, []
        elif iteration >= self.probe_at and not self.usual:
            self.phase, self.healthy = PROBING, 0
            return Action.PROBE
        return Action.NONE

    def _probe(self, signals: Signals, iteration: int) -> Action:
        if not signals.is_healthy:
            self.phase, self.probe_at = ADAPTING, iteration + max(limits.PROBATION, (iteration - self.since) // 3)
            return Action.RESUME
        if self.healthy >= len(limits.TESTS):
            self.phase, self.is_test, self.failed, self.healthy = RECOVERING, True, [], 0
        return Action.DISCARD
