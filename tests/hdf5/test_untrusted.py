"""Files that HDF5Logger did not write: the same numbers, or a ValueError in one line, in bounded memory."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tracemalloc
import zlib

import h5py
import numpy as np
import pytest

from ignite_monitor import HDF5Logger, read_hdf5
from ignite_monitor.hdf5.layout import EMPTY, TABLES, extended, sealed
from tests.hdf5._runs import as_lists, run

MEMORY = 20_000_000


def rewrite(file, name, data):
    """Write a dataset anew, without space for more."""
    del file[name]
    file.create_dataset(name, data=data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file with names that come and go, and rows that a resumed run replaced."""
    path = tmp_path_factory.mktemp("whole") / "whole.h5"
    run(path, 60, output=lambda i: {"a": i / 7, "b": 2**30 + i, **({"late": 1.0} if i > 40 else {})})
    run(path, 70, "a", output=lambda i: {"a": i / 3, "top": float(i)}, start=50)
    with h5py.File(path, "r+") as file:
        for name, size in zip(TABLES, file["state"][:3], strict=True):
            rewrite(file, name, file[name][:size])
        seal(file)
    return path


@pytest.fixture
def path(whole, tmp_path):
    for name in ("run.h5", "whole.h5"):
        shutil.copy(whole, tmp_path / name)
    return tmp_path / "run.h5"


def read_or_refused(path):
    """Contents of a file; None if it is refused in one line that names it."""
    read, text = None, f"{path} is no file of HDF5Logger, or damaged: "
    tracemalloc.start()
    try:
        read = as_lists(path)
    except ValueError as error:
        text = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY
    assert text.startswith(f"{path} is no file of HDF5Logger, or damaged: ")
    assert len(text.splitlines()) == 1
    return read


def seal(file):
    """Count all that is there, with the right checksums."""
    file["state"][...] = np.tile(sealed(extended(EMPTY, {name: file[name][()] for name in TABLES})), 2)


def replaced(name, shape=None, **options):
    """Write a dataset anew: with its data, or with a shape and no data."""

    def change(file, folder):
        data, dtype = file[name][()], file[name].dtype
        del file[name]
        if shape is None:
            file.create_dataset(name, data=data, **options)
        else:
            file.create_dataset(name, shape, **{"dtype": dtype, **options})

    return change


def linked(name, link):
    def change(file, folder):
        del file[name]
        file[name] = link

    return change


def virtual(file, folder):
    layout = h5py.VirtualLayout(file["values"].shape, file["values"].dtype)
    layout[:] = h5py.VirtualSource(str(folder / "whole.h5"), "values", file["values"].shape)
    del file["values"]
    file.create_virtual_dataset("values", layout)


def external(file, folder):
    data = file["values"][()]
    (folder / "raw").write_bytes(data.tobytes())
    del file["values"]
    file.create_dataset("values", data.shape, data.dtype, external=[(str(folder / "raw"), 0, data.nbytes)])


def moved(file, folder):
    file.move("values", "elsewhere")
    file["values"] = h5py.SoftLink("/elsewhere")


def attribute(name, value=None):
    def change(file, folder):
        del file.attrs[name]
        if value is not None:
            file.attrs[name] = value

    return change


def element(name, index, value, field=None):
    def change(file, folder):
        data = file[name][()]
        (data if field is None else data[field])[index] = value
        file[name][...] = data
        seal(file)

    return change


def lines(text, keep=True):
    """Add lines, or write them instead of those of the file."""

    def change(file, folder):
        content = (file["lines"][()].tobytes() if keep else b"") + text
        rewrite(file, "lines", np.frombuffer(content, np.uint8))
        seal(file)

    return change


def line(*entry):
    return lines(json.dumps(entry).encode() + b"\n")


def state(index, value):
    def change(file, folder):
        numbers = file["state"][:7]
        numbers[index] = value
        numbers[6] = zlib.crc32(numbers[:6].tobytes())
        file["state"][...] = np.tile(numbers, 2)

    return change


