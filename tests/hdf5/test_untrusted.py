"""Files that HDF5Logger has not written: the same numbers or a ValueError in one line, in bounded time and memory."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tracemalloc

import h5py
import numpy as np
import pytest

from ignite_monitor import HDF5Logger, read_hdf5
from ignite_monitor.cli import main
from tests.hdf5._runs import ENVIRONMENT, as_lists, run
from tests.hdf5._untrusted import damaged, strangers

MEMORY = 20_000_000


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A file with names that come and go, numbers that float32 can't hold, and rows that were taken back."""
    path = tmp_path_factory.mktemp("whole") / "whole.h5"
    run(path, 60, output=lambda i: {"a": i / 7, "b": 2**30 + i, **({"late": 1.0} if i > 40 else {})})
    run(path, 70, "a", output=lambda i: {"a": i / 3, "top": float(i)}, start=50)
    return path


@pytest.fixture
def path(whole, tmp_path):
    shutil.copy(whole, tmp_path / "run.h5")
    return tmp_path / "run.h5"


def read_or_refused(path):
    """What is in a file; None where it is refused in one line that names it."""
    said = f"{path} is damaged, or was not written by HDF5Logger: "
    read = None
    tracemalloc.start()
    try:
        read = as_lists(path)
    except ValueError as error:
        said = str(error)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < MEMORY
    assert said.startswith(f"{path} is damaged, or was not written by HDF5Logger: ")
    assert len(said.splitlines()) == 1
    return read


CHANGES = dict(strangers())
SAME = (": contiguous", ": chunked", ": deflated", ": of one chunk", "ids: with more elements")
UNREAD = ("attribute format: another text", "attribute created: ")  # by nobody


@pytest.mark.parametrize("what", CHANGES)
def test_a_file_of_another_make(path, whole, what):
    with h5py.File(path, "r+") as file:
        CHANGES[what](file, whole.parent)
    if what.endswith(SAME) or what.startswith(UNREAD):
        assert read_or_refused(path) == as_lists(whole)
    elif what in ("exact: without the last elements", "exact: of shape (0,)"):
        assert set(read_or_refused(path) or as_lists(whole)) == set(as_lists(whole))  # by their looks all is well
    else:
        assert read_or_refused(path) is None
        with pytest.raises(ValueError, match="is damaged, or was not written by HDF5Logger"):
            HDF5Logger(path, "a")


@pytest.mark.parametrize("name", ["names", "ids", "values", "exact", "rows"])
def test_only_datasets_that_can_grow_are_continued(path, name):
    with h5py.File(path, "r+") as file:
        data = file[name][()]
        del file[name]
        file[name] = data
    read_hdf5(path)
    with pytest.raises(ValueError, match=f"{name} is not laid out as HDF5Logger does it"):
        HDF5Logger(path, "a")


FIELDS = ["step", "iteration", "time", "run", "nested", "ids", "values", "count"]
EXTREMES = [-(2**63), -1, 0, 1, 2**31, 10**12, 2**63 - 1]


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("extreme", EXTREMES)
@pytest.mark.parametrize("row", [0, 30, -1])
def test_extreme_rows(path, field, extreme, row):
    with h5py.File(path, "r+") as file:
        rows = file["rows"][()]
        rows[field][row] = extreme
        file["rows"][...] = rows
    read = read_or_refused(path)
    if field in ("ids", "values", "count") and not 0 <= extreme < 10_000:
        assert read is None
    assert main(["summary", str(path)]) == (0 if read else 2)
    if read:
        with HDF5Logger(path, "a") as logger:
            run_on = logger._writer.first_run
        assert run_on > 0


@pytest.mark.parametrize(
    ("name", "element", "value"),
    [("ids", 0, -1), ("ids", -1, 99), ("exact", 0, (-1, 5.0)), ("exact", 1, (0, 5.0)), ("exact", -1, (10**12, 5.0))],
)
def test_an_index_that_is_nowhere(path, name, element, value):
    with h5py.File(path, "r+") as file:
        file[name][range(len(file[name]))[element]] = value
    assert read_or_refused(path) is None


@pytest.mark.parametrize(
    "lines",
    [b"{}\n", b'["a"]\n', b"1\n2\n", b"null\n", b'"a"', b"\n", b'"a"\n\n"b"\n"c"\n"d"\n', b"[" * 100_000 + b"\n",
     b'"a"\n"a"\n"b"\n"c"\n"d"\n', b'"\xff"\n', b"NaN\n", b"1" * 10_000 + b"\n", b'"a" "b"\n'],
)  # fmt: skip
def test_names_that_are_none(path, lines):
    with h5py.File(path, "r+") as file:
        del file["names"]
        file["names"] = np.frombuffer(lines, np.uint8)
    assert read_or_refused(path) is None


@pytest.mark.parametrize("seed", range(320))
def test_a_damaged_file_is_refused_or_read_as_it_was(path, whole, seed):
    path.write_bytes(damaged(whole.read_bytes(), seed))
    assert read_or_refused(path) in (None, as_lists(whole))


# What is no file


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "link to a pipe", "link to itself"])
@pytest.mark.parametrize("mode", ["x", "w", "a", "read"])
def test_what_is_no_file_is_refused_and_left_alone(tmp_path, kind, mode):
    path = tmp_path / "run.h5"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "link to a pipe":
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to("pipe")
    elif kind == "link to itself":
        path.symlink_to("run.h5")
    else:
        path = tmp_path / "null"
        path.symlink_to(os.devnull)
    before = os.lstat(path)
    errors = (OSError,) if kind == "link to itself" else (ValueError, IsADirectoryError)
    with pytest.raises(errors, match=r"is a |symbolic links"):
        read_hdf5(path) if mode == "read" else HDF5Logger(path, mode)
    assert os.lstat(path) == before
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_the_command_line_does_not_wait_for_a_pipe(tmp_path):
    os.mkfifo(tmp_path / "run.h5")
    command = [sys.executable, "-m", "ignite_monitor", "summary", "run.h5"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "ignite-monitor: error: run.h5 is a device, pipe or socket, not a file written by HDF5Logger\n"
    )


def test_a_path_is_printed_without_control_characters(tmp_path):
    path = tmp_path / "a\x1b[31m\n\u202e.h5"
    path.write_text("no HDF5")
    with pytest.raises(ValueError, match=r"a\\x1b\[31m\\n\\u202e\.h5 is damaged") as caught:
        read_hdf5(path)
    assert str(caught.value).isprintable()
