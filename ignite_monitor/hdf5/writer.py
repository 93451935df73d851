"""Rows of named values, collected in memory and written together."""

from __future__ import annotations

import json
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.hdf5.double_buffer import Patch, SwappedFile
from ignite_monitor.hdf5.layout import EXACT, ROW, load, needs_float64, one_line
from ignite_monitor.hdf5.runs import EarlierRuns, Gap, Position, TakenBack
from ignite_monitor.report.series import printable

REMEMBERED = 64  # lists of names
WAITING_BYTES = 2**23  # after which what waits is written
KEPT_BYTES = 2**27  # how much waits at most, while writing fails
ROW_BYTES, NAME_BYTES = 512, 256  # what a row and a name in a list of names take about, besides the values


class NameList(NamedTuple):
    """The numbers of the names that a row's values have, and where they stand in the file."""

    ids: NDArray[np.int32]
    first: int


class Row(NamedTuple):
    """What one write brings."""

    step: int
    position: Position
    time: int
    names: NameList
    values: NDArray[np.float64]


@dataclass
class Waiting:
    """What is not in the file yet. One object, so that an interrupt finds it whole: either before or after a write."""

    sizes: dict[str, int]  # of the file's datasets
    names: int  # that the file holds
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    taken_back: list[TakenBack] = field(default_factory=list)
    bytes: int = 0  # of memory, about
    tried: int = 0  # bytes when writing last failed


@dataclass
class Trouble:
    """Writing fails, and so many values that no longer fitted in memory are lost, of these iterations."""

    lost: int = 0
    first: int = 2**63
    last: int = 0

    def lose(self, values: int, iteration: int) -> None:
        """Add values to those that are lost."""
        self.lost += values
        self.first, self.last = min(self.first, iteration), max(self.last, iteration)

    def __str__(self) -> str:
        lost = f"{self.lost} values of iterations {self.first} to {self.last} are lost"
        return lost if self.lost else "nothing is lost"


