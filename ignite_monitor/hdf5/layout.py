"""Layout of the file, and the checks that make files from untrusted sources safe to read.

=========== ==================================================================================================
``names``   one JSON line per name: ``[name, kind, root]``. ``kind`` is the schema kind of the monitor that publishes
            the name, ``"user"`` for any other name; the monitor's key is what follows ``root/`` in the name
``ids``     indices of names; a list of indices is stored once, however many rows use it
``values``  float64
``rows``    one row per write: ``count`` values from ``values[first_value]`` on, with names ``ids[first_id:]``;
            ``step``; ``time`` in milliseconds since 1970; the number of the ``run``; ``iteration`` of its engine;
            ``nested``, 1 where the values belong to another engine
``runs``    ``run``, numbers from 0 on; ``start``, the iteration after which the run starts; ``continues``, the run that
            it continues, ``after`` that run's iteration of this number. -1 and -1 where it continues none; ``after`` is
            -1 where it replaces the whole run. The last record of a run counts
``reports`` one JSON line per report of a monitor: ``[run, iteration, monitor, kind, severity, text, names]``
=========== ==================================================================================================

All datasets are chunked, compressed with deflate and checksummed. Nothing that is written is ever changed: rows and
reports that a later run replaces are dropped by the reader (:mod:`ignite_monitor.hdf5.reader`).

HDF5 files can refer to other files, compute data by filters from plugins, and claim any size. Links, layouts, filters
and sizes are therefore checked before data is read, and the data before anything is computed from it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORMAT, VERSION = "ignite_monitor", 4
DEFLATE_RATIO = 1032  # the largest that deflate reaches
LARGEST = 2**62  # number of a run or iteration
SEVERITIES = ("problem", "warning", "note")
SETTINGS = "run_settings"
"""Kind of the reports that hold the settings of a run: versions, seed, arguments of monitors."""

ROW = np.dtype(
    [(field, "<i8") for field in ("step", "iteration", "time", "run", "nested", "first_id", "first_value", "count")]
)
RUN = np.dtype([(field, "<i8") for field in ("run", "start", "continues", "after")])

COLUMNS: dict[str, tuple[np.dtype[Any], int]] = {
    "names": (np.dtype("u1"), 4096),
    "ids": (np.dtype("<i4"), 4096),
    "values": (np.dtype("<f8"), 8192),
    "rows": (ROW, 512),
    "runs": (RUN, 64),
    "reports": (np.dtype("u1"), 4096),
}
"""One-dimensional datasets: the type of their elements, and the number of elements per chunk."""


class Name(NamedTuple):
    """A name, the schema kind of the monitor that publishes it, and what precedes the monitor's key in it."""

    name: str
    kind: str = "user"
    root: str = ""


class RecordedReport(NamedTuple):
    """A line that a monitor has reported.

    Attributes:
        iteration: its iteration; 0 before the first one.
        monitor: class and prefix of the monitor.
        kind: identifier of what is reported.
        severity: ``"problem"``, ``"warning"`` or ``"note"``.
        text: the line.
        names: parameters, modules or groups that it speaks of.
        run: number of the run in the file.
    """

    iteration: int
    monitor: str
    kind: str
    severity: str
    text: str
    names: tuple[str, ...]
    run: int


def import_h5py() -> ModuleType:
    """Import ``h5py``, an optional dependency.

    Raises:
        ModuleNotFoundError: if it is not installed.
    """
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "HDF5 files need h5py. Install it with: pip install 'ignite-monitor[hdf5]'", name="h5py"
        ) from error
    return h5py  # type: ignore[no-any-return, unused-ignore]


