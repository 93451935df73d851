"""Rows of named values: the run and iteration they belong to; collected in memory and written together."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from ignite.engine import Engine
from numpy.typing import NDArray

from ignite_monitor.hdf5.double_buffer import DoubleBuffer, Patch
from ignite_monitor.hdf5.layout import ROW, Name, one_line, opened, printable

SECONDS = 10.0  # after which rows are written
REMEMBERED = 64  # lists of names
KEPT_BYTES = 2**27  # of rows kept in memory at most while writing fails
ROW_BYTES, NAME_BYTES = 512, 256  # approximate size of a row and of a name in a list of names, without the values


class Position(NamedTuple):
    """Run and iteration of a row: see :mod:`ignite_monitor.hdf5.layout`."""

    run: int
    start: int
    iteration: int
    nested: bool


@dataclass
class _Run:
    number: int
    start: int
    last: int  # iteration


class Clock:
    """Follows the engines that a logger is attached to.

    An engine whose ``run()`` is called within that of another one belongs to the other's run. The call stack decides
    it: an engine that has raised is no longer on it, whatever it raised and however long the engine lives.
    """

    def __init__(self, next_run: int, flush_every: int) -> None:
        self._next_run, self._flush_every = next_run, flush_every
        self._runs: WeakKeyDictionary[Engine, _Run] = WeakKeyDictionary()
        self.written()

    def start(self, engine: Engine) -> None:
        """Begin a run."""
        self._begin(engine, engine.state.iteration)

    def tick(self, engine: Engine) -> None:
        """Count an iteration; an iteration that was counted before begins a run."""
        self._iterations += 1
        run, iteration = self._runs.get(engine), engine.state.iteration
        if run is None or iteration <= run.last:
            run = self._begin(engine, iteration - 1)
        run.last = iteration

    def position(self, engine: Engine) -> Position:
        """Return the position of a value that comes from an engine now."""
        outermost = _outermost() or engine
        run, iteration = self._runs.get(outermost), outermost.state.iteration
        if run is None or iteration < run.last:  # an engine that is not followed
            run = self._begin(outermost, max(0, iteration - 1))
        run.last = iteration
        return Position(run.number, run.start, iteration, outermost is not engine)

    def is_time(self) -> bool:
        """Return True if rows should be written: after enough iterations or seconds."""
        return self._iterations >= self._flush_every or time.monotonic() - self._written > SECONDS

    def written(self) -> None:
        """Count from now on."""
        self._iterations, self._written = 0, time.monotonic()

    def _begin(self, engine: Engine, start: int) -> _Run:
        run = self._runs[engine] = _Run(self._next_run, start, start)
        self._next_run += 1
        return run


def _outermost() -> Engine | None:
    """The outermost engine whose ``run()`` is on the stack, attached to the logger or not."""
    outermost, frame = None, sys._getframe(1)
    while frame is not None:
        if frame.f_code is Engine.run.__code__:
            outermost = frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
    return outermost


@dataclass
class Waiting:
    """Rows that are not in the file yet. One object, so that an interrupt leaves the state before or after a write."""

    sizes: dict[str, int]  # of the file's datasets
    names: int  # in the file
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    rows: list[tuple[int, ...]] = field(default_factory=list)  # the fields of ROW
    values: list[NDArray[np.float64]] = field(default_factory=list)
    bytes: int = 0  # of memory, approximately


class Writer:
    """Writes rows to a file. Rows that can't be written are kept in memory, and written with the next ones.

    A log line reports when writing begins to fail, when it succeeds again, and how many values are lost.
    """

    def __init__(self, path: Path, mode: str, logger: logging.Logger) -> None:
        self.path = path
        self._logger = logger
        self._process = os.getpid()
        self._file: DoubleBuffer | None = DoubleBuffer(path, mode)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release)
            with opened(path) as contents:
                sizes, names, rows = contents.sizes, contents.names, contents.rows
            undo.pop_all()
        self.first_run = int(rows["run"].max(initial=-1)) + 1
        self._session = int(rows["session"].max(initial=-1)) + 1
        self._names = {name.name: name for name in names}
        self._ids = {name: index for index, name in enumerate(self._names)}
        self._lists: dict[tuple[str | None, tuple[str, ...]], int] = {}  # names -> place of their list in ``ids``
        self._waiting = Waiting(sizes, len(names))
        self._lost: int | None = None  # values that no longer fitted in memory; None while writing works

    @property
    def is_own(self) -> bool:
        """True in the process that made it, and not in one that was forked."""
        return os.getpid() == self._process

    @property
    def has_rows(self) -> bool:
        """True if there are rows to be written."""
        return bool(self._waiting.rows)

    def add(
        self,
        step: int,
        tag: str | None,
        names: tuple[str, ...],
        values: NDArray[np.float64],
        position: Position,
        origin: Callable[[str], Name],
    ) -> None:
        """Take a row, unless writing has failed for so long that memory is used up.

        Args:
            origin: called with a value's name, without the tag, if the name is new.
        """
        waiting = self._waiting
        if self._lost is not None and waiting.bytes >= KEPT_BYTES:
            self._lost += len(values)
            return
        if (tag, names) not in self._lists:
            if len(self._lists) >= REMEMBERED:
                self._lists.clear()
            ids = np.array([self._index_of(tag, name, origin) for name in names], np.int32)
            self._lists[tag, names] = waiting.sizes["ids"] + sum(map(len, waiting.ids))
            waiting.ids.append(ids)
            waiting.bytes += NAME_BYTES * len(ids)
        run, start, iteration, nested = position
        times, ids_at = int(1000 * time.time()), self._lists[tag, names]
        row = step, iteration, times, self._session, run, start, nested, ids_at, 0, len(values)
        waiting.rows.append(row)
        waiting.values.append(values)
        waiting.bytes += ROW_BYTES + values.nbytes

    def flush(self) -> None:
        """Write the pending rows."""
        if self._file is None or not self.has_rows or not self.is_own:
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
        self._waiting = after
        if self._lost is not None:
            self._log("writing works again: %d values are lost", self._lost)
            self._lost = None

    def close(self) -> None:
        """Write the pending rows, and release the file."""
        try:
            self.flush()
            if self.is_own and self._lost is not None:
                self._lost += sum(map(len, self._waiting.values))
                self._log("writing failed to the end: %d values are lost", self._lost)
        finally:
            self._release()
            self._waiting, self._lost = Waiting({}, 0), None

    def _release(self) -> None:
        file, self._file = self._file, None
        if file is not None and self.is_own:
            file.close()

    def _log(self, text: str, *values: object) -> None:
        self._logger.warning(f"HDF5Logger (%s): {text}.", printable(str(self.path)), *values)

    def _patch(self) -> tuple[Patch, Waiting]:
        """The patch to write, and the state once it is written."""
        waiting = self._waiting
        rows = np.array(waiting.rows, ROW)
        rows["values"] = waiting.sizes["values"] + np.cumsum(rows["count"]) - rows["count"]
        lines = "".join(json.dumps(self._names[name]) + "\n" for name in islice(self._ids, waiting.names, None))
        additions: dict[str, NDArray[Any]] = {
            "names": np.frombuffer(lines.encode("ascii"), np.uint8),
            "ids": np.concatenate([np.empty(0, np.int32), *waiting.ids]),
            "rows": rows,
            "values": np.concatenate(waiting.values),
        }
        patch = [(name, waiting.sizes[name], elements) for name, elements in additions.items() if len(elements)]
        sizes = {name: waiting.sizes[name] + len(elements) for name, elements in additions.items()}
        return patch, Waiting(sizes, len(self._ids))

    def _index_of(self, tag: str | None, name: str, origin: Callable[[str], Name]) -> int:
        full = name if tag is None else f"{tag}/{name}" if name else tag
        if not full.isascii():  # two surrogates may be one character when they are read
            full = json.loads(json.dumps(full))
        if full not in self._ids:
            self._names[full] = origin(name)._replace(name=full)
            self._ids[full] = len(self._ids)
        return self._ids[full]
