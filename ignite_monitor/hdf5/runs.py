"""Runs of engines: the run and iteration that a value or a report belongs to."""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from ignite.engine import Engine

from ignite_monitor.events.source import EventSource

SECONDS = 10.0  # after which rows are written


@dataclass
class Run:
    """A run of an engine, or what follows in it when its iteration has been set back."""

    number: int
    start: int  # iteration after which it starts
    last: int  # iteration
    last_step: int = -(2**63)  # largest step of a value
    continues: int = -1  # the run that it continues; -1 for none, or unknown yet
    after: int = -1  # that run's iteration after which it does; -1 if it replaces the whole run


class Position(NamedTuple):
    """Place of a value; ``nested`` if it is of another engine than the run."""

    run: Run
    iteration: int
    nested: bool


class RunTracker:
    """Follows the engines of a logger; an engine that runs within another belongs to that one's run."""

    def __init__(self, new_run: Callable[..., Run], flush_every: int) -> None:
        self._new_run, self._flush_every = new_run, flush_every
        self._distance = 0  # iterations between writes; it grows, so that a run can be read from the beginning on
        self._before_iterations: weakref.WeakSet[Engine] = weakref.WeakSet()  # have started, but no iteration of theirs
        # Of runs without a value or report yet; None before the first iteration, as handlers may resume at STARTED.
        self._starts: WeakKeyDictionary[Engine, int | None] = WeakKeyDictionary()
        self._runs: WeakKeyDictionary[Engine, Run] = WeakKeyDictionary()
        self._last_run: Run | None = None
        self._trainer: Callable[[], Engine | None] = lambda: (
            None
        )  # engine of the latest run, if possible one with monitors
        self._iterations, self._written = 0, time.monotonic()

    def start(self, engine: Engine) -> None:
        """Note that a run starts; its record is made with its first value or report."""
        self._starts[engine] = None
        self._before_iterations.add(engine)

    def is_first_iteration(self, engine: Engine) -> bool:
        """Note the start of a run in its first iteration, and return True then."""
        is_first = engine in self._before_iterations
        self._before_iterations.discard(engine)
        if is_first and engine in self._starts:
            self._starts[engine] = engine.state.iteration - 1
        return is_first

    def tick(self, engine: Engine) -> None:
        """Count an iteration; an iteration that was counted before begins a run."""
        self._iterations += 1
        run, iteration = self._runs.get(engine), engine.state.iteration
        if run is not None and engine not in self._starts:
            if iteration <= run.last:
                run = self._begin(engine, iteration - 1, is_rewound=True)
            run.last = iteration

    def position(self, engine: Engine, has_own_steps: bool = True) -> Position:
        """Return the position of a value of an engine; without steps of its own, it follows the latest trainer."""
        outermost = _outermost() or engine
        trainer = self._trainer()
        is_other = not has_own_steps and outermost is engine and EventSource.on(engine) is None
        if trainer is not None and is_other and (engine not in self._runs or EventSource.on(trainer) is not None):
            return Position(self._runs[trainer], self._runs[trainer].last, True)
        run, iteration = self.run_of(outermost), max(0, outermost.state.iteration)
        if iteration < run.last:  # an engine that is not followed
            run = self._begin(outermost, max(0, iteration - 1), is_rewound=True)
        run.last = iteration
        return Position(run, iteration, outermost is not engine)

    def run_of(self, engine: Engine) -> Run:
        """Return the current run of an engine."""
        if engine in self._starts:
            start = self._starts[engine]
            return self._begin(engine, engine.state.iteration if start is None else start)
        if engine not in self._runs:  # an engine that is not followed
            return self._begin(engine, max(0, engine.state.iteration - 1))
        return self._runs[engine]

    def place_of_report(self, engine: Engine | None, iteration: int) -> tuple[Run, int]:
        """Return the run and its iteration that a report of an engine's monitor belongs to."""
        outermost = None if engine in self._runs else _outermost()
        if outermost is not None and outermost is not engine:
            run = self.run_of(outermost)
            return run, run.last
        if engine is not None:
            return self.run_of(engine), iteration
        self._last_run = self._last_run or self._new_run(0)
        return self._last_run, iteration

    def has_run(self, engine: Engine) -> bool:
        """Return True if a run of the engine has a value or a report."""
        return engine in self._runs

    def is_time(self) -> bool:
        """Return True if rows should be written: after enough iterations or seconds."""
        return self._iterations >= self._distance or time.monotonic() - self._written > SECONDS

    def written(self) -> None:
        """Count from now on."""
        self._distance = min(max(1, 10 * self._distance), self._flush_every)
        self._iterations, self._written = 0, time.monotonic()

    def _begin(self, engine: Engine, start: int, is_rewound: bool = False) -> Run:
        former, continued = self._runs.get(engine), {}
        if former is not None:  # from the beginning: the iterations of both count
            continued = {"continues": former.number, "after": start if start or is_rewound else former.last}
        run = self._last_run = self._runs[engine] = self._new_run(start, **continued)
        self._starts.pop(engine, None)
        trainer = self._trainer()
        if trainer is None or EventSource.on(trainer) is None or EventSource.on(engine) is not None:
            self._trainer = weakref.ref(engine)
        return run


def _outermost() -> Engine | None:
    """The outermost engine whose ``run()`` is on the call stack, on which an engine that has raised is not."""
    outermost, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is Engine.run.__code__:
            outermost = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return outermost
