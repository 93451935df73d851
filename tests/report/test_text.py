"""Words and tables in terminals wide and narrow."""

from __future__ import annotations

import io

import numpy as np
import pytest

from ignite_monitor.report.finding import iterations, listed, number, times
from ignite_monitor.report.summary import summarise
from ignite_monitor.report.text import show, summary_text
from tests.report import _runs as runs
from tests.report._runs import make_run


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [40, 120])
def test_a_narrow_terminal_has_whole_numbers_and_names(width, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("NO_COLOR", "1")
    name = ".".join(["transformer", "layers", "3", "a" * 120])
    run = runs.grad(runs.with_spike([50]), [50]) | {f"activation/{name}/dead_fraction": runs.series([0.95] * 9)}
    summary, stream = summarise("run.h5", make_run(run)), Terminal()
    show(summary_text(summary, every=True), stream)
    text = "".join(stream.getvalue().split())
    assert text.count("a" * 120) >= 1
    numbers = summary.metrics["grad/norm"]
    (row,) = [
        line.split() for line in stream.getvalue().splitlines() if line.lstrip("\x1b[0m").startswith("grad/norm ")
    ]
    assert row[1:] == [*(number(getattr(numbers, key)) for key in ("first", "last", "min", "max")), "200"]


def test_words():
    assert [number(value) for value in (3.0, 0.12345, 1e6, -2.0)] == ["3", "0.1235", "1e+06", "-2"]
    assert [times(factor) for factor in (3.456, 34.56)] == ["3.5 times", "35 times"]
    assert listed("ab") == "a and b"
    assert listed("abcdef") == "a, b, c, d, e and f"
    assert listed("abcdefg") == "a, b, c, d, e and 2 more"
    assert listed([]) == ""
    assert iterations(np.array([7])) == "iteration 7"
    assert iterations(np.array([7, 20, 21, 22, 90])) == "iterations 7, 20-22 and 90"
    assert iterations(np.arange(0, 20, 2)) == "iterations 0, 2, 4, 6, 8, 10 and 4 more"
