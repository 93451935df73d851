"""Snapshots in memory, and the choice of the one to restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ignite_monitor.rollback.parts import clone

RECENT = 3  # newest snapshots, which are always kept
_SPACING = 5  # distance of older ones, in units of ``every``
_PROVED = 100  # iterations without another instability after which a restored snapshot has proved healthy
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
        self.restored: Snapshot | None = None  # the one restored last
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

        It begins with an older one the longer the instability took to be detected. If that does not help, the newest
        from before the first sign follows, or an older one if the last recovery was less than 100 iterations ago.
        """
        if not discarded:
            newest = self.before(first_sign)
            if self.restored in self.all and first_sign - self.restored_at < _PROVED:
                del self.all[max(self.all.index(self.restored), 1) :]
            else:
                del self.all[self.all.index(newest) + 1 :]
            self.all[-1].thresholds = newest.thresholds  # those of an older one may not be warmed up
            self.restored = self.before(first_sign - 2 * (iteration + 1 - first_sign))
        elif discarded >= _PROBE:
            older = 0 if discarded % _PROBE else discarded // _PROBE
            self.restored = self.all[max(len(self.all) - 1 - older, 0)]
        self.restored_at = iteration
        return self.restored

    def drop_newer(self) -> None:
        """Drop the snapshots newer than the one that the recovery ended with."""
        del self.all[self.all.index(self.restored) + 1 :]

    def state_dict(self) -> dict[str, Any]:
        """The snapshots that a recovery may need, at most four."""
        saved = self.all[-RECENT - 1 :]
        return {
            "taken": self.taken,
            "restored_at": self.restored_at,
            "restored": saved.index(self.restored) if self.restored in saved else -1,
            "all": [vars(snapshot) | {"state": clone(snapshot.state)} for snapshot in saved],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.taken, self.restored_at = state_dict["taken"], state_dict["restored_at"]
        self.all = [Snapshot(**{**saved, "state": clone(saved["state"], self.on_host)}) for saved in state_dict["all"]]
        self.restored = self.all[state_dict["restored"]] if state_dict["restored"] >= 0 else None
