"""Rows of named values, and reports: collected in memory, and written together."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.hdf5.double_buffer import DoubleBuffer, Patch
from ignite_monitor.hdf5.layout import ROW, RUN, Name, Position, one_line, opened, printable

REMEMBERED = 64  # lists of names
KEPT_BYTES = 2**27  # of rows kept in memory at most while writing fails
SECONDS = 10.0  # between writes at most
ROW_BYTES, NAME_BYTES = 512, 256  # approximate size of a row and of a name in a list of names, without the values


@dataclass
class PendingRows:
    """Rows that are not in the file yet. One object, so that an interrupt leaves the state before or after a write."""

    sizes: dict[str, int]  # of the file's datasets
    names: int  # in the file
    runs: list[tuple[int, int]] = field(default_factory=list)  # fields of RUN
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    rows: list[tuple[tuple[int, ...], NDArray[np.float64]]] = field(default_factory=list)  # fields of ROW, and values
    reports: list[str] = field(default_factory=list)  # JSON lines
    bytes: int = 0  # of memory, approximately


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
                names, runs, rows = contents.names, contents.runs, contents.rows
                new_runs = runs[contents.sizes["runs"] :].tolist()
                self._pending = PendingRows(contents.sizes, len(names), new_runs)
            undo.pop_all()
        self.offset = int(runs["offset"][-1]) if len(runs) else 0  # of the last run in the file
        self.last = int(rows["iteration"][-1]) if len(rows) else 0  # iteration in the file
        self.is_continued = len(rows) > 0
        self._names = {name.name: name for name in names}
        self._ids = {name: index for index, name in enumerate(self._names)}
        self._lists: dict[tuple[int, str | None, tuple[str, ...]], int] = {}  # engine, tag, names -> place of their ids
        self._engine_of_name: dict[str, int] = {}  # number of the engine that writes it in this session
        self._is_shared = False  # whether several engines write under the same names
        self._lost: int | None = None  # values that no longer fitted in memory; None while writing works
        self._flush_every = flush_every
        self._distance = 0  # iterations between writes; it grows, so that a run can be read from the beginning on
        self._iterations, self._written = 0, time.monotonic()

    @property
    def is_own(self) -> bool:
        """True in the process that made it, and not in one that was forked."""
        return os.getpid() == self._process

    @property
    def runs(self) -> int:
        """Number of runs that have begun."""
        return self._pending.sizes["runs"] + len(self._pending.runs)

    def begin_run(self, offset: int, after: int) -> None:
        """Begin a run with the fields of RUN."""
        self._pending.runs.append((offset, after))

    def count_iteration(self) -> None:
        """Count an iteration of an engine."""
        self._iterations += 1

    def is_time(self) -> bool:
        """Return True if rows should be written: after enough iterations or seconds."""
        return self._iterations >= self._distance or time.monotonic() - self._written > SECONDS

    def add(
        self,
        engine: int,
        step: int,
        tag: str | None,
        names: tuple[str, ...],
        values: NDArray[np.float64],
        position: Position,
        make_origin: Callable[[str], Name],
    ) -> None:
        """Take a row, unless writing has failed for so long that memory is used up; make origins of new names."""
        if not self._has_room(len(values)):
            return
        pending, key = self._pending, (engine, tag, names)
        if key not in self._lists:
            if len(self._lists) >= REMEMBERED:
                self._lists.clear()
            ids = np.array([self._index_of(engine, tag, name, make_origin) for name in names], np.int32)
            place = pending.sizes["ids"] + sum(map(len, pending.ids))
            pending.ids.append(ids)  # first, or a list that an interrupt leaves out would have a place
            self._lists[key] = place
            pending.bytes += NAME_BYTES * len(ids)
        row = step, position.iteration, int(1000 * time.time()), position.run, self._lists[key], len(values)
        pending.rows.append((row, values))
        pending.bytes += ROW_BYTES + values.nbytes

    def add_report(self, position: Position, *parts: Any) -> None:
        """Take a report: monitor, kind, severity, text, names."""
        if self._has_room(1):
            line = json.dumps([*position, *parts]) + "\n"
            self._pending.reports.append(line)
            self._pending.bytes += ROW_BYTES + len(line)

    def flush(self) -> None:
        """Write what is pending."""
        self._distance = min(max(1, 10 * self._distance), self._flush_every)
        self._iterations, self._written = 0, time.monotonic()
        if self._file is None or not self.is_own or not (self._pending.rows or self._pending.reports):
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
                self._lost += len(self._pending.reports) + sum(len(values) for _, values in self._pending.rows)
                self._log("writing failed to the end: %d values are lost", self._lost)
        finally:
            self._release()
            self._pending, self._lost = PendingRows({}, 0), None

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None and self.is_own:
            file.close()

    def _log(self, text: str, *values: object) -> None:
        self._logger.warning(f"HDF5Logger (%s): {text}.", printable(str(self.path)), *values)

    def _has_room(self, values: int) -> bool:
        if self._lost is None or self._pending.bytes < KEPT_BYTES:
            return True
        self._lost += values
        return False

    def _patch(self) -> tuple[Patch, PendingRows]:
        """The patch to write, and the state once it is written."""
        pending = self._pending
        rows = np.array([row for row, _ in pending.rows], ROW)
        lines = "".join(json.dumps(self._names[name]) + "\n" for name in islice(self._ids, pending.names, None))
        additions: dict[str, NDArray[Any]] = {
            "names": np.frombuffer(lines.encode("ascii"), np.uint8),
            "ids": np.concatenate([np.empty(0, np.int32), *pending.ids]),
            "rows": rows,
            "values": np.concatenate([np.empty(0), *(values for _, values in pending.rows)]),
            "runs": np.array(pending.runs, RUN),
            "reports": np.frombuffer("".join(pending.reports).encode("ascii"), np.uint8),
        }
        patch = [(name, pending.sizes[name], elements) for name, elements in additions.items() if len(elements)]
        sizes = {name: pending.sizes[name] + len(elements) for name, elements in additions.items()}
        return patch, PendingRows(sizes, len(self._ids))

    def _index_of(self, engine: int, tag: str | None, name: str, make_origin: Callable[[str], Name]) -> int:
        full = name if tag is None else f"{tag}/{name}" if name else tag
        if not full.isascii():  # two surrogates may be one character when they are read
            full = json.loads(json.dumps(full))
        if self._engine_of_name.setdefault(full, engine) != engine and not self._is_shared:
            self._is_shared = True
            text = "a second engine writes %s: give each training a file of its own, and each engine names of its own"
            self._log(text, printable(full))
        if full not in self._ids:
            self._names[full] = make_origin(name)._replace(name=full)
            self._ids[full] = len(self._ids)
        return self._ids[full]
