"""Layout of the file, and the checks that make files from untrusted sources safe to read.

=========== ==================================================================================================
``names``   one JSON line per name: ``[name, kind, root]``. ``kind`` is the schema kind of the monitor that publishes
            the name, ``"user"`` for any other name; the monitor's key is what follows ``root/`` in the name
``ids``     indices of names; a list of indices is stored once, however many rows use it
``values``  float64
``rows``    one row per write: its next ``count`` values, with names ``ids[first_id:]``; ``step``; ``time`` in
            milliseconds since 1970; the number of the ``run``; ``iteration`` of the training, or in rows from before
            the run's first iteration, ``-1 - iteration`` of the last one known
``runs``    one row per run of the trainer, numbered from 0: ``offset``, the iterations of the training before the
            trainer's own; ``after``, the iteration of the training after which it replaces earlier runs, -1 for all,
            2**62 for none. Rows and reports may have the number of a run that has not begun
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

VERSION = 6
DEFLATE_RATIO = 1032  # the largest that deflate reaches
LARGEST = 2**62  # number of a run or iteration
SEVERITIES = ("problem", "warning", "note")
SETTINGS = "run_settings"
"""Kind of the reports that hold the settings of a run: versions, seed, arguments of monitors."""

ROW = np.dtype([(field, "<i8") for field in ("step", "iteration", "time", "run", "first_id", "count")])
RUN = np.dtype([(field, "<i8") for field in ("offset", "after")])

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


class Position(NamedTuple):
    """Place of a value or report: the number of the run, and the iteration of the training."""

    run: int
    iteration: int


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
        file.attrs["version"] = VERSION
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
    """Checked contents of a file; ``values`` is the dataset. All texts but names are safe to print.

    If rows or reports wait for a run, ``runs`` ends with one that replaces nothing, which is not in the file.
    """

    sizes: dict[str, int]  # of the datasets
    names: list[Name]
    ids: NDArray[np.int32]
    rows: NDArray[Any]
    runs: NDArray[Any]
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
            _check_version(file)
            file_size = file.id.get_filesize()
            sizes = {name: _check_dataset(h5py, file, name, file_size) for name in COLUMNS}
            rows, runs, ids, lines = (file[name][()] for name in ("rows", "runs", "ids", "names"))
            names = [Name(*map(_text, entry)) for entry in _json_lines(lines)]
            _check(len({name.name for name in names}) == len(names), "names has a name twice")
            _check_rows(rows, ids, sizes | {"name": len(names)})
            reports = [_report(entry, len(runs)) for entry in _json_lines(file["reports"][()])]
            if len(runs) in rows["run"] or any(report.run == len(runs) for report in reports):
                runs = np.append(runs, np.array([(runs["offset"][-1] if len(runs) else 0, LARGEST)], RUN))
            _place_early_rows(rows, runs)
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


def _check_version(file: Any) -> None:
    # A text would be in a heap without a checksum, in which HDF5 can loop for ever if it is damaged: it is not read.
    is_number = file.attrs.get_id("version").dtype.kind in "iu"
    _check(is_number and file.attrs["version"] == VERSION, f"only files of version {VERSION} can be read")


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


def _check_rows(rows: NDArray[Any], ids: NDArray[np.int32], sizes: dict[str, int]) -> None:
    """Check that the values, names and runs of all rows exist."""
    starts, counts = rows["first_id"], rows["count"]
    _check(
        _are_within(ids, 0, sizes["name"])
        and _are_within(rows["run"], 0, sizes["runs"] + 1)
        and _are_within(counts, 1, sizes["values"] + 1)
        and counts.sum() == sizes["values"]
        and _are_within(starts, 0, sizes["ids"] + 1)
        and _are_within(starts + counts, 0, sizes["ids"] + 1),
        "rows, values and names do not agree",
    )


def _place_early_rows(rows: NDArray[Any], runs: NDArray[Any]) -> None:
    """Give the rows that were written before their run began the iteration at which it starts."""
    early = np.flatnonzero(rows["iteration"] < 0)
    after, last = runs["after"][rows["run"][early]], ~rows["iteration"][early]
    rows["iteration"][early] = np.where(after < LARGEST, np.maximum(after, 0), last)


def _are_within(numbers: NDArray[Any], begin: int, end: int) -> bool:
    return bool(((numbers >= begin) & (numbers < end)).all())


def _json_lines(lines: NDArray[np.uint8]) -> list[Any]:
    return [json.loads(line) for line in lines.tobytes().splitlines()]


def _text(value: Any) -> str:
    _check(isinstance(value, str), "names and reports should hold texts")
    return str(value)


def _report(entry: Any, runs: int) -> RecordedReport:
    run, iteration, *texts, names = entry
    monitor, kind, severity, text = (printable(_text(it)) for it in texts)
    is_valid = 0 <= run <= runs and 0 <= iteration <= LARGEST and severity in SEVERITIES
    _check(is_valid, "reports should hold existing runs and severities")
    shown = tuple(printable(_text(name)) for name in names)
    return RecordedReport(int(iteration), monitor, kind, severity, text, shown, int(run))
