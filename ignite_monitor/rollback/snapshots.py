"""In-memory snapshots: which are confirmed, and which one to restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ignite_monitor.rollback.copying import clone

CONFIRMED_AFTER = 20
"""Number of consecutive healthy iterations after which a snapshot is confirmed."""
_UNCONFIRMED = 3  # number of unconfirmed snapshots at most
_SPACING = 5  # distance of older confirmed snapshots, in units of ``every``
_TRIES = 3  # number of discarded iterations after which an unconfirmed snapshot gives way to an older one


@dataclass(eq=False)
class Snapshot:
    """State after an iteration."""

    iteration: int
    state: Any  # nested copies
    thresholds: Any  # of the monitors and of the handler, at the same time
    lr_scale: float  # product of the factors that learning rates had been multiplied by
    quiet: int = 0  # consecutive healthy iterations since it was taken or restored
    confirmed: bool = False


@dataclass
class Snapshots:
    """Snapshots in order of their iterations, of which at most ``keep`` are confirmed."""

    every: int
    keep: int
    on_host: bool

    def __post_init__(self) -> None:
        self.taken = 0  # the iteration of the newest one
        self.all: list[Snapshot] = []
        self.restored: Snapshot | None = None  # the one restored last, until it has been confirmed again
        self._failed = 0  # discarded iterations since it was chosen

    def overdue(self, iteration: int) -> int:
        """Number of iterations since a snapshot has been due; negative before."""
        return iteration - self.taken - self.every if self.all else 0

    @property
    def newest(self) -> Snapshot:
        """The newest snapshot; there has to be one."""
        return self.all[-1]

    def take(self, iteration: int, state: Any, thresholds: Any, lr_scale: float) -> None:
        """Copy a state."""
        self.taken = iteration
        unconfirmed = [snapshot for snapshot in self.all if not snapshot.confirmed]
        if len(unconfirmed) == _UNCONFIRMED:
            self.all.remove(unconfirmed[0])
        self.all.append(Snapshot(iteration, clone(state, self.on_host), clone(thresholds), lr_scale))

    def note(self, healthy: bool) -> None:
        """Count an iteration, confirm snapshots, and drop those that are not needed any more."""
        for snapshot in self.all:
            snapshot.quiet = snapshot.quiet + 1 if healthy else 0
            snapshot.confirmed |= snapshot.quiet >= CONFIRMED_AFTER
        if self.restored is not None and self.restored.quiet >= CONFIRMED_AFTER:
            self.restored = None
        confirmed = [snapshot for snapshot in self.all if snapshot.confirmed]
        if len(confirmed) > 2 and confirmed[-2].iteration - confirmed[-3].iteration < _SPACING * self.every:
            self.all.remove(confirmed.pop(-2))
        if len(confirmed) > self.keep:
            self.all.remove(confirmed[0])

    def choose(self) -> Snapshot:
        """Choose the snapshot to restore when a recovery begins: the newest.

        If the snapshot that the last recovery restored has not been confirmed again since, it is one older than that.
        """
        if self.restored in self.all:
            self.all = self.all[: self.all.index(self.restored)] or [self.restored]
        self.restored, self._failed = self.newest, 0
        return self.restored

    def choose_again(self) -> Snapshot:
        """Choose the snapshot to restore when an iteration of a recovery is discarded.

        After three discarded iterations an unconfirmed snapshot gives way to the next older one.
        """
        restored = self.restored or self.newest
        self._failed += 1
        if self._failed >= _TRIES and not restored.confirmed and restored is not self.all[0]:
            restored, self._failed = self.all[self.all.index(restored) - 1], 0
        self.restored = restored
        return restored

    def drop_newer(self) -> None:
        """Drop the snapshots that a recovery has tried without success."""
        if self.restored is not None:
            self.all = self.all[: self.all.index(self.restored) + 1]

    def clear(self) -> None:
        """Drop all snapshots."""
        self.all, self.restored, self._failed = [], None, 0

    def state_dict(self) -> dict[str, Any]:
        """The snapshots that a recovery may need: the newest confirmed one and all newer ones."""
        first = max((place for place, snapshot in enumerate(self.all) if snapshot.confirmed), default=0)
        needed = self.all if self.restored is not None else self.all[first:]
        return {
            "taken": self.taken,
            "restored": -1 if self.restored is None else needed.index(self.restored),
            "failed": self._failed,
            "all": [vars(snapshot) | {"state": clone(snapshot.state)} for snapshot in needed],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.taken, self._failed = int(state_dict["taken"]), int(state_dict["failed"])
        self.all = [Snapshot(**{**saved, "state": clone(saved["state"], self.on_host)}) for saved in state_dict["all"]]
        self.restored = self.all[state_dict["restored"]] if state_dict["restored"] >= 0 else None
