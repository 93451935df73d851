"""Rows of named values, and reports: collected in memory, and written together."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ignite_monitor.hdf5.layout import ROW, VALUE, Additions, Name, Position, Run, State, one_line, opened, printable
from ignite_monitor.hdf5.store import Store

KEPT = 2**21  # values and lines kept in memory at most while writing fails
SECONDS = 10.0  # between writes at most


@dataclass
class Pending:
    """Rows and lines to be written. One object, so that an interrupt leaves the state before or after a write."""

    state: State  # of the file
    lines: list[str] = field(default_factory=list)
    rows: list[tuple[tuple[int, ...], dict[int, float]]] = field(default_factory=list)  # ROW, number of name -> value
    count: int = 0  # of values and lines


class Writer:
    """Writes rows to a file. Rows that can't be written are kept in memory, and written with the next ones."""

    def __init__(self, path: Path, mode: str, flush_every: int, logger: logging.Logger) -> None:
        self._shown = printable(str(path))
        self._logger = logger
        self._process = os.getpid()
        self._store: Store | None = Store(path, mode)
        with contextlib.ExitStack() as undo:
            undo.callback(self._store.release)
            with opened(path) as contents:
                for _ in contents.blocks("values"):  # a damaged file is not continued
                    pass
            undo.pop_all()
        self._pending = Pending(contents.state)
        self._names = {name.name: (number, name.trains) for number, name in enumerate(contents.names)}
        self.runs = contents.begun  # number of runs that have begun
        for run in contents.runs[self.runs :]:
            self.begin_run(run)
        self.offset = contents.runs[-1].offset if contents.runs else 0  # of the last run in the file
        self._known: dict[
            tuple[str | None, str], tuple[int, bool]
        ] = {}  # tag and name -> number, and whether it trains
        self._lost: int | None = None  # values that no longer fitted in memory; None while writing works
        self._flush_every = flush_every
        self._distance = 0  # iterations between writes; it grows, so that a run can be read from the beginning on
        self.iterations, self._written = 0, time.monotonic()  # since the last write, of all engines

    @property
    def is_own(self) -> bool:
        """True in the process that made it, and not in one that was forked."""
        return os.getpid() == self._process

    def begin_run(self, run: Run) -> None:
        """Begin the next run."""
        self._add_line("run", self.runs, *run)
        self.runs += 1

    def is_time(self) -> bool:
        """Return True if rows should be written: after enough iterations or seconds."""
        return self.iterations >= self._distance or time.monotonic() - self._written > SECONDS

    def add(
        self,
        step: int,
        position: Position,
        tag: str | None,
        numbers: dict[str, float],
        make_origin: Callable[[str], Name],
        *,
        trains: bool,
    ) -> bool:
        """Take a row of the trainer or of another engine; return True if names are left out, which the other kind has.

        Origins are made of new names.
        """
        if not self._has_room(len(numbers)):
            return False
        values: dict[int, float] = {}
        is_shared = False
        for name, value in numbers.items():
            if (known := self._known.get((tag, name))) is None:
                known = self._known[tag, name] = self._find(tag, name, make_origin, trains)
            number, is_trainers = known
            if is_trainers == trains:
                values[number] = value
            else:
                is_shared = True
        if values:
            run, iteration = position
            self._pending.rows.append(((step, iteration, int(1000 * time.time()), run, 0), values))
            self._pending.count += len(values)
        return is_shared

    def add_report(self, position: Position, *parts: Any) -> None:
        """Take a report: monitor, kind, severity, text, names."""
        if self._has_room(1):
            self._add_line("report", *position, *parts)

    def flush(self) -> None:
        """Write what is pending."""
        self._distance = min(max(1, 10 * self._distance), self._flush_every)
        self.iterations, self._written = 0, time.monotonic()
        if self._store is None or not self.is_own or not (self._pending.rows or self._pending.lines):
            return
        try:
            self._pending = Pending(self._store.append(self._pending.state, self._additions()))
        except Exception as error:  # noqa: BLE001 - h5py and the system raise many types, and training continues
            if self._lost is None:
                self._lost = 0
                text = "writing failed: %s; keeping the values in memory and retrying at every flush"
                self._log(text, one_line(error))
            return
        if self._lost is not None:
            self._log("writing works again: %d values are lost", self._lost)
            self._lost = None

    def close(self) -> None:
        """Write what is pending, and release the file."""
        try:
            self.flush()
            if self.is_own and self._lost is not None:
                lost = self._lost + sum(len(numbered) for _, numbered in self._pending.rows)
                self._log("writing failed to the end: %d values are lost", lost)
        finally:
            store, self._store = self._store, None
            if store is not None and self.is_own:
                store.close(self._pending.state)
            self._pending, self._lost = Pending({}), None

    def _log(self, text: str, *values: object) -> None:
        self._logger.warning(f"HDF5Logger (%s): {text}.", self._shown, *values)

    def _has_room(self, values: int) -> bool:
        if self._lost is None or self._pending.count < KEPT:
            return True
        self._lost += values
        return False

    def _add_line(self, *entry: Any) -> None:
        self._pending.lines.append(json.dumps(entry) + "\n")
        self._pending.count += 1

    def _additions(self) -> Additions:
        rows = np.array([row for row, _ in self._pending.rows], ROW)
        contents = [numbered for _, numbered in self._pending.rows]
        rows["end"] = self._pending.state["values"][0] + np.cumsum([len(it) for it in contents], dtype=np.int64)
        values = np.array([*chain.from_iterable(it.items() for it in contents)], VALUE)
        lines = np.frombuffer("".join(self._pending.lines).encode("ascii"), np.uint8)
        return {"rows": rows, "values": values, "lines": lines}

    def _find(self, tag: str | None, name: str, make_origin: Callable[[str], Name], trains: bool) -> tuple[int, bool]:
        full = name if tag is None else f"{tag}/{name}" if name else tag
        full = json.loads(json.dumps(full))  # two surrogates may be one character when they are read
        if full not in self._names:
            # The line first: an interrupt in between leaves the number for the next name, whose line is then valid.
            self._add_line("name", len(self._names), *make_origin(name)._replace(name=full, trains=trains))
            self._names[full] = len(self._names), trains
        return self._names[full]
