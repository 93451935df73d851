"""Words and tables, in terminals wide and narrow."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ignite_monitor.report.series import number
from ignite_monitor.report.summary import summarise
from ignite_monitor.report.text import summary_text
from tests.report import _runs as runs
from tests.report._runs import tidy


@pytest.mark.parametrize("width", [24, 40, 60, 80, 120])
def test_a_narrow_table_has_fewer_columns_and_whole_numbers(width):
    summary = summarise("run.h5", tidy(runs.healthy()))
    stream = io.StringIO()
    Console(file=stream, width=width, color_system=None).print(summary_text(summary)[-2])
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    columns = lines[0].split()
    assert columns[0] == "metric"
    assert "last" in columns
    assert ("count" in columns) is (width >= 80)
    (row,) = [line.split() for line in lines if line.startswith("grad/norm")]
    numbers = summary.metrics["grad/norm"]
    told = {**{each: number(getattr(numbers, each)) for each in ("first", "last", "min", "max")}, "count": "200"}
    assert row[1:] == [told[column] for column in columns[1:]]


@pytest.mark.parametrize("width", [40, 80])
def test_everything_fits_the_terminal_with_long_names_too(width):
    name = ".".join(["transformer", "layers", "3", "a" * 120, "output_projection"])
    run = runs.grad(runs.with_spike([50]), [50], root="train/" + "grad" * 30) | runs.weights(frozen=1)
    run |= {
        f"activation/{name}/dead_fraction": runs.series([0.95] * 9),
        f"monitor/topk_frozen/{name}": runs.series([3.0]),
    }
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None)
    for part in summary_text(summarise("run.h5", tidy(run)), every=True):
        console.print(part)
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    assert max(map(len, lines)) <= width
    assert "".join(lines).replace(" ", "").count("a" * 120) >= 3  # nothing of a name is lost
