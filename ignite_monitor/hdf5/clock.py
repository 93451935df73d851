"""The run and iteration that a row belongs to."""

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
        """Count an iteration; an iteration that was counted before begins a run."""
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
        """Return the position of a value that comes from an engine now."""
        outermost = _outermost() or engine
        run, iteration = self._runs.get(outermost), outermost.state.iteration
        if run is None or iteration < run.last:  # an engine that is not followed
            run = self._begin(outermost, max(0, iteration - 1))
        run.last = iteration
        self._latest = run
        return Position(run.number, run.start, iteration, outermost is not engine)

    def is_time(self) -> bool:
        """Return True if rows should be written: after enough iterations or seconds, and after the end of a run."""
        completed = self._latest is not None and self._latest.completed
        return completed or self._iterations >= self._flush_every or time.monotonic() - self._written > SECONDS

    def written(self) -> None:
        """Count from now on."""
        self._iterations, self._written = 0, time.monotonic()

    def _begin(self, engine: Engine, start: int) -> _Run:
        run = self._runs[engine] = _Run(self._next_run, start, start)
        self._next_run += 1
        return run


def _outermost() -> Engine | None:
    """The outermost engine whose ``run()`` is on the stack, attached to the logger or not."""
    outermost, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is Engine.run.__code__:
            outermost = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return outermost
