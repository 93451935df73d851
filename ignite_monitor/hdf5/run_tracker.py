"""Runs of a training, settings of a run, and reports of monitors."""

from __future__ import annotations

import platform
import weakref
from dataclasses import dataclass

import torch
from ignite.engine import Engine

from ignite_monitor.events.source import EventSource
from ignite_monitor.hdf5.layout import ENDLESS, SETTINGS, Position, Run, with_version
from ignite_monitor.hdf5.writer import Writer
from ignite_monitor.monitor.reports import Report

PACKAGES = ("ignite-monitor", "torch", "pytorch-ignite", "numpy")


@dataclass
class _Source:
    """Reports of a monitor, which appends to them, or the settings of an engine."""

    reports: list[Report]
    is_trainers: bool
    count: int = 0  # of reports that the writer has


class RunTracker:
    """Says to which run and iteration of the training a value belongs; gives each report to the writer once.

    The engine that trains is the trainer or, while none is known, the outermost engine that runs. Its first iteration
    begins a run in the file. What is written before, as by an evaluation at the start, has the number of the run to
    come. It is read as written at the start of that run; if the run never begins, at the last iteration known when it
    was written.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._trainer: weakref.ref[Engine] | None = None
        self._running: list[Engine] = []  # each within the run of the one before
        self._trained: weakref.ref[Engine] | None = None  # the last engine that has begun a run
        self._offsets: weakref.WeakKeyDictionary[Engine, int] = weakref.WeakKeyDictionary()  # of engines that train
        self._offset, self._last = writer.offset, writer.last  # iterations before its own; its last one, with these
        self._end = self._last  # largest last iteration of runs that have ended
        self._has_begun = False  # a run in this session
        self._awaits_run = True  # until its first iteration: handlers may load a checkpoint before
        self._sources: dict[int, _Source] = {}  # by the list's id
        self._settings: list[_Source] = []
        self._described: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines whose settings this run has

    @property
    def knows_trainer(self) -> bool:
        """True if the engine that trains was named, or has monitors."""
        return self._trainer is not None

    def set_trainer(self, trainer: Engine) -> None:
        """Name the engine that trains; what ran before does not move its iterations."""
        self._trainer = weakref.ref(trainer)
        self._offset, self._last = self._writer.offset, self._writer.last

    def trains(self, engine: Engine) -> bool:
        """Check whether an engine is the trainer or, while none is known, the outermost one that runs."""
        if self._trainer is not None:
            return self._trainer() is engine
        return not self._running or self._running[0] is engine

    def keep_apart(self, engine: Engine) -> bool:
        """Place the run of an engine after all before it, if it trains and no trainer is known; return True if so."""
        if self._trainer is not None or engine not in self._running:
            return False
        self._offsets[engine] = self._end
        iteration = int(engine.state.iteration)
        self._begin(engine, iteration - 1)
        self._last = iteration + self._offset
        return True

    def add_source(self, reports: list[Report], *, is_trainers: bool) -> None:
        """Add the reports of a monitor of the trainer or of another engine, unless they are known."""
        self._sources.setdefault(id(reports), _Source(reports, is_trainers))

    def start(self, engine: Engine) -> bool:
        """Follow a run of an engine; return True if it trains as another engine has, while no trainer is known."""
        self.leave(engine)  # a run that ended by an exception
        self._running.append(engine)
        if not self.trains(engine):
            return False
        if not self._awaits_run:
            self.take_reports()
            self._described.clear()
        self._awaits_run = True
        return self._trainer is None and self._trained is not None and self._trained() is not engine

    def leave(self, engine: Engine) -> None:
        """End the run of an engine, and those within it."""
        if engine in self._running:
            del self._running[self._running.index(engine) :]

    def start_iteration(self, engine: Engine) -> None:
        """Count an iteration; the first one of a run that trains, or one that was counted before, begins a run."""
        trains = self.trains(engine)
        if trains:
            iteration = int(engine.state.iteration)  # a resumed engine may count in floats
            if self._awaits_run or iteration + self._offset <= self._last:
                self._begin(engine, iteration - 1)
            self._last = iteration + self._offset
        if engine not in self._described:
            self._described.add(engine)
            self._settings.append(_Source(_settings_of(engine), trains))

    def position(self, engine: Engine) -> Position:
        """Return the position of a value that an engine writes now."""
        if self._trainer is None and not self._running:
            return self._run, self._offsets.get(engine, 0) + max(0, int(engine.state.iteration))
        if not self._awaits_run:
            return self._run, self._last
        trainer = self._running[0] if self._trainer is None else self._trainer()
        iteration = 0 if trainer is None or self._has_begun else trainer.state.iteration
        return self._run, ~(iteration + self._offset if iteration > 0 else self._last)

    def take_reports(self, *, at_end: bool = False) -> bool:
        """Give new reports to the writer, once their run has begun; return True if one is a problem."""
        is_urgent = False
        if at_end or not self._awaits_run:
            for source in [*self._settings, *self._sources.values()]:
                while source.count < len(source.reports):
                    report = source.reports[source.count]
                    source.count += 1
                    iteration = max(0, report.iteration) + self._offset if source.is_trainers else self._last
                    self._writer.add_report((self._run, iteration), *report[1:])
                    is_urgent |= report.severity == "problem"
            self._settings.clear()
        return is_urgent

    @property
    def _run(self) -> int:
        """Number of the run in progress, or of the one to come."""
        return self._writer.runs - (not self._awaits_run)

    def _begin(self, engine: Engine, start: int) -> None:
        """Begin a run after an iteration of the engine.

        A run of the trainer from the beginning is added to the session's earlier ones. Any other replaces what the file
        holds after that iteration, and the session's first one everything if it is from the beginning. While no trainer
        is known, iterations are the engine's own, and nothing is replaced.
        """
        self._end = max(self._end, self._last)
        after = ENDLESS
        if self._trainer is None:
            self._offset = self._offsets.get(engine, 0)
        elif start == 0 and not self._has_begun:
            self._offset, after = 0, -1
        elif start == 0 and self._awaits_run:
            self._offset = self._last
        else:
            after = start + self._offset
        self._offsets[engine], self._trained = self._offset, weakref.ref(engine)
        self._writer.begin_run(Run(self._offset, after))
        self._awaits_run, self._has_begun = False, True


def _settings_of(engine: Engine) -> list[Report]:
    """Describe an engine whose run starts; empty if no monitor is attached to it."""
    source = EventSource.on(engine)
    if source is None or not source.monitors:
        return []
    versions = [f"Python {platform.python_version()}", *map(with_version, PACKAGES)]
    texts = [("run", f"{', '.join(versions)}; seed {torch.initial_seed()} of torch")]
    texts += [(monitor._title, monitor.given_arguments) for monitor in source.monitors]
    return [Report(int(engine.state.iteration), name, SETTINGS, "note", text) for name, text in texts]
