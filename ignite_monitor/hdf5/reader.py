"""Reading what an HDF5Logger wrote."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.hdf5.layout import Contents, Name, opened
from ignite_monitor.hdf5.superseded import current
from ignite_monitor.report.series import printable

RETRIES = 50
COMMON = 8
BLOCK = 2**18  # values

Indices = NDArray[np.int64]


class Series(NamedTuple):
    """The values of one name and the steps they were written with, in the order of writing."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class Recording(Mapping[str, Series]):
    """Contents of a file: name -> (steps, values), in the order in which the names were first written.

    Args:
        series: name -> (steps, values).
        rows: name -> the rows of its values.
        monitors: name -> the monitor that published it.
    """

    def __init__(
        self, series: dict[str, Series], rows: dict[str, NDArray[Any]], monitors: dict[str, Name] | None = None
    ) -> None:
        self._series, self._rows, self._monitors = series, rows, monitors or {}

    def __getitem__(self, name: str) -> Series:
        return self._series[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._series)

    def __len__(self) -> int:
        return len(self._series)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self)} names: {', '.join(list(self)[:5])}{', …' * (len(self) > 5)}>"

    def times(self, name: str) -> NDArray[np.datetime64]:
        """When the values of a name were written, in UTC, to the millisecond.

        Raises:
            KeyError: if the name is not in the file.
        """
        return self._rows[name]["time"].astype("datetime64[ms]")

    def iterations(self, name: str) -> NDArray[np.int64]:
        """Iterations in which the values of a name were written; of an evaluator's values, those of the trainer.

        Raises:
            KeyError: if the name is not in the file.
        """
        return self._rows[name]["iteration"]

    def sessions(self, name: str) -> NDArray[np.int64]:
        """Number of the logger that wrote each value: 0 for the one that created the file.

        Raises:
            KeyError: if the name is not in the file.
        """
        return self._rows[name]["session"]

    def monitor(self, name: str) -> tuple[str, str]:
        """Kind of the monitor that published a name, and what precedes the monitor's key in it (tag and prefix).

        The kind is ``"user"`` for any other name.

        Raises:
            KeyError: if the name is not in the file.
        """
        return self._monitors[name][1:]

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with the columns ``name`` (categorical), ``step``, ``value`` and ``time``.

        ``frame.pivot_table("value", "step", "name", observed=True)`` makes one column per name of it, with NaN where
        nothing was written.

        Raises:
            ModuleNotFoundError: if pandas is not installed.
        """
        try:
            import pandas
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "to_pandas needs pandas. Install it with: pip install pandas", name="pandas"
            ) from error
        series = self._series.values()
        codes = np.repeat(np.arange(len(self)), [len(steps) for steps, _ in series])
        columns = {
            "name": pandas.Categorical.from_codes(codes, categories=list(self)),
            "step": np.concatenate([np.empty(0, np.int64), *(steps for steps, _ in series)]),
            "value": np.concatenate([np.empty(0), *(values for _, values in series)]),
            "time": np.concatenate([np.empty(0, "datetime64[ms]"), *map(self.times, self)]),
        }
        return pandas.DataFrame(columns)


def read_hdf5(path: str | os.PathLike[str], metrics: str | re.Pattern[str] | None = None) -> Recording:
    """Read a file that an :class:`~ignite_monitor.HDF5Logger` has written or is writing.

    What a resumed run has replaced is not returned.

    Args:
        path: the file.
        metrics: a regular expression; only values of names in which it is found are kept in memory.

    Returns:
        A mapping: name -> (steps, values), two NumPy arrays of int64 and float64 with what was written and no more.
        ``to_pandas()`` returns a data frame.

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
    if metrics is not None and not isinstance(metrics, (str, re.Pattern)):
        raise TypeError(f"Argument metrics should be a regular expression, but given {type(metrics)}")
    try:
        pattern = re.compile(metrics or "")
    except re.error as error:
        raise ValueError(f"Argument metrics should be a regular expression, but given {metrics!r}: {error}") from None
    path = Path(path)
    try:
        for _ in range(RETRIES):
            try:
                return _read(path, pattern)
            except BlockingIOError:  # opened just before it became the standby copy
                time.sleep(0.01)
        return _read(path, pattern)
    except MemoryError:
        raise ValueError(f"{printable(str(path))} holds more than fits in memory") from None


def _read(path: Path, pattern: re.Pattern[str]) -> Recording:
    with opened(path) as contents:
        wanted = np.array([pattern.search(name) is not None for name, _, _ in contents.names], bool)
        rows = contents.rows[current(contents.rows, contents.ids, len(wanted))]
        parts: dict[int, list[tuple[Indices, Indices]]] = {}
        for number, of_rows, offsets in _occurrences(rows, contents.ids):
            if wanted[number]:
                parts.setdefault(number, []).append((of_rows, rows["values"][of_rows] + offsets))
        places: dict[int, Indices] = {}
        rows_of: dict[str, NDArray[Any]] = {}
        for number in sorted(parts):
            of_rows, at = (np.concatenate(part) for part in zip(*parts[number], strict=True))
            in_time = np.argsort(of_rows, kind="stable")
            rows_of[contents.names[number].name] = rows[of_rows[in_time]]
            places[number] = at[in_time]
        values = _values(contents, places, all_of_them=bool(wanted.all()))
    names = [contents.names[number] for number in places]
    series = {name: Series(rows_of[name]["step"], its) for (name, _, _), its in zip(names, values, strict=True)}
    return Recording(series, rows_of, {name.name: name for name in names})


def _values(contents: Contents, places: dict[int, Indices], all_of_them: bool) -> list[NDArray[np.float64]]:
    """Values at places, block by block where not all are read."""
    if all_of_them:
        values = contents.values[()]
        return [values[at] for at in places.values()]
    flat = np.concatenate([np.empty(0, np.int64), *places.values()])
    order, out = np.argsort(flat), np.empty(len(flat))
    ends = np.searchsorted(flat, np.arange(0, contents.sizes["values"] + BLOCK, BLOCK), sorter=order)
    for block, (first, end) in enumerate(pairwise(ends)):
        if first < end:
            where = order[first:end]
            out[where] = contents.values[block * BLOCK : (block + 1) * BLOCK][flat[where] - block * BLOCK]
    return np.split(out, np.cumsum([len(at) for at in places.values()])[:-1]) if places else []


def _occurrences(rows: NDArray[Any], ids: NDArray[np.int32]) -> Iterator[tuple[int, Indices, Indices]]:
    """(index of a name, the rows that have it, its offset in each row), possibly several times for a name."""
    if not len(rows):
        return
    lists, which, uses = np.unique(rows["ids"], return_inverse=True, return_counts=True)
    by_list = np.split(np.argsort(which, kind="stable"), np.cumsum(uses)[:-1])
    for start, of_rows in zip(lists.tolist(), by_list, strict=True):
        if len(of_rows) >= COMMON:
            for offset, number in enumerate(ids[start : start + rows["count"][of_rows[0]]].tolist()):
                yield number, of_rows, np.full(len(of_rows), offset)
    # Where every row has names of its own, sorting all values by name is faster than a loop over the lists.
    rare = np.flatnonzero(uses[which] < COMMON)
    if len(rare):
        counts = rows["count"][rare]
        of_values = np.repeat(rare, counts)
        offsets = np.arange(len(of_values)) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = ids[rows["ids"][of_values] + offsets]
        order = np.argsort(numbers, kind="stable")
        for same in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            yield int(numbers[same[0]]), of_values[same], offsets[same]
