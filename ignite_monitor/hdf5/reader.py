"""Reading what an HDF5Logger wrote."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.checks import check_pattern, check_type
from ignite_monitor.hdf5.layout import ENDLESS, SETTINGS, Name, RecordedReport, read

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
        settings: versions and torch's seed of each run, in the same form.
        restarts: iterations after which the trainer was run again from the beginning.
    """

    def __init__(
        self, rows: NDArray[np.void], parts: dict[Name, Part], reports: list[RecordedReport], restarts: Iterable[int]
    ) -> None:
        super().__init__({name.name: Series(rows["step"][which], values) for name, (which, values) in parts.items()})
        self._rows = rows
        self._which = {name.name: which for name, (which, _) in parts.items()}
        self._monitors = {name.name: (name.kind, name.root) for name in parts}
        self.reports = [it for it in reports if it.kind != SETTINGS]
        self.settings = [it for it in reports if it.kind == SETTINGS]
        self.restarts = sorted(restarts)

    def iterations(self, name: str) -> NDArray[np.int64]:
        """Return the iterations of a name's values; of an evaluator's values, those of the trainer.

        Where an engine was run again from the beginning, the iterations of its earlier runs are added.
        """
        return np.asarray(self._rows["iteration"][self._which[name]])

    def runs(self, name: str) -> NDArray[np.int64]:
        """Return the number of the run that each value belongs to."""
        return np.asarray(self._rows["run"][self._which[name]])

    def monitor(self, name: str) -> tuple[str, str]:
        """Return the kind of the monitor that published a name, and what precedes the monitor's key in it.

        The kind is ``"user"`` for any other name.
        """
        return self._monitors[name]


def read_hdf5(path: str | os.PathLike[str], metrics: str | re.Pattern[str] | None = None) -> Recording:
    """Read a file that an :class:`~ignite_monitor.HDF5Logger` has written or is writing.

    Values and reports that a later run has replaced are not returned: those after the iteration from which a run was
    resumed, all if it started from the beginning in a file that it continues.

    Args:
        path: the file.
        metrics: a regular expression; only names in which it is found are returned.

    Returns:
        A mapping: name -> (steps, values), two NumPy arrays of int64 and float64. Its list ``reports`` holds what
        monitors have reported, with the fields iteration, monitor, kind, severity, text, names and run.

    Raises:
        TypeError: if ``path`` is no path, or ``metrics`` no regular expression.
        FileNotFoundError: if the file does not exist.
        ValueError: if the file is damaged, has another version, or was not written by HDF5Logger.
        ModuleNotFoundError: if h5py is not installed.

    Examples:
        .. code-block:: python

            steps, norms = read_hdf5("run.h5")["grad/norm"]
    """
    check_type("path", path, (str, os.PathLike), "str or os.PathLike")
    pattern = check_pattern("metrics", metrics)
    contents = read(Path(path))
    rows, names = contents.rows, contents.names
    # For each run: the iteration after which it replaces earlier ones, and the last one that no later run replaces.
    after = np.array([*(run.after for run in contents.runs), ENDLESS], np.int64)
    limits = np.minimum.accumulate(after[:0:-1])[::-1]
    is_wanted = np.array([pattern is None or pattern.search(name.name) is not None for name in names], bool)
    is_kept = rows["iteration"] <= limits[rows["run"]]
    is_between = np.isin(rows["iteration"], after)
    which = np.repeat(np.arange(len(rows)), np.diff(rows["end"], prepend=0))  # row of each value
    numbers = contents.values["name"].astype(np.min_scalar_type(len(names)))  # NumPy sorts small ones in linear time
    use = np.flatnonzero(is_wanted[numbers] & is_kept[which])
    order = use[np.argsort(numbers[use], kind="stable")]
    ends = np.cumsum(np.bincount(numbers[use], minlength=len(names)))
    parts: dict[Name, Part] = {}
    for name, begin, end in zip(names, [0, *ends], ends, strict=False):
        if end > begin:
            part = order[begin:end]
            part = part[_newest(rows, which[part], is_between[which[part]])]
            parts[name] = which[part], contents.values["value"][part]
    reports = [it for it in contents.reports if it.iteration <= limits[it.run]]
    last_run = {it[:6]: it.run for it in reports}  # that has made it
    restarts = {run.offset for run in contents.runs} - {0}
    return Recording(rows, parts, [it for it in reports if last_run[it[:6]] == it.run], restarts)


def _newest(rows: NDArray[np.void], which: NDArray[np.intp], is_between: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mask of a name's values without those between two iterations that a later run has written again.

    Values at the start of an epoch, say, belong to the iteration after which a run resumes, and this run may write them
    again or not.
    """
    kept = np.ones(len(which), bool)
    newest: dict[tuple[int, int], int] = {}  # iteration and step -> the last run that has written there
    for index in np.flatnonzero(is_between)[::-1]:
        row = rows[which[index]]
        kept[index] = newest.setdefault((int(row["iteration"]), int(row["step"])), int(row["run"])) == row["run"]
    return kept
