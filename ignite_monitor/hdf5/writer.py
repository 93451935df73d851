"""Rows of named values, collected in memory and written together."""

from __future__ import annotations

import json
import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.hdf5.layout import COLUMNS, EXACT, ROW, opened, read_names, read_rows
from ignite_monitor.hdf5.runs import EarlierRuns, Gap, Place, TakenBack
from ignite_monitor.hdf5.swap import Patch, SwappedFile
from ignite_monitor.hdf5.values import Numbers, needs_float64

REMEMBERED = 64  # lists of names
WAITING_VALUES = 2**20


class NameList(NamedTuple):
    """The numbers of the names that a row's values have, and where they stand in the file."""

    ids: NDArray[np.int32]
    first: int


class Row(NamedTuple):
    """What one write brings."""

    step: int
    place: Place
    time: int
    names: NameList
    values: Numbers


@dataclass
class Waiting:
    """What is not in the file yet. One object, so that an interrupt finds it whole: either before or after a write."""

    sizes: dict[str, int]  # of the file's datasets
    names: int  # that the file holds
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    taken_back: list[TakenBack] = field(default_factory=list)
    values: int = 0


class Writer:
    """Writes rows to a file.

    Args:
        mode: ``"x"``, ``"w"`` or ``"a"``.

    Raises:
        ValueError: if the file to be continued is damaged or not one of HDF5Logger's.
        OSError: if it can't be written.
    """

    def __init__(self, path: Path, mode: str) -> None:
        self.path = path
        self._process = os.getpid()
        self._file: SwappedFile | None = SwappedFile(path, mode)
        try:
            with opened(path) as file:
                rows, names, ids = read_rows(file), read_names(file), file["ids"][()]
                sizes = {name: len(file[name]) for name in COLUMNS}
        except BaseException:
            self.abandon()
            raise
        self.first_run = int(rows["run"].max()) + 1 if len(rows) else 0
        self._earlier = EarlierRuns(rows, ids, self.first_run) if len(rows) else None
        self._ids = {name: number for number, name in enumerate(names)}
        self._lists: OrderedDict[tuple[str | None, tuple[str, ...]], NameList] = OrderedDict()
        self._waiting = Waiting(sizes, len(names))
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

    def add(self, step: int, tag: str | None, names: tuple[str, ...], values: Numbers, place: Place) -> None:
        """Take a row, and write those that wait if there are many values in them.

        Args:
            values: one for each.
        """
        self._last = max(self._last, place.iteration)
        named = self._list_of(tag, names)
        if self._earlier is not None:
            self._waiting.taken_back += self._earlier.taken_back(place, step, named.ids, named.first)
        self._waiting.rows.append(Row(step, place, int(1000 * time.time()), named, values))
        self._waiting.values += len(values)
        if self._waiting.values >= WAITING_VALUES:
            self.flush()

    def begin(self, start: int) -> None:
        """A run begins: where it goes back behind others of this writer, it is compared with them as with any.

        Args:
            start: the iteration that it begins after.

        Raises:
            OSError: if what waits can't be written.
        """
        if 0 < start < self._last:
            self.flush()
            with opened(self.path) as file:
                self._earlier = EarlierRuns(read_rows(file), file["ids"][()], self.first_run)

    def flush(self) -> None:
        """Write the rows that wait.

        Raises:
            OSError: if that fails.
        """
        if self._file is not None and self.waits and self.is_own:
            patch, after = self._patch()
            self._file.write(patch)
            self._waiting = after

    def close(self) -> None:
        """Write what waits, and let go of the file."""
        try:
            self.flush()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the file and of what waits."""
        file, self._file = self._file, None
        if file is not None and self.is_own:
            file.close()
        self._waiting, self._ids, self._lists = Waiting({}, 0), {}, OrderedDict()

    def _patch(self) -> tuple[Patch, Waiting]:
        """What to write, and what waits once it is written."""
        waiting = self._waiting
        after = Waiting(dict(waiting.sizes), len(self._ids))
        patch = self._emptied(waiting) if waiting.taken_back else []

        def append(name: str, elements: NDArray[Any]) -> None:
            if len(elements):
                patch.append((name, after.sizes[name], elements))
                after.sizes[name] += len(elements)

        lines = "".join(json.dumps(name) + "\n" for name in islice(self._ids, waiting.names, None))
        append("names", np.frombuffer(lines.encode("ascii"), np.uint8))
        append("ids", np.concatenate([np.empty(0, np.int32), *waiting.ids]))
        rows = np.zeros(len(waiting.rows), ROW)
        first = waiting.sizes["values"]
        for number, (step, place, moment, names, values) in enumerate(waiting.rows):
            rows[number] = (
                step, place.iteration, moment, place.run, place.nested, names.first, first, len(values)
            )  # fmt: skip
            first += len(values)
        numbers = np.concatenate([row.values for row in waiting.rows])
        places = np.flatnonzero(needs_float64(numbers))
        exact = np.zeros(len(places), EXACT)
        exact["place"], exact["value"] = waiting.sizes["values"] + places, numbers[places]
        with np.errstate(over="ignore"):
            append("values", numbers.astype(np.float32))
        append("exact", exact)
        append("rows", rows)
        return patch, after

    def _emptied(self, waiting: Waiting) -> Patch:
        with opened(self.path) as file:
            rows, ids = file["rows"][()], file["ids"][()]
        gone = np.zeros(len(rows), bool)
        for taken_back in waiting.taken_back:
            gone |= taken_back.among(rows, ids)
        places = np.flatnonzero(gone)
        rows["count"][places] = 0
        return [("rows", int(places[0]), rows[places[0] : places[-1] + 1])] if len(places) else []

    def _list_of(self, tag: str | None, names: tuple[str, ...]) -> NameList:
        key = tag, names
        if key in self._lists:
            self._lists.move_to_end(key)
            return self._lists[key]
        full = names if tag is None else [f"{tag}/{name}" if name else tag for name in names]
        ids = np.array([self._ids.setdefault(name, len(self._ids)) for name in full], np.int32)
        found = NameList(ids, self._waiting.sizes["ids"] + sum(map(len, self._waiting.ids)))
        self._waiting.ids.append(ids)
        self._lists[key] = found
        if len(self._lists) > REMEMBERED:
            self._lists.popitem(last=False)
        return found
