"""Refused arguments, and failures during a run."""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import logging
import re
import resource

import numpy as np
import pytest
from ignite.engine import Events

from ignite_monitor import HDF5Logger, read_hdf5
from ignite_monitor.hdf5 import recorder, store
from tests.hdf5._runs import as_lists, engine_of, log_output, run


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((3,), {}, TypeError, "Argument path should be of type str or os.PathLike"),
        (("a.h5", "r"), {}, ValueError, "Argument mode should be 'x' or 'w' or 'a', but given 'r'"),
        (("a.h5",), {"flush_every": 0}, ValueError, "Argument flush_every should be at least 1"),
        (("absent/a.h5",), {}, FileNotFoundError, r"Can't write .*absent/a\.h5: .*No such file"),
        (("/proc/a.h5",), {}, OSError, "Can't write /proc/a.h5"),
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
        with pytest.raises(ValueError, match=r"run\.h5 is no file of HDF5Logger, or damaged: ") as caught:
            use(path)
        assert len(str(caught.value).splitlines()) == 1
    assert path.read_bytes() == before
    run(path, 3, "w")
    assert as_lists(path)["train/loss"][0] == [1, 2, 3]


def test_a_flipped_bit_is_an_error_and_never_another_number(path):
    run(path, 200, output=lambda i: {"a": i / 7, "b": 2**30 + i, **({"late": 1.0} if i > 90 else {})})
    data, whole = path.read_bytes(), as_lists(path)
    errors = []
    for place in np.random.default_rng(0).permutation(len(data))[:400].tolist():
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        try:
            assert as_lists(path) == whole  # where nothing stands
        except ValueError as error:
            errors.append(str(error))
    assert len(errors) > 25
    assert {str(path) in error and "\n" not in error for error in errors} == {True}


def test_no_file(path):
    with pytest.raises(FileNotFoundError, match=r"run\.h5"):
        read_hdf5(path)


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


# While a run is going on


def train_with(path, happens=lambda: None, at=101, **output):
    """Run all iterations, whatever happens at one or several of them."""
    engine, completed = engine_of(**output), []
    with HDF5Logger(path, flush_every=10) as logger:
        log_output(logger, engine)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: completed.append(1))
        engine.add_event_handler(Events.ITERATION_STARTED(once=at), happens)
        engine.run(range(300), max_epochs=1)
    assert len(completed) == 300


FAILED = r"HDF5Logger \(.*run\.h5\): writing failed: .*; the values wait in memory for the next flush\."


def failed_to_the_end(caplog, path):
    """The first warning, and the number of lost values, which the only other warning, that of the close, says."""
    begin, end = caplog.records
    assert {begin.levelno, end.levelno} == {logging.WARNING}
    assert re.fullmatch(FAILED, begin.message)
    text = rf"HDF5Logger \({re.escape(str(path))}\): (\d+) values that could not be written are lost\."
    return begin.message, int(re.fullmatch(text, end.message)[1])


@pytest.mark.parametrize(
    ("text", "reason"), [("mine", "another program has put another file in its place"), (None, "No such file")]
)
def test_another_file_takes_its_place(path, caplog, text, reason):
    def replace():
        path.unlink()
        if text:
            path.write_text(text)

    train_with(path, replace, 101)
    assert [(item.name, item.read_text()) for item in path.parent.iterdir()] == ([("run.h5", text)] if text else [])
    message, lost = failed_to_the_end(caplog, path)
    assert reason in message
    assert 200 <= lost < 210


@contextlib.contextmanager
def file_size(limit):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("limit", "is_lost"), [(0, True), (10_000, True), (300_000, False), (2_000_000, False)])
def test_a_disk_that_is_full(path, caplog, limit, is_lost):
    """A limit on the size of files, which the system enforces as it does that of a disk."""
    with contextlib.ExitStack() as limits:
        train_with(path, lambda: limits.enter_context(file_size(limit)), 101)
    if is_lost:
        message, lost = failed_to_the_end(caplog, path)
        assert re.search(r"File too large|No space left", message)
        assert 200 <= lost < 210
        assert as_lists(path)["train/loss"][0] == list(range(1, 301 - lost))
    else:
        assert as_lists(path)["train/loss"][0] == list(range(1, 301))
    assert [item.name for item in path.parent.iterdir()] == ["run.h5"]
    run(path, 400, "a", start=90)
    assert as_lists(path)["train/loss"][0] == list(range(1, 401))


