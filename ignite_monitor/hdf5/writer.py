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
from ignite_monitor.hdf5.layout import ROW, RUN, Contents, Name, one_line, opened, printable, ranges
from ignite_monitor.hdf5.runs import Position, Run

REMEMBERED = 64  # lists of names
KEPT_BYTES = 2**27  # of rows kept in memory at most while writing fails
ROW_BYTES, NAME_BYTES = 512, 256  # approximate size of a row and of a name in a list of names, without the values


@dataclass
class PendingRows:
    """Rows that are not in the file yet. One object, so that an interrupt leaves the state before or after a write."""

    sizes: dict[str, int]  # of the file's datasets
    names: int  # in the file
    runs: int = 0  # of this session in the file
    changed_runs: list[Run] = field(default_factory=list)
    ids: list[NDArray[np.int32]] = field(default_factory=list)
    rows: list[tuple[tuple[int, ...], NDArray[np.float64]]] = field(default_factory=list)  # fields of ROW, and values
    reports: list[str] = field(default_factory=list)  # JSON lines
    bytes: int = 0  # of memory, approximately


class Writer:
    """Writes rows to a file. Rows that can't be written are kept in memory, and written with the next ones."""

    def __init__(self, path: Path, mode: str, logger: logging.Logger) -> None:
        self.path = path
        self._logger = logger
        self._process = os.getpid()
        self._file: DoubleBuffer | None = DoubleBuffer(path, mode)
        with contextlib.ExitStack() as undo:
            undo.callback(self._release)
            with opened(path) as contents:
                sizes, names, runs = contents.sizes, contents.names, contents.runs
                self._run_of_name = _newest_runs(contents)
                self._ends = _ends(contents)
            undo.pop_all()
        self._first_run = len(runs)
        self._runs: list[Run] = []  # of this session
        self._names = {name.name: name for name in names}
        self._ids = {name: index for index, name in enumerate(self._names)}
        self._lists: dict[tuple[str | None, tuple[str, ...]], tuple[int, NDArray[np.int32]]] = {}  # names -> place, ids
        self._run_of_list: dict[tuple[int, bool], int] = {}  # place of a list, nested -> the last run that used it
        self._pending = PendingRows(sizes, len(names))
        self._lost: int | None = None  # values that no longer fitted in memory; None while writing works

    @property
    def is_own(self) -> bool:
        """True in the process that made it, and not in one that was forked."""
        return os.getpid() == self._process

    def begin_run(self, start: int, continues: int = -1, after: int = -1) -> Run:
        """Return a new run, with the fields of :class:`Run`."""
        run = Run(self._first_run + len(self._runs), start, start, continues=continues, after=after)
        self._runs.append(run)
        return run

    def add(
        self,
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
        pending, (run, iteration, nested) = self._pending, position
        if (tag, names) not in self._lists:
            if len(self._lists) >= REMEMBERED:
                self._lists.clear()
                self._run_of_list.clear()
            ids = np.array([self._index_of(tag, name, make_origin) for name in names], np.int32)
            place = pending.sizes["ids"] + sum(map(len, pending.ids))
            pending.ids.append(ids)  # first, or a list that an interrupt leaves out would have a place
            self._lists[tag, names] = place, ids
            pending.bytes += NAME_BYTES * len(ids)
        place, ids = self._lists[tag, names]
        if self._run_of_list.get((place, nested)) != run.number:
            self._find_continued(run, nested, ids.tolist(), step)
            self._run_of_list[place, nested] = run.number
        run.last_step = max(run.last_step, step)
        row = step, iteration, int(1000 * time.time()), run.number, nested, place, 0, len(values)
        pending.rows.append((row, values))
        pending.bytes += ROW_BYTES + values.nbytes

    def add_report(self, run: Run, iteration: int, *parts: Any) -> None:
        """Take a report: monitor, kind, severity, text, names."""
        if self._has_room(1):
            line = json.dumps([run.number, max(0, iteration), *parts]) + "\n"
            self._pending.reports.append(line)
            self._pending.bytes += ROW_BYTES + len(line)

    def flush(self) -> None:
        """Write what is pending."""
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
        rows["first_value"] = pending.sizes["values"] + np.cumsum(rows["count"]) - rows["count"]
        lines = "".join(json.dumps(self._names[name]) + "\n" for name in islice(self._ids, pending.names, None))
        runs = [*self._runs[pending.runs :], *pending.changed_runs]
        records = [(run.number, run.start, run.continues, run.after) for run in runs]
        additions: dict[str, NDArray[Any]] = {
            "names": np.frombuffer(lines.encode("ascii"), np.uint8),
            "ids": np.concatenate([np.empty(0, np.int32), *pending.ids]),
            "rows": rows,
            "values": np.concatenate([np.empty(0), *(values for _, values in pending.rows)]),
            "runs": np.array(records, RUN),
            "reports": np.frombuffer("".join(pending.reports).encode("ascii"), np.uint8),
        }
        patch = [(name, pending.sizes[name], elements) for name, elements in additions.items() if len(elements)]
        sizes = {name: pending.sizes[name] + len(elements) for name, elements in additions.items()}
        return patch, PendingRows(sizes, len(self._ids), len(self._runs))

    def _find_continued(self, run: Run, nested: bool, ids: list[int], step: int) -> None:
        """Find the run that a run continues: the newest earlier one with one of these names."""
        named = self._run_of_name[nested]
        older = max((number for index in ids if (number := named.get(index, -1)) < run.number), default=-1)
        if run.continues < 0 <= older:
            self._continue(run, older, step)
        named.update(dict.fromkeys(ids, run.number))

    def _continue(self, run: Run, older: int, step: int) -> None:
        if older < self._first_run:
            last, last_step = self._ends[older]
        else:
            former = self._runs[older - self._first_run]
            last, last_step = former.last, former.last_step
        if run.start:
            run.after = run.start
        elif step > last_step:  # the user's steps go on
            run.after = last
        elif older >= self._first_run:
            text = "a second training writes under the names of run %d: read_hdf5(path) returns the second, and "
            self._log(text + "read_hdf5(path, before_run=%d) the first; give each training a file", older, run.number)
        run.continues = older
        if run.number < self._first_run + self._pending.runs:
            self._pending.changed_runs.append(run)

    def _index_of(self, tag: str | None, name: str, make_origin: Callable[[str], Name]) -> int:
        full = name if tag is None else f"{tag}/{name}" if name else tag
        if not full.isascii():  # two surrogates may be one character when they are read
            full = json.loads(json.dumps(full))
        if full not in self._ids:
            self._names[full] = make_origin(name)._replace(name=full)
            self._ids[full] = len(self._ids)
        return self._ids[full]


def _newest_runs(contents: Contents) -> tuple[dict[int, int], dict[int, int]]:
    """Index of a name -> the newest run with it, for the run's engine and for engines that ran within it."""
    newest = np.full((2, len(contents.names)), -1)
    lists, places = np.unique(contents.rows[["first_id", "count", "nested"]], return_inverse=True)
    runs = np.zeros(len(lists), np.int64)
    np.maximum.at(runs, places, contents.rows["run"])
    ids = contents.ids[ranges(lists["first_id"], lists["count"])]
    np.maximum.at(newest, (np.repeat(lists["nested"], lists["count"]), ids), np.repeat(runs, lists["count"]))
    own, nested = ({index: run for index, run in enumerate(row) if run >= 0} for row in newest.tolist())
    return own, nested


def _ends(contents: Contents) -> list[tuple[int, int]]:
    """The last iteration and the largest step of every run."""
    rows, ends = contents.rows, np.full((2, len(contents.runs)), -1)
    for end, field_name in zip(ends, ("iteration", "step"), strict=True):
        np.maximum.at(end, rows["run"], rows[field_name])
    return [*zip(*ends.tolist(), strict=True)]
