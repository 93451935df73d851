"""Reading what an HDF5Logger wrote."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.hdf5.layout import Contents, load
from ignite_monitor.report.series import printable

RETRIES = 50
COMMON = 8

Indices = NDArray[np.int64]


class Series(NamedTuple):
    """The values of one name and the steps they were written with, in the order of writing."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


class Recording(Mapping[str, Series]):
    """What a file holds: name -> (steps, values), in the order in which the names appeared.

    Args:
        series: name -> (steps, values).
    """

    def __init__(self, series: dict[str, Series], times: dict[str, NDArray[np.datetime64]]) -> None:
        self._series, self._times = series, times

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
            KeyError: if there is none such.
        """
        return self._times[name]

    def to_pandas(self) -> Any:
        """A ``pandas.DataFrame`` with the columns ``name`` (categorical), ``step``, ``value`` and ``time``.

        One column per name is made of it by ``frame.pivot_table("value", "step", "name", observed=True)``, which puts
        NaN where nothing was written.

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
        codes = np.repeat(np.arange(len(self)), [len(each.steps) for each in series])
        columns = {
            "name": pandas.Categorical.from_codes(codes, categories=list(self)),
            "step": np.concatenate([np.empty(0, np.int64), *(each.steps for each in series)]),
            "value": np.concatenate([np.empty(0), *(each.values for each in series)]),
            "time": np.concatenate([np.empty(0, "datetime64[ms]"), *self._times.values()]),
        }
        return pandas.DataFrame(columns)


def read_hdf5(path: str | os.PathLike[str], metrics: str | re.Pattern[str] | None = None) -> Recording:
    """Read a file that an :class:`~ignite_monitor.HDF5Logger` has written or is writing.

    Args:
        path: the file.
        metrics: a regular expression; only names in which it is found are read.

    Returns:
        A mapping: name -> (steps, values), two NumPy arrays of int64 and float64 with what was written and no more.
        ``to_pandas()`` makes a data frame of it.

    Raises:
        TypeError: if ``path`` is no path, or ``metrics`` no regular expression.
        FileNotFoundError: if the file is not there.
        ValueError: if it is damaged, or not one of HDF5Logger's.
        BlockingIOError: if another program than an HDF5Logger is writing it.
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
        return _recording(_load(path), pattern)
    except MemoryError:
        raise ValueError(f"{printable(str(path))} holds more than fits in memory") from None


def _load(path: Path) -> Contents:
    for _ in range(RETRIES):
        try:
            return load(path, values=True)
        except BlockingIOError:  # opened just before it became the shadow
            time.sleep(0.01)
    return load(path, values=True)


def _recording(contents: Contents, pattern: re.Pattern[str]) -> Recording:
    rows = contents.rows[contents.rows["count"] > 0]
    wanted = [pattern.search(name) is not None for name in contents.names]
    parts: dict[int, list[tuple[Indices, Indices]]] = {}
    for number, of_rows, offsets in _occurrences(rows, contents.ids):
        if wanted[number]:
            parts.setdefault(number, []).append((of_rows, offsets))
    series: dict[str, Series] = {}
    times: dict[str, NDArray[np.datetime64]] = {}
    for number in sorted(parts):
        of_rows, offsets = (np.concatenate(part) for part in zip(*parts[number], strict=True))
        in_time = np.argsort(of_rows, kind="stable")
        of_rows, name = of_rows[in_time], contents.names[number]
        series[name] = Series(rows["step"][of_rows], contents.values[rows["values"][of_rows] + offsets[in_time]])
        times[name] = rows["time"][of_rows].astype("datetime64[ms]")
    return Recording(series, times)


def _occurrences(rows: NDArray[Any], ids: NDArray[np.int32]) -> Iterator[tuple[int, Indices, Indices]]:
    """(number of a name, the rows that have it, its offset in each of them), several times for a name."""
    if not len(rows):
        return
    lists, which, uses = np.unique(rows[["ids", "count"]], return_inverse=True, return_counts=True)
    by_list = np.split(np.argsort(which, kind="stable"), np.cumsum(uses)[:-1])
    for (start, count), of_rows in zip(lists.tolist(), by_list, strict=True):
        if len(of_rows) >= COMMON:
            for offset, number in enumerate(ids[start : start + count].tolist()):
                yield number, of_rows, np.full(len(of_rows), offset)
    # Where every row has names of its own, a look at each list would take longer than sorting all values by name.
    rare = np.flatnonzero(uses[which] < COMMON)
    if len(rare):
        counts = rows["count"][rare]
        of_values = np.repeat(rare, counts)
        offsets = np.arange(len(of_values)) - np.repeat(np.cumsum(counts) - counts, counts)
        numbers = ids[rows["ids"][of_values] + offsets]
        order = np.argsort(numbers, kind="stable")
        for same in np.split(order, np.flatnonzero(np.diff(numbers[order])) + 1):
            yield int(numbers[same[0]]), of_values[same], offsets[same]
