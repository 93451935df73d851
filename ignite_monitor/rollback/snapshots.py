"""Snapshots in memory, and the choice of the one to restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ignite_monitor.rollback.parts import clone

RECENT = 3  # newest snapshots, which are always kept
_SPACING = 5  # distance of older ones, in units of ``every``
_MARGIN = 2  # times the delay of the detection: a snapshot is so much older than the first sign
_PROVED = 20  # iterations, or ten times the delay, after which a restored snapshot has proved healthy
_PROBE = 7  # of so many discarded iterations one is tried from an older snapshot, in case that the newest is damaged


@dataclass(eq=False)
class Snapshot:
    """State after an iteration."""

    iteration: int
    state: Any  # nested copies
    thresholds: Any  # nested copies, of monitors and triggers
    lr_scale: float  # product of the factors that learning rates had been multiplied by


class Snapshots:
    """Snapshots in order of their iterations: three recent ones, and at most ``keep`` older ones."""

    def __init__(self, every: int, keep: int, on_host: bool) -> None:
        self.every, self.keep, self.on_host = every, keep, on_host
        self.clear()

    def clear(self) -> None:
        """Drop all snapshots."""
        self.all: list[Snapshot] = []
        self.taken = 0  # iteration of the newest one
        self.restored = -1  # iteration of the one restored last
        self.restored_at = 0  # iteration in which it was restored

    def take(self, iteration: int, state: Any, thresholds: Any, lr_scale: float) -> None:
        """Copy a state after an iteration."""
        self.taken = iteration
        self.all.append(Snapshot(iteration, clone(state, self.on_host), clone(thresholds), lr_scale))
        older = self.all[:-RECENT]
        if len(older) > 1 and older[-1].iteration - older[-2].iteration < _SPACING * self.every:
            self.all.remove(older[-1])
        elif len(older) > self.keep:
            self.all.remove(older[0])

    def before(self, first_sign: int) -> Snapshot:
        """Return the newest snapshot after which an iteration before the first sign was healthy, else the oldest."""
        usable = [snapshot for snapshot in self.all if snapshot.iteration + 1 < first_sign]
        return usable[-1] if usable else self.all[0]

    def choose(self, iteration: int, first_sign: int, discarded: int) -> Snapshot:
        """Choose the snapshot to restore, when a recovery begins and after each of its discarded iterations.

        It begins with one that is older than the first sign, the more so the longer the detection took, and older than
        the one restored last if that has not proved healthy. After some discarded iterations the newest one follows.
        """
        if not discarded:
            newest, delay = self.before(first_sign), iteration - first_sign
            if self.restored >= 0 and first_sign - self.restored_at < max(_PROVED, 10 * delay):
                self.all = [snapshot for snapshot in self.all if snapshot.iteration < self.restored] or self.all[:1]
            else:
                self.drop_newer(newest.iteration)
            self.all[-1].thresholds = newest.thresholds  # those of an older one may not be warmed up
            snapshot = self.before(first_sign - _MARGIN * delay)
        elif discarded < _PROBE:
            snapshot = self.before(self.restored + 2)  # the same
        else:
            older = 0 if discarded % _PROBE else discarded // _PROBE
            snapshot = self.all[max(len(self.all) - 1 - older, 0)]
        self.restored, self.restored_at = snapshot.iteration, iteration
        return snapshot

    def drop_newer(self, iteration: int) -> None:
        """Drop the snapshots taken after an iteration."""
        self.all = [snapshot for snapshot in self.all if snapshot.iteration <= iteration]

    def state_dict(self) -> dict[str, Any]:
        """The snapshots that a recovery may need, at most four."""
        saved = [vars(snapshot) | {"state": clone(snapshot.state)} for snapshot in self.all[-RECENT - 1 :]]
        return {"all": saved, "taken": self.taken, "restored": self.restored, "restored_at": self.restored_at}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        vars(self).update(state_dict)
        self.all = [Snapshot(**{**saved, "state": clone(saved["state"], self.on_host)}) for saved in state_dict["all"]]
