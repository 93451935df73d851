"""Two runs side by side."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from ignite_monitor.report.run import is_loss
from ignite_monitor.report.summary import compare
from tests.report import _runs as runs
from tests.report._runs import make_run


def compared(a, b):
    return compare(("a.h5", "b.h5"), (make_run(a), make_run(b)))


def difference(a, b, name="x"):
    return compared({name: runs.series(a)}, {name: runs.series(b)}).differences[name]


def test_final_values():
    entry = difference(np.linspace(3, 1, 100), np.linspace(3, 2, 100), "train/loss")
    # The median of the last tenth is that of places 91 to 100.
    assert entry.a == pytest.approx(3 - 2 * 94.5 / 99)
    assert entry.b == pytest.approx(3 - 94.5 / 99)
    assert entry.relative == pytest.approx((entry.b - entry.a) / entry.b)
    assert entry.matters


@pytest.mark.parametrize(("factor", "matters"), [(1.0, False), (1.03, False), (1.2, True), (0.5, True)])
def test_differences_of_more_than_five_percent_matter(factor, matters):
    values = np.ones(100)
    assert difference(values, factor * values).matters is matters


@pytest.mark.parametrize(("a", "b", "matters"), [(1.0, math.nan, True), (math.nan, math.nan, False), (0.0, 0.0, False)])
def test_nonfinite_values(a, b, matters):
    entry = difference([1.0, a], [1.0, b])
    assert entry.matters is matters
    json.dumps(compared({"x": runs.series([1.0, a])}, {"x": runs.series([1.0, b])}).as_json(), allow_nan=False)


def test_the_largest_differences_come_first_and_the_users_own_before_the_rest():
    a = {"grad/norm": runs.series([1] * 9), "grad/spike": runs.series([0] * 9)}
    b = {"grad/norm": runs.series([9] * 9), "grad/spike": runs.series([0] * 9)}
    for name, factor in (("same", 1.0), ("small", 1.2), ("large", 3.0)):
        a[name], b[name] = runs.series([1] * 9), runs.series([factor] * 9)
    assert [*compared(a, b).differences] == ["large", "small", "grad/norm", "same", "grad/spike"]


def test_runs_of_unequal_length_are_compared_where_both_are():
    comparison = compared({"x": runs.series(np.arange(1, 101))}, {"x": runs.series(np.arange(1, 11))})
    assert [run.last for run in comparison.runs] == [100, 10]
    assert comparison.until == 10
    assert comparison.differences["x"][:2] == (10, 10)


def test_metrics_of_one_run_and_spikes_of_each():
    a = runs.grad(runs.with_spike([50]), [50]) | {"only/a": runs.series([1])}
    comparison = compared(a, {"only/b": runs.series([1])})
    assert comparison.only[0] == sorted(a)
    assert comparison.only[1] == ["only/b"]
    kinds = [[finding.kind for finding in run.findings] for run in comparison.runs]
    assert kinds == [["bad_batches"], ["not_monitored"]]
    assert comparison.differences == {}


def test_losses_by_name():
    losses = ["train/loss", "val_loss", "l1loss", "nll", "val/perplexity", "loss_mean", "val/rmse"]
    others = ["accuracy", "loss/gizmo", "lr", "glossary", "loss_scale", "train/loss_weight", "num_loss_terms", "terror"]
    assert [name for name in losses + others if is_loss(name)] == losses
