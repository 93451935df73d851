"""Causes before consequences, no contradictory advice, and what each number is of."""

from __future__ import annotations

import time

import numpy as np
import pytest

from ignite_monitor.report.summary import find, healthy, summarise
from tests.report import _runs as runs
from tests.report._runs import tidy
from tests.report.test_findings import found, only, with_stepped


def test_finite_and_nonfinite_spikes_are_counted_each_for_themselves():
    norms = runs.with_spike([50, 80, 110])
    norms[99] = np.nan
    run = runs.grad(norms, [50, 80, 100, 110])
    assert "All 3 steps were skipped." in only(run, "spikes").text
    finding = only(run, "nonfinite_gradients")
    assert "The step was skipped." in finding.text
    assert "on_spike" not in finding.text
    assert "share of the excess" not in finding.text


def test_clipped_and_skipped_steps_are_counted_apart():
    run = runs.grad(runs.with_spike([50, 80, 110]), [50, 80, 110], skipped=False)
    run["grad/skipped_count"] = runs.series(np.arange(1, 201) >= 80)
    run["grad/clipped_count"] = runs.series((np.arange(1, 201) >= 50) * 1.0)
    text = only(with_stepped(run, [80]), "spikes").text
    assert "1 of 3 steps were skipped. 1 of 3 steps were clipped. The step was made in iteration 110." in text


def test_the_parameters_with_the_largest_excess_are_named():
    run = runs.grad(runs.with_spike([50]), [50]) | {"grad/culprit/head.weight": (np.array([50]), np.array([0.7]))}
    assert "its threshold of 6 (share of the excess: head.weight 70 %)" in only(run, "spikes").text


@pytest.mark.parametrize(("at", "period"), [(range(25, 200, 25), 25), ([50, 90, 97, 160], None), ([50, 75, 100], None)])
def test_a_periodic_fault_has_a_period(at, period):
    text = only(runs.grad(runs.with_spike(list(at)), at), "spikes").text
    assert ("every" in text) is (period is not None)
    assert period is None or f"every {period} iterations" in text


def test_spikes_of_the_loss_are_none_of_the_norm():
    norms = runs.calm_norms()
    run = runs.grad(norms, [50, 90]) | {"grad/loss_spike": runs.series(np.isin(np.arange(1, 201), [50, 90]))}
    assert [each.kind for each in found(run)] == ["loss_spikes"]
    assert only(run, "loss_spikes").iterations == (50, 90)


def test_an_optimizer_that_stopped():
    run = with_stepped(runs.grad(runs.calm_norms(500)), range(101, 501))
    finding = only(run, "no_step")
    assert finding.severity == "problem"
    assert "The optimizer made no step after iteration 100: 400 iterations without one" in finding.text
    assert "zero_grad" in finding.text
    assert healthy(find(tidy(run))) is False


@pytest.mark.parametrize("name", ["train/loss", "loss/value"])
def test_a_loss_that_ended_far_above_its_best_is_never_healthy(name):
    """Whoever recorded it, and however much it had gained."""
    values = np.concatenate([10 * np.exp(-np.arange(300) / 50) + 0.03, np.linspace(0.03, 1.0, 100)])
    run = runs.grad(runs.calm_norms(400)) | {name: runs.series(values)}
    if name == "loss/value":
        run |= {"loss/spike": runs.series(np.zeros(400)), "loss/spike_count": runs.series(np.zeros(400))}
    assert only(run, "loss_rose_again").severity == "warning"
    assert healthy(find(tidy(run))) is False


def test_dead_units_are_advised_in_the_right_direction():
    run = {"activation/a/dead_fraction": runs.series(np.full(40, 0.95), 5)}
    assert "Raise the biases" in only(run, "dead_units").action
    run = {"activation/a/dead_fraction": runs.series(np.where(np.arange(40) < 20, 0.1, 0.95), 5)}
    assert "Lower the learning rate" in only(run, "dead_units").action


def test_no_advice_contradicts_another():
    """Dead units, from iteration 105 on; parameters that no longer move and small updates follow."""
    dead = {"activation/a/dead_fraction": runs.series(np.where(np.arange(40) < 20, 0.1, 0.95), 5)}
    run = dead | runs.weights(frozen=np.where(np.arange(40) < 22, 0, 2), median=5e-7) | runs.grad(runs.calm_norms())
    findings = find(tidy(run))
    assert [each.kind for each in findings] == ["small_updates", "dead_units", "frozen_parameters"]
    assert [each.action[:5] for each in findings] == ["Raise", "Follo", "Proba"]
    assert not any("Lower" in each.action for each in findings)


@pytest.mark.parametrize(
    ("rate", "largest", "severity"), [(0.1, 12.0, "warning"), (0.1, 2.0, "note"), (0.01, 12.0, None)]
)
def test_a_parameter_group_with_100_times_the_learning_rate(rate, largest, severity):
    run = runs.weights() | {"step/lr/group_0": runs.series([1e-3] * 40), "step/lr/group_1": runs.series([rate] * 40)}
    steps, median = run["monitor/update_ratio_median"]
    run["monitor/update_ratio_max"] = (steps, median * largest / np.linspace(1, 3, 40))
    findings = found(run, "group_rate")
    assert [each.severity for each in findings] == [severity] * (severity is not None)
    assert all("Parameter group 1 has a learning rate of 0.1" in each.text for each in findings)


@pytest.mark.parametrize("every", [1, 10])
def test_since_when_a_parameter_is_frozen_where_it_is_logged_less_often_than_measured(every):
    steps = np.arange(every, 1001, every)
    still = np.maximum(0, steps - 950).astype(float)
    run = {f"monitor/{name}_count": (steps, np.zeros(len(steps))) for name in ("vanishing", "exploding")}
    run["monitor/frozen_count"] = (steps, (still >= 3) * 1.0)
    run["monitor/topk_frozen/b.weight"] = (steps[still >= 3], still[still >= 3])
    assert only(run, "frozen_parameters").iterations == (951,)


def test_a_million_iterations_with_ten_thousand_spikes():
    count, random = 1_000_000, np.random.default_rng(0)
    spikes = np.sort(random.choice(count, 10_000, replace=False)) + 1
    norms = 1 + 0.1 * random.random(count)
    norms[spikes - 1] = 60.0
    run = tidy(with_stepped(runs.grad(norms, spikes, skipped=False)) | {"train/loss": runs.series(1 / norms)})
    begin = time.process_time()
    summary = summarise("run.h5", run)
    assert time.process_time() - begin < 6  # about 1 s on a quiet machine
    assert "10000 gradient spikes" in " ".join(each.text for each in summary.findings)
