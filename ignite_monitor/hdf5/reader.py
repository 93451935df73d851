"""Reading what an HDF5Logger wrote."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.checks import check_pattern
from ignite_monitor.hdf5.layout import ENDLESS, SETTINGS, Contents, Name, RecordedReport, opened

Part = tuple[NDArray[np.intp], NDArray[np.float64]]
"""Numbers of rows, and the values of a name in these rows."""


class Series(NamedTuple):
    """The values of one name and the steps they were written with, in the order of writing."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class Recording(dict[str, Series]):
    """Contents of a file: name -> (steps, values), in the order in which the names were first written.

    Attributes:
        reports: what monitors reported, in the order of writing: iteration, monitor, kind, severity, text, names, run.
        settings: versions, torch's seed, and the arguments that each monitor was given, in the same form.
    """

    def __init__(self, rows: NDArray[np.void], parts: dict[Name, Part], reports: list[RecordedReport]) -> None:
        super().__init__({name.name: Series(rows["step"][which], values) for name, (which, values) in parts.items()})
        self._rows = rows
        self._which = {name.name: which for name, (which, _) in parts.items()}
        self._monitors = {name.name: (name.kind, name.root) for name in parts}
        self.reports = [it for it in reports if it.kind != SETTINGS]
        self.settings = [it for it in reports if it.kind == SETTINGS]

    def times(self, name: str) -> NDArray[np.datetime64]:
        """Return the times at which the values of a name were written, in UTC, to the millisecond."""
        return self._field("time", name).astype("datetime64[ms]")

    def iterations(self, name: str) -> NDArray[np.int64]:
        """Return the iterations of a name's values; of an evaluator's values, those of the trainer.

        Where an engine was run again from the beginning, the iterations of its earlier runs are added.
        """
        return self._field("iteration", name)

    def runs(self, name: str) -> NDArray[np.int64]:
        """Return the number of the run that each value belongs to."""
        return self._field("run", name)

    def monitor(self, name: str) -> tuple[str, str]:
        """Return the kind of the monitor that published a name, and what precedes the monitor's key in it.

        The kind is ``"user"`` for any other name.
        """
        return self._monitors[name]

    def _field(self, field: str, name: str) -> NDArray[np.int64]:
        values: NDArray[np.int64] = self._rows[field][self._which[name]]
        return values


def read_hdf5(path: str | os.PathLike[str], metrics: str | re.Pattern[str] | None = None) -> Recording:
    """Read a file that an :class:`~ignite_monitor.HDF5Logger` has written or is writing.

    Values and reports that a later run has replaced are not returned: those after the iteration from which a run was
    resumed, all if it started from the beginning in a file that it continues.

    Args:
        path: the file.
        metrics: a regular expression; only values of names in which it is found are kept in memory.

    Returns:
        A mapping: name -> (steps, values), two NumPy arrays of int64 and float64. Its list ``reports`` holds what
        monitors have reported, with the fields iteration, monitor, kind, severity, text, names and run.

    Raises:
        TypeError: if ``path`` is no path, or ``metrics`` no regular expression.
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is damaged, or was not written by HDF5Logger.
        BlockingIOError: if a program other than HDF5Logger is writing it.
        ModuleNotFoundError: if h5py is not installed.

    Examples:
        .. code-block:: python

            steps, norms = read_hdf5("run.h5")["grad/norm"]
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"Argument path should be of type str or os.PathLike, but given {type(path)}")
    pattern = check_pattern("metrics", metrics)
    with opened(Path(path)) as contents:
        return _read(contents, pattern)


def _read(contents: Contents, pattern: re.Pattern[str] | None) -> Recording:
    """Read the current values of the names in which a pattern is found.

    Values between two iterations, as at the start of an epoch, are replaced only if the later run has written them
    again.
    """
    rows = contents.rows
    # For each run: the iteration after which it replaces earlier ones, and the last one that no later run replaces.
    after = np.array([*(run.after for run in contents.runs), ENDLESS], np.int64)
    limits = np.minimum.accumulate(after[:0:-1])[::-1]
    run, iteration = rows["run"], rows["iteration"]
    is_kept = iteration <= limits[run]
    is_between = is_kept & ((iteration == limits[run]) | (iteration == after[run]))
    wanted = np.array([pattern is None or pattern.search(name.name) is not None for name in contents.names], bool)
    names, which, values = _values(contents, wanted, is_kept)
    order = np.argsort(names, kind="stable")
    ends = np.cumsum(np.bincount(names, minlength=len(wanted)))
    parts: dict[Name, Part] = {}
    for name, begin, end in zip(contents.names, [0, *ends], ends, strict=False):
        if end > begin:
            part = order[begin:end]
            part = part[_newest(rows, which[part], is_between[which[part]])]
            parts[name] = which[part], values[part]
    reports = [it for it in contents.reports if it.iteration <= limits[it.run]]
    last_run = {it[:6]: it.run for it in reports}  # that has made it
    return Recording(rows, parts, [it for it in reports if last_run[it[:6]] == it.run])


def _values(contents: Contents, wanted: NDArray[np.bool_], is_kept: NDArray[np.bool_]) -> tuple[NDArray[Any], ...]:
    """Numbers of the names and rows of all wanted values in kept rows, and the values, in time."""
    kind = np.min_scalar_type(len(wanted))  # NumPy sorts small integers in linear time
    parts = [(np.empty(0, kind), np.empty(0, np.intp), np.empty(0))]
    begin, ends = 0, contents.rows["end"]
    for block in contents.blocks("values"):
        first, last = np.searchsorted(ends, [begin, begin + len(block) - 1], side="right")
        counts = np.diff(np.minimum(ends[first : last + 1], begin + len(block)), prepend=begin)
        rows = np.repeat(np.arange(first, last + 1), counts)
        use = np.flatnonzero(wanted[block["name"]] & is_kept[rows])
        parts.append((block["name"][use].astype(kind), rows[use], block["value"][use]))
        begin += len(block)
    return tuple(np.concatenate(part) for part in zip(*parts, strict=True))


def _newest(rows: NDArray[np.void], which: NDArray[np.intp], is_between: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mask of a name's values without those between two iterations that a later run has written again."""
    kept = np.ones(len(which), bool)
    newest: dict[tuple[int, int], int] = {}  # iteration and step -> the last run that has written there
    for index in np.flatnonzero(is_between)[::-1]:
        row = rows[which[index]]
        kept[index] = newest.setdefault((int(row["iteration"]), int(row["step"])), int(row["run"])) == row["run"]
    return kept
