"""What is refused, and what goes wrong during a run."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import re
import resource
import shutil

import numpy as np
import pytest
from ignite.engine import Events

from ignite_monitor import HDF5Logger, read_hdf5
from tests.hdf5._runs import as_lists, engine_of, log_output, run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.h5"


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((3,), {}, TypeError, "Argument path should be of type str or os.PathLike"),
        (("a.h5", "r"), {}, ValueError, "Argument mode should be one of 'x', 'w' and 'a', but given 'r'"),
        (("a.h5", None), {}, ValueError, "Argument mode should be"),
        (("a.h5",), {"flush_every": 0}, ValueError, "Argument flush_every should be at least 1"),
        (("a.h5",), {"flush_every": 1.5}, TypeError, "Argument flush_every should be an integer"),
        (("absent/a.h5",), {}, FileNotFoundError, r"The directory of .*absent/a\.h5 does not exist"),
    ],
)
def test_wrong_arguments(tmp_path, monkeypatch, args, kwargs, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        HDF5Logger(*args, **kwargs)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["text", "empty", "cut", "head only"])
def test_a_foreign_or_damaged_file(path, kind):
    run(path, 100)
    data = path.read_bytes()
    before = {"text": b"no HDF5\n" * 1000, "empty": b"", "cut": data[: len(data) // 2], "head only": data[:50]}[kind]
    path.write_bytes(before)
    for use in (read_hdf5, lambda path: HDF5Logger(path, "a")):
        with pytest.raises(ValueError, match=r"run\.h5 (is|was) ") as caught:
            use(path)
        assert len(str(caught.value).splitlines()) == 1
    assert path.read_bytes() == before
    run(path, 3, "w")
    assert as_lists(path)["train/loss"][0] == [1, 2, 3]


def test_a_flipped_bit_is_an_error_and_never_another_number(path):
    run(path, 200, output=lambda i: {"a": i / 7, "b": 2**30 + i, **({"late": 1.0} if i > 90 else {})})
    data, whole = path.read_bytes(), as_lists(path)
    errors = []
    for place in np.random.default_rng(0).permutation(len(data))[:300].tolist():
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        try:
            assert as_lists(path) == whole  # where nothing stands
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) > 50
    assert {str(path) in error and "\n" not in error for error in errors} == {True}


def test_no_file(path):
    with pytest.raises(FileNotFoundError, match=r"run\.h5"):
        read_hdf5(path)
    with pytest.raises(TypeError, match="Argument path should be of type str or"):
        read_hdf5(3)


@pytest.mark.parametrize("mode", ["a", "w"])
def test_a_second_writer_is_refused(path, mode):
    first, engine = HDF5Logger(path), engine_of()
    log_output(first, engine)
    with pytest.raises(BlockingIOError, match=r"run\.h5: it is open in another program"):
        HDF5Logger(path, mode)
    engine.run(range(5))
    first.close()
    assert as_lists(path)["train/loss"][0] == [1, 2, 3, 4, 5]
    HDF5Logger(path, mode).close()


def test_a_directory_that_can_not_be_written_to():
    with pytest.raises(FileNotFoundError, match=r"The directory of /dev/full/a\.h5 does not exist"):
        HDF5Logger("/dev/full/a.h5")
    with pytest.raises(OSError, match=r"Can't write /proc/a\.h5"):
        HDF5Logger("/proc/a.h5")


# While a run is going on


def train_with(path, happens, at, count=300, mode="x", **kwargs):
    """What happens at an iteration; all of them are run all the same. The file's steps."""
    engine, completed = engine_of(), []
    with HDF5Logger(path, mode, flush_every=10, **kwargs) as logger:
        log_output(logger, engine)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: completed.append(1))
        engine.add_event_handler(Events.ITERATION_STARTED(once=at), happens)
        engine.run(range(count), max_epochs=1)
    assert len(completed) == count


def failed_to_the_end(caplog, path, first=100):
    """The first warning, after which there is only that of the close, which says what is lost."""
    begin, end = caplog.records
    assert {begin.levelno, end.levelno} == {logging.WARNING}
    assert begin.message.startswith(f"HDF5Logger ({path}): writing failed: ")
    assert begin.message.endswith("; keeping the values in memory and retrying at every flush.")
    lost = f"{301 - first} values are lost"
    assert end.message == f"HDF5Logger ({path}): writing failed to the end: {lost}."
    assert len(begin.message.splitlines()) == 1
    return begin.message


def test_the_directory_is_removed(tmp_path, caplog):
    folder = tmp_path / "folder"
    folder.mkdir()
    train_with(folder / "run.h5", lambda: shutil.rmtree(folder), 101)
    assert "No such file" in failed_to_the_end(caplog, folder / "run.h5")


