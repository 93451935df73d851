"""What stands in a file, and opening one for reading.

=========== ==================================================================================================
``names``   one JSON string a line: the name of value 0, of value 1, …
``ids``     numbers of names; a list of them stands once, however many rows use it
``values``  float32
``exact``   values that float32 can't hold (:func:`~ignite_monitor.hdf5.values.needs_float64`), by their place
``rows``    one row per write: ``count`` values from ``values[values]`` on, named by ``ids[ids:]``; ``step``; ``time``
            in milliseconds since 1970. ``run`` numbers the runs of an engine, ``iteration`` is that engine's, and
            ``nested`` is 1 where the values are another engine's, run within it. A row that was taken back has count 0
=========== ==================================================================================================

All are chunked, compressed with deflate and checksummed. Every file is complete and closed when it gets its name:
see :mod:`ignite_monitor.hdf5.swap`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

FORMAT, VERSION = "ignite_monitor", 1

ROW = np.dtype([(field, "<i8") for field in ["step", "iteration", "time", "run", "nested", "ids", "values", "count"]])
EXACT = np.dtype([("place", "<i8"), ("value", "<f8")])

TROUBLE = (OSError, RuntimeError, ValueError, LookupError)  # what h5py raises, depending on where a file is damaged


class Column(NamedTuple):
    """A one-dimensional dataset: the type of its elements, and how many of them a chunk holds."""

    dtype: np.dtype[Any]
    chunk: int


COLUMNS = {
    "names": Column(np.dtype("u1"), 4096),
    "ids": Column(np.dtype("<i4"), 4096),
    "values": Column(np.dtype("<f4"), 8192),
    "exact": Column(EXACT, 256),
    "rows": Column(ROW, 512),
}


def import_h5py() -> ModuleType:
    """The module ``h5py``, which only those need who use a file.

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
    """Write a file without rows.

    Args:
        path: the file; one that is there is replaced.
    """
    # Without a list of free space, which has to be asked for, a chunk that grows leaves its old place empty for good:
    # files of small rows take 40 times as much. The format of HDF5 1.10 has checksums for all but the data.
    options = {"libver": ("v110", "v110"), "fs_strategy": "fsm", "fs_persist": True, "fs_threshold": 1}
    with import_h5py().File(path, "w", locking=False, **options) as file:
        file.attrs.update(format=FORMAT, version=VERSION, created=time.time())
        for name, (dtype, chunk) in COLUMNS.items():
            file.create_dataset(
                name, (0,), dtype, maxshape=(None,), chunks=(chunk,), shuffle=True, compression=1, fletcher32=True
            )


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The ``h5py.File``, for reading.

    Raises:
        FileNotFoundError: if it is not there.
        ValueError: if it is damaged, or was not written by HDF5Logger.
        BlockingIOError: if it is being written just now, which can only be where it was opened before and locked after
            it was replaced.
    """
    h5py = import_h5py()
    if path.is_dir():
        raise ValueError(f"{path} is a directory, not a file written by HDF5Logger")
    path.open("rb").close()  # h5py says less well what the system has against it
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            _check(path, file)
            yield file
    except BlockingIOError:
        raise
    except TROUBLE as error:
        if str(error).startswith(str(path)):
            raise
        raise ValueError(f"{path} is no HDF5 file, or a damaged one: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What an error says, in one line, which HDF5 does not."""
    return " ".join(str(error).split())


def _check(path: Path, file: Any) -> None:
    if file.attrs.get("format") != FORMAT:
        raise ValueError(f"{path} is an HDF5 file, but was not written by HDF5Logger")
    version = file.attrs.get("version")
    if version != VERSION:
        raise ValueError(f"{path} is of version {version}, and this release of ignite_monitor reads {VERSION}")
    for name, (dtype, _) in COLUMNS.items():
        if file[name].dtype != dtype or file[name].ndim != 1:
            raise ValueError(f"its dataset {name} is not what HDF5Logger writes")


def read_names(file: Any) -> list[str]:
    """All names, in the order of their numbers."""
    return [json.loads(line) for line in file["names"][()].tobytes().splitlines()]


def read_rows(file: Any) -> NDArray[Any]:
    """The rows that have not been taken back, in the order of writing."""
    rows = file["rows"][()]
    return rows[rows["count"] > 0]  # type: ignore[no-any-return]


def room_for(name: str, elements: int) -> int:
    """How many bytes a dataset may grow by at most when elements are added, compressed or not."""
    dtype, chunk = COLUMNS[name]
    return (math.ceil(elements / chunk) + 2) * (chunk * dtype.itemsize + 4096)
