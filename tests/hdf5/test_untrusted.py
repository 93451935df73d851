"""Files that HDF5Logger did not write: the same numbers, or a ValueError in one line."""

from __future__ import annotations

import json
import os
import shutil
import stat
import zlib

import h5py
import numpy as np
import pytest

from ignite_monitor import HDF5Logger, read_hdf5
from ignite_monitor.hdf5.layout import EMPTY, TABLES, extended, sealed
from tests.hdf5._runs import as_lists, run


def seal(file):
    """Count all that is there, with the right checksums."""
    file["state"][...] = np.tile(sealed(extended(EMPTY, {name: file[name][()] for name in TABLES})), 2)


def rewrite(file, name, data=None, **options):
    """Write a dataset anew."""
    data = file[name][()] if data is None else data
    del file[name]
    file.create_dataset(name, **({"shape": data} if isinstance(data, tuple) else {"data": data}), **options)


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
def path(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("run.h5", "whole.h5"):
        shutil.copy(whole, tmp_path / name)
    return tmp_path / "run.h5"


def link(file, name, target):
    del file[name]
    file[name] = target


def virtual(file):
    layout = h5py.VirtualLayout(file["values"].shape, file["values"].dtype)
    layout[:] = h5py.VirtualSource("whole.h5", "values", file["values"].shape)
    del file["values"]
    file.create_virtual_dataset("values", layout)


def external(file):
    data = file["values"][()]
    data.tofile("raw")
    rewrite(file, "values", data.shape, dtype=data.dtype, external=[("raw", 0, data.nbytes)])


def edit(file, name, index, value, field):
    data = file[name][()]
    data[field][index] = value
    file[name][...] = data
    seal(file)


def add(file, text, keep=True):
    """Add lines, or write them instead of those of the file."""
    rewrite(file, "lines", np.frombuffer((file["lines"][()].tobytes() if keep else b"") + text, np.uint8))
    seal(file)


def line(*entry):
    return lambda file: add(file, json.dumps(entry).encode() + b"\n")


def state(file, index, value):
    numbers = file["state"][:7]
    numbers[index] = value
    numbers[6] = zlib.crc32(numbers[:6].tobytes())
    file["state"][...] = np.tile(numbers, 2)


REPORT = ["report", 1, 5, "GradMonitor (grad)", "kind", "problem", "text", ["a"]]
REFUSED = {
    "external storage": external,
    "virtual": virtual,
    "soft link": lambda file: link(file, "values", h5py.SoftLink("/rows")),
    "link to a file": lambda file: link(file, "values", h5py.ExternalLink("whole.h5", "values")),
    "state in another file": lambda file: link(file, "state", h5py.ExternalLink("whole.h5", "state")),
    "committed type": lambda file: link(file, "values", np.dtype("<i8")),
    "dataset missing": lambda file: file.__delitem__("rows"),
    "newer version": lambda file: file.attrs.modify("version", 11),
    "no version": lambda file: file.attrs.__delitem__("version"),
    "version as text": lambda file: file.attrs.__setitem__("version", "10"),
    "1e12 elements": lambda file: rewrite(file, "values", (10**12,), dtype=file["values"].dtype),
    "compressed": lambda file: rewrite(file, "lines", compression=1),
    "another type": lambda file: rewrite(file, "values", (8,), dtype="<f8"),
    "other fields": lambda file: rewrite(file, "rows", (8,), dtype=[("step", "<i8")]),
    "fewer values": lambda file: rewrite(file, "values", file["values"][:-3]),
    "fewer values that count": lambda file: (rewrite(file, "values", file["values"][:-3]), seal(file)),
    "more values that count": lambda file: (rewrite(file, "values", np.tile(file["values"], 2)), seal(file)),
    "size below zero": lambda file: state(file, 0, -1),
    "another checksum": lambda file: state(file, 4, 1),
    "state of more numbers": lambda file: rewrite(file, "state", (15,), dtype="<i8"),
    **{
        f"{name} {field} {value} at {index}": lambda file, entry=(name, index, value, field): edit(file, *entry)
        for name, field, index, value in [
            *(("values", "name", 0, -1), ("values", "name", -1, 99), ("rows", "run", 0, -1), ("rows", "run", 9, 2)),
            *(("rows", "end", 0, -1), ("rows", "end", 0, 0), ("rows", "end", 30, 1), ("rows", "end", -1, 2**63 - 1)),
        ]
    },
    **{
        f"report {place} {value}": line(*REPORT[:place], value, *REPORT[place + 1 :])
        for place, value in [
            *((1, -1), (1, 2), (1, "a"), (1, True), (2, 0.5), (3, 3), (5, "fatal"), (6, None), (7, [1])),
        ]
    },
    "report without names": line(*REPORT[:7]),
    "a name twice": line("name", 4, "train/a", "user", "", True),
    "a name with a number too high": line("name", 9, "train/x", "user", "", True),
    "a run with a number too high": line("run", 3, 0, 4),
    "a run that replaces a fraction": line("run", 1, 0, 0.5),
    "a line of another kind": line("nothing", 0),
    "lines of deep nesting": lambda file: add(file, b"[" * 100_000 + b"\n"),
    "no lines": lambda file: add(file, b"", keep=False),
    "a line without an end": lambda file: add(file, b'["name", 4, "train/x", "user", "", true'),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_file_with_another_layout(path, what):
    with h5py.File(path, "r+") as file:
        REFUSED[what](file)
    for use in (read_hdf5, lambda path: HDF5Logger(path, "a")):
        with pytest.raises(ValueError, match=rf"^{path} is no file of HDF5Logger, or damaged: .*\Z"):
            use(path)


def test_an_older_version_is_named(path):
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = 9
    with pytest.raises(ValueError, match="its format has version 9, and only version 10 can be read"):
        read_hdf5(path)


@pytest.mark.parametrize("extreme", [0, 10**12, 2**62])
def test_extreme_but_possible_numbers_are_read(path, extreme):
    for change in (
        lambda file: edit(file, "rows", -1, extreme, "step"),
        lambda file: edit(file, "rows", -1, extreme, "iteration"),
        line("run", 1, extreme, extreme),
    ):
        with h5py.File(path, "r+") as file:
            change(file)
        assert set(as_lists(path)) >= {"train/a"}


def test_a_report_is_read(path):
    with h5py.File(path, "r+") as file:
        line(*REPORT)(file)
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
