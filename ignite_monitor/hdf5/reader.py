"""Reading what an HDF5Logger wrote."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.checks import check_pattern
from ignite_monitor.hdf5.layout import Contents, Name, opened

RETRIES = 50
BLOCK = 2**18  # values

Indices = NDArray[np.int64]


class Series(NamedTuple):
    """The values of one name and the steps they were written with, in the order of writing."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class Recording(dict[str, Series]):
    """Contents of a file: name -> (steps, values), in the order in which the names were first written.

    Args:
        series: name -> (steps, values).
        rows: name -> the rows of its values.
        monitors: name -> the monitor that published it.
    """

    def __init__(self, series: dict[str, Series], rows: dict[str, NDArray[Any]], monitors: dict[str, Name]) -> None:
        super().__init__(series)
        self._rows, self._monitors = rows, monitors

    def times(self, name: str) -> NDArray[np.datetime64]:
        """Return the times at which the values of a name were written, in UTC, to the millisecond."""
        return self._rows[name]["time"].astype("datetime64[ms]")

    def iterations(self, name: str) -> NDArray[np.int64]:
        """Return the iterations of a name's values; of an evaluator's values, those of the trainer."""
        return self._rows[name]["iteration"]

    def sessions(self, name: str) -> NDArray[np.int64]:
        """Return the number of the logger that wrote each value: 0 for the one that created the file."""
        return self._rows[name]["session"]

    def monitor(self, name: str) -> tuple[str, str]:
        """Return the kind of the monitor that published a name, and what precedes the monitor's key in it.

        The kind is ``"user"`` for any other name.
        """
        return self._monitors[name][1:]


