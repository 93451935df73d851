"""Two copies of a file, of which one has the name."""

from __future__ import annotations

import functools
import os
import shutil
import signal

import h5py
import numpy as np
import pytest

from ignite_monitor.hdf5 import double_buffer
from ignite_monitor.hdf5.double_buffer import DoubleBuffer
from ignite_monitor.hdf5.layout import VALUE


def values(first, *numbers):
    return [("values", first, np.array([(0, number) for number in numbers], VALUE))]


def held(path):
    with h5py.File(path, "r") as file:
        return file["values"]["value"].tolist()


def count_copies(monkeypatch):
    copies, copyfile = [], shutil.copyfile
    monkeypatch.setattr(shutil, "copyfile", lambda *args: copies.append(args) or copyfile(*args))
    return copies


def test_a_published_file_is_copied_only_while_it_is_open(path, monkeypatch):
    copies, file = count_copies(monkeypatch), DoubleBuffer(path, "x")
    for number in range(10):
        file.write(values(number, number))
        assert held(path) == list(range(number + 1))
    assert len(copies) == 1
    assert len(list(path.parent.iterdir())) == 3
    with h5py.File(path, "r") as reader:
        before = path.read_bytes()
        with path.open("rb") as raw:
            for number in range(10, 20):
                file.write(values(number, number))
                assert reader["values"]["value"].tolist() == list(range(10))
            assert raw.read() == before
    for number in range(20, 30):
        file.write(values(number, number))
    assert len(copies) == 2
    file.close()
    assert held(path) == list(range(30))
    assert list(path.parent.iterdir()) == [path]


def test_leftovers_of_a_killed_writer(path):
    DoubleBuffer(path, "x").close()
    for end in ("standby", "spare", "lock"):
        path.with_name(f".run.h5.{end}").write_text("left over")
    file = DoubleBuffer(path, "a")
    file.write(values(0, 1))
    file.close()
    assert held(path) == [1]
    assert list(path.parent.iterdir()) == [path]


STEPS = ["create", "shutil.copyfile", "DoubleBuffer._apply", "DoubleBuffer._discard", "import_h5py", "_lock",
         "shutil.copymode", "os.link", "os.replace", "os.fstat"]  # fmt: skip


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", STEPS)
def test_killed_at_every_step(path, where, after, number):
    """Whatever the moment, there is a whole file or, before the first is there, none."""
    *owner, name = where.split(".")
    target = functools.reduce(getattr, owner, double_buffer)
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
        file = DoubleBuffer(path, "x")
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
    file = DoubleBuffer(path, "a")
    file.write(values(0, *range(8)))
    file.close()
    assert held(path) == list(range(8))
    assert list(path.parent.iterdir()) == [path]
