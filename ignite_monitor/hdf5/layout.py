"""Layout of the file, and the checks that make files from untrusted sources safe to read.

========== ===================================================================================================
``state``  the numbers of rows, values and bytes of lines that count, the CRC-32 of each, and of these six; in a
           second row, those of the last time at which all was on the disk, which hold after a loss of power
``rows``   one row per write: ``step``; ``iteration`` of the training; number of the ``run``; ``end``, the number of
           values up to the end of the row
``values`` pairs of the number of a ``name``, and a ``value`` in float64
``lines``  JSON lines: ``["name", number, name, kind, root, trains]``, ``["run", number, offset, after]`` and
           ``["report", run, iteration, monitor, kind, severity, text, names]``; the last of a number is valid
========== ===================================================================================================

``kind`` of a name is the schema kind of the monitor that publishes it, ``"user"`` for any other name. The monitor's key
is what follows ``root/`` in it. ``trains`` is True for names of the trainer. A run of the trainer is recorded when it
starts, and once more with its first iteration. ``offset`` is the number of iterations before the trainer's own. The run
replaces iterations after ``after``: -1 for all, 2**62 for none.

Datasets are contiguous, and larger than what counts. Nothing that counts is ever changed: rows and reports that a later
run replaces are dropped by the reader (:mod:`ignite_monitor.hdf5.reader`).

HDF5 files can refer to other files, compute data by filters from plugins, and claim any size. Links, layouts and sizes
are therefore checked before data is read, and the data before anything is computed from it.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

VERSION = 10
ENDLESS = 2**62  # iterations
SEVERITIES = ("problem", "warning", "note")
SETTINGS = "run_settings"
"""Kind of the reports that hold versions and the seed of a run."""

ROW = np.dtype([(field, "<i8") for field in ("step", "iteration", "run", "end")])
VALUE = np.dtype([("name", "<i4"), ("value", "<f8")])
TABLES: dict[str, np.dtype[Any]] = {"rows": ROW, "values": VALUE, "lines": np.dtype("u1")}
"""One-dimensional datasets: the type of their elements."""

Elements = dict[str, NDArray[Any]]
"""Elements of datasets."""

State = dict[str, tuple[int, int]]
"""Number of the elements of each dataset that count, and their CRC-32."""

EMPTY: State = dict.fromkeys(TABLES, (0, 0))

FIELDS: dict[str, list[type]] = {
    "name": [int, str, str, str, bool],
    "run": [int, int, int],
    "report": [int, int, str, str, str, str, list],
}
"""Fields of each kind of lines."""


class Name(NamedTuple):
    """A name, the schema kind of the monitor that publishes it, what precedes the monitor's key, and whose it is."""

    name: str
    kind: str = "user"
    root: str = ""
    trains: bool = True


class Run(NamedTuple):
    """A run of the trainer."""

    offset: int
    after: int


class RecordedReport(NamedTuple):
    """A line that a monitor has reported."""

    iteration: int  # 0 before the first one
    monitor: str  # class and prefix
    kind: str  # identifier of what is reported
    severity: str  # one of SEVERITIES
    text: str
    names: tuple[str, ...]  # of parameters, modules or groups that it speaks of
    run: int  # its number in the file


class Contents(NamedTuple):
    """Checked contents of a file. All texts but names are safe to print."""

    state: State
    names: list[Name]
    runs: list[Run]
    reports: list[RecordedReport]
    rows: NDArray[np.void]
    values: NDArray[np.void]


def import_h5py() -> ModuleType:
    """Import ``h5py``, an optional dependency."""
    try:
        import h5py
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "HDF5 files need h5py. Install it with: pip install 'ignite-monitor[hdf5]'", name="h5py"
        ) from error
    return h5py  # type: ignore[no-any-return, unused-ignore]


def extended(state: State, additions: Elements) -> State:
    """State after additions."""
    return {
        name: (size + len(additions[name]), zlib.crc32(additions[name].tobytes(), checksum))
        for name, (size, checksum) in state.items()
    }


def sealed(state: State) -> NDArray[np.int64]:
    """State as it is stored, with a checksum of its own."""
    numbers = np.array([*zip(*state.values(), strict=True)], "<i8").ravel()
    return np.append(numbers, zlib.crc32(numbers.tobytes()))


def printable(name: str) -> str:
    """Escape control characters, so that a name is safe to print to a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def with_version(package: str) -> str:
    """Name and version of an installed package."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"{package} (not installed)"


def one_line(error: BaseException) -> str:
    """Text of an error in one line that is safe to print to a terminal."""
    return printable(" ".join(str(error).split())) or type(error).__name__


