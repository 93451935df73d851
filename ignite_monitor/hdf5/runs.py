"""Which run a row belongs to, and which rows of earlier runs it takes the place of.

A run that is resumed from iteration n repeats what an earlier one did after n. The earlier one is known by its names:
both write some of the same. Names that are written from within a run (an evaluator's) are told from those of an engine
that runs alone, so that a later evaluation takes nothing away from the training.
"""

from __future__ import annotations

import time
import weakref
from typing import Any, NamedTuple

import numpy as np
from ignite.engine import Engine
from numpy.typing import NDArray

SECONDS = 10.0
REMEMBERED = 1024  # lists of names that have been compared


class Position(NamedTuple):
    """Where in which run a row is written: see :mod:`ignite_monitor.hdf5.layout`. The run began after ``start``."""

    run: int
    start: int
    iteration: int
    nested: bool


class Clock:
    """Follows the engines that a logger is attached to.

    A run is that of the engine that started first; what other engines do while it is running belongs to it.
    """

    def __init__(self, next_run: int, flush_every: int) -> None:
        self._next_run, self._flush_every = next_run, flush_every
        self._engine: weakref.ref[Engine] | None = None
        self._run = self._start = self._last = 0
        self.is_running = False
        self.written()

    def start(self, engine: Engine) -> int | None:
        """An engine starts; the iteration after which a run begins with it."""
        if self.is_running and self._running_engine() not in {None, engine}:
            return None
        self.is_running = True
        return self._begin(engine, engine.state.iteration)

    def complete(self, engine: Engine) -> None:
        """An engine has come to its end."""
        if self._running_engine() is engine:
            self.is_running = False

    def position(self, engine: Engine) -> Position:
        """Where a value that comes from an engine now belongs."""
        running = self._running_engine()
        if running is None or (running is not engine and not self.is_running):
            self._begin(engine, max(0, engine.state.iteration - 1))  # nobody saw it start
            self.is_running, running = True, engine
        return Position(self._run, self._start, running.state.iteration, running is not engine)

    def tick(self, engine: Engine) -> int | None:
        """An iteration of any of the engines starts; the iteration after which a run begins with it."""
        self._iterations += 1
        if self._running_engine() is not engine:
            return None
        iteration, last = engine.state.iteration, self._last
        self._last = iteration
        # Where it went back to a checkpoint in the middle of its run.
        return self._begin(engine, iteration - 1) if iteration <= last else None

    def is_time(self) -> bool:
        """Whether what waits should be written."""
        late = time.monotonic() - self._written > SECONDS
        return late or self._iterations >= self._flush_every or not self.is_running

    def written(self) -> None:
        """What waits has been written."""
        self._iterations, self._written = 0, time.monotonic()

    def _running_engine(self) -> Engine | None:
        return None if self._engine is None else self._engine()

    def _begin(self, engine: Engine, start: int) -> int:
        self._engine, self._start, self._last = weakref.ref(engine), start, start
        self._run, self._next_run = self._next_run, self._next_run + 1
        return start


class TakenBack(NamedTuple):
    """Rows of a run after an iteration; or, where a step is given, of this step and iteration, with these names."""

    run: int
    iteration: int
    step: int | None = None
    ids: NDArray[np.int32] | None = None

    def among(self, rows: NDArray[Any], ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of all rows it is."""
        of_run = (rows["run"] == self.run) & (rows["count"] > 0)
        if self.ids is None:
            return of_run & (rows["iteration"] > self.iteration)  # type: ignore[no-any-return]
        found = of_run & (rows["iteration"] == self.iteration) & (rows["step"] == self.step)
        for index in np.flatnonzero(found):
            first, count = rows["ids"][index], rows["count"][index]
            found[index] = np.isin(ids[first : first + count], self.ids).all()
        return found  # type: ignore[no-any-return]


class EarlierRun(NamedTuple):
    """What one run wrote, its own values or those of engines within it."""

    run: int
    nested: bool
    ids: NDArray[np.int32]
    last_step: int
    first_iteration: int
    last_iteration: int
    distance: int | None  # the largest between iterations that it wrote


class Gap(NamedTuple):
    """Iterations that are in neither run: the earlier ones end at one, and the new one begins after another."""

    end: int
    start: int


class EarlierRuns:
    """The runs in a file that is continued."""

    def __init__(self, rows: NDArray[Any], ids: NDArray[np.int32], first_own: int) -> None:
        self.gap: Gap | None = None  # what is in neither these runs nor the one that continues them, if that is known
        self._first_own = first_own  # the first run that is the logger's own
        self._runs = []
        self._compared: set[tuple[int, bool, int]] = set()
        self._continued: set[tuple[int, int]] = set()
        kinds, which = np.unique(rows[["run", "nested"]], return_inverse=True)
        for number, (run, nested) in enumerate(kinds.tolist()):
            members = rows[which == number]
            lists = np.unique(members[["ids", "count"]]).tolist()
            used = np.unique(np.concatenate([ids[first : first + count] for first, count in lists]))
            iterations = np.unique(members["iteration"])
            distance = int(np.diff(iterations).max()) if len(iterations) > 1 else None
            ends = int(members["step"].max()), int(iterations[0]), int(iterations[-1])
            self._runs.append(EarlierRun(run, bool(nested), used, *ends, distance))

    def taken_back(self, position: Position, step: int, ids: NDArray[np.int32], list_number: int) -> list[TakenBack]:
        """What a new row takes the place of.

        Args:
            list_number: the same for every row with these names.
        """
        key = position.run, position.nested, list_number
        found = []
        if key not in self._compared:
            if len(self._compared) >= REMEMBERED:
                self._compared.clear()
            self._compared.add(key)
            found = [TakenBack(run, position.start) for run in self._newly_continued(position, step, ids)]
        if position.iteration == position.start:
            # Written between two iterations (at EPOCH_STARTED), and perhaps before the end of the earlier run too.
            runs = [run for new, run in self._continued if new == position.run]
            found += [TakenBack(run, position.start, step, ids) for run in runs]
        return found

    def _newly_continued(self, position: Position, step: int, ids: NDArray[np.int32]) -> list[int]:
        alike = [each for each in self._runs if each.nested == position.nested and np.isin(ids, each.ids).any()]
        if position.start > 0:
            alike = [each for each in alike if not self._is_over(each)]
        else:  # from the very beginning: again, or something else, whose steps go on?
            alike = [each for each in alike if each.run < self._first_own and each.last_step >= step]
        runs = [each.run for each in alike if (position.run, each.run) not in self._continued]
        self._continued |= {(position.run, run) for run in runs}
        own = [each for each in self._runs if (position.run, each.run) in self._continued and not each.nested]
        if own:
            last = max(own, key=lambda each: each.last_iteration)
            is_gap = last.distance is not None and position.start - last.last_iteration >= last.distance
            self.gap = Gap(last.last_iteration, position.start) if is_gap else None
        return runs

    def _is_over(self, run: EarlierRun) -> bool:
        """Whether a later run with some of its names began before its end, and left it as it was: started anew."""
        return any(
            later.run > run.run
            and later.nested == run.nested
            and later.first_iteration < run.last_iteration
            and bool(np.isin(later.ids, run.ids).any())
            for later in self._runs
        )
