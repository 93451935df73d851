"""Two copies of a file, of which one has the name."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import signal

import h5py
import numpy as np
import pytest

from ignite_monitor.hdf5.double_buffer import SwappedFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.h5"


def values(first, *numbers):
    return [("values", first, np.array(numbers, np.float32))]


def held(path):
    with h5py.File(path, "r") as file:
        return file["values"][()].tolist()


def count_copies(monkeypatch):
    copies, copyfile = [], shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", lambda *args: copies.append(args) or copyfile(*args))
    return copies


def test_nothing_is_copied_but_once(path, monkeypatch):
    copies, file = count_copies(monkeypatch), SwappedFile(path, "x")
    for number in range(50):
        file.write(values(number, number))
        assert held(path) == list(range(number + 1))
    assert len(copies) == 1
    assert len(list(path.parent.iterdir())) == 3
    file.close()
    assert list(path.parent.iterdir()) == [path]


def test_a_published_file_does_not_change_while_it_is_open(path, monkeypatch):
    copies, file = count_copies(monkeypatch), SwappedFile(path, "x")
    for number in range(10):
        file.write(values(number, number))
    with h5py.File(path, "r") as reader:
        before = path.read_bytes()
        with path.open("rb") as raw:
            for number in range(10, 20):
                file.write(values(number, number))
                assert reader["values"][()].tolist() == list(range(10))
            assert raw.read() == before
    assert len(copies) == 2
    for number in range(20, 30):
        file.write(values(number, number))
    assert len(copies) == 2
    file.close()
    assert held(path) == list(range(30))


def test_a_patch_twice_is_a_patch_once(path):
    file = SwappedFile(path, "x")
    file.write(values(0, 1, 2))
    file.write(values(0, 1, 2, 3))
    file.write(values(2, 3, 4))
    file.close()
    assert held(path) == [1, 2, 3, 4]


def test_an_error_leaves_the_file_as_it_was(path, monkeypatch):
    file = SwappedFile(path, "x")
    file.write(values(0, 1))
    file.write(values(1, 2))
    before = path.read_bytes()
    with pytest.raises(KeyError):
        file.write([*values(2, 3), ("nothing", 0, np.zeros(1))])
    assert path.read_bytes() == before
    file.write(values(2, 4))
    file.close()
    assert held(path) == [1, 2, 4]


def test_leftovers_of_a_killed_writer(path):
    SwappedFile(path, "x").close()
    for end in ("shadow", "spare", "lock"):
        path.with_name(f".run.h5.{end}").write_text("left over")
    file = SwappedFile(path, "a")
    file.write(values(0, 1))
    file.close()
    assert held(path) == [1]
    assert list(path.parent.iterdir()) == [path]


STEPS = [
    "double_buffer.create",
    "double_buffer.shutil.copyfile",
    "double_buffer.SwappedFile._is_free",
    "double_buffer.SwappedFile._apply",
    "double_buffer.SwappedFile._publish",
    "double_buffer.shutil.copymode",
    "double_buffer.os.link",
    "double_buffer.os.replace",
    "double_buffer.os.fstat",
]


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", STEPS)
def test_killed_at_every_step(path, where, after, number):
    """Whatever the moment, there is a whole file or, before the first is there, none."""
    *owner, name = where.split(".")
    target = functools.reduce(getattr, owner[1:], importlib.import_module(f"ignite_monitor.hdf5.{owner[0]}"))
    original, calls = getattr(target, name), []

    def kill(*args, **kwargs):
        calls.append(1)
        result = original(*args, **kwargs) if after or len(calls) < number else None
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        setattr(target, name, kill)
        file = SwappedFile(path, "x")
        for count in range(6):
            file.write(values(count, count))
            os.write(write, b".")
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        written = len(pipe.read())
    if written or path.exists():
        assert held(path) in (list(range(written)), list(range(written + 1)))
    file = SwappedFile(path, "a")
    file.write(values(0, *range(8)))
    file.close()
    assert held(path) == list(range(8))
    assert list(path.parent.iterdir()) == [path]


def test_one_writer_at_a_time(path):
    file = SwappedFile(path, "x")
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            SwappedFile(path, "w")
    file.write(values(0, 1))
    file.close()
    SwappedFile(path, "w").close()
    assert held(path) == []
    with pytest.raises(FileExistsError):
        SwappedFile(path, "x")
