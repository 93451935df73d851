"""Results and errors of read_hdf5."""

from __future__ import annotations

import datetime
import re
import tracemalloc

import numpy as np
import pytest

from ignite_monitor import read_hdf5
from tests.hdf5._runs import run


def test_metrics_by_regular_expression(path):
    run(path, 3, output=lambda i: {"a/norm": 1.0, "a/std": 2.0, "b/norm": 3.0})
    assert list(read_hdf5(path, "norm$")) == ["train/a/norm", "train/b/norm"]
    assert list(read_hdf5(path, re.compile("A/", re.IGNORECASE))) == ["train/a/norm", "train/a/std"]
    assert list(read_hdf5(path, "nothing")) == []
    with pytest.raises(ValueError, match=r"Argument metrics should be a regular expression, but given '\('"):
        read_hdf5(path, "(")
    with pytest.raises(TypeError, match="Argument metrics should be a regular expression"):
        read_hdf5(path, 3)


def test_one_name_of_many_takes_little_memory(path):
    run(path, 1000, output=lambda i: {f"m{j}": float(i * j) for j in range(500)})
    tracemalloc.start()
    _, values = read_hdf5(path, "^train/m7$")["train/m7"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert values.tolist() == [7.0 * i for i in range(1, 1001)]
    assert peak < 500 * 1000 * 8  # all values; one block of them is in memory at a time


def test_times(path):
    before = np.datetime64(datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None), "ms")
    run(path, 10)
    after = np.datetime64(datetime.datetime.now(datetime.timezone.utc).replace(tzinfo=None), "ms")
    times = read_hdf5(path).times("train/loss")
    assert len(times) == 10
    assert (np.diff(times) >= np.timedelta64(0)).all()
    assert before <= times[0]
    assert times[-1] <= after
