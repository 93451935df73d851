"""What is said of a noise scale and of a curvature."""

from __future__ import annotations

import numpy as np
import pytest

from ignite_monitor.report.summary import find
from tests.report._runs import series, tidy


def findings(names, values, *kinds):
    run = tidy({name: series(each, 10) for name, each in zip(names, np.array(values, dtype=float).T, strict=True)})
    return [each for each in find(run) if each.kind in kinds]


@pytest.mark.parametrize(
    ("interval", "kind"),
    [((300, 200, 400), "small_batch"), ((3, 2, 7), "large_batch"), ((300, 100, 900), "batch_size")],
)
def test_the_batch_is_judged_by_the_whole_interval(interval, kind):
    names = [f"noise_scale/{name}" for name in ("value", "low", "high", "batch")]
    (finding,) = findings(names, [(*interval, 32)] * 3, "small_batch", "large_batch", "batch_size")
    value, low, high = interval
    assert finding.kind == kind
    assert f"The noise scale is {value} items ({low} to {high}" in finding.what
    assert "a step uses 32" in finding.what


@pytest.mark.parametrize("metric", ["hessian_max_eigenvalue", "hessian_max_eigenvalue_preconditioned"])
@pytest.mark.parametrize(
    ("shares", "kind"),
    [
        ((0.1, 0.1, 0.1, 0.1), None),
        ((2.0, 0.1, 2.0, 0.1), None),
        ((0.1, 0.4, 0.1, 0.5), "near_curvature"),
        ((1.05, 0.95, 1.0, 1.04), "near_curvature"),
        ((0.5, 1.4, 0.9, 1.5), "large_curvature"),
    ],
)
def test_most_looks_lately_tell_of_a_large_curvature(metric, shares, kind):
    names = ["curvature/stability_threshold", f"curvature/{metric}"] + ["curvature/hessian_max_eigenvalue"] * (
        metric != "hessian_max_eigenvalue"
    )
    rows = [(40.0, 40 * share, 1e9)[: len(names)] for share in shares]
    found = findings(names, rows, "near_curvature", "large_curvature")
    assert [each.kind for each in found] == ([kind] if kind else [])
    assert all("learning rate" in each.action for each in found)
