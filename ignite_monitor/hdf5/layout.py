"""What stands in a file, and how to read one that anybody may have made.

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
see :mod:`ignite_monitor.hdf5.double_buffer`.

What is read holds exactly that, or a ValueError names it. HDF5 files can point to other files, compute their data by
filters from plugins, and claim any size. So links, layouts, filters and sizes are looked at before anything is read,
and what is read before anything is computed from it.
"""

from __future__ import annotations

import json
import math
import stat
import time
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ignite_monitor.report.series import printable

FORMAT, VERSION = "ignite_monitor", 1
DEFLATE_RATIO = 1032  # what deflate makes of zeros; nothing gets smaller
RUNS = 2**62
LONGEST_CHUNK = 2**16
NOTHING = np.empty(0)

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


class Contents(NamedTuple):
    """What a file holds; ``rows`` with those that were taken back, ``values`` only where they are asked for."""

    sizes: dict[str, int]  # of the datasets
    names: list[str]
    ids: NDArray[np.int32]
    rows: NDArray[Any]
    values: NDArray[np.float64] = NOTHING


def load(path: Path, *, values: bool = False, continued: bool = False) -> Contents:
    """Read a file.

    Args:
        continued: whether it will be written to, so that its datasets have to be able to grow.

    Raises:
        OSError: if it is not there, or can't be opened.
        ValueError: if it is damaged, or not what HDF5Logger writes.
        BlockingIOError: if it is being written just now, which can only be where it was opened before and locked after
            it was replaced.
    """
    h5py = import_h5py()
    check_regular(path)
    path.open("rb").close()  # h5py says less well what the system has against it
    try:
        with h5py.File(path, "r", locking="best-effort") as file:
            _check_attributes(h5py, file)
            sizes = {name: _check_dataset(h5py, file, name, file.id.get_filesize(), continued) for name in COLUMNS}
            return _load(file, sizes, values)
    except BlockingIOError:
        raise
    except Exception as error:  # what h5py raises depends on where a file is damaged
        shown = printable(str(path))
        raise ValueError(f"{shown} is damaged, or was not written by HDF5Logger: {one_line(error)}") from error


def check_regular(path: Path) -> None:
    """Refuse what is there but no file on a disk; opening a pipe would wait for its other end.

    Raises:
        ValueError: if it is none.
        OSError: if it is not there.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "directory" if stat.S_ISDIR(mode) else "device, pipe or socket"
        raise ValueError(f"{printable(str(path))} is a {kind}, not a file written by HDF5Logger")


def _check_attributes(h5py: Any, file: Any) -> None:
    text, number = (file.attrs.get_id(name) for name in ("format", "version"))
    # The text itself lies in a heap without a checksum, in which HDF5 goes round in circles where it is damaged: nobody
    # looks at it. The datasets say well enough whose file it is.
    string = h5py.check_string_dtype(text.dtype)
    if string is None or string.length is not None or text.shape != ():
        raise ValueError("it has another format")
    version = file.attrs["version"] if number.dtype.kind in "iu" and number.shape == () else None
    if version != VERSION:
        raise ValueError(f"it is of version {version}, and this release of ignite_monitor reads {VERSION}")
    if len(file) != len(COLUMNS) or set(file) != set(COLUMNS):
        raise ValueError(f"it should hold {', '.join(COLUMNS)} and nothing else")


def _check_dataset(h5py: Any, file: Any, name: str, file_size: int, continued: bool) -> int:
    """How many elements a dataset has, all of which the file itself holds.

    Raises:
        ValueError: if it is laid out in another way than HDF5Logger's.
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
        raise ValueError(f"{name} is not laid out as HDF5Logger does it")
    size, in_chunk = len(dataset), dataset.chunks[0] if dataset.chunks else 0
    if size * dtype.itemsize > DEFLATE_RATIO * file_size or in_chunk > LONGEST_CHUNK:
        raise ValueError(f"{name} has {size} elements, which a file of {file_size} bytes can't hold")
    # What HDF5 finds nowhere it would fill with zeros.
    if dataset.chunks:
        whole = dataset.id.get_num_chunks() == math.ceil(size / in_chunk)
    else:
        whole = dataset.id.get_storage_size() == size * dtype.itemsize
    if not whole:
        raise ValueError(f"parts of {name} are missing")
    return size


def _load(file: Any, sizes: dict[str, int], with_values: bool) -> Contents:
    rows = file["rows"][()]
    _check_rows(rows, sizes)
    ids, names = file["ids"][()], _names(file["names"][()].tobytes())
    if not _within(ids, len(names)):
        raise ValueError("ids has numbers of names that are not there")
    exact = file["exact"][()]
    if not _within(exact["place"], sizes["values"]) or (np.diff(exact["place"]) <= 0).any():
        raise ValueError("exact has values that are not there")
    if not with_values:
        return Contents(sizes, names, ids, rows)
    values = file["values"][()].astype(np.float64)
    values[exact["place"]] = exact["value"]
    return Contents(sizes, names, ids, rows, values)


def _check_rows(rows: NDArray[Any], sizes: dict[str, int]) -> None:
    """See that the values of rows follow each other, and that they and their names are there.

    Raises:
        ValueError: if it is not so.
    """
    first, count, ids = (rows[field] for field in ("values", "count", "ids"))
    limits = [(first, sizes["values"]), (count, sizes["values"]), (ids, sizes["ids"]), (rows["run"], RUNS)]
    in_range = all(_within(numbers, limit + 1) for numbers, limit in limits)
    beyond = np.diff(first, append=sizes["values"]) - count  # values that only rows which were taken back leave behind
    if (
        not in_range
        or (ids + count > sizes["ids"]).any()
        or (beyond < 0).any()
        or ((beyond > 0) & (count > 0)).any()
        or np.append(first, sizes["values"])[0] != 0
    ):
        raise ValueError("rows and values do not agree")


def _within(numbers: NDArray[Any], end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


def _names(lines: bytes) -> list[str]:
    names = [json.loads(line) for line in lines.split(b"\n")[:-1]]
    if (lines and not lines.endswith(b"\n")) or not all(isinstance(name, str) for name in names):
        raise ValueError("names has other lines than JSON strings")
    if len(set(names)) < len(names):
        raise ValueError("names has a name twice")
    return names
