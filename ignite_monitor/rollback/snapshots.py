"""Snapshots in memory, confirmed or not, and the choice of the one to restore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ignite_monitor.rollback.parts import clone

CONFIRMED_AFTER = 20  # healthy iterations
_UNCONFIRMED = 3  # number of unconfirmed snapshots at most
_SPACING = 5  # distance of older confirmed snapshots, in units of ``every``
_PROBE = 7  # of so many discarded iterations one is tried from a confirmed snapshot


@dataclass(eq=False)
class Snapshot:
    """State after an iteration."""

    iteration: int
    state: Any  # nested copies
    lr_scale: float  # product of the factors that learning rates had been multiplied by
    quiet: int = 0  # healthy iterations since it was taken or restored
    confirmed: bool = False


class Snapshots:
    """Snapshots in order of their iterations, of which at most ``keep`` are confirmed."""

    def __init__(self, every: int, keep: int, on_host: bool) -> None:
        self.every, self.keep, self.on_host = every, keep, on_host
        self.clear()

    def clear(self) -> None:
        """Drop all snapshots."""
        self.all: list[Snapshot] = []
        self.taken = 0  # iteration of the newest one
        self.restored: Snapshot | None = None  # the one restored last, until it has been confirmed again
        self._unhealthy = 0  # consecutive unhealthy iterations

    def take(self, iteration: int, state: Any, lr_scale: float) -> None:
        """Copy a state, in place of the second of three unconfirmed ones: the first is confirmed next."""
        self.taken = iteration
        unconfirmed = [snapshot for snapshot in self.all if not snapshot.confirmed]
        if len(unconfirmed) == _UNCONFIRMED:
            self.all.remove(unconfirmed[1])
        self.all.append(Snapshot(iteration, clone(state, self.on_host), lr_scale))

    def note(self, healthy: bool) -> None:
        """Count an iteration, confirm snapshots, and drop those that are not needed any more.

        A single unhealthy iteration between healthy ones is noise; two in a row restart the counts.
        """
        self._unhealthy = 0 if healthy else self._unhealthy + 1
        for snapshot in self.all:
            snapshot.quiet = snapshot.quiet + healthy if self._unhealthy < 2 else 0
            snapshot.confirmed |= snapshot.quiet >= CONFIRMED_AFTER
        if self.restored is not None and self.restored.quiet >= CONFIRMED_AFTER:
            self.restored = None
        confirmed = [snapshot for snapshot in self.all if snapshot.confirmed]
        if len(confirmed) > 2 and confirmed[-2].iteration - confirmed[-3].iteration < _SPACING * self.every:
            self.all.remove(confirmed.pop(-2))
        if len(confirmed) > self.keep:
            self.all.remove(confirmed[0])

    def choose(self, is_decisive: bool, discarded: int) -> Snapshot:
        """Choose the snapshot to restore, when a recovery begins and after each of its discarded iterations.

        It begins with the newest after a decisive trigger, else with the newest confirmed one, and with an older one if
        that of the last recovery has not been confirmed again. Then the newest is restored, every seventh time the
        newest confirmed one, in case that the newest is damaged.
        """
        if not discarded and self.restored in self.all:
            self.all = self.all[: self.all.index(self.restored)] or [self.restored]
        if discarded % _PROBE if discarded else is_decisive:
            self.restored = self.all[-1]
        else:
            self.restored = ([snapshot for snapshot in self.all if snapshot.confirmed] or self.all[:1])[-1]
        self.restored.quiet = 0
        return self.restored

    def end_recovery(self) -> None:
        """Drop the snapshots newer than the one that the recovery ended with."""
        if self.restored in self.all:
            self.all = self.all[: self.all.index(self.restored) + 1]

    def state_dict(self) -> dict[str, Any]:
        """The snapshots that a recovery may need, at most four."""
        saved = self.all[-_UNCONFIRMED - 1 :]
        return {
            "taken": self.taken,
            "restored": saved.index(self.restored) if self.restored in saved else -1,
            "unhealthy": self._unhealthy,
            "all": [vars(snapshot) | {"state": clone(snapshot.state)} for snapshot in saved],
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.taken, self._unhealthy = state_dict["taken"], state_dict["unhealthy"]
        self.all = [Snapshot(**{**saved, "state": clone(saved["state"], self.on_host)}) for saved in state_dict["all"]]
        self.restored = self.all[state_dict["restored"]] if state_dict["restored"] >= 0 else None
