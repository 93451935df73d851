"""Reading what an HDF5Logger wrote."""

from __future__ import annotations

import contextlib
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.checks import check_count, check_pattern
from ignite_monitor.hdf5.layout import SETTINGS, Contents, Name, RecordedReport, opened, printable, ranges

RETRIES = 50
BLOCK = 2**17  # values
ENDLESS = 2**63 - 1  # iterations


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

    def __init__(
        self,
        series: dict[str, Series],
        rows: dict[str, _Rows],
        monitors: dict[str, Name],
        reports: list[RecordedReport],
        times: NDArray[np.int64],
    ) -> None:
        super().__init__(series)
        self._rows, self._monitors, self._times = rows, monitors, times
        self.reports = [it for it in reports if it.kind != SETTINGS]
        self.settings = [it for it in reports if it.kind == SETTINGS]

    def _add_rank(self, rank: str, other: Recording) -> None:
        """Add what another rank has recorded in the same time and this one has not, under names of its own."""
        if len(self._times) and len(other._times) and other._times.max() < self._times.min():
            return  # left by an earlier training
        for name, series in other.items():
            if name in self and all(map(partial(np.array_equal, equal_nan=True), self[name], series)):
                continue
            kind, root = other.monitor(name)
            root = root if kind == "user" else f"{rank}/{root}".removesuffix("/")
            full = f"{rank}/{name}"
            self[full], self._rows[full], self._monitors[full] = series, other._rows[name], Name(full, kind, root)
        known = {it[:-1] for it in self.reports}  # a rank may have a number of runs of its own
        new = [it for it in other.reports if it[:-1] not in known]
        self.reports += [it._replace(monitor=f"{it.monitor} on {rank}") for it in new]

    def times(self, name: str) -> NDArray[np.datetime64]:
        """Return the times at which the values of a name were written, in UTC, to the millisecond."""
        return self._rows[name].field("time").astype("datetime64[ms]")

    def iterations(self, name: str) -> NDArray[np.int64]:
        """Return the iterations of a name's values; of an evaluator's values, those of the trainer.

        Where an engine was run again from the beginning, the iterations of its earlier runs are added.
        """
        return self._rows[name].field("iteration")

    def runs(self, name: str) -> NDArray[np.int64]:
        """Return the number of the run that each value belongs to."""
        return self._rows[name].field("run")

    def monitor(self, name: str) -> tuple[str, str]:
        """Return the kind of the monitor that published a name, and what precedes the monitor's key in it.

        The kind is ``"user"`` for any other name.
        """
        return self._monitors[name][1:]


class _Rows(NamedTuple):
    """The rows of a name's values."""

    rows: dict[str, NDArray[np.int64]]  # fields of all rows
    which: NDArray[np.intp]

    def field(self, name: str) -> NDArray[np.int64]:
        return self.rows[name][self.which]


