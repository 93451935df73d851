"""Layout of the file, and the checks that make files from untrusted sources safe to read.

========== ===================================================================================================
``state``  the numbers of rows, values and bytes of lines that count, the CRC-32 of each, and of these six; in a
           second row, those of the last time at which all was on the disk, which hold after a loss of power
``rows``   one row per write: ``step``; ``iteration`` of the training; ``time`` in milliseconds since 1970; number of
           the ``run``; ``end``, the number of values up to the end of the row
``values`` pairs of the number of a ``name``, and a ``value`` in float64
``lines``  JSON lines: ``["name", number, name, kind, root, trains]``, ``["run", number, offset, after]`` and
           ``["report", run, iteration, monitor, kind, severity, text, names]``; the last of a number is valid
========== ===================================================================================================

``kind`` of a name is the schema kind of the monitor that publishes it, ``"user"`` for any other name; the monitor's key
is what follows ``root/`` in it; ``trains`` tells names of the trainer from those of other engines. A run of the trainer
is recorded when it begins: ``offset`` is the number of iterations before the trainer's own, and ``after`` the iteration
after which the run replaces earlier ones, -1 for all, 2**62 for none. Rows and reports may have the number of a run
that has not begun.

Datasets are contiguous and larger than what counts while the file is written, and compressed with deflate afterwards.
Nothing that counts is ever changed: rows and reports that a later run replaces are dropped by the reader
(:mod:`ignite_monitor.hdf5.reader`).

HDF5 files can refer to other files, compute data by filters from plugins, and claim any size. Links, layouts, filters
and sizes are therefore checked before data is read, and the data before anything is computed from it.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

VERSION = 9
DEFLATE_RATIO = 1032  # the largest that deflate reaches
BLOCK = 2**16  # values
ENDLESS = 2**62  # iterations
SEVERITIES = ("problem", "warning", "note")
SETTINGS = "run_settings"
"""Kind of the reports that hold the settings of a run: versions, seed, arguments of monitors."""

ROW = np.dtype([(field, "<i8") for field in ("step", "iteration", "time", "run", "end")])
VALUE = np.dtype([("name", "<i4"), ("value", "<f8")])

TABLES: dict[str, tuple[np.dtype[Any], int]] = {
    "rows": (ROW, 512),
    "values": (VALUE, 8192),
    "lines": (np.dtype("u1"), 4096),
}
"""One-dimensional datasets: the type of their elements, and the number of elements per compressed chunk."""

Additions = dict[str, NDArray[Any]]
"""Elements that are added to datasets."""

State = dict[str, tuple[int, int]]
"""Number of the elements of each dataset that count, and their CRC-32."""

EMPTY: State = dict.fromkeys(TABLES, (0, 0))

Position = tuple[int, int]
"""Place of a value or report: the number of the run, and the iteration of the training."""

FIELDS: dict[str, list[type]] = {
    "name": [int, str, str, str, bool],
    "run": [int, int, int],
    "report": [int, int, str, str, str, str, list],
}
"""Fields of each kind of lines."""

_LOGGER = logging.getLogger(__name__)


class Name(NamedTuple):
    """A name, the schema kind of the monitor that publishes it, what precedes the monitor's key, and whose it is."""

    name: str
    kind: str = "user"
    root: str = ""
    trains: bool = True


class Run(NamedTuple):
    """A run of the trainer, as recorded when it begins."""

    offset: int
    after: int


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


def extended(state: State, additions: Additions) -> State:
    """State after additions."""
    added = {
        name: (state[name][0] + len(elements), zlib.crc32(elements.tobytes(), state[name][1]))
        for name, elements in additions.items()
    }
    return state | added


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


