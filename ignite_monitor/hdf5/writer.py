"""Rows of named values, and reports: collected in memory, and written together."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.hdf5.double_buffer import DoubleBuffer, Patch
from ignite_monitor.hdf5.layout import ROW, VALUE, Name, Position, Run, one_line, opened, printable

KEPT = 2**21  # values and lines kept in memory at most while writing fails
SECONDS = 10.0  # between writes at most


@dataclass
class Pending:
    """Rows and lines to be written. One object, so that an interrupt leaves the state before or after a write."""

    sizes: dict[str, int]  # of the file's datasets
    lines: list[str] = field(default_factory=list)
    rows: list[tuple[tuple[int, ...], list[int], list[float]]] = field(default_factory=list)  # ROW, names, values
    count: int = 0  # of values and lines


class Writer:
    """Writes rows to a file. Rows that can't be written are kept in memory, and written with the next ones."""

    def __init__(self, path: Path, mode: str, flush_every: int, logger: logging.Logger) -> None:
        self.path = path
        self._logger = logger
        self._process = os.getpid()
        self._file: DoubleBuffer | None = DoubleBuffer(path, mode)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release)
            with opened(path) as contents:
                for _ in contents.blocks():  # a damaged file is not continued
                    pass
            undo.pop_all()
        self._pending = Pending(contents.sizes)
        self._numbers = {name.name: number for number, name in enumerate(contents.names)}
        self.runs = contents.begun  # number of runs that have begun
        for run in contents.runs[self.runs :]:
            self.begin_run(run)
        self.offset = contents.runs[-1].offset if contents.runs else 0  # of the last run in the file
        self.last = int(contents.rows["iteration"][-1]) if len(contents.rows) else 0  # iteration in the file
        self._known: weakref.WeakKeyDictionary[Any, dict[tuple[str | None, str], int]] = weakref.WeakKeyDictionary()
        self._owners: dict[str, weakref.ref[Any]] = {}  # name -> the engine that writes it in this session
        self._is_shared = False  # whether several engines write under the same names
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
        engine: Any,
        step: int,
        tag: str | None,
        numbers: dict[str, float],
        position: Position,
        make_origin: Callable[[str], Name],
    ) -> None:
        """Take a row, unless writing has failed for so long that memory is used up; make origins of new names."""
        if self._has_room(len(numbers)):
            known = self._known.setdefault(engine, {})
            for name in numbers:
                if (tag, name) not in known:
                    known[tag, name] = self._number_of(engine, tag, name, make_origin)
            run, iteration = position
            row = step, iteration, int(1000 * time.time()), run, 0
            self._pending.rows.append((row, [known[tag, name] for name in numbers], list(numbers.values())))
            self._pending.count += len(numbers)

    def add_report(self, position: Position, *parts: Any) -> None:
        """Take a report: monitor, kind, severity, text, names."""
        if self._has_room(1):
            self._add_line("report", *position, *parts)

    def flush(self) -> None:
        """Write what is pending."""
        self._distance = min(max(1, 10 * self._distance), self._flush_every)
        self.iterations, self._written = 0, time.monotonic()
        if self._file is None or not self.is_own or not (self._pending.rows or self._pending.lines):
            return
        try:
            patch, after = self._patch()
            self._file.write(patch)
        except Exception as error:  # noqa: BLE001 - h5py and the system raise many types, and training continues
            if self._lost is None:
                self._lost = 0
                text = "writing failed: %s; keeping the values in memory and retrying at every flush"
                self._log(text, one_line(error))
            return
        self._pending = after
        if self._lost is not None:
            self._log("writing works again: %d values are lost", self._lost)
            self._lost = None

    def close(self) -> None:
        """Write what is pending, and release the file."""
        try:
            self.flush()
            if self.is_own and self._lost is not None:
                lost = self._lost + sum(len(names) for _, names, _ in self._pending.rows)
                self._log("writing failed to the end: %d values are lost", lost)
        finally:
            self._release()
            self._pending, self._lost = Pending({}), None

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None and self.is_own:
            file.close()

    def _log(self, text: str, *values: object) -> None:
        self._logger.warning(f"HDF5Logger (%s): {text}.", printable(str(self.path)), *values)

    def _has_room(self, values: int) -> bool:
        if self._lost is None or self._pending.count < KEPT:
            return True
        self._lost += values
        return False

    def _add_line(self, *entry: Any) -> None:
        self._pending.lines.append(json.dumps(entry) + "\n")
        self._pending.count += 1

    def _patch(self) -> tuple[Patch, Pending]:
        """The patch to write, and the state once it is written."""
        sizes = self._pending.sizes
        rows = np.array([row for row, _, _ in self._pending.rows], ROW)
        rows["end"] = sizes["values"] + np.cumsum([len(names) for _, names, _ in self._pending.rows], dtype=np.int64)
        values = np.empty(int(rows["end"][-1]) - sizes["values"] if len(rows) else 0, VALUE)
        values["name"] = list(chain.from_iterable(names for _, names, _ in self._pending.rows))
        values["value"] = list(chain.from_iterable(numbers for _, _, numbers in self._pending.rows))
        lines = np.frombuffer("".join(self._pending.lines).encode("ascii"), np.uint8)
        additions: dict[str, NDArray[Any]] = {"lines": lines, "rows": rows, "values": values}
        patch = [(name, sizes[name], elements) for name, elements in additions.items() if len(elements)]
        return patch, Pending({name: sizes[name] + len(elements) for name, elements in additions.items()})

    def _number_of(self, engine: Any, tag: str | None, name: str, make_origin: Callable[[str], Name]) -> int:
        full = name if tag is None else f"{tag}/{name}" if name else tag
        full = json.loads(json.dumps(full))  # two surrogates may be one character when they are read
        if self._owners.setdefault(full, weakref.ref(engine))() is not engine and not self._is_shared:
            self._is_shared = True
            text = "a second engine writes %s: give each training a file of its own, and each engine names of its own"
            self._log(text, printable(full))
        if full not in self._numbers:
            # The line first: an interrupt in between leaves the number for the next name, whose line is then valid.
            self._add_line("name", len(self._numbers), *make_origin(name)._replace(name=full))
            self._numbers[full] = len(self._numbers)
        return self._numbers[full]
