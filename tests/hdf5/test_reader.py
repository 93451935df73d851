"""Results and errors of read_hdf5."""

from __future__ import annotations

import re

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