class Contents:
    """Checked contents of a file, all but the values. All texts but names are safe to print.

    Attributes:
        state: sizes and checksums.
        is_cut: True if the newest state does not hold, and ``state`` is that of the last time all was on the disk.
        names: all names.
        reports: all reports, in order.
        begun: the number of runs that have begun.
        runs: these, and if rows or reports wait for one more, one that replaces nothing.
        rows: the rows.
    """

    def __init__(self, h5py: Any, file: Any) -> None:
        self._file = file
        for name, (dtype, chunk) in {"state": (np.dtype("<i8"), 0), **TABLES}.items():
            _check_dataset(h5py, file, name, dtype, chunk)
        _check(len(file["state"]) == 14, "the state has another size")
        latest, on_disk = map(self._state, file["state"][()].reshape(2, 7))
        self.is_cut, self.state = not latest, latest or on_disk or {}
        _check(bool(self.state), "a checksum is wrong")

        names, runs, self.reports = _parsed(np.concatenate([*self.blocks("lines"), np.empty(0, "u1")]).tobytes())
        self.names, self.runs, self.begun = list(names.values()), list(runs.values()), len(runs)
        _check([*names] == [*range(len(names))] and [*runs] == [*range(len(runs))], "names or runs are missing")
        _check(len({name.name for name in self.names}) == len(names), "a name is there twice")

        self.rows = np.concatenate([*self.blocks("rows"), np.empty(0, ROW)])
        ends = np.append(0, self.rows["end"])
        is_whole = bool((ends[1:] > ends[:-1]).all()) and ends[-1] == self.state["values"][0]
        _check(is_whole, "rows and values do not agree")
        numbers = np.append(self.rows["run"], np.array([report.run for report in self.reports], np.int64))
        _check(_are_within(numbers, len(runs) + 1), "rows or reports have a run that does not exist")
        if len(runs) in numbers:
            self.runs.append(Run(self.runs[-1].offset if runs else 0, ENDLESS))

    def blocks(self, name: str) -> Iterator[NDArray[Any]]:
        """Read a dataset in blocks, to hold one of them in memory."""
        for block in self._parts(name, self.state[name][0]):
            _check(name != "values" or _are_within(block["name"], len(self.names)), "values without names")
            yield block

    def _parts(self, name: str, size: int) -> Iterator[NDArray[Any]]:
        for begin in range(0, size, BLOCK):
            yield self._file[name][begin : min(begin + BLOCK, size)]

    def _state(self, numbers: NDArray[np.int64]) -> State | None:
        """A stored state; None if a checksum is wrong."""
        state = {name: (int(numbers[i]), int(numbers[3 + i])) for i, name in enumerate(TABLES)}
        if not np.array_equal(sealed(state), numbers):
            return None
        for name, (size, expected) in state.items():
            checksum = 0
            if not 0 <= size <= len(self._file[name]):
                return None
            for part in self._parts(name, size):
                checksum = zlib.crc32(part.tobytes(), checksum)
            if checksum != expected:
                return None
        return state


@contextmanager
def opened(path: Path) -> Iterator[Contents]:
    """Open a file for reading.

    Raises:
        ValueError: if it is damaged, has another layout, or holds more than fits in memory.
        BlockingIOError: if a program other than HDF5Logger is writing it.
    """
    h5py = import_h5py()
    check_regular(path)
    path.open("rb").close()  # the system's errors are clearer than h5py's
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            # A text would be in a heap without a checksum, in which HDF5 can loop for ever if it is damaged.
            is_number = file.attrs.get_id("version").dtype.kind in "iu"
            _check(is_number and file.attrs["version"] == VERSION, f"only files of version {VERSION} can be read")
            contents = Contents(h5py, file)
            if contents.is_cut:
                _LOGGER.warning("The end of %s is damaged; what was written last is left out.", printable(str(path)))
            yield contents
    except BlockingIOError:
        raise BlockingIOError(f"{printable(str(path))} is being written by a program other than HDF5Logger") from None
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


def _check_dataset(h5py: Any, file: Any, name: str, dtype: np.dtype[Any], chunk: int) -> None:
    """Refuse a dataset that is not stored in the file itself, or has a size that the file can't hold."""
    is_dataset = isinstance(file.get(name, getlink=True), h5py.HardLink) and isinstance(file[name], h5py.Dataset)
    _check(is_dataset, f"{name} is no dataset")
    dataset, file_size = file[name], file.id.get_filesize()
    properties, h5z = dataset.id.get_create_plist(), h5py.h5z
    filters = {properties.get_filter(number)[0] for number in range(properties.get_nfilters())}
    _check(
        properties.get_layout() in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED)
        and properties.get_external_count() == 0
        and (dataset.ndim, dataset.chunks) in ((1, None), (1, (chunk,)))
        and dataset.id.get_type() == h5py.h5t.py_create(dtype, logical=True)
        and filters <= {h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE},
        f"{name} has another layout than HDF5Logger's",
    )
    possible = len(dataset) * dtype.itemsize <= DEFLATE_RATIO * file_size
    _check(possible, f"{name} has {len(dataset)} elements, which a file of {file_size} bytes can't hold")


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
            _check(
                severity in SEVERITIES and all(isinstance(it, str) for it in objects), "a report holds something else"
            )
            objects = tuple(map(printable, objects))
            reports.append(RecordedReport(iteration, monitor, kind, severity, text, objects, number))
    return names, runs, reports
