"""Rows of named values, and reports: collected with the trainer's run and iteration, and written together."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ignite.engine import Engine, Events

from ignite_monitor.events.hooks import remove_all
from ignite_monitor.hdf5 import layout
from ignite_monitor.hdf5.layout import ENDLESS, ROW, SETTINGS, VALUE, Name, State, one_line, printable
from ignite_monitor.hdf5.store import Store
from ignite_monitor.model._torch import put_first
from ignite_monitor.monitor.loggers import Report

PACKAGES = ("ignite-monitor", "torch", "pytorch-ignite", "numpy")
KEPT = 2**21  # values that wait in memory at most, between two attempts to write them
SECONDS = 10.0  # between writes at most


@dataclass
class Pending:
    """Rows and lines to be written. One object, so that an interrupt leaves the state before or after a write."""

    state: State  # of the file
    lines: list[str] = field(default_factory=list)
    rows: list[tuple[tuple[int, int, int, int], dict[int, float]]] = field(default_factory=list)  # ROW, name -> value


class Recorder:
    """Writes values and reports with the trainer's run and iteration; what can't be written waits in memory.

    What a run replaces is known with its first iteration, since handlers may load a checkpoint before. Until then it
    is recorded as a run that replaces nothing.
    """

    def __init__(self, path: Path, mode: str, flush_every: int, logger: logging.Logger) -> None:
        self._shown = printable(str(path))
        self._logger = logger
        self._process = os.getpid()
        self._one_thread = threading.RLock()  # engines may run in several threads
        self._trainer: weakref.ref[Engine] | None = None
        self._handles: list[Any] = []
        self.sources: dict[int, list[Any]] = {}  # reports of a monitor, whether of the trainer, how many are taken
        layout.check_regular(path)  # a device must not be replaced
        try:
            self._store = Store(path, mode)
        except OSError as error:
            raise type(error)(f"Can't write {self._shown}: {one_line(error)}") from error
        with contextlib.ExitStack() as undo:
            undo.callback(self._store.release)
            contents = layout.read(path)
            undo.pop_all()
        self._pending = Pending(contents.state)
        self._names = {name.name: (number, name.trains) for number, name in enumerate(contents.names)}
        self._is_failing = self.is_closed = False
        self._flush_every = flush_every
        self._iterations, self._written = 0, time.monotonic()  # since the last write
        self._first = self._run = len(contents.runs)  # numbers of the session's first run and of the present one
        self._offset = contents.runs[-1].offset if contents.runs else 0  # iterations before the trainer's own
        self._last = 0  # its last iteration, with these
        self._awaits_iteration = True
        self._add_line("run", self._run, self._offset, ENDLESS)

    @property
    def is_own(self) -> bool:
        """False in a forked process."""
        return os.getpid() == self._process

    def follow(self, trainer: Engine) -> None:
        """Take an engine as the trainer."""
        self._trainer = weakref.ref(trainer)
        self._handles.append(trainer.add_event_handler(Events.COMPLETED | Events.TERMINATE, self.flush))
        self._handles.append(trainer.add_event_handler(Events.STARTED, self._start))
        self._handles.append(trainer.add_event_handler(Events.ITERATION_STARTED, self._start_iteration))
        for event in (Events.STARTED, Events.ITERATION_STARTED):
            put_first(trainer, event)  # or values of these events would belong to the run before

    def leave_trainer(self) -> None:
        """Undo :meth:`follow`."""
        remove_all(self._handles)
        self._trainer = None

    def add_source(self, reports: list[Report], *, trains: bool) -> None:
        """Add the reports of a monitor of the trainer or of another engine, unless they are known."""
        with self._one_thread:
            self.sources.setdefault(id(reports), [reports, trains, 0])

    def add_row(
        self, step: int, named: Mapping[str, float], describe: Callable[[str], Name], *, trains: bool
    ) -> str | None:
        """Take values of the trainer or of another engine; return a name that belongs to the other."""
        values: dict[int, float] = {}
        taken = None
        with self._one_thread:
            for name, value in named.items():
                number, is_trainers = self._names.get(name) or self._add_name(name, describe, trains)
                if is_trainers == trains:
                    values[number] = value
                else:
                    taken = name
            if values:
                run, iteration = self._position()
                self._pending.rows.append(((step, iteration, run, 0), values))
            self._flush_in_time()
        return taken

    def flush(self) -> None:
        """Write what is in memory."""
        if self.is_closed or not self.is_own:  # a forked process may hold a lock of another thread
            return
        with self._one_thread:
            self._take_reports()
            self._iterations, self._written = 0, time.monotonic()
            if not self._pending.rows and not self._pending.lines:
                return
            try:
                self._pending = Pending(self._store.append(self._pending.state, self._additions()))
            except Exception as error:  # noqa: BLE001 - h5py and the system raise many types, and training continues
                if not self._is_failing:
                    self._log("writing failed: %s; the values wait in memory for the next flush", one_line(error))
                self._is_failing = True
                self._drop(more_than=KEPT)
                return
            if self._is_failing:
                self._log("writing works again")
            self._is_failing = False

    def close(self) -> None:
        """Write what is in memory, and release the file."""
        with self._one_thread:
            try:
                remove_all(self._handles)
                self.flush()
                self._drop()
            finally:
                self.is_closed = True
                self._store.close(self._pending.state)

    def _position(self) -> tuple[int, int]:
        """Return the number of the run, and the iteration of the training, of a value that is written now."""
        trainer = None if self._trainer is None or not self._awaits_iteration else self._trainer()
        iteration = 0 if trainer is None else int(trainer.state.iteration)
        return self._run, iteration + self._offset if iteration > 0 else self._last

    def _start(self) -> None:
        with self._one_thread:
            self._take_reports()
            if not self._awaits_iteration:
                self._add_line("run", self._run + 1, self._offset, ENDLESS)  # before it is used: an interrupt may come
                self._run += 1
                self._awaits_iteration = True

    def _start_iteration(self, trainer: Engine) -> None:
        """Count an iteration; one that was counted before starts a run."""
        with self._one_thread:
            iteration = int(trainer.state.iteration)  # a resumed engine may count in floats
            if not self._awaits_iteration and iteration + self._offset <= self._last:
                self._start()
            is_first = self._awaits_iteration
            if is_first:
                self._begin(iteration - 1)
            self._take_reports()  # those of other engines belong to the iteration before
            self._last = iteration + self._offset
            if is_first:
                versions = [f"Python {platform.python_version()}", *map(layout.with_version, PACKAGES)]
                text = f"{', '.join(versions)}; seed {torch.initial_seed()} of torch"
                self._add_line("report", self._run, self._last, "run", SETTINGS, "note", text, ())
            self._iterations += 1
            self._flush_in_time()

    def _begin(self, start: int) -> None:
        """Record what the run replaces, which begins after an iteration of the trainer.

        A run from the beginning is added to the session's earlier ones, and replaces those of earlier sessions. Any
        other one replaces what the file holds after that iteration.
        """
        after = start + self._offset
        if start == 0 and self._run == self._first:
            self._offset, after = 0, -1
        elif start == 0:
            self._offset, after = self._last, ENDLESS
        self._add_line("run", self._run, self._offset, after)
        self._last, self._awaits_iteration = start + self._offset, False

    def _take_reports(self) -> None:
        run, last = self._position()
        for source in self.sources.values():
            reports, trains, count = source
            for report in reports[count:]:
                source[2] += 1
                iteration = int(report.iteration) + self._offset if trains and report.iteration > 0 else last
                self._add_line("report", run, iteration, *report[1:])

    def _flush_in_time(self) -> None:
        if self._iterations >= self._flush_every or time.monotonic() - self._written > SECONDS:
            self.flush()

    def _drop(self, more_than: int = 0) -> None:
        """Drop the rows that could not be written, if they have too many values, but no line: rows to come need it."""
        if (lost := sum(len(values) for _, values in self._pending.rows)) > more_than:
            self._log("%d values that could not be written are lost", lost)
            self._pending.rows.clear()

    def _log(self, text: str, *values: object) -> None:
        self._logger.warning(f"HDF5Logger (%s): {text}.", self._shown, *values)

    def _add_name(self, name: str, describe: Callable[[str], Name], trains: bool) -> tuple[int, bool]:
        stored = json.loads(json.dumps(name))  # two surrogates may be one character when they are read
        if stored not in self._names:
            # The line first: an interrupt in between leaves the number for the next name, whose line is then valid.
            self._add_line("name", len(self._names), *describe(name)._replace(name=stored, trains=trains))
            self._names[stored] = len(self._names), trains
        return self._names[stored]

    def _add_line(self, *entry: Any) -> None:
        self._pending.lines.append(json.dumps(entry) + "\n")

    def _additions(self) -> layout.Elements:
        rows = np.array([row for row, _ in self._pending.rows], ROW)
        contents = [values for _, values in self._pending.rows]
        rows["end"] = self._pending.state["values"][0] + np.cumsum([len(it) for it in contents], dtype=np.int64)
        values = np.array([*chain.from_iterable(it.items() for it in contents)], VALUE)
        lines = np.frombuffer("".join(self._pending.lines).encode("ascii"), np.uint8)
        return {"rows": rows, "values": values, "lines": lines}
