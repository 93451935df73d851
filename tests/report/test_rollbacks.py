"""A training that went back: a finding each time, and a mark in every panel."""

from __future__ import annotations

import numpy as np
import pytest

from ignite_monitor.report.panels import picture
from ignite_monitor.report.plot import draw
from ignite_monitor.report.summary import find
from tests.report._runs import calm_norms, grad, series, tidy


def make_run(root="rollback", went_back=((80, 50, 20), (150, 120, 0)), norms=None):
    counts, undone = np.zeros(200), np.zeros(200)
    iterations = {}
    for at, target, left in went_back:
        counts[at - 1 :] += 1
        undone[at : at + left] += np.arange(1, left + 1)
        undone[at + left :] += left
        iterations |= dict.fromkeys(range(at, at + left + 1), target)
    values = np.array([*iterations.values()], dtype=np.float64)
    own = {"count": series(counts), "discarded_count": series(undone)}
    if iterations:
        own["restored_iteration"] = (np.array([*iterations]), values)
    return tidy((norms or grad(calm_norms(200))) | {f"{root}/{name}": value for name, value in own.items()})


@pytest.mark.parametrize("root", ["rollback", "train/rollback", "mine"])
def test_a_finding_each_time(root):
    run = make_run(root)
    first, second = [each for each in find(run) if each.kind == "rolled_back"]
    assert (first.iterations, second.iterations) == ((80,), (150,))
    assert (first.severity, first.values) == ("warning", {"target": 50, "discarded": 20})
    assert "Rolled back to iteration 50 at iteration 80" in first.what
    assert "30 batches skipped, 20 more discarded during recovery" in first.what
    assert second.what.endswith("30 batches skipped.")


def test_without_there_is_none():
    run = make_run(went_back=())
    assert [each for each in find(run) if each.kind == "rolled_back"] == []
    assert picture(run).rollbacks == ()


def test_a_new_level_that_was_gone_back_from_is_told_once():
    norms = calm_norms(200)
    norms[70:90] = norms[100:110] = 60
    run = make_run(norms=grad(norms, [*range(71, 91), *range(101, 111)]))
    assert [each.iterations for each in find(run) if each.kind == "regime_change"] == [(110,)]


def test_a_mark_in_every_panel(monkeypatch, tmp_path):
    from matplotlib.axes import Axes

    marks, axvline = {}, Axes.axvline

    def note(axes, x, **kwargs):
        marks.setdefault(axes, []).append(x)
        return axvline(axes, x, **kwargs)

    monkeypatch.setattr(Axes, "axvline", note)
    shown = picture(make_run())
    assert shown.rollbacks == (80, 150)
    draw(shown, tmp_path / "run.png")
    assert len(marks) == len(shown.panels)
    assert all({80, 150} <= set(each) for each in marks.values())