REPORT = ["report", 1, 5, "GradMonitor (grad)", "kind", "problem", "text", ["a"]]
CHUNKS = {"maxshape": (None,), "chunks": (64,)}
REFUSED = {
    "external storage": external,
    "virtual": virtual,
    "soft link": moved,
    "link to a file": linked("values", h5py.ExternalLink("whole.h5", "values")),
    "committed type": linked("values", np.dtype("<i8")),
    "dataset missing": lambda file, folder: file.__delitem__("rows"),
    "group": lambda file, folder: (file.__delitem__("rows"), file.create_group("rows")),
    "unknown version": attribute("version", 11),
    "version of an older release": attribute("version", 9),
    "no version": attribute("version"),
    "version as text": attribute("version", "2"),
    "1e12 elements": replaced("values", (10**12,)),
    "chunks": replaced("rows", **CHUNKS),
    "compressed": replaced("lines", compression=1, **CHUNKS),
    "another type": replaced("values", (8,), dtype="<f8"),
    "other fields": replaced("rows", (8,), dtype=[("step", "<i8")]),
    "fewer values": lambda file, folder: rewrite(file, "values", file["values"][:-3]),
    "fewer values that count": lambda file, folder: (rewrite(file, "values", file["values"][:-3]), seal(file)),
    "more values that count": lambda file, folder: (rewrite(file, "values", np.tile(file["values"], 2)), seal(file)),
    "state with a size below zero": state(0, -1),
    "state with another checksum": state(4, 1),
    "state of more numbers": replaced("state", (15,)),
    "state in another file": linked("state", h5py.ExternalLink("whole.h5", "state")),
    "name below zero": element("values", 0, -1, "name"),
    "name beyond the names": element("values", -1, 99, "name"),
    **{
        f"{field} {value} in row {row}": element("rows", row, value, field)
        for row, field, value in [
            *((0, "end", -1), (0, "end", 0), (30, "end", 1), (-1, "end", 2**63 - 1), (0, "end", -(2**63))),
            *((0, "run", -1), (9, "run", 2)),
        ]
    },
    **{
        f"report {number}": line(*REPORT[:place], value, *REPORT[place + 1 :])
        for number, (place, value) in enumerate(
            [(1, -1), (1, 2), (1, "a"), (1, True), (2, 0.5), (3, 3), (5, "fatal"), (6, None), (7, [1])]
        )
    },
    "report without names": line(*REPORT[:7]),
    "a name twice": line("name", 3, "train/a", "user", "", True),
    "a name with a number too high": line("name", 9, "train/x", "user", "", True),
    "a run with a number too high": line("run", 3, 0, 4),
    "a run that replaces a fraction": line("run", 2, 0, 0.5),
    "a line of another kind": line("nothing", 0),
    "lines of deep nesting": lines(b"[" * 100_000 + b"\n"),
    "no lines": lines(b"", keep=False),
    "a line without an end": lines(b'["name", 4, "train/x", "user", "", true'),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_with_another_layout(path, what):
    with h5py.File(path, "r+") as file:
        REFUSED[what](file, path.parent)
    assert read_or_refused(path) is None
    with pytest.raises(ValueError, match="is no file of HDF5Logger, or damaged"):
        HDF5Logger(path, "a")


@pytest.mark.parametrize(
    ("name", "field"),
    [("rows", "step"), ("rows", "iteration"), ("run", "offset"), ("run", "after")],
)
def test_extreme_but_possible_rows_and_runs_are_read(path, name, field):
    for extreme in (0, 10**12, 2**62):
        change = element(name, -1, extreme, field) if name == "rows" else None
        with h5py.File(path, "r+") as file:
            run = {"offset": 0, "after": 50, field: extreme}
            (change or line("run", 1, run["offset"], run["after"]))(file, path.parent)
        assert set(as_lists(path)) >= {"train/a"}


def test_a_report_is_read(path):
    with h5py.File(path, "r+") as file:
        line(*REPORT)(file, path.parent)
    assert read_hdf5(path).reports == [(5, "GradMonitor (grad)", "kind", "problem", "text", ("a",), 1)]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: path.symlink_to(os.devnull)])
def test_no_regular_file(tmp_path, make):
    path = tmp_path / "run.h5"
    make(path)
    for use in (read_hdf5, HDF5Logger, lambda path: HDF5Logger(path, "w")):
        with pytest.raises(ValueError, match="is no regular file"):
            use(path)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    assert list(tmp_path.iterdir()) == [path]
