"""Which run of which engine a row belongs to."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ignite.engine import Engine

SECONDS = 10.0


class Position(NamedTuple):
    """Run and iteration of a row: see :mod:`ignite_monitor.hdf5.layout`."""

    run: int
    start: int
    iteration: int
    nested: bool


@dataclass
class _Run:
    number: int
    start: int
    last: int  # iteration
    completed: bool = False


class Clock:
    """Follows the engines that a logger is attached to.

    An engine whose ``run()`` is called within that of another one belongs to the other's run. The call stack decides
    it: an engine that has raised is no longer on it, whatever it raised and however long the engine lives.
    """

    def __init__(self, next_run: int, flush_every: int) -> None:
        self._next_run, self._flush_every = next_run, flush_every
        self._runs: WeakKeyDictionary[Engine, _Run] = WeakKeyDictionary()
        self._latest: _Run | None = None  # that had a row
        self.written()

    def start(self, engine: Engine) -> None:
        """Begin a run."""
        self._begin(engine, engine.state.iteration)

    def tick(self, engine: Engine) -> None:
        """Count an iteration; one that goes back to a checkpoint begins a run."""
        self._iterations += 1
        run, iteration = self._runs.get(engine), engine.state.iteration
        if run is None or iteration <= run.last:
            run = self._begin(engine, iteration - 1)
        run.last = iteration

    def complete(self, engine: Engine) -> None:
        """End a run."""
        if engine in self._runs:
            self._runs[engine].completed = True

    def position(self, engine: Engine) -> Position:
        """Position of a value that comes from an engine now."""
        outermost = self._outermost() or engine
        run = self._runs.get(outermost)
        if run is None:  # its start was not seen
            run = self._begin(outermost, max(0, outermost.state.iteration - 1))
        self._latest = run
        return Position(run.number, run.start, outermost.state.iteration, outermost is not engine)

    def is_time(self) -> bool:
        """Whether to write now: after enough iterations or seconds, and at once after the end of a run."""
        late = time.monotonic() - self._written > SECONDS
        completed = self._latest is not None and self._latest.completed
        return late or self._iterations >= self._flush_every or completed

    def written(self) -> None:
        """Count from now on."""
        self._iterations, self._written = 0, time.monotonic()

    def _outermost(self) -> Engine | None:
        """The outermost engine with a run whose ``run()`` is on the stack."""
        outermost, frame = None, sys._getframe(1)
        while frame is not None:
            if frame.f_code is Engine.run.__code__ and frame.f_locals["self"] in self._runs:
                outermost = frame.f_locals["self"]
            frame = frame.f_back  # type: ignore[assignment]
        return outermost

    def _begin(self, engine: Engine, start: int) -> _Run:
        run = self._runs[engine] = _Run(self._next_run, start, start)
        self._next_run += 1
        return run
