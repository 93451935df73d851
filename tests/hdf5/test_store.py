"""A file that is written in place, and replaced by a larger one."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import zlib

import h5py
import numpy as np
import pytest

from ignite_monitor import read_hdf5
from ignite_monitor.hdf5 import store
from ignite_monitor.hdf5.layout import EMPTY, ROW, TABLES, VALUE, extended
from ignite_monitor.hdf5.store import Store


def values(first, count):
    added = {"values": np.array([(0, number) for number in range(first, first + count)], VALUE)}
    return {name: np.empty(0, dtype) for name, dtype in TABLES.items()} | added


def held(path):
    """Numbers of the values, whose checksum is right."""
    with h5py.File(path, "r") as file:
        count = file["state"][1]
        numbers = file["values"]["value"][:count].tolist()
        assert file["state"][4] == zlib.crc32(file["values"][:count].tobytes())
    return numbers


def write(store, parts, size=1):
    state = EMPTY
    for number in range(parts):
        state = store.append(state, values(number * size, size))
    return state


def count_replacements(monkeypatch):
    replacements, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda *args: replacements.append(args) or replace(*args))
    return replacements


def test_a_file_is_replaced_when_it_is_full(path, monkeypatch):
    replacements, state = count_replacements(monkeypatch), EMPTY
    file = Store(path, "x")
    for number in range(100):
        state = file.append(state, values(1000 * number, 1000))
        assert held(path) == [*range(1000 * (number + 1))]
    assert len(replacements) == 5  # the first file, and four times one half as large again as needed
    assert len([*path.parent.iterdir()]) == 2  # and its lock
    assert path.stat().st_size < 1.7 * 12 * 100_000
    file.release()
    assert held(path) == [*range(100_000)]
    assert [*path.parent.iterdir()] == [path]


def test_copies_and_open_files_are_whole(path):
    """A reader sees what there was when it opened the file, and a copy has the state from before its values."""
    file = Store(path, "x")
    with h5py.File(path, "r") as reader:
        state = write(file, 10)
        assert reader["values"]["value"][:10].tolist() == [*range(10)]
    with h5py.File(path, "r") as reader, path.open("rb") as raw:
        begin = raw.read(4096)
        state = file.append(state, values(10, 10))
        assert reader["values"]["value"][:10].tolist() == [*range(10)]
        path.with_name("copy.h5").write_bytes(begin + raw.read())
        state = file.append(state, values(20, 100_000))
        assert reader["values"]["value"][:20].tolist() == [*range(20)]
    assert held(path.with_name("copy.h5")) == [*range(10)]
    file.release()
    assert held(path) == [*range(100_020)]


def test_what_was_on_the_disk_is_left_after_a_loss_of_power(path, monkeypatch, caplog):
    """The state was written, and what was added since the last time at which all was on the disk was not."""
    now = [100.0]
    monkeypatch.setattr(store.time, "monotonic", lambda: now[0])
    file, state, row = Store(path, "x"), EMPTY, np.zeros(1, ROW)
    line = np.frombuffer(b'["name", 0, "a", "user", "", true]\n["run", 0, 0, -1]\n', np.uint8)
    for number in range(9):
        now[0] += 3.0
        row["end"], row["step"] = number + 1, number
        added = {"rows": row, "values": np.array([(0, number)], VALUE), "lines": line if number == 0 else line[:0]}
        state = file.append(state, added)
    assert read_hdf5(path)["a"].values.tolist() == [*range(9)]
    place = file._places["values"][0]
    file.release()
    data = bytearray(path.read_bytes())
    data[place + 12 * 8 : place + 12 * 9] = bytes(12)  # added since
    path.write_bytes(data)
    assert read_hdf5(path)["a"].values.tolist() == [*range(8)]
    assert caplog.messages == [f"The end of {path} is damaged; ignoring what was written last."]
    data[place + 12 * 7 : place + 12 * 8] = bytes(12)
    path.write_bytes(data)
    with pytest.raises(ValueError, match="a checksum is wrong"):
        read_hdf5(path)


def test_leftovers_of_a_killed_writer(path):
    Store(path, "x").release()
    for end in ("new", "lock"):
        path.with_name(f".run.h5.{end}").write_text("left over")
    file = Store(path, "a")
    write(file, 1)
    file.release()
    assert held(path) == [0]
    assert [*path.parent.iterdir()] == [path]


STEPS = ["Store._make_room", "_write", "Store._replace", "Store.release", "import_h5py", "fcntl.flock",
         "shutil.copymode", "os.replace", "_identity", "sealed"]  # fmt: skip


@pytest.mark.parametrize("number", [1, 2, 4, 9])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", STEPS)
def test_killed_at_every_step(path, where, after, number):
    """Whatever the moment, there is a whole file or, before the first is there, none."""
    *owner, name = where.split(".")
    target = functools.reduce(getattr, owner, store)
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
        with contextlib.suppress(BaseException):
            setattr(target, name, kill)
            file, state = Store(path, "x"), EMPTY
            for count in range(6):
                state = file.append(state, values(count * 5000, 5000))
                os.write(write, b".")
            file.release()
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with os.fdopen(read, "rb") as pipe:
        written = len(pipe.read())
    count = len(held(path)) if written or path.exists() else 0
    assert count in (5000 * written, 5000 * (written + 1))
    state = extended(EMPTY, values(0, count))
    file = Store(path, "a")
    file.append(state, values(count, 8))
    file.release()
    assert held(path) == [*range(count + 8)]
    assert [*path.parent.iterdir()] == [path]
