"""Files that HDF5Logger did not write: the same numbers, or a ValueError in one line, in bounded memory."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tracemalloc

import h5py
import numpy as np
import pytest

from ignite_monitor import HDF5Logger, read_hdf5
from tests.hdf5._runs import as_lists, run

MEMORY = 20_000_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file with names that come and go, and rows that a resumed run replaced."""
    path = tmp_path_factory.mktemp("whole") / "whole.h5"
    run(path, 60, output=lambda i: {"a": i / 7, "b": 2**30 + i, **({"late": 1.0} if i > 40 else {})})
    run(path, 70, "a", output=lambda i: {"a": i / 3, "top": float(i)}, start=50)
    return path


@pytest.fixture
def path(whole, tmp_path):
    for name in ("run.h5", "whole.h5"):
        shutil.copy(whole, tmp_path / name)
    return tmp_path / "run.h5"


def read_or_refused(path):
    """Contents of a file; None if it is refused in one line that names it."""
    read, text = None, f"{path} is damaged, or was not written by HDF5Logger: "
    tracemalloc.start()
    try:
        read = as_lists(path)
    except ValueError as error:
        text = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY
    assert text.startswith(f"{path} is damaged, or was not written by HDF5Logger: ")
    assert len(text.splitlines()) == 1
    return read


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

    return change


def lines(text, name="names"):
    def change(file, folder):
        file[name].resize((len(text),))
        file[name][...] = np.frombuffer(text, np.uint8)

    return change


REPORT = [1, 5, "GradMonitor (grad)", "kind", "problem", "text", ["a"]]
CHUNKS = {"maxshape": (None,), "chunks": (64,)}
REFUSED = {
    "external storage": external,
    "virtual": virtual,
    "soft link": moved,
    "link to a file": linked("values", h5py.ExternalLink("whole.h5", "values")),
    "committed type": linked("values", np.dtype("<i8")),
    "dataset missing": lambda file, folder: file.__delitem__("ids"),
    "group": lambda file, folder: (file.__delitem__("ids"), file.create_group("ids")),
    "unknown version": attribute("version", 9),
    "version of an older release": attribute("version", 5),
    "no version": attribute("version"),
    "version as text": attribute("version", "2"),
    "1e12 elements": replaced("values", (10**12,), maxshape=(None,), chunks=(1 << 16,)),
    "1e8 elements, compressed": replaced("names", (10**8,), compression=1, **CHUNKS),
    "1e12 rows": replaced("rows", (10**12,), maxshape=(None,), chunks=(1 << 16,)),
    "another type": replaced("values", dtype="<f4", maxshape=(None,), chunks=(8192,)),
    "other fields": replaced("rows", (8,), dtype=[("step", "<i8")]),
    "another filter": replaced("values", compression="lzf", **CHUNKS),
    "fewer values": lambda file, folder: file["values"].resize((len(file["values"]) - 3,)),
    "more values": lambda file, folder: file["values"].resize((len(file["values"]) + 3,)),
    "index below zero": element("ids", 0, -1),
    "index beyond the names": element("ids", -1, 99),
    **{
        f"{field} {value} in row {row}": element("rows", row, value, field)
        for row, field, value in [
            *((0, "count", -1), (30, "count", 0), (-1, "count", 2**63 - 1), (0, "first_id", -(2**63))),
            *((-1, "first_id", 2**63 - 1), (0, "run", -1), (9, "run", 3)),
        ]
    },
    **{
        f"report {number}": lines(
            json.dumps([*REPORT[:place], value, *REPORT[place + 1 :]]).encode() + b"\n", "reports"
        )
        for number, (place, value) in enumerate([(0, -1), (0, 3), (1, "a"), (2, 3), (4, "fatal"), (5, None), (6, [1])])
    },
    "report without names": lines(json.dumps(REPORT[:6]).encode() + b"\n", "reports"),
    "a name twice": lines(b'["a", "user", ""]\n' * 4),
    "names of deep nesting": lines(b"[" * 100_000 + b"\n"),
    "names without an end": lines(b'["a", "user", ""]'),
    "contiguous": replaced("values"),
    "other chunks": replaced("rows", compression=9, **CHUNKS),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_with_another_layout(path, what):
    with h5py.File(path, "r+") as file:
        REFUSED[what](file, path.parent)
    assert read_or_refused(path) is None
    with pytest.raises(ValueError, match="is damaged, or was not written by HDF5Logger"):
        HDF5Logger(path, "a")


@pytest.mark.parametrize(
    ("name", "field"),
    [("rows", "step"), ("rows", "iteration"), ("rows", "time"), ("runs", "offset"), ("runs", "after")],
)
def test_extreme_but_possible_rows_and_runs_are_read(path, name, field):
    for extreme in (0, 10**12, 2**62):
        with h5py.File(path, "r+") as file:
            element(name, -1, extreme, field)(file, path.parent)
        assert set(as_lists(path)) >= {"train/a"}


def test_a_report_is_read(path):
    with h5py.File(path, "r+") as file:
        lines(json.dumps(REPORT).encode() + b"\n", "reports")(file, path.parent)
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