def read(path: Path) -> Contents:
    """Read a file, and check it.

    Raises:
        ValueError: if it is damaged, has another version or layout, or holds more than fits in memory.
    """
    h5py = import_h5py()
    check_regular(path)
    path.open("rb").close()  # the system's errors are clearer than h5py's
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            # A text would be in a heap without a checksum, in which HDF5 can loop for ever if it is damaged.
            version = file.attrs["version"] if file.attrs.get_id("version").dtype.kind in "iu" else "unknown"
            _check(version == VERSION, f"its format has version {version}, and only version {VERSION} can be read")
            return _read(h5py, file)
    except Exception as error:  # the type that h5py raises depends on where a file is damaged
        raise ValueError(f"{printable(str(path))} is no file of HDF5Logger, or damaged: {one_line(error)}") from error


def check_regular(path: Path) -> None:
    """Refuse a directory, device or pipe with a ValueError: opening a pipe would block."""
    if os.path.lexists(path) and not path.is_file():
        raise ValueError(f"{printable(str(path))} is no regular file")


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _read(h5py: Any, file: Any) -> Contents:
    state, elements = _counted(h5py, file)
    names, runs, reports = _parsed(elements["lines"].tobytes())
    rows, values = elements["rows"], elements["values"]
    _check([*names] == [*range(len(names))] and [*runs] == [*range(len(runs))], "names or runs are missing")
    _check(len({name.name for name in names.values()}) == len(names), "a name is there twice")
    ends = np.append(0, rows["end"])
    _check(bool((ends[1:] > ends[:-1]).all()) and ends[-1] == len(values), "rows and values do not agree")
    _check(_are_within(values["name"], len(names)), "values have no name")
    numbers = np.append(rows["run"], np.array([report.run for report in reports], np.int64))
    _check(_are_within(numbers, len(runs)), "rows or reports have a run that does not exist")
    return Contents(state, [*names.values()], [*runs.values()], reports, rows, values)


def _counted(h5py: Any, file: Any) -> tuple[State, Elements]:
    """State and elements: the newest ones, or if these are damaged, those that were on the disk before."""
    for name, dtype in {"state": np.dtype("<i8"), **TABLES}.items():
        _check_dataset(h5py, file, name, dtype)
    _check(len(file["state"]) == 14, "the state has another size")
    for is_older, numbers in enumerate(file["state"][()].reshape(2, 7)):
        elements = {name: file[name][: max(0, int(size))] for name, size in zip(TABLES, numbers, strict=False)}
        state = extended(EMPTY, elements)
        if np.array_equal(sealed(state), numbers):
            if is_older:
                text = "The end of %s is damaged; ignoring what was written last."
                logging.getLogger(__name__).warning(text, printable(os.fsdecode(file.filename)))
            return state, elements
    raise ValueError("a checksum is wrong")


def _check_dataset(h5py: Any, file: Any, name: str, dtype: np.dtype[Any]) -> None:
    """Refuse a dataset that is not stored in the file itself, or has a size that the file can't hold."""
    is_dataset = isinstance(file.get(name, getlink=True), h5py.HardLink) and isinstance(file[name], h5py.Dataset)
    _check(is_dataset, f"{name} is no dataset")
    dataset, file_size = file[name], file.id.get_filesize()
    properties = dataset.id.get_create_plist()
    _check(
        properties.get_layout() == h5py.h5d.CONTIGUOUS
        and properties.get_external_count() == 0
        and dataset.ndim == 1
        and dataset.id.get_type() == h5py.h5t.py_create(dtype, logical=True),
        f"{name} has another layout than HDF5Logger's",
    )
    is_possible = len(dataset) * dtype.itemsize <= file_size
    _check(is_possible, f"{name} has {len(dataset)} elements, which a file of {file_size} bytes can't hold")


def _are_within(numbers: NDArray[Any], end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _parsed(lines: bytes) -> tuple[dict[int, Name], dict[int, Run], list[RecordedReport]]:
    names: dict[int, Name] = {}
    runs: dict[int, Run] = {}
    reports = []
    for line in lines.splitlines():
        what, *fields = json.loads(line)
        _check([*map(type, fields)] == FIELDS[what], "a line holds something else")
        _check(all(-1 <= field <= ENDLESS for field in fields if isinstance(field, int)), "a number is not possible")
        number, *rest = fields
        if what == "name":
            names[number] = Name(*rest)
        elif what == "run":
            runs[number] = Run(*rest)
        else:
            iteration, *texts, objects = rest
            monitor, kind, severity, text = map(printable, texts)
            is_report = severity in SEVERITIES and all(isinstance(it, str) for it in objects)
            _check(is_report, "a report holds something else")
            objects = tuple(map(printable, objects))
            reports.append(RecordedReport(iteration, monitor, kind, severity, text, objects, number))
    return names, runs, reports