class Writer:
    """Writes rows to a file. Where that fails they wait, and it is tried again with the next ones.

    The logger is told when writing begins to fail, when it succeeds again, and what is lost.
    """

    def __init__(self, path: Path, mode: str, logger: logging.Logger) -> None:
        self.path = path
        self._logger = logger
        self._process = os.getpid()
        self._file: SwappedFile | None = SwappedFile(path, mode)
        try:
            contents = load(path, continued=True)
        except BaseException:
            self._abandon()
            raise
        rows = contents.rows[contents.rows["count"] > 0]
        self.first_run = int(rows["run"].max()) + 1 if len(rows) else 0
        self._earlier = EarlierRuns(rows, contents.ids, self.first_run) if len(rows) else None
        self._goes_back = False
        self._ids = {name: number for number, name in enumerate(contents.names)}
        self._lists: OrderedDict[tuple[str | None, tuple[str, ...]], NameList] = OrderedDict()
        self._waiting = Waiting(contents.sizes, len(contents.names))
        self._trouble: Trouble | None = None
        self._last = 0  # iteration of all runs

    @property
    def is_own(self) -> bool:
        """Whether it was made by this process, and not before it was forked off."""
        return os.getpid() == self._process

    @property
    def gap(self) -> Gap | None:
        """What is in neither the earlier runs nor the one that continues them."""
        return self._earlier.gap if self._earlier is not None else None

    @property
    def waits(self) -> bool:
        """Whether there is something to write."""
        return bool(self._waiting.rows)

    @property
    def is_full(self) -> bool:
        """Whether so much waits, or has come since writing failed, that it should be written."""
        return self._waiting.bytes - self._waiting.tried >= WAITING_BYTES

    def add(
        self, step: int, tag: str | None, names: tuple[str, ...], values: NDArray[np.float64], position: Position
    ) -> None:
        """Take a row, unless writing has failed for so long that memory is used up."""
        self._last = max(self._last, position.iteration)
        if self._trouble is not None and self._waiting.bytes >= KEPT_BYTES:
            self._trouble.lose(len(values), position.iteration)
            return
        if self._goes_back:
            with self._watched():
                self._compare_anew(position.run)
        named = self._list_of(tag, names)
        if self._earlier is not None:
            self._waiting.taken_back += self._earlier.taken_back(position, step, named.ids, named.first)
        self._waiting.rows.append(Row(step, position, int(1000 * time.time()), named, values))
        self._waiting.bytes += ROW_BYTES + values.nbytes

    def begin(self, start: int) -> None:
        """A run begins after an iteration; one that goes back behind others of this writer is compared with them."""
        self._goes_back |= 0 < start < self._last

    def flush(self) -> None:
        """Write the rows that wait."""
        if self._file is None or not self.waits or not self.is_own:
            return
        self._waiting.tried = self._waiting.bytes
        with self._watched():
            patch, after = self._patch()
            self._file.write(patch)
            self._waiting = after
            if self._trouble is not None:
                self._logger.warning("Writing to %s works again: %s", printable(str(self.path)), self._trouble)
                self._trouble = None

    def close(self) -> None:
        """Write what waits, and let go of the file."""
        try:
            self.flush()
            if self.is_own and self._trouble is not None:
                for row in self._waiting.rows:
                    self._trouble.lose(len(row.values), row.position.iteration)
                self._logger.warning("Writing to %s failed to the end: %s", printable(str(self.path)), self._trouble)
                self._trouble = None
        finally:
            self._abandon()

    def _abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None and self.is_own:
            file.close()
        self._waiting, self._ids, self._lists = Waiting({}, 0), {}, OrderedDict()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # noqa: BLE001 - whatever h5py and the system have against it, training goes on
            if self._trouble is None:
                self._trouble = Trouble()
                self._logger.warning(
                    "Can't write to %s: %s. What is logged waits in memory, and every flush tries again",
                    printable(str(self.path)),
                    one_line(error),
                )

    def _patch(self) -> tuple[Patch, Waiting]:
        """What to write, and what waits once it is written."""
        waiting = self._waiting
        after = Waiting(dict(waiting.sizes), len(self._ids))
        rows = self._table()
        patch = self._take_back(rows) if waiting.taken_back else []

        def append(name: str, elements: NDArray[Any]) -> None:
            if len(elements):
                patch.append((name, after.sizes[name], elements))
                after.sizes[name] += len(elements)

        lines = "".join(json.dumps(name) + "\n" for name in islice(self._ids, waiting.names, None))
        append("names", np.frombuffer(lines.encode("ascii"), np.uint8))
        append("ids", np.concatenate([np.empty(0, np.int32), *waiting.ids]))
        numbers = np.concatenate([row.values for row in waiting.rows])
        indices = np.flatnonzero(needs_float64(numbers))
        exact = np.zeros(len(indices), EXACT)
        exact["place"], exact["value"] = waiting.sizes["values"] + indices, numbers[indices]
        with np.errstate(over="ignore"):
            append("values", numbers.astype(np.float32))
        append("exact", exact)
        append("rows", rows)
        return patch, after

    def _table(self) -> NDArray[Any]:
        """The rows that wait, as they will stand in the file."""
        rows = np.zeros(len(self._waiting.rows), ROW)
        first = self._waiting.sizes["values"]
        for number, (step, position, moment, names, values) in enumerate(self._waiting.rows):
            rows[number] = (
                step, position.iteration, moment, position.run, position.nested, names.first, first, len(values)
            )  # fmt: skip
            first += len(values)
        return rows

    def _all_rows(self, waiting: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Rows and ids of the file, and after them those that wait."""
        # An interrupt may have come right after they were written.
        contents, sizes = load(self.path), self._waiting.sizes
        rows = np.concatenate([contents.rows[: sizes["rows"]], waiting])
        return rows, np.concatenate([contents.ids[: sizes["ids"]], *self._waiting.ids])

    def _take_back(self, waiting: NDArray[Any]) -> Patch:
        """Let the rows that are taken back have no values: those that wait at once, those of the file by a patch."""
        rows, ids = self._all_rows(waiting)
        gone = np.zeros(len(rows), bool)
        for taken_back in self._waiting.taken_back:
            gone |= taken_back.among(rows, ids)
        rows["count"][gone] = 0
        in_file = len(rows) - len(waiting)
        waiting[:] = rows[in_file:]
        indices = np.flatnonzero(gone[:in_file])
        return [("rows", int(indices[0]), rows[indices[0] : indices[-1] + 1])] if len(indices) else []

    def _compare_anew(self, run: int) -> None:
        rows, ids = self._all_rows(self._table())
        rows = rows[(rows["count"] > 0) & (rows["run"] < run)]
        self._earlier = EarlierRuns(rows, ids, self.first_run) if len(rows) else None
        self._goes_back = False

    def _list_of(self, tag: str | None, names: tuple[str, ...]) -> NameList:
        key = tag, names
        if key in self._lists:
            self._lists.move_to_end(key)
            return self._lists[key]
        full = names if tag is None else [f"{tag}/{name}" if name else tag for name in names]
        # A name is what is read back: two surrogates may be one character there.
        full = [name if name.isascii() else json.loads(json.dumps(name)) for name in full]
        ids = np.array([self._ids.setdefault(name, len(self._ids)) for name in full], np.int32)
        found = NameList(ids, self._waiting.sizes["ids"] + sum(map(len, self._waiting.ids)))
        self._waiting.ids.append(ids)
        self._waiting.bytes += NAME_BYTES * len(ids)
        self._lists[key] = found
        if len(self._lists) > REMEMBERED:
            self._lists.popitem(last=False)
        return found
