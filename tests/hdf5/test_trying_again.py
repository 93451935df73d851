"""A write that fails is tried again: nothing is lost that fits in memory, and two warnings tell of it."""

from __future__ import annotations

import errno
import os
import re

import pytest
from ignite.engine import Events

from ignite_monitor import HDF5Logger
from ignite_monitor.hdf5 import double_buffer, writer
from tests.hdf5._runs import as_lists, engine_of, log_output


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.h5"


class Failing:
    """A function that raises while it is told to, or in its n-th call."""

    def __init__(self, function, calls=()):
        self.function, self.calls, self.count, self.fails = function, calls, 0, False

    def __call__(self, *args, **kwargs):
        self.count += 1
        if self.fails or self.count in self.calls:
            raise OSError(errno.EIO, "Input/output error")
        return self.function(*args, **kwargs)


def train(path, failing=None, between=(), count=120, flush_every=5, output=lambda i: {"loss": i / 8}, **kwargs):
    """A run in which writing fails between two iterations."""
    engine, completed = engine_of(output), []
    with HDF5Logger(path, flush_every=flush_every) as logger:
        log_output(logger, engine, tag=None)

        @engine.on(Events.ITERATION_STARTED)
        def look():
            completed.append(engine.state.iteration)
            if between:
                failing.fails = between[0] <= engine.state.iteration < between[1]

        engine.run(range(count), max_epochs=1)
    assert completed == list(range(1, count + 1))


def told(caplog):
    return [re.sub(r"/\S*run\.h5", "run.h5", record.message) for record in caplog.records]


TROUBLE = (
    "HDF5Logger (run.h5): writing failed: [Errno 5] Input/output error; keeping the values in memory and retrying at "
    "every flush."
)
OVER = "HDF5Logger (run.h5): writing works again: 0 values are lost."

WHERE = [
    (os, "replace"),
    (double_buffer.DoubleBuffer, "_apply"),
    (double_buffer.shutil, "copyfile"),
    (double_buffer.os, "posix_fallocate"),
]


@pytest.mark.parametrize("call", range(2, 9))
@pytest.mark.parametrize(("owner", "name"), WHERE, ids=lambda each: getattr(each, "__name__", each))
def test_one_failure_loses_nothing(path, monkeypatch, caplog, owner, name, call):
    failing = Failing(getattr(owner, name), {call})
    method = lambda *args, **kwargs: failing(*args, **kwargs)  # noqa: E731 - bound to its file where it is a method
    monkeypatch.setattr(owner, name, method)
    train(path)
    steps = list(range(1, 121))
    assert as_lists(path) == {"loss": (steps, [step / 8 for step in steps])}
    trouble = [re.sub(": a write may need [^;]*", "", each) for each in told(caplog)]
    assert trouble in ([], [TROUBLE, OVER])
    assert [each.name for each in path.parent.iterdir()] == ["run.h5"]


def test_a_long_failure_is_told_when_it_begins_and_ends(path, monkeypatch, caplog):
    failing = Failing(os.posix_fallocate)
    monkeypatch.setattr(double_buffer.os, "posix_fallocate", failing)
    train(path, failing, (30, 90))
    assert as_lists(path)["loss"][0] == list(range(1, 121))
    assert len(told(caplog)) == 2
    assert told(caplog)[0].startswith(
        "HDF5Logger (run.h5): writing failed: [Errno 5] Input/output error: a write may need "
    )
    assert told(caplog)[1] == OVER
    assert failing.count > 10


@pytest.mark.parametrize("to_the_end", [False, True])
def test_what_does_not_fit_in_memory_is_told(path, monkeypatch, caplog, to_the_end):
    """Rows of ever new names, which take memory as well."""
    kept = 40
    monkeypatch.setattr(writer, "KEPT_BYTES", kept * (writer.ROW_BYTES + 3 * 8 + 3 * writer.NAME_BYTES))
    failing = Failing(os.replace)
    monkeypatch.setattr(double_buffer.os, "replace", failing)
    train(path, failing, (31, 1000 if to_the_end else 200), count=300, output=lambda i: {f"{i}/{j}": i for j in "abc"})
    failed_at = 31 - 31 % 5
    steps = {step for steps, _ in as_lists(path).values() for step in steps}
    first_lost = min(set(range(1, 301)) - steps)
    if to_the_end:
        assert first_lost <= 31
        assert told(caplog)[1:] == [
            f"HDF5Logger (run.h5): writing failed to the end: {3 * (301 - first_lost)} values are lost."
        ]
    else:
        lost = set(range(first_lost, max(set(range(1, 301)) - steps) + 1))
        assert steps == set(range(1, 301)) - lost
        assert failed_at + kept <= first_lost <= 31 + kept
        assert told(caplog)[1:] == [f"HDF5Logger (run.h5): writing works again: {3 * len(lost)} values are lost."]
