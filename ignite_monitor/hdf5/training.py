"""Runs of a logger's trainer, settings of a run, and reports of monitors."""

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


class Training:
    """Says to which run of the trainer and to which iteration a value belongs; gives each report to the writer once.

    The first iteration of a run begins that run in the file. What is written before, as by an evaluation at the start,
    has the number of the run to come. It is read as written at the start of that run; if the run never begins, at the
    last iteration known when it was written.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._offset, self._last = writer.offset, writer.last  # iterations before its own; its last one, with these
        self._has_begun = False  # a run in this session
        self._awaits_run = True  # until its first iteration: handlers may load a checkpoint before
        self._sources: dict[int, _Source] = {}  # by the list's id
        self._settings: list[_Source] = []
        self._described: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines whose settings this run has

    def add_source(self, reports: list[Report], *, is_trainers: bool) -> None:
        """Add the reports of a monitor of the trainer or of another engine, unless they are known."""
        self._sources.setdefault(id(reports), _Source(reports, is_trainers))

    def start_run(self) -> None:
        """Give the reports of the last run to the writer, and wait for the first iteration of the next one."""
        if not self._awaits_run:
            self.take_reports()
            self._described.clear()
        self._awaits_run = True

    def start_iteration(self, engine: Engine, *, is_trainer: bool) -> None:
        """Count an iteration; the trainer's first one of a run, or one that was counted before, begins a run."""
        if is_trainer:
            iteration = engine.state.iteration
            if self._awaits_run or iteration + self._offset <= self._last:
                self._begin(iteration - 1)
            self._last = iteration + self._offset
        if engine not in self._described:
            self._described.add(engine)
            self._settings.append(_Source(_settings_of(engine), is_trainer))

    @property
    def run(self) -> int:
        """Number of the run in progress, or of the one to come."""
        return self._writer.runs - (not self._awaits_run)

    def position(self, iteration: int) -> Position:
        """Return the position of a value that is written while the trainer's counter has this number."""
        if not self._awaits_run:
            return self.run, self._last
        return self.run, ~(iteration + self._offset if iteration > 0 and not self._has_begun else self._last)

    def take_reports(self, *, at_end: bool = False) -> bool:
        """Give new reports to the writer, once their run has begun; return True if one is a problem."""
        is_urgent = False
        if at_end or not self._awaits_run:
            for source in [*self._settings, *self._sources.values()]:
                while source.count < len(source.reports):
                    report = source.reports[source.count]
                    source.count += 1
                    iteration = max(0, report.iteration) + self._offset if source.is_trainers else self._last
                    self._writer.add_report((self.run, iteration), *report[1:])
                    is_urgent |= report.severity == "problem"
            self._settings.clear()
        return is_urgent

    def _begin(self, start: int) -> None:
        """Begin a run after an iteration of the trainer; one from the beginning is added to the session's earlier ones.

        Any other run replaces what the file holds after that iteration, and the session's first one everything if it
        is from the beginning.
        """
        if start == 0 and not self._has_begun:
            self._offset, after = 0, -1
        elif start == 0 and self._awaits_run:
            self._offset, after = self._last, ENDLESS
        else:
            after = start + self._offset
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
    return [Report(engine.state.iteration, name, SETTINGS, "note", text) for name, text in texts]
