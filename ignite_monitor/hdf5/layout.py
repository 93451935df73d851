"""What stands in a file.

=========== ==================================================================================================
``names``   one JSON string a line: the name of value 0, of value 1, …
``ids``     numbers of names; a list of them stands once, however many rows use it
``values``  float32
``exact``   values that float32 can't hold (:func:`needs_float64`), by their index in ``values``
``rows``    one row per write: ``count`` values from ``values[values]`` on, named by ``ids[ids:]``; ``step``; ``time``
            in milliseconds since 1970. ``run`` numbers the runs of an engine, ``iteration`` is that engine's, and
            ``nested`` is 1 where the values are another engine's, run within it. A row that was taken back has count 0
=========== ==================================================================================================

All are chunked, compressed with deflate and checksummed. Every file is complete and closed when it gets its name:
see :mod:`ignite_monitor.hdf5.swap`.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.report.series import printable

FORMAT, VERSION = "ignite_monitor", 1

ROW = np.dtype([(field, "<i8") for field in ["step", "iteration", "time", "run", "nested", "ids", "values", "count"]])
EXACT = np.dtype([("place", "<i8"), ("value", "<f8")])


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
    """Write a file without rows; one that is there is replaced."""
    # Without a list of free space, which has to be asked for, a chunk that grows leaves its old place empty for good:
    # files of small rows take 40 times as much. The format of HDF5 1.10 has checksums for all but the data.
    options = {"libver": ("v110", "v110"), "fs_strategy": "fsm", "fs_persist": True, "fs_threshold": 1}
    with import_h5py().File(path, "w", locking=False, **options) as file:
        file.attrs.update(format=FORMAT, version=VERSION, created=time.time())
        for name, (dtype, chunk) in COLUMNS.items():
            file.create_dataset(
                name, (0,), dtype, maxshape=(None,), chunks=(chunk,), shuffle=True, compression=1, fletcher32=True
            )


def room_for(name: str, elements: int) -> int:
    """How many bytes a dataset may grow by at most when elements are added, compressed or not."""
    dtype, chunk = COLUMNS[name]
    return (math.ceil(elements / chunk) + 2) * (chunk * dtype.itemsize + 4096)


def needs_float64(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which values float32 would turn into another number, not just round: integers, and what is out of its range."""
    limits = np.finfo(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        changed = values.astype(np.float32) != values
        size = np.abs(values)
        other = (size > limits.max) | (size < limits.tiny) | (values == np.rint(values))
    return np.asarray(changed & other & np.isfinite(values))


def one_line(error: BaseException) -> str:
    """What an error says, in one line that is safe to send to a terminal; HDF5's have several."""
    return printable(" ".join(str(error).split())) or type(error).__name__
