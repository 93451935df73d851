"""Rows of named values, collected in memory and written together."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.hdf5.clock import Position
from ignite_monitor.hdf5.double_buffer import DoubleBuffer, Patch
from ignite_monitor.hdf5.layout import ROW, Name, one_line, opened
from ignite_monitor.report.series import printable

REMEMBERED = 64  # lists of names
WAITING_BYTES = 2**23  # of rows in memory, after which they are written
KEPT_BYTES = 2**27  # of rows kept in memory at most while writing fails
ROW_BYTES, NAME_BYTES = 512, 256  # approximate size of a row and of a name in a list of names, without the values


class NameList(NamedTuple):
    """The indices of the names of a row's values, and their place in the file."""

    ids: NDArray[np.int32]
    first: int


class Row(NamedTuple):
    """One write."""

    step: int
    position: Position
    time: int
    names: NameList
    values: NDArray[np.float64]


@dataclass
class Waiting:
    """Rows that are not in the file yet. One object, so that an interrupt leaves the state before or after a write."""

    sizes: dict[str, int]  # of the file's datasets
    names: int  # in the file
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    bytes: int = 0  # of memory, approximately
    tried: int = 0  # bytes when writing last failed


@dataclass
class Failure:
    """Writing fails, and values of these iterations that no longer fitted in memory are lost."""

    lost: int = 0
    first: int = 2**63
    last: int = 0

    def lose(self, values: int, iteration: int) -> None:
        """Count values that are lost."""
        self.lost += values
        self.first, self.last = min(self.first, iteration), max(self.last, iteration)

    def __str__(self) -> str:
        lost = f"{self.lost} values of iterations {self.first} to {self.last} are lost"
        return lost if self.lost else "nothing is lost"


class Writer:
    """Writes rows to a file. Rows that can't be written are kept in memory, and written with the next ones.

    A log line says when writing begins to fail, when it succeeds again, and what is lost.
    """

    def __init__(self, path: Path, mode: str, logger: logging.Logger) -> None:
        self.path = path
        self._logger = logger
        self._process = os.getpid()
        self._file: DoubleBuffer | None = DoubleBuffer(path, mode)
        try:
            with opened(path, continued=True) as contents:
                sizes, names, rows = contents.sizes, contents.names, contents.rows
        except BaseException:
            self._abandon()
            raise
        self.first_run = int(rows["run"].max(initial=-1)) + 1
        self._session = int(rows["session"].max(initial=-1)) + 1
        self._names = {name.name: name for name in names}
        self._ids = {name: index for index, name in enumerate(self._names)}
        self._lists: OrderedDict[tuple[str | None, tuple[str, ...]], NameList] = OrderedDict()
        self._waiting = Waiting(sizes, len(names))
        self._failure: Failure | None = None

    @property
    def is_own(self) -> bool:
        """Whether this process made it, and not its parent before a fork."""
        return os.getpid() == self._process

    @property
    def has_rows(self) -> bool:
        """Whether rows wait to be written."""
        return bool(self._waiting.rows)

    @property
    def is_full(self) -> bool:
        """Whether so many rows wait, or have come since writing failed, that they should be written."""
        return self._waiting.bytes - self._waiting.tried >= WAITING_BYTES

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
            origin: called with a value's name, without the tag, where the name is new.
        """
        if self._failure is not None and self._waiting.bytes >= KEPT_BYTES:
            self._failure.lose(len(values), position.iteration)
            return
        name_list = self._list_of(tag, names, origin)
        self._waiting.rows.append(Row(step, position, int(1000 * time.time()), name_list, values))
        self._waiting.bytes += ROW_BYTES + values.nbytes

    def flush(self) -> None:
        """Write the rows that wait."""
        if self._file is None or not self.has_rows or not self.is_own:
            return
        self._waiting.tried = self._waiting.bytes
        with self._reported():
            patch, after = self._patch()
            self._file.write(patch)
            self._waiting = after
            if self._failure is not None:
                self._log("writing works again: %s", self._failure)
                self._failure = None

    def close(self) -> None:
        """Write the rows that wait, and release the file."""
        try:
            self.flush()
            if self.is_own and self._failure is not None:
                for row in self._waiting.rows:
                    self._failure.lose(len(row.values), row.position.iteration)
                self._log("writing failed to the end: %s", self._failure)
                self._failure = None
        finally:
            self._abandon()

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None and self.is_own:
            file.close()
        self._waiting, self._ids, self._names, self._lists = Waiting({}, 0), {}, {}, OrderedDict()

    def _log(self, text: str, *values: object) -> None:
        self._logger.warning(f"HDF5Logger (%s): {text}.", printable(str(self.path)), *values)

    @contextmanager
    def _reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - h5py and the system raise many types, and training continues
            if self._failure is None:
                self._failure = Failure()
                self._log(
                    "writing failed: %s; keeping the values in memory and retrying at every flush", one_line(error)
                )

    def _patch(self) -> tuple[Patch, Waiting]:
        """The patch to write, and the state once it is written."""
        waiting = self._waiting
        after = Waiting(dict(waiting.sizes), len(self._ids))
        patch: Patch = []

        def append(name: str, elements: NDArray[Any]) -> None:
            if len(elements):
                patch.append((name, after.sizes[name], elements))
                after.sizes[name] += len(elements)

        lines = "".join(json.dumps(self._names[name]) + "\n" for name in islice(self._ids, waiting.names, None))
        append("names", np.frombuffer(lines.encode("ascii"), np.uint8))
        append("ids", np.concatenate([np.empty(0, np.int32), *waiting.ids]))
        append("rows", self._table())
        append("values", np.concatenate([row.values for row in waiting.rows]))
        return patch, after

    def _table(self) -> NDArray[Any]:
        rows = np.zeros(len(self._waiting.rows), ROW)
        first = self._waiting.sizes["values"]
        for index, (step, position, moment, names, values) in enumerate(self._waiting.rows):
            run, start, iteration, nested = position
            rows[index] = (
                step, iteration, moment, self._session, run, start, nested, names.first, first, len(values)
            )  # fmt: skip
            first += len(values)
        return rows

    def _list_of(self, tag: str | None, names: tuple[str, ...], origin: Callable[[str], Name]) -> NameList:
        key = tag, names
        if key in self._lists:
            self._lists.move_to_end(key)
            return self._lists[key]
        ids = np.array([self._index_of(tag, name, origin) for name in names], np.int32)
        name_list = NameList(ids, self._waiting.sizes["ids"] + sum(map(len, self._waiting.ids)))
        self._waiting.ids.append(ids)
        self._waiting.bytes += NAME_BYTES * len(ids)
        self._lists[key] = name_list
        if len(self._lists) > REMEMBERED:
            self._lists.popitem(last=False)
        return name_list

    def _index_of(self, tag: str | None, name: str, origin: Callable[[str], Name]) -> int:
        full = name if tag is None else f"{tag}/{name}" if name else tag
        if not full.isascii():  # two surrogates may be one character when they are read
            full = json.loads(json.dumps(full))
        if full not in self._ids:
            self._names[full] = origin(name)._replace(name=full)
            self._ids[full] = len(self._ids)
        return self._ids[full]
