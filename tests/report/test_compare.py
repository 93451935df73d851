"""Two runs side by side."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from ignite_monitor.report.summary import compare
from ignite_monitor.report.training import direction
from tests.report import _runs as runs
from tests.report._runs import make_run


def compared(a, b):
    return compare(("a.h5", "b.h5"), (make_run(a), make_run(b)))


def difference(a, b, name="x"):
    (each,) = compared({name: runs.series(a)}, {name: runs.series(b)}).differences
    return each


def test_final_and_best_values():
    each = difference(np.linspace(3, 1, 100), np.linspace(3, 2, 100), "train/loss")
    # The median of the last tenth is that of places 91 to 100.
    assert each.a == pytest.approx(3 - 2 * 94.5 / 99)
    assert each.b == pytest.approx(3 - 94.5 / 99)
    assert (each.best_a, each.best_b) == (1, 2)
    assert each.relative == pytest.approx((each.b - each.a) / each.b)
    assert each.matters


def test_best_is_the_largest_accuracy_and_nothing_of_what_is_unknown():
    each = difference([0.1, 0.9, 0.5], [0.2, 0.3, 0.4], "val/accuracy")
    assert (each.best_a, each.best_b) == (0.9, 0.4)
    assert math.isnan(difference([1, 2], [1, 2], "gizmo").best_a)


@pytest.mark.parametrize(("factor", "matters"), [(1.0, False), (1.03, False), (1.2, True), (0.5, True)])
def test_what_differs_by_more_than_a_few_percent_matters(factor, matters):
    values = np.ones(100)
    assert difference(values, factor * values).matters is matters


@pytest.mark.parametrize(("a", "b", "matters"), [(1.0, math.nan, True), (math.nan, math.nan, False), (0.0, 0.0, False)])
def test_what_is_not_finite(a, b, matters):
    each = difference([1.0, a], [1.0, b])
    assert each.matters is matters
    json.dumps(compared({"x": runs.series([1.0, a])}, {"x": runs.series([1.0, b])}).as_json(), allow_nan=False)


def test_the_largest_differences_come_first_and_the_users_own_before_the_rest():
    a = {"grad/norm": runs.series([1] * 9), "grad/spike": runs.series([0] * 9)}
    b = {"grad/norm": runs.series([9] * 9), "grad/spike": runs.series([0] * 9)}
    for name, factor in (("same", 1.0), ("small", 1.2), ("large", 3.0)):
        a[name], b[name] = runs.series([1] * 9), runs.series([factor] * 9)
    names = [each.name for each in compared(a, b).differences]
    assert names == ["large", "small", "grad/norm", "same", "grad/spike"]


def test_runs_of_unequal_length_are_compared_where_both_are():
    comparison = compared({"x": runs.series(np.arange(1, 101))}, {"x": runs.series(np.arange(1, 11))})
    assert [run.last for run in comparison.runs] == [100, 10]
    assert comparison.until == 10
    assert comparison.differences[0].a == comparison.differences[0].b == 10


def test_metrics_of_one_run_and_spikes_of_each():
    a = runs.grad(runs.with_spike([50]), [50]) | {"only/a": runs.series([1])}
    comparison = compared(a, {"only/b": runs.series([1])})
    assert comparison.only[0] == sorted(a)
    assert comparison.only[1] == ["only/b"]
    kinds = [[finding.kind for finding in run.findings] for run in comparison.runs]
    assert kinds == [["spikes"], ["not_monitored"]]
    assert comparison.differences == []


@pytest.mark.parametrize(
    ("name", "better"),
    [
        ("train/loss", -1), ("val_loss", -1), ("l1loss", -1), ("nll", -1), ("val/perplexity", -1), ("mse", -1),
        ("accuracy", 1), ("val/acc", 1), ("top5", 1), ("val_f1", 1), ("mAP", 1),
        ("loss/gizmo", 0), ("lr", 0), ("glossary", 0), ("map_size_x", 0),
        ("loss_scale", 0), ("train/loss_weight", 0), ("num_loss_terms", 0), ("val/rmse", -1),
        ("loss_mean", -1), ("accumulated", 0), ("terror", 0),
    ],
)  # fmt: skip
def test_which_way_is_better(name, better):
    assert direction(name) == better