def read_hdf5(path: str | os.PathLike[str], metrics: str | re.Pattern[str] | None = None) -> Recording:
    """Read a file that an :class:`~ignite_monitor.HDF5Logger` has written or is writing.

    Values that a resumed run has replaced are not returned.

    Args:
        path: the file.
        metrics: a regular expression; only values of names in which it is found are kept in memory.

    Returns:
        A mapping: name -> (steps, values), two NumPy arrays of int64 and float64.

    Raises:
        TypeError: if ``path`` is no path, or ``metrics`` no regular expression.
        FileNotFoundError: if the file does not exist.
        ValueError: if it is damaged, or was not written by HDF5Logger.
        BlockingIOError: if a program other than HDF5Logger is writing it.
        ModuleNotFoundError: if h5py is not installed.

    Examples:
        .. code-block:: python

            steps, norms = read_hdf5("run.h5")["grad/norm"]
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"Argument path should be of type str or os.PathLike, but given {type(path)}")
    pattern = check_pattern("metrics", metrics)
    path = Path(path)
    for _ in range(RETRIES):
        with contextlib.suppress(BlockingIOError):  # opened just before it became the standby copy
            return _read(path, pattern)
        time.sleep(0.01)
    return _read(path, pattern)


def _read(path: Path, pattern: re.Pattern[str] | None) -> Recording:
    with opened(path) as contents:
        wanted = np.array([pattern is None or pattern.search(name) is not None for name, _, _ in contents.names], bool)
        rows = contents.rows[_current(contents.rows, contents.ids)]
        rows_of: dict[str, NDArray[Any]] = {}
        places: list[Indices] = []
        for number, indices, offsets in _occurrences(rows, contents.ids, wanted):
            rows_of[contents.names[number].name] = rows[indices]
            places.append(rows["values"][indices] + offsets)
        values = _values(contents, places)
    series = {name: Series(own["step"], part) for (name, own), part in zip(rows_of.items(), values, strict=True)}
    return Recording(series, rows_of, {name.name: name for name in contents.names})


def _occurrences(
    rows: NDArray[Any], ids: NDArray[np.int32], wanted: NDArray[np.bool_]
) -> Iterator[tuple[int, Indices, Indices]]:
    """(index of a name, the rows that have it, its offset in each row), for the wanted names."""
    lists, first, which, uses = np.unique(rows["ids"], return_index=True, return_inverse=True, return_counts=True)
    lengths = rows["count"][first]
    of_list = np.repeat(np.arange(len(lists)), lengths)
    places = _ranges(lists, lengths)
    numbers, offsets = ids[places], places - lists[of_list]
    by_list, starts = np.argsort(which, kind="stable"), np.cumsum(uses) - uses
    order = np.argsort(numbers, kind="stable")
    order = order[wanted[numbers[order]]]
    for same in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1) if len(order) else ():
        indices = of_list[same]
        in_rows = by_list[_ranges(starts[indices], uses[indices])]
        in_time = np.argsort(in_rows, kind="stable")
        yield int(numbers[same[0]]), in_rows[in_time], np.repeat(offsets[same], uses[indices])[in_time]


def _ranges(starts: Indices, lengths: Indices) -> Indices:
    """The numbers of several ranges, one after another."""
    ends = np.cumsum(lengths)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - ends + lengths, lengths)


def _values(contents: Contents, places: list[Indices]) -> list[NDArray[np.float64]]:
    """Values at places; one block of all values is in memory at a time."""
    flat = np.concatenate([np.empty(0, np.int64), *places])
    order, out = np.argsort(flat), np.empty(len(flat))
    ends = np.searchsorted(flat, np.arange(0, contents.sizes["values"] + BLOCK, BLOCK), sorter=order)
    for block, (first, end) in enumerate(pairwise(ends)):
        if first < end:
            where = order[first:end]
            out[where] = contents.values[block * BLOCK : (block + 1) * BLOCK][flat[where] - block * BLOCK]
    return np.split(out, np.cumsum([len(at) for at in places])[:-1]) if places else []


class _Run(NamedTuple):
    rows: NDArray[np.int64]
    start: int
    session: int
    first_step: int
    last_step: int
    names: set[tuple[int, int]]  # (nested, index)


def _current(rows: NDArray[Any], ids: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Mask of the rows that no later run replaces.

    A run that resumes from iteration n replaces what earlier runs with one of its names recorded after n, back to the
    one that started from the beginning. Values of engines that ran within a run (an evaluator's) are compared with such
    values only, so that a later evaluation replaces nothing of a training run. A run from the beginning replaces the
    runs of earlier sessions whose steps it repeats, and nothing of its own session (another loader: steps are added).
    """
    kept = np.ones(len(rows), bool)
    numbers, which = np.unique(rows["run"], return_inverse=True)
    if len(numbers) < 2:
        return kept
    runs: list[_Run] = []
    for index in np.split(np.argsort(which, kind="stable"), np.cumsum(np.bincount(which))[:-1]):
        (start, session), steps = (int(rows[field][index[0]]) for field in ("start", "session")), rows["step"][index]
        run = _Run(index, start, session, int(steps.min()), int(steps.max()), _names(rows[index], ids))
        for old in reversed(runs):
            if run.start == 0:
                repeats = old.session < run.session and old.last_step >= run.first_step
                if repeats and not run.names.isdisjoint(old.names):
                    kept[old.rows] = False
            elif not run.names.isdisjoint(old.names):
                iterations = rows["iteration"][old.rows]
                kept[old.rows[iterations > run.start]] = False
                _drop_repeated(rows, ids, kept, old.rows[iterations == run.start], run)
                if old.start == 0:
                    break
        runs.append(run)
    return kept


def _names(rows: NDArray[Any], ids: NDArray[np.int32]) -> set[tuple[int, int]]:
    _, first = np.unique(2 * rows["ids"] + rows["nested"], return_index=True)
    return {(int(row["nested"]), name) for row in rows[first] for name in _names_of(row, ids).tolist()}


def _names_of(row: Any, ids: NDArray[np.int32]) -> NDArray[np.int32]:
    return ids[row["ids"] : row["ids"] + row["count"]]


def _drop_repeated(
    rows: NDArray[Any], ids: NDArray[np.int32], kept: NDArray[np.bool_], old: NDArray[np.int64], run: _Run
) -> None:
    """Drop rows that were written between two iterations, as at the start of an epoch, and are written again."""

    def content(row: Any) -> tuple[int, int, bytes]:
        return int(row["nested"]), int(row["step"]), _names_of(row, ids).tobytes()

    again = {content(row) for row in rows[run.rows[rows["iteration"][run.rows] == run.start]]} if len(old) else set()
    for index in old:
        if content(rows[index]) in again:
            kept[index] = False
