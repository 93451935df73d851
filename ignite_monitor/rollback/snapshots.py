"""Snapshots of a training in memory that is allocated once: which are good, and which to go back to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ignite_monitor.rollback.copying import clone, refill


@dataclass(eq=False)
class Snapshot:
    """A state, and how well training went after it."""

    iteration: int  # the state is that after this iteration
    state: Any  # nested copies
    factor: float  # what learning rates had been lowered to by then, of their schedule
    young: bool  # whether rules had not seen enough by then to judge anything
    quiet: int = 0  # for how many iterations nothing has been unhealthy since

    def state_dict(self) -> dict[str, Any]:
        """All of it, copied."""
        return vars(self) | {"state": clone(self.state)}


@dataclass
class Snapshots:
    """Those that have proved good, oldest first, and those that have not yet."""

    every: int  # in which distance they are taken, in iterations
    keep: int  # how many good ones are kept, and how many others at most
    quiet: int  # after how many healthy iterations in a row one is good
    on_host: bool  # whether to keep them in the host's memory, pinned where a device copies from it

    def __post_init__(self) -> None:
        self.taken = 0  # the iteration after which the last one was taken
        self.good: list[Snapshot] = []
        self.pending: list[Snapshot] = []
        self._free: list[Any] = []  # states whose memory can be used again
        self._in_doubt: Snapshot | None = None  # gone back to, and not proved good again since

    def __len__(self) -> int:
        return len(self.good) + len(self.pending)

    def overdue(self, iteration: int) -> int:
        """For how many iterations one should have been there, after this one; less than 0 as long as none is due."""
        return iteration - self.taken - self.every if len(self) else 0

    @property
    def newest(self) -> Snapshot:
        """The one taken last; there has to be one."""
        return (self.pending or self.good)[-1]

    def take(self, iteration: int, state: Any, factor: float) -> None:
        """Copy the state after an iteration."""
        self.taken = iteration
        if len(self.pending) == self.keep:
            self._drop(self.pending[:1])
        self.pending.append(Snapshot(iteration, self._copy(state), factor, young=not len(self)))

    def _copy(self, state: Any) -> Any:
        return refill(self._free.pop() if self._free else None, state, self.on_host)

    def _drop(self, unwanted: Sequence[Snapshot]) -> None:
        self._free += [each.state for each in unwanted]
        self.good = [each for each in self.good if each not in unwanted]
        self.pending = [each for each in self.pending if each not in unwanted]

    def update(self, snapshot: Snapshot, state: Mapping[str, Any]) -> None:
        """Copy parts of a state into a snapshot anew."""
        snapshot.state |= refill({key: snapshot.state[key] for key in state}, dict(state), self.on_host)

    def note(self, healthy: bool) -> list[Snapshot]:
        """An iteration has passed; the snapshots that have proved good by it."""
        for each in [*self.pending, *self.good[-1:]]:
            each.quiet = each.quiet + 1 if healthy else 0
            if each is self._in_doubt and each.quiet >= self.quiet:
                self._in_doubt = None
        proved = [each for each in self.pending if each.quiet >= self.quiet]
        self.pending = [each for each in self.pending if each not in proved]
        self.good += proved
        self._drop(self.good[: -self.keep])
        return proved

    @property
    def current(self) -> Snapshot:
        """The one that was chosen last."""
        return self.good[-1] if self.good else self.pending[0]

    def choose(self, anew: bool) -> Snapshot:
        """What to go back to: the newest good one, and where none is good the oldest.

        At another trouble (``anew``) the one that was gone back to at the last is not good any more if it has not
        proved so again since, unless there is no other.
        """
        if anew and len(self.good) > 1 and self.good[-1] is self._in_doubt:
            self._drop(self.good[-1:])
        chosen = self._in_doubt = self.current
        self._drop([each for each in self.pending if each is not chosen])  # they may be of the trouble
        chosen.quiet = 0
        return chosen

    def start_from(self, snapshot: Snapshot, thresholds: Mapping[str, Any]) -> None:
        """Forget all others; this one has to prove itself again, with other thresholds."""
        self._drop([each for each in [*self.good, *self.pending] if each is not snapshot])
        self.good, self.pending, self._in_doubt = [], [snapshot], None
        snapshot.young, snapshot.quiet = True, 0
        self.update(snapshot, thresholds)

    def clear(self) -> None:
        """Forget all of them."""
        self._drop([*self.good, *self.pending])
        self._in_doubt = None

    def release(self) -> None:
        """Let the memory go that is not in use."""
        self._free.clear()

    def state_dict(self) -> dict[str, Any]:
        """What going back may need, copied: the newest good one, all if it is in doubt, and those not yet good."""
        in_doubt = len(self) > 0 and self._in_doubt is self.current
        good = [each.state_dict() for each in (self.good if in_doubt else self.good[-1:])]
        pending = [each.state_dict() for each in self.pending]
        return {"taken": self.taken, "in_doubt": in_doubt, "good": good, "pending": pending}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        self.clear()
        self.taken = int(state_dict["taken"])
        self.good, self.pending = (
            [Snapshot(**{**saved, "state": self._copy(saved["state"])}) for saved in state_dict[name]]
            for name in ("good", "pending")
        )
        self._in_doubt = self.current if state_dict["in_doubt"] else None