def read_hdf5(
    path: str | os.PathLike[str], metrics: str | re.Pattern[str] | None = None, *, before_run: int | None = None
) -> Recording:
    """Read a file that an :class:`~ignite_monitor.HDF5Logger` has written or is writing.

    Values and reports that a later run has replaced are not returned: those after the iteration from which a run was
    resumed, all if it started from the beginning in a file that it continues. What other ranks have recorded
    (``HDF5Logger(ranks="all")``) and rank 0 has not is returned as well, under ``rank1/grad/norm``.

    Args:
        path: the file.
        metrics: a regular expression; only values of names in which it is found are kept in memory.
        before_run: number of a run; read what the file held before this run, without the files of other ranks, whose
            runs have numbers of their own. None for everything.

    Returns:
        A mapping: name -> (steps, values), two NumPy arrays of int64 and float64. Its list ``reports`` holds what
        monitors have reported, with the fields iteration, monitor, kind, severity, text, names and run.

    Raises:
        TypeError: if ``path`` is no path, ``metrics`` no regular expression, or ``before_run`` no integer.
        FileNotFoundError: if the file does not exist.
        ValueError: if ``before_run`` is negative, or the file is damaged, or was not written by HDF5Logger.
        BlockingIOError: if a program other than HDF5Logger is writing it.
        ModuleNotFoundError: if h5py is not installed.

    Examples:
        .. code-block:: python

            steps, norms = read_hdf5("run.h5")["grad/norm"]
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"Argument path should be of type str or os.PathLike, but given {type(path)}")
    pattern = check_pattern("metrics", metrics)
    if before_run is not None:
        check_count("before_run", before_run, least=0)
    path = Path(os.path.realpath(path))
    recording = _read_again(path, pattern, before_run)
    for rank, other in _files_of_other_ranks(path) if before_run is None else ():
        recording._add_rank(f"rank{rank}", _read_again(other, pattern, start=f"rank{rank}/"))
    return recording


def _files_of_other_ranks(path: Path) -> list[tuple[int, Path]]:
    names = re.compile(rf"{re.escape(path.stem)}\.rank([1-9]\d*){re.escape(path.suffix)}", re.ASCII)
    return sorted((int(match[1]), it) for it in path.parent.iterdir() if (match := names.fullmatch(it.name)))


def _read_again(
    path: Path, pattern: re.Pattern[str] | None, before_run: int | None = None, start: str = ""
) -> Recording:
    for _ in range(RETRIES):
        with contextlib.suppress(BlockingIOError):  # opened just before it became the standby copy
            return _read(path, pattern, before_run, start)
        time.sleep(0.01)
    raise BlockingIOError(f"{printable(str(path))} is being written by a program other than HDF5Logger")


def _read(path: Path, pattern: re.Pattern[str] | None, before_run: int | None, start: str) -> Recording:
    """Read the values of names in which a pattern is found when ``start`` precedes them."""
    with opened(path) as contents:
        rows, runs = contents.rows, contents.runs[:before_run]
        names = [start + name.name for name in contents.names]
        wanted = np.array([pattern is None or pattern.search(name) is not None for name in names], bool)
        parts_by_name = _values(contents, wanted, _current(rows, contents.ids, runs))
        reports = _current_reports(contents.reports, _limits(runs))
    fields = {name: np.ascontiguousarray(rows[name]) for name in ("step", "iteration", "time", "run")}
    series, rows_by_name = {}, {}
    for (name, _, _), parts in zip(contents.names, parts_by_name, strict=True):
        if parts:
            which, values = (np.concatenate(part) for part in zip(*parts, strict=True))
            rows_by_name[name] = named_rows = _Rows(fields, which)
            series[name] = Series(named_rows.field("step"), values)
    return Recording(series, rows_by_name, {name.name: name for name in contents.names}, reports, fields["time"])


def _values(
    contents: Contents, wanted: NDArray[np.bool_], kept: NDArray[np.bool_]
) -> list[list[tuple[NDArray[np.intp], NDArray[np.float64]]]]:
    """Per name, (rows, values) of all wanted values in current rows, in time, one pair for each block of rows.

    The values of one block are in memory at a time.
    """
    rows = contents.rows
    parts_by_name: list[list[tuple[NDArray[np.intp], NDArray[np.float64]]]] = [[] for _ in wanted]
    kind = np.min_scalar_type(len(wanted))  # NumPy sorts small integers in linear time
    ends = np.cumsum(rows["count"])
    begin = 0
    while begin < len(rows):
        done = ends[begin - 1] if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + BLOCK, side="right")))
        block = rows[begin:end]
        numbers = contents.ids[ranges(block["first_id"], block["count"])].astype(kind)
        use = np.flatnonzero(wanted[numbers] & np.repeat(kept[begin:end], block["count"]))
        if len(use):
            use = use[np.argsort(numbers[use], kind="stable")]
            which = np.repeat(np.arange(begin, end), block["count"])[use]
            values = contents.values[done : ends[end - 1]][use]
            counts = np.bincount(numbers[use], minlength=len(wanted))
            last = np.cumsum(counts)
            for number in np.flatnonzero(counts).tolist():
                part = slice(last[number] - counts[number], last[number])
                parts_by_name[number].append((which[part], values[part]))
        begin = end
    return parts_by_name


def _limits(runs: NDArray[Any]) -> NDArray[np.int64]:
    """Return the last iteration of each run that no later run replaces."""
    limits: NDArray[np.int64] = np.minimum.accumulate(np.append(runs["after"], ENDLESS)[::-1])[-2::-1]
    return limits


def _current(rows: NDArray[Any], ids: NDArray[np.int32], runs: NDArray[Any]) -> NDArray[np.bool_]:
    """Mask of the rows that no later run replaces.

    Rows between two iterations, as at the start of an epoch, are replaced only if the later run has written them again.
    """
    # One run more, for rows of the runs that are left out.
    limits, after = np.append(_limits(runs), -2), np.append(runs["after"], -2)
    run, iteration = np.minimum(rows["run"], len(runs)), rows["iteration"]
    kept: NDArray[np.bool_] = iteration <= limits[run]
    again: dict[tuple[Any, ...], int] = {}  # content of a row -> the newest run that has it
    for index in np.flatnonzero(kept & ((iteration == limits[run]) | (iteration == after[run])))[::-1]:
        row = rows[index]
        names = ids[row["first_id"] :][: row["count"]].tobytes()
        content = int(row["iteration"]), int(row["step"]), names
        kept[index] = again.setdefault(content, int(row["run"])) == row["run"]
    return kept


def _current_reports(reports: list[RecordedReport], limits: NDArray[np.int64]) -> list[RecordedReport]:
    """The reports that no later run replaces, nor has made again."""
    kept = [it for it in reports if it.run < len(limits) and it.iteration <= limits[it.run]]
    newest = {it[:6]: it.run for it in kept}
    return [it for it in kept if newest[it[:6]] == it.run]