def test_the_file_is_removed(path, caplog):
    """What the other copy holds is not lost with it."""
    train_with(path, path.unlink, 101)
    assert not caplog.records
    assert as_lists(path)["train/loss"][0] == list(range(1, 301))


def test_another_file_takes_its_place(path, caplog):
    def replace():
        path.unlink()
        path.write_text("mine")

    train_with(path, replace, 101)
    assert path.read_text() == "mine"
    assert "another program has changed it, or put another file in its place" in failed_to_the_end(caplog, path)
    assert [each.name for each in path.parent.iterdir()] == ["run.h5"]


def test_a_second_name_is_not_written_to(path):
    second = path.with_name("snapshot.h5")
    train_with(path, lambda: os.link(path, second), 101)
    before = as_lists(second)["train/loss"][0]
    assert before == list(range(1, len(before) + 1))
    assert len(before) < 110
    assert as_lists(path)["train/loss"][0] == list(range(1, 301))


def test_no_hard_links(path, monkeypatch):
    def link(*_):
        raise PermissionError(1, os.strerror(1))

    monkeypatch.setattr(os, "link", link)
    train_with(path, lambda: None, 101)
    assert as_lists(path)["train/loss"][0] == list(range(1, 301))
    assert [each.name for each in path.parent.iterdir()] == ["run.h5"]


@contextlib.contextmanager
def file_size(limit):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("limit", [0, 10_000, 300_000, 2_000_000])
def test_a_disk_that_is_full(path, caplog, limit):
    """A limit on the size of files, which the system enforces as it does that of a disk."""
    with contextlib.ExitStack() as limits:
        train_with(path, lambda: limits.enter_context(file_size(limit)), 101)
    if limit < 2_000_000:
        assert re.search(r"File too large: a write may need \d+ kB", failed_to_the_end(caplog, path))
        assert as_lists(path)["train/loss"][0] == list(range(1, 100))
    else:
        assert as_lists(path)["train/loss"][0] == list(range(1, 301))
    assert [each.name for each in path.parent.iterdir()] == ["run.h5"]
    run(path, 400, "a", start=90)
    assert as_lists(path)["train/loss"][0] == list(range(1, 401))


# Interrupts


WHERE = [
    "double_buffer.DoubleBuffer._is_free",
    "double_buffer.DoubleBuffer._apply",
    "double_buffer.DoubleBuffer.write",
    "double_buffer._identity",
    "double_buffer.shutil.copymode",
    "double_buffer.os.link",
    "double_buffer.os.replace",
    "double_buffer.import_h5py",
    "double_buffer.os.posix_fallocate",
    "writer.Writer._patch",
    "writer.islice",
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("where", WHERE)
def test_interrupted_while_it_writes(path, monkeypatch, caplog, where, number, after):
    """Ctrl-C in a notebook, where training then goes on with the same logger: nothing is lost, twice or misnamed."""
    calls, engine = [], engine_of(lambda iteration: {f"{iteration % 7}": iteration % 7, "step": iteration})
    *owner, name = f"ignite_monitor.hdf5.{where}".split(".")
    target = functools.reduce(getattr, owner[3:], importlib.import_module(".".join(owner[:3])))
    original = getattr(target, name)

    def interrupt(*args, **kwargs):
        calls.append(1)
        if len(calls) == number and not after:
            raise KeyboardInterrupt
        result = original(*args, **kwargs)
        if len(calls) == number:
            raise KeyboardInterrupt
        return result

    with HDF5Logger(path, flush_every=10) as logger:
        log_output(logger, engine, tag=None)
        engine.add_event_handler(
            Events.ITERATION_STARTED(once=45), lambda: monkeypatch.setattr(target, name, interrupt)
        )
        with contextlib.suppress(KeyboardInterrupt):
            engine.run(range(90))
        assert calls
        monkeypatch.undo()
        again = engine_of(lambda iteration: {f"{iteration % 7}": iteration % 7, "again": iteration})
        log_output(logger, again, tag=None)
        again.run(range(40))
    assert [record for record in caplog.records if "hdf5" in record.name] == []
    read = as_lists(path)
    assert read["step"][0] == list(range(1, len(read["step"][0]) + 1))
    assert len(read["step"][0]) >= engine.state.iteration - 1
    assert read["again"][0] == list(range(1, 41))
    for own in ("step", "again"):
        steps, values = read.pop(own)
        assert values == steps
    for name, (steps, values) in read.items():
        assert values == [float(name)] * len(steps)
        assert {step % 7 for step in steps} == {int(name)}
    assert [each.name for each in path.parent.iterdir()] == ["run.h5"]
