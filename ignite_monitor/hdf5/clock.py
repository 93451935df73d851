"""Which run a value belongs to, and when it is time to write."""

from __future__ import annotations

import time
import weakref

from ignite.engine import Engine

from ignite_monitor.hdf5.runs import Place

SECONDS = 10.0


class Clock:
    """Follows the engines that a logger is attached to.

    A run is that of the engine that started first; what other engines do while it is running belongs to it.

    Args:
        next_run: the number of the first run.
        flush_every: how many iterations may pass before it is time to write.
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

    def place(self, engine: Engine) -> Place:
        """Where a value that comes from an engine now belongs."""
        running = self._running_engine()
        if running is None or (running is not engine and not self.is_running):
            self._begin(engine, max(0, engine.state.iteration - 1))  # nobody saw it start
            self.is_running, running = True, engine
        return Place(self._run, self._start, running.state.iteration, running is not engine)

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