def path_of_rank(path: Path, rank: int) -> Path:
    """Return the file of a rank, from that of rank 0: ``run.rank1.h5`` beside ``run.h5``."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path


def create(path: Path) -> None:
    """Write a file without rows, replacing an existing one."""
    # Without a persistent list of free space, a chunk that grows leaves its old place empty for good: files of small
    # rows take 40 times as much. The format of HDF5 1.10 has checksums for all but the data.
    options = {"libver": ("v110", "v110"), "fs_strategy": "fsm", "fs_persist": True, "fs_threshold": 1}
    with import_h5py().File(path, "w", locking=False, **options) as file:
        file.attrs.update(format=FORMAT, version=VERSION)
        for name, (dtype, chunk) in COLUMNS.items():
            file.create_dataset(
                name, (0,), dtype, maxshape=(None,), chunks=(chunk,), shuffle=True, compression=1, fletcher32=True
            )


def ranges(starts: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """Return the numbers of several ranges, one after another."""
    ends = np.cumsum(lengths)
    numbers: NDArray[np.int64] = np.repeat(starts - ends + lengths, lengths)
    return numbers + np.arange(len(numbers))


def printable(name: str) -> str:
    """Escape control characters, so that a name is safe to print to a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def one_line(error: BaseException) -> str:
    """Text of an error in one line that is safe to print to a terminal."""
    return printable(" ".join(str(error).split())) or type(error).__name__


class Contents(NamedTuple):
    """Checked contents of a file; ``values`` is the dataset. All texts but names are safe to print."""

    sizes: dict[str, int]  # of the datasets
    names: list[Name]
    ids: NDArray[np.int32]
    rows: NDArray[Any]
    runs: NDArray[Any]  # by number
    reports: list[RecordedReport]
    values: Any


@contextmanager
def opened(path: Path) -> Iterator[Contents]:
    """Open a file for reading.

    Raises:
        ValueError: if it is damaged, has another layout, or holds more than fits in memory.
        BlockingIOError: if it is being written; only possible between a reader's opening and its lock.
    """
    h5py = import_h5py()
    check_regular(path)
    path.open("rb").close()  # the system's errors are clearer than h5py's
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            _check_attributes(h5py, file)
            file_size = file.id.get_filesize()
            sizes = {name: _check_dataset(h5py, file, name, file_size) for name in COLUMNS}
            rows, ids, names = file["rows"][()], file["ids"][()], _names(file["names"][()].tobytes())
            runs = _runs(file["runs"][()])
            _check_rows(rows, len(runs), sizes)
            _check(_within(ids, len(names)), "ids refers to names that do not exist")
            reports = [_report(entry, len(runs)) for entry in _json_lines("reports", file["reports"][()].tobytes())]
            yield Contents(sizes, names, ids, rows, runs, reports, file["values"])
    except BlockingIOError:
        raise
    except MemoryError:
        raise ValueError(f"{printable(str(path))} holds more than fits in memory") from None
    except Exception as error:  # the type that h5py raises depends on where a file is damaged
        shown = printable(str(path))
        raise ValueError(f"{shown} is damaged, or was not written by HDF5Logger: {one_line(error)}") from error


def check_regular(path: Path) -> None:
    """Refuse a directory, device or pipe with a ValueError: opening a pipe would block."""
    if os.path.lexists(path) and not path.is_file():
        raise ValueError(f"{printable(str(path))} is no regular file")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_attributes(h5py: Any, file: Any) -> None:
    text, number = (file.attrs.get_id(name) for name in ("format", "version"))
    # The text itself is in a heap without a checksum, in which HDF5 can loop for ever if it is damaged: it is not read.
    string = h5py.check_string_dtype(text.dtype)
    _check(string is not None and string.length is None and text.shape == (), "it has another format")
    version = file.attrs["version"] if number.dtype.kind in "iu" and number.shape == () else None
    _check(version == VERSION, f"it is of version {version}, and this release of ignite_monitor reads {VERSION}")
    _check(len(file) == len(COLUMNS) and set(file) == set(COLUMNS), f"it should hold {', '.join(COLUMNS)} only")


