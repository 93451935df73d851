"""Reports that monitors make, and the settings of a run: versions and seed, and the arguments of each monitor."""

from __future__ import annotations

import platform
import weakref
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from ignite.engine import Engine

from ignite_monitor.events.source import EventSource
from ignite_monitor.hdf5.layout import SETTINGS
from ignite_monitor.hdf5.runs import RunTracker
from ignite_monitor.hdf5.writer import Writer
from ignite_monitor.monitor.reports import Report

PACKAGES = ("ignite-monitor", "torch", "pytorch-ignite", "numpy")


@dataclass
class _Source:
    """A list to which a monitor, or the description of an engine, appends reports."""

    reports: list[Report]
    is_trainers: bool
    count: int = 0  # of reports that the writer has


class ReportSources:
    """Gives each report of the monitors to a writer once, and the settings of each engine once per run."""

    def __init__(self, writer: Writer, runs: RunTracker) -> None:
        self._writer, self._runs = writer, runs
        self._sources: dict[int, _Source] = {}  # by the list's id
        self._settings: list[_Source] = []
        self._described: weakref.WeakSet[Engine] = weakref.WeakSet()  # engines whose settings this run has

    def add(self, reports: list[Report], *, is_trainers: bool) -> None:
        """Add the list of a monitor of the trainer or of another engine, unless it is known."""
        self._sources.setdefault(id(reports), _Source(reports, is_trainers))

    def describe(self, engine: Engine, *, is_trainers: bool) -> None:
        """Take the settings of an engine, unless this run has them."""
        if engine not in self._described:
            self._described.add(engine)
            self._settings.append(_Source(_settings_of(engine), is_trainers))

    def end_run(self) -> None:
        """Give what the last run has left to the writer; the next one is described anew."""
        if not self._runs.awaits_run:
            self.take()
            self._described.clear()

    def take(self, *, at_end: bool = False) -> bool:
        """Give new reports to the writer, once their run has begun; return True if one is a problem."""
        is_urgent = False
        if at_end or not self._runs.awaits_run:
            for source in [*self._settings, *self._sources.values()]:
                while source.count < len(source.reports):
                    report = source.reports[source.count]
                    source.count += 1
                    position = self._runs.position_of_report(report.iteration if source.is_trainers else None)
                    self._writer.add_report(position, *report[1:])
                    is_urgent |= report.severity == "problem"
            self._settings.clear()
        return is_urgent


def _settings_of(engine: Engine) -> list[Report]:
    """Describe an engine whose run starts; empty if no monitor is attached to it."""
    source = EventSource.on(engine)
    if source is None or not source.monitors:
        return []
    versions = [f"Python {platform.python_version()}", *map(_with_version, PACKAGES)]
    texts = [("run", f"{', '.join(versions)}; seed {torch.initial_seed()} of torch")]
    texts += [(monitor._title, monitor.given_arguments) for monitor in source.monitors]
    return [Report(engine.state.iteration, name, SETTINGS, "note", text) for name, text in texts]


def _with_version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} (not installed)"
