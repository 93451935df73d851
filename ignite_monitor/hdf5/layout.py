"""Layout of the file, and the checks that make files from untrusted sources safe to read.

=========== ==================================================================================================
``names``   one JSON line per name: ``[name, kind, root]``. ``kind`` is the schema kind of the monitor that publishes
            the name, ``"user"`` for any other name; the monitor's key is what follows ``root/`` in the name
``ids``     indices of names; a list of indices is stored once, however many rows use it
``values``  float64
``rows``    one row per write: ``count`` values from ``values[values]`` on, with names ``ids[ids:]``; ``step``; ``time``
            in milliseconds since 1970; ``session``, the number of the logger; ``run``, the number of the engine's run;
            ``start``, the iteration after which the run started; ``iteration`` of its engine; ``nested``, 1 where the
            values belong to another engine that ran within it
=========== ==================================================================================================

All datasets are chunked, compressed with deflate and checksummed. No row is ever changed: rows that a resumed run
replaces are dropped by the reader (:mod:`ignite_monitor.hdf5.superseded`).

HDF5 files can refer to other files, compute data by filters from plugins, and claim any size. Links, layouts, filters
and sizes are therefore checked before data is read, and the data before anything is computed from it.
"""

from __future__ import annotations

import json
import math
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.report.series import printable

FORMAT, VERSION = "ignite_monitor", 2
DEFLATE_RATIO = 1032  # the largest that deflate reaches
RUNS = 2**62
LONGEST_CHUNK = 2**16

FIELDS = ("step", "iteration", "time", "session", "run", "start", "nested", "ids", "values", "count")
ROW = np.dtype([(field, "<i8") for field in FIELDS])


class Column(NamedTuple):
    """A one-dimensional dataset: the type of its elements, and the number of elements per chunk."""

    dtype: np.dtype[Any]
    chunk: int


COLUMNS = {
    "names": Column(np.dtype("u1"), 4096),
    "ids": Column(np.dtype("<i4"), 4096),
    "values": Column(np.dtype("<f8"), 8192),
    "rows": Column(ROW, 512),
}


class Name(NamedTuple):
    """A name, the schema kind of the monitor that publishes it, and what precedes the monitor's key in it."""

    name: str
    kind: str = "user"
    root: str = ""


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


def create(path: Path) -> None:
    """Write a file without rows, replacing an existing one."""
    # Without a persistent list of free space, a chunk that grows leaves its old place empty for good: files of small
    # rows take 40 times as much. The format of HDF5 1.10 has checksums for all but the data.
    options = {"libver": ("v110", "v110"), "fs_strategy": "fsm", "fs_persist": True, "fs_threshold": 1}
    with import_h5py().File(path, "w", locking=False, **options) as file:
        file.attrs.update(format=FORMAT, version=VERSION, created=time.time())
        for name, (dtype, chunk) in COLUMNS.items():
            file.create_dataset(
                name, (0,), dtype, maxshape=(None,), chunks=(chunk,), shuffle=True, compression=1, fletcher32=True
            )


def one_line(error: BaseException) -> str:
    """Text of an error in one line that is safe to print to a terminal; HDF5's errors have several."""
    return printable(" ".join(str(error).split())) or type(error).__name__


class Contents(NamedTuple):
    """The names, lists of names and rows of a file, checked; ``values`` is the dataset."""

    sizes: dict[str, int]  # of the datasets
    names: list[Name]
    ids: NDArray[np.int32]
    rows: NDArray[Any]
    values: Any


@contextmanager
def opened(path: Path, *, continued: bool = False) -> Iterator[Contents]:
    """Open a file for reading.

    Args:
        continued: whether it will be written to, so that its datasets must be resizable.

    Raises:
        OSError: if the file does not exist, or can't be opened.
        ValueError: if it is damaged, or has another layout.
        MemoryError: if it holds more than fits in memory.
        BlockingIOError: if it is being written; only possible between a reader's opening and its lock.
    """
    h5py = import_h5py()
    check_regular(path)
    path.open("rb").close()  # the system's errors are clearer than h5py's
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            _check_attributes(h5py, file)
            file_size = file.id.get_filesize()
            sizes = {name: _check_dataset(h5py, file, name, file_size, continued) for name in COLUMNS}
            rows, ids, names = file["rows"][()], file["ids"][()], _names(file["names"][()].tobytes())
            _check_rows(rows, sizes)
            if not _within(ids, len(names)):
                raise ValueError("ids refers to names that do not exist")
            yield Contents(sizes, names, ids, rows, file["values"])
    except (BlockingIOError, MemoryError):  # the latter: a file that is larger than the memory
        raise
    except Exception as error:  # the type that h5py raises depends on where a file is damaged
        shown = printable(str(path))
        raise ValueError(f"{shown} is damaged, or was not written by HDF5Logger: {one_line(error)}") from error