def _check_dataset(h5py: Any, file: Any, name: str, file_size: int) -> int:
    """Number of elements of a dataset, all of which are stored in the file itself."""
    dtype, chunk = COLUMNS[name]
    is_dataset = isinstance(file.get(name, getlink=True), h5py.HardLink) and isinstance(file[name], h5py.Dataset)
    _check(is_dataset, f"{name} is no dataset")
    dataset = file[name]
    properties, h5z = dataset.id.get_create_plist(), h5py.h5z
    filters = {properties.get_filter(number)[0] for number in range(properties.get_nfilters())}
    _check(
        properties.get_layout() == h5py.h5d.CHUNKED
        and (dataset.chunks, dataset.maxshape) == ((chunk,), (None,))
        and dataset.id.get_type() == h5py.h5t.py_create(dtype, logical=True)
        and filters <= {h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE, h5z.FILTER_FLETCHER32},
        f"{name} has another layout than HDF5Logger's",
    )
    size = len(dataset)
    possible = size * dtype.itemsize <= DEFLATE_RATIO * file_size
    _check(possible, f"{name} has {size} elements, which a file of {file_size} bytes can't hold")
    # HDF5 would fill missing chunks with zeros.
    _check(dataset.id.get_num_chunks() == math.ceil(size / chunk), f"parts of {name} are missing")
    return size


def _runs(records: NDArray[Any]) -> NDArray[Any]:
    """Return the last record of every run, after checking that a run continues an earlier one."""
    run, continues = records["run"], records["continues"]
    numbers, places = np.unique(run[::-1], return_index=True)
    in_range = _within(1 + continues, 1 + run) and _within(1 + records["after"], LARGEST + 2)
    in_range &= _within(records["start"], LARGEST + 1)
    _check(in_range and np.array_equal(numbers, np.arange(len(numbers))), "runs do not follow each other")
    return records[::-1][places]


def _check_rows(rows: NDArray[Any], runs: int, sizes: dict[str, int]) -> None:
    """Check that rows follow each other without a gap, and that their values, names and runs exist."""
    first, count, ids = (rows[field] for field in ("first_value", "count", "first_id"))
    limits = {"count": sizes["values"], "first_id": sizes["ids"], "nested": 1, "run": runs - 1, "iteration": LARGEST}
    in_range = all(_within(rows[field], limit + 1) for field, limit in limits.items())
    ends = np.cumsum(count)
    _check(
        in_range
        and bool((count > 0).all() and (ids + count <= sizes["ids"]).all() and (first == ends - count).all())
        and (ends[-1] if len(ends) else 0) == sizes["values"],
        "rows and values do not agree",
    )


def _within(numbers: NDArray[Any], end: Any) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _json_lines(dataset: str, lines: bytes) -> list[Any]:
    _check(not lines or lines.endswith(b"\n"), f"{dataset} has no end")
    return [json.loads(line) for line in lines.split(b"\n")[:-1]]


def _report(entry: Any, runs: int) -> RecordedReport:
    types = [int, int, str, str, str, str, list]
    _check(isinstance(entry, list) and [*map(type, entry)] == types, "reports has lines that are no reports")
    run, iteration, monitor, kind, severity, text, names = entry
    valid = 0 <= run < runs and 0 <= iteration <= LARGEST and severity in SEVERITIES
    _check(valid and all(isinstance(name, str) for name in names), "reports has lines that are no reports")
    monitor, kind, text = map(printable, (monitor, kind, text))
    return RecordedReport(iteration, monitor, kind, severity, text, tuple(map(printable, names)), run)


def _names(lines: bytes) -> list[Name]:
    entries = _json_lines("names", lines)
    valid = (isinstance(it, list) and len(it) == 3 and all(isinstance(part, str) for part in it) for it in entries)
    _check(all(valid), "names has lines other than [name, kind, root]")
    names = [Name(*entry) for entry in entries]
    _check(len({name for name, _, _ in names}) == len(names), "names has a name twice")
    return names