class Failing:
    """A function that raises while ``fails`` is true, or in its n-th call."""

    def __init__(self, function, call=0):
        self.function, self.call, self.count, self.fails = function, call, 0, False

    def __call__(self, *args, **kwargs):
        self.count += 1
        if self.fails or self.count == self.call:
            raise OSError(errno.EIO, "Input/output error")
        return self.function(*args, **kwargs)

    def toggle(self):
        self.fails = not self.fails


@pytest.mark.parametrize("call", [2, 3, 5])
@pytest.mark.parametrize("name", ["os.replace", "_write", "Store._replace", "Store._make_room"])
def test_one_failure_loses_nothing(path, monkeypatch, caplog, name, call):
    owner, _, last = name.rpartition(".")
    owner = getattr(store, owner) if owner else store
    failing = Failing(getattr(owner, last), call)
    monkeypatch.setattr(owner, last, lambda *args, **kwargs: failing(*args, **kwargs))
    train_with(path)
    assert as_lists(path)["train/loss"] == (list(range(1, 301)), [step / 8 for step in range(1, 301)])
    assert [entry.name for entry in path.parent.iterdir()] == ["run.h5"]
    if caplog.messages:
        assert re.fullmatch(FAILED, caplog.messages[0])
        assert caplog.messages[1].endswith("writing works again.")


@pytest.mark.parametrize(("kept", "end"), [(1000, 90), (40, 200), (40, 1000)])
def test_a_long_failure(path, monkeypatch, caplog, kept, end):
    """Rows of ever new names, which need memory too, until iteration ``end``; the run has 300."""
    failing = Failing(store._write)
    monkeypatch.setattr(recorder, "KEPT", kept * 3)
    monkeypatch.setattr(store, "_write", lambda *args: failing(*args))
    train_with(path, failing.toggle, [31, end], output=lambda i: {f"{i}/{j}": i for j in "abc"})
    first, *others = caplog.messages
    assert re.fullmatch(FAILED, first)
    missing = set(range(1, 301)).difference(*(steps for steps, _ in as_lists(path).values()))
    lost = [int(found[1]) for text in others if (found := re.search(r"(\d+) values that could not", text))]
    assert sum(lost) == 3 * len(missing)
    assert max(lost, default=0) <= 3 * (kept + 10)
    assert bool(missing) is (kept == 40)
    assert caplog.text.count("writing works again") == (end < 300)
    if end == 1000:
        assert missing == set(range(min(missing), 301))
        assert 20 < min(missing) <= 31
    assert failing.count > 10


# Interrupts


WHERE = [
    "store._identity",
    "store.sealed",
    "store.Store._open",
    "store._write",
    "store.Store.append",
    "recorder.Recorder._additions",
    "recorder.np.cumsum",
    "recorder.Recorder._add_name",
    "recorder.Recorder._add_line",
]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("where", WHERE)
def test_interrupted_while_it_writes(path, monkeypatch, caplog, where, number, after):
    """Ctrl-C in a notebook, where training then goes on with the same logger: nothing is lost, twice or misnamed."""

    def output(iteration):
        late = {f"late/{iteration % 7}": iteration % 7} if iteration > 46 else {}
        return {f"{iteration % 7}": iteration % 7, "step": iteration} | late

    calls, engine = [], engine_of(output)
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

    with HDF5Logger(path, flush_every=10, trainer=engine) as logger:
        log_output(logger, engine, tag=None)
        engine.add_event_handler(
            Events.ITERATION_STARTED(once=45), lambda: monkeypatch.setattr(target, name, interrupt)
        )
        with contextlib.suppress(KeyboardInterrupt):
            engine.run(range(90))
        assert calls
        monkeypatch.undo()
        again = engine_of(lambda iteration: {f"{iteration % 7}": iteration % 7, "again": iteration})
        log_output(logger, again, tag="again")
        again.run(range(40))
    assert [record for record in caplog.records if "hdf5" in record.name] == []
    read = as_lists(path)
    first, second = ([*range(1, len(read[name][0]) + 1)] for name in ("step", "again/again"))
    assert read.pop("step") == (first, first)
    assert read.pop("again/again") == (second, second)
    assert (len(first) >= engine.state.iteration - 1, len(second)) == (True, 40)
    for name, (steps, values) in read.items():
        assert {*values} == {step % 7 for step in steps} == {int(name.rpartition("/")[2])}
    assert [item.name for item in path.parent.iterdir()] == ["run.h5"]