def check_regular(path: Path) -> None:
    """Refuse what is no regular file; opening a pipe would block.

    Raises:
        ValueError: if it is a directory, device, pipe or socket.
        OSError: if it does not exist.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "device, pipe or socket"
        raise ValueError(f"{printable(str(path))} is a {kind}, not a file written by HDF5Logger")


def _check_attributes(h5py: Any, file: Any) -> None:
    text, number = (file.attrs.get_id(name) for name in ("format", "version"))
    # The text itself is in a heap without a checksum, in which HDF5 can loop for ever if it is damaged: it is not read.
    string = h5py.check_string_dtype(text.dtype)
    if string is None or string.length is not None or text.shape != ():
        raise ValueError("it has another format")
    version = file.attrs["version"] if number.dtype.kind in "iu" and number.shape == () else None
    if version != VERSION:
        raise ValueError(f"it is of version {version}, and this release of ignite_monitor reads {VERSION}")
    if len(file) != len(COLUMNS) or set(file) != set(COLUMNS):
        raise ValueError(f"it should hold {', '.join(COLUMNS)} and nothing else")


def _check_dataset(h5py: Any, file: Any, name: str, file_size: int, continued: bool) -> int:
    """Number of elements of a dataset, all of which are stored in the file itself.

    Raises:
        ValueError: if its layout is not HDF5Logger's.
    """
    dtype, chunk = COLUMNS[name]
    if not isinstance(file.get(name, getlink=True), h5py.HardLink) or not isinstance(file[name], h5py.Dataset):
        raise ValueError(f"{name} is no dataset")
    dataset = file[name]
    properties, h5z = dataset.id.get_create_plist(), h5py.h5z
    filters = {properties.get_filter(number)[0] for number in range(properties.get_nfilters())}
    if (
        dataset.ndim != 1
        or dataset.id.get_type() != h5py.h5t.py_create(dtype, logical=True)
        or properties.get_layout() not in (h5py.h5d.CHUNKED, h5py.h5d.CONTIGUOUS)
        or properties.get_external_count()
        or not filters <= {h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE, h5z.FILTER_FLETCHER32}
        or (continued and (dataset.chunks, dataset.maxshape) != ((chunk,), (None,)))
    ):
        raise ValueError(f"{name} has another layout than HDF5Logger's")
    size, in_chunk = len(dataset), dataset.chunks[0] if dataset.chunks else 0
    if size * dtype.itemsize > DEFLATE_RATIO * file_size or in_chunk > LONGEST_CHUNK:
        raise ValueError(f"{name} has {size} elements, which a file of {file_size} bytes can't hold")
    # HDF5 would fill missing parts with zeros.
    if dataset.chunks:
        complete = dataset.id.get_num_chunks() == math.ceil(size / in_chunk)
    else:
        complete = dataset.id.get_storage_size() == size * dtype.itemsize
    if not complete:
        raise ValueError(f"parts of {name} are missing")
    return size


def _check_rows(rows: NDArray[Any], sizes: dict[str, int]) -> None:
    """Check that rows follow each other without a gap, and that their values and names exist.

    Raises:
        ValueError: if not.
    """
    first, count, ids = (rows[field] for field in ("values", "count", "ids"))
    limits = [(count, sizes["values"]), (ids, sizes["ids"]), (rows["nested"], 1)]
    limits += [(rows[field], RUNS) for field in ("session", "run", "start")]
    in_range = all(_within(numbers, limit + 1) for numbers, limit in limits)
    ends = np.cumsum(count)
    if (
        not in_range
        or (count == 0).any()
        or (ids + count > sizes["ids"]).any()
        or (first != ends - count).any()
        or (ends[-1] if len(ends) else 0) != sizes["values"]
    ):
        raise ValueError("rows and values do not agree")
    order = np.argsort(ids, kind="stable")
    if (np.diff(count[order])[np.diff(ids[order]) == 0] != 0).any():
        raise ValueError("a list of names has two lengths")


def _within(numbers: NDArray[Any], end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _names(lines: bytes) -> list[Name]:
    entries = [json.loads(line) for line in lines.split(b"\n")[:-1]]
    if (lines and not lines.endswith(b"\n")) or not all(
        isinstance(entry, list) and len(entry) == 3 and all(isinstance(part, str) for part in entry)
        for entry in entries
    ):
        raise ValueError("names has lines other than [name, kind, root]")
    names = [Name(*entry) for entry in entries]
    if len({name for name, _, _ in names}) < len(names):
        raise ValueError("names has a name twice")
    return names
