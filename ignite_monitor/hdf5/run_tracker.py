"""Runs of the trainer, their settings, and reports of monitors."""

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
    """Reports of a monitor, which appends to them."""

    reports: list[Report]
    is_trainers: bool
    count: int = 0  # of reports that the writer has


class RunTracker:
    """Says to which run and iteration of the trainer a value belongs; gives each report to the writer once.

    A run begins with its first iteration: handlers may load a checkpoint before. What is written earlier, as by an
    evaluation at the start, has the number of the run to come.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self.trainer: weakref.ref[Engine] | None = None
        self._offset = writer.offset  # iterations before the trainer's own
        self._last = 0  # its last iteration, with these
        self._has_begun = False  # a run in this session
        self._awaits_run = True
        self._sources: dict[int, _Source] = {}  # by the list's id

    def add_source(self, reports: list[Report], *, is_trainers: bool) -> None:
        """Add the reports of a monitor of the trainer or of another engine, unless they are known."""
        self._sources.setdefault(id(reports), _Source(reports, is_trainers))

    def start(self) -> None:
        """Await a run of the trainer."""
        self.take_reports()
        self._awaits_run = True

    def start_iteration(self, trainer: Engine) -> bool:
        """Count an iteration, whose run may begin with it; return True if it is time to write.

        An iteration that was counted before begins a run too.
        """
        iteration = int(trainer.state.iteration)  # a resumed engine may count in floats
        is_first = self._awaits_run
        if is_first or iteration + self._offset <= self._last:
            self._begin(iteration - 1)
        is_urgent = self.take_reports()  # those of other engines belong to the iteration before
        self._last, self._awaits_run = iteration + self._offset, False
        for name, text in _settings_of(trainer) if is_first else ():
            self._writer.add_report(self.position(), name, SETTINGS, "note", text, ())
        self._writer.iterations += 1
        return is_urgent or self._writer.is_time()

    def position(self) -> Position:
        """Return the position of a value that is written now."""
        if not self._awaits_run:
            return self._writer.runs - 1, self._last
        trainer = None if self.trainer is None else self.trainer()
        iteration = 0 if trainer is None else int(trainer.state.iteration)
        return self._writer.runs, iteration + self._offset if iteration > 0 else self._last

    def take_reports(self, *, at_end: bool = False) -> bool:
        """Give new reports to the writer, once their run has begun; return True if one is a problem."""
        is_urgent = False
        if at_end or not self._awaits_run:
            run, last = self.position()
            for source in self._sources.values():
                while source.count < len(source.reports):
                    report = source.reports[source.count]
                    source.count += 1
                    iteration = max(0, report.iteration) + self._offset if source.is_trainers else last
                    self._writer.add_report((run, iteration), *report[1:])
                    is_urgent |= report.severity == "problem"
        return is_urgent

    def _begin(self, start: int) -> None:
        """Begin a run after an iteration of the trainer.

        A run from the beginning is added to the session's earlier ones. Any other replaces what the file holds after
        that iteration, and the session's first one everything if it is from the beginning.
        """
        after = start + self._offset
        if start == 0 and not self._has_begun:
            self._offset, after = 0, -1
        elif start == 0 and self._awaits_run:
            self._offset, after = self._last, ENDLESS
        self._writer.begin_run(Run(self._offset, after))
        self._has_begun = True


def _settings_of(trainer: Engine) -> list[tuple[str, str]]:
    """Versions, and the arguments of each monitor; empty if there are no monitors."""
    source = EventSource.on(trainer)
    if source is None or not source.monitors:
        return []
    versions = [f"Python {platform.python_version()}", *map(with_version, PACKAGES)]
    texts = [("run", f"{', '.join(versions)}; seed {torch.initial_seed()} of torch")]
    return texts + [(monitor._title, monitor.given_arguments) for monitor in source.monitors]
