"""A failed write is repeated: no value is lost that fits in memory, and two warnings describe the failure."""

from __future__ import annotations

import errno
import os
import re

import pytest
from ignite.engine import Events

from ignite_monitor import HDF5Logger
from ignite_monitor.hdf5 import double_buffer, writer
from tests.hdf5._runs import as_lists, engine_of, log_output

FAILED = (
    r"HDF5Logger \(.*run\.h5\): writing failed: \[Errno 5\] Input/output error(: a write may need .*)?; "
    r"keeping the values in memory and retrying at every flush\."
)


class Failing:
    """A function that raises while ``fails`` is true, or in its n-th call."""

    def __init__(self, function, call=0):
        self.function, self.call, self.count, self.fails = function, call, 0, False

    def __call__(self, *args, **kwargs):
        self.count += 1
        if self.fails or self.count == self.call:
            raise OSError(errno.EIO, "Input/output error")
        return self.function(*args, **kwargs)


def train(path, failing, caplog, between=(), count=120, output=lambda i: {"loss": i / 8}):
    """Warnings of a run in which writing fails between two iterations."""
    engine = engine_of(output)
    with HDF5Logger(path, flush_every=5) as logger:
        log_output(logger, engine, tag=None)

        @engine.on(Events.ITERATION_STARTED)
        def set_fails():
            failing.fails = engine.state.iteration in range(*between) if between else False

        engine.run(range(count), max_epochs=1)
    assert engine.state.iteration == count
    assert [entry.name for entry in path.parent.iterdir()] == ["run.h5"]
    return [record.message for record in caplog.records]


@pytest.mark.parametrize("call", range(2, 7))
@pytest.mark.parametrize("name", ["os.replace", "DoubleBuffer._apply", "shutil.copyfile", "os.posix_fallocate"])
def test_one_failure_loses_nothing(tmp_path, monkeypatch, caplog, name, call):
    owner, _, last = name.rpartition(".")
    owner = getattr(double_buffer, owner)
    failing = Failing(getattr(owner, last), call)
    monkeypatch.setattr(owner, last, lambda *args, **kwargs: failing(*args, **kwargs))
    warned = train(tmp_path / "run.h5", failing, caplog)
    steps = list(range(1, 121))
    assert as_lists(tmp_path / "run.h5") == {"loss": (steps, [step / 8 for step in steps])}
    assert not warned or (re.fullmatch(FAILED, warned[0]) and warned[1].endswith("works again: 0 values are lost."))


@pytest.mark.parametrize(("kept", "end", "lost"), [(1000, 90, False), (40, 200, True), (40, 1000, True)])
def test_a_long_failure(tmp_path, monkeypatch, caplog, kept, end, lost):
    """Rows of ever new names, which need memory too, until iteration ``end``; the run has 300."""
    path, failing = tmp_path / "run.h5", Failing(os.posix_fallocate)
    monkeypatch.setattr(writer, "KEPT_BYTES", kept * (writer.ROW_BYTES + 3 * 8 + 3 * writer.NAME_BYTES))
    monkeypatch.setattr(double_buffer.os, "posix_fallocate", failing)
    first, last = train(path, failing, caplog, (31, end), 300, lambda i: {f"{i}/{j}": i for j in "abc"})
    assert re.fullmatch(FAILED, first)
    missing = set(range(1, 301)).difference(*(steps for steps, _ in as_lists(path).values()))
    assert bool(missing) is lost
    if end == 1000:
        assert missing == set(range(min(missing), 301))
        assert 25 < min(missing) <= 31
        assert last.endswith(f"writing failed to the end: {3 * len(missing)} values are lost.")
    else:
        assert not lost or 30 + kept - 5 <= min(missing) <= 31 + kept
        assert last.endswith(f"writing works again: {3 * len(missing)} values are lost.")
    assert failing.count > 10
