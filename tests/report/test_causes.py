"""Causes: evidence, order, reports of monitors, and rules that fail."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ignite_monitor.cli import FAILED, main
from ignite_monitor.hdf5.reader import RecordedReport
from ignite_monitor.report import summary as summary_module
from ignite_monitor.report.finding import KINDS
from ignite_monitor.report.run import Run
from ignite_monitor.report.summary import summarise
from tests.report import _runs as runs
from tests.report._runs import found, make_run, series

STEPS = np.array([1, 2, 3, 5, 10, *range(20, 301, 20)])


def at(values):
    """A value in each iteration of STEPS."""
    return STEPS, np.broadcast_to(values, STEPS.shape).astype(float)


def trained(loss=None, **metrics):
    """A calm run of 300 iterations with StepStatsHandler and a recorded loss; ``__`` in names is a slash."""
    run = runs.grad(runs.calm_norms(300), made=range(1, 301)) | {
        "train/loss": series(falling() if loss is None else loss)
    }
    run |= {"step/parameter_norm": at(10.0), "step/items_per_s": at(9.0), "step/lr/group_0": at(1e-3)}
    return run | {name.replace("__", "/"): value for name, value in metrics.items()}


def falling(begin=2.3, end=0.1):
    return np.linspace(begin, end, 300) + 0.02 * runs.noise(300)


def outputs(std, largest):
    return {"activation/_root_/std": at(std), "activation/_root_/max_abs": at(largest)}


def deviations(*sizes):
    return {f"activation/{module}/std": at(size) for module, size in enumerate(sizes)}


def trained_loss(high):
    """A loss that is high in some of 200 iterations."""
    return {"train/loss": series(falling()[:200] + 9 * np.isin(np.arange(1, 201), [*high]))}


def heavy_tail(place):
    """Noise whose largest value is 30 times as far from the median as the 80th percentile."""
    noise = np.abs(runs.noise(200, 4)) / 2
    noise[place - 1] = np.median(noise) + 30 * (np.quantile(noise, 0.8) - np.median(noise))
    return noise


def returned(**numbers):
    """A calm run whose train step returns numbers."""
    run = {name: its for name, its in trained().items() if name != "train/loss"}
    return run | {f"loss/{name}": series(values) for name, values in numbers.items()}


LATE = STEPS >= 180
FLAT = 2.3 + 0.1 * runs.noise(300)
# kind: case -> run, severity (None: not found), what the text says
CASES = {
    "large_updates: of an optimizer whose steps are unknown": (trained(step__gradient_norm=at(3000.0)), None, ""),
    "large_updates: of the median parameter": (
        trained(np.exp(-falling()), monitor__update_ratio_median=at(np.where(STEPS < 5, 0.16, 0.004))),
        *(
            "problem",
            "in iterations 1-3 a step moved the median parameter by 0.16, 0.16 and 0.16 of its|rate was 0.001",
        ),
    ),
    "large_updates: parameters that begin at 0, and the noisy loss of a trained model": (
        trained(
            0.3 * np.exp(runs.noise(300) * (np.arange(300) > 0)),
            monitor__update_ratio_median=at(np.where(STEPS == 1, 4e9, 0.8 / STEPS)),
        ),
        *(None, ""),
    ),
    "large_updates: a loss that falls, and damage soon after": (
        trained(monitor__update_ratio_median=at(0.8 / STEPS))
        | {"attention_logit_max/a/head_0": at(np.where(STEPS < 10, 1.0, 1e3))},
        *("problem", "in iterations 1-3 a step moved the median parameter by 0.8, 0.4 and 0.27 of its norm"),
    ),
    "large_updates: a loss that falls, and damage much later": (
        trained(monitor__update_ratio_median=at(0.8 / STEPS))
        | {"attention_logit_max/a/head_0": at(np.where(STEPS < 80, 1.0, 1e3))},
        *(None, ""),
    ),
    "large_updates: parameters that begin at 0, and a loss that rises": (
        trained(2.4 - falling(), monitor__update_ratio_median=at(np.where(STEPS == 1, 4e9, 0.8 / STEPS))),
        *("problem", "in iterations 1-3 a step moved the median parameter by 4e+09, 0.4 and 0.27 of its norm"),
    ),
    "large_updates: a noisy loss that falls": (
        trained(
            2.0 + 6.0 * (runs.noise(300) > 0.8) - np.linspace(0, 1, 300),
            monitor__update_ratio_median=at(0.8 / STEPS),
        ),
        *(None, ""),
    ),
    "large_updates: a loss as noisy that does not fall": (
        trained(
            2.0 + 6.0 * (runs.noise(300) > 0.8) + np.linspace(0, 1, 300),
            monitor__update_ratio_median=at(0.8 / STEPS),
        ),
        *("problem", "in iterations 1-3 a step moved the median parameter by 0.8, 0.4 and 0.27 of its norm"),
    ),
    "large_updates: of the median parameter, twice": (
        trained(monitor__update_ratio_median=at(np.where(STEPS < 3, 0.16, 0.08))),
        *(None, ""),
    ),
    "large_updates: growth between measurements": (
        trained(step__parameter_norm=at(np.where(LATE, 100.0, 10.0))),
        *("problem", "by iteration 180 the parameters' norm had changed by 0.45 of itself per step"),
    ),
    "large_updates: a weight that changed by other means": (
        trained(
            optimizer__update_norm=at(0.01), optimizer__rms_median=at(1.0), step__parameter_norm=at(1.0 + 99 * LATE)
        ),
        *(None, ""),
    ),
    "weight_changed: times 100, without WeightUpdateHandler": (
        trained(
            optimizer__update_norm=at(0.01), optimizer__rms_median=at(1.0), step__parameter_norm=at(1.0 + 99 * LATE)
        ),
        *("problem", "The parameters changed by other means than steps between iterations 160 and 180"),
    ),
    "large_updates: growth of which a tenth of the steps is known": (
        trained(step__parameter_norm=at(10.0 * 1.5 ** (STEPS // 20)))
        | {f"grad/{key}": series(np.ones(30), 10) for key in ("norm", "stepped", "spike")},
        *(None, ""),
    ),
    "rate_vanished: at 60 of 300": (
        trained(step__lr__group_0=at(np.maximum(0.01 - STEPS / 6000, 0))),
        *("warning", "fell from 0.00983 to less than a thousandth (step/lr/group_0) by iteration 60"),
    ),
    "rate_vanished: three step decays": (trained(step__lr__group_0=at(0.1 ** (STEPS // 75))), None, ""),
    "rate_vanished: cosine": (trained(step__lr__group_0=at(1 + np.cos(np.pi * STEPS / 300))), None, ""),
    "clipped_away: to 1e-7": (
        trained(step__gradient_norm=at(1e-7)),
        "warning",
        "The step used a gradient with a norm of 1e-07",
    ),
    "clipped_away: a tenth": (trained(step__gradient_norm=at(0.1)), None, ""),
    "input_scale: 500": (trained(FLAT, step__batch_rms__0=at(500.0)), "warning", "large from the first measurement on"),
    "input_scale: 500, which the model normalizes": (
        trained(step__batch_rms__0=at(500.0)) | deviations(90.0, 1.0, 1.0),
        *("note", "large from the first measurement on"),
    ),
    "input_scale: 300, outputs of modules are usual, and the loss can't fall": (
        trained(FLAT, step__batch_rms__0=at(300.0)) | deviations(1.0, 0.6, 2.0),
        *("note", "its root mean square is 300"),
    ),
    "input_scale: 300, and so are outputs of modules": (
        trained(FLAT, step__batch_rms__0=at(300.0)) | deviations(170.0, 60.0, 2.0),
        *("warning", "its root mean square is 300"),
    ),
    "input_scale: 500, and damage": (
        trained(step__batch_rms__0=at(500.0)) | deviations(110.0, 1.0, 1.0),
        *("warning", "large from the first measurement on"),
    ),
    "input_scale: 500 for the later half": (
        trained(FLAT, step__batch_rms__0=at(np.where(STEPS > 80, 500.0, 1.0))),
        *("warning", "its root mean square is 500 "),
    ),
    "input_scale: 500 for the last third": (
        trained(FLAT, step__batch_rms__0=at(np.where(STEPS > 190, 500.0, 1.0))),
        *("warning", "batch[0] is large since iteration 200"),
    ),
    "input_scale: 0": (
        trained(FLAT, step__batch_rms__0=at(0.0)),
        "warning",
        "batch[0] is 0 from the first measurement",
    ),
    "loss_scale: times, beside a loss that is small": (
        trained(step__batch_rms__0=at(1.0), step__batch_rms__1=at(1.7e9)),
        *(None, ""),
    ),
    "loss_scale: targets of 0": (trained(step__batch_rms__0=at(1.0), step__batch_rms__1=at(0.0)), None, ""),
    "no_gradients: a loss of 0": (
        trained() | runs.grad(np.zeros(300), made=range(1, 301)),
        *("problem", "The gradient's norm is 0 (grad/norm), from the first measurement on"),
    ),
    "input_scale: every other": (trained(step__batch_rms__0=at(np.where(STEPS % 40, 1.0, 500.0))), None, ""),
    "loss_scale: targets": (
        trained(60 * falling(2.3, 1.5), step__batch_rms__1=at(1.0), step__batch_rms__2=at(90.0)),
        "warning",
        "batch[2] is large",
    ),
    "loss_scale: targets that the model fits": (
        trained(60 * falling(), step__batch_rms__1=at(1.0), step__batch_rms__2=at(90.0)),
        "note",
        "batch[2] is large",
    ),
    "loss_scale: the loss begins at 4,000": (
        trained(falling(4000, 3000)) | outputs(0.1, 0.5),
        *("warning", "begins at 4000 (train/loss), while the model's outputs are at most 0.5"),
    ),
    "loss_scale: a sum that begins at 4,000 and falls": (
        trained(falling(4000, 700)) | outputs(0.1, 0.5),
        *("note", "begins at 4000 (train/loss), while the model's outputs are at most 0.5"),
    ),
    "loss_scale: a sum that begins at 4,000, falls and does damage": (
        trained(falling(4000, 700)) | outputs(0.1, 0.5) | {"attention_logit_max/a/head_0": at(300.0)},
        *("warning", "begins at 4000 (train/loss), while the model's outputs are at most 0.5"),
    ),
    "loss_scale: a loss of infinity": (
        trained(np.where(np.arange(300) < 4, np.inf, falling())) | outputs(0.1, 0.5),
        *(None, ""),
    ),
    "loss_scale: cross-entropy": (trained() | outputs(0.1, 0.5), None, ""),
    "weight_changed: times 50": (
        trained(
            optimizer__update_norm=at(0.01),
            optimizer__rms_median=at(1.0),
            step__parameter_norm=at(np.where(LATE, 500.0, 10.0)),
            monitor__largest_weight__a=at(np.where(LATE, 499.0, 8.0)),
            monitor__largest_weight__b=at(9.0),
        ),
        *(
            "problem",
            "most of all a, changed by other means than steps between iterations 160 and 180: their norm from 10 to",
        ),
    ),
    "weight_changed: by steps of SGD": (
        trained(step__parameter_norm=at(np.where(LATE, 500.0, 10.0)), step__lr__group_0=at(10.0)),
        *(None, ""),
    ),
    "weight_changed: more than gradients of SGD explain": (
        trained(optimizer__update_norm=at(0.01), step__parameter_norm=at(np.where(LATE, 1.5, 10.0))),
        *("problem", "their norm from 10 to 1.5 (step/parameter_norm), which steps move by about 0.2"),
    ),
    "weight_changed: gradients of SGD explain it": (
        trained(optimizer__update_norm=at(0.01), step__parameter_norm=at(np.where(LATE, 1.5, 10.0)))
        | {"grad/norm": series(np.where(np.arange(300) < 165, 1.0, 30.0))},
        *(None, ""),
    ),
    "bounded_outputs: softmax": (
        trained(falling(2.3, 1.5)) | outputs(0.3, np.minimum(1.0, STEPS / 100)),
        *("warning", "never exceed 1|ended at 1.5"),
    ),
    "bounded_outputs: the loss falls to 0.1": (trained() | outputs(0.3, np.minimum(1.0, STEPS / 100)), None, ""),
    "wrong_sign: rises throughout": (trained(2.3 * 1.02 ** np.arange(300)), "problem", "rises from the first step on"),
    "wrong_sign: it falls at first": (
        trained(np.append(2.3 * 0.95 ** np.arange(40), 0.3 * 1.02 ** np.arange(260))),
        None,
        "",
    ),
    "wrong_sign: a number without a name": (returned(value=2.3 * 1.02 ** np.arange(300)), None, ""),
    "not_monitored: a number without a name": (
        returned(value=2.3 * 1.02 ** np.arange(300)),
        *("note", "What the train step returns rises from the first step on (loss/value)|it is a loss is not known"),
    ),
    "not_monitored: a number that falls": (returned(value=falling()), None, ""),
    "wrong_sign: of several numbers the loss": (
        returned(loss=2.3 * 1.02 ** np.arange(300), error=falling()),
        *("problem", "The loss rises from the first step on (loss/loss), from 3.065 to 643"),
    ),
    "wrong_sign: of several losses": (returned(d_loss=2.3 * 1.02 ** np.arange(300), g_loss=falling()), None, ""),
    "wrong_sign: a policy's, which begins below 0": (trained(np.linspace(-0.01, -0.002, 300)), None, ""),
    "loss_rose: a policy's, which begins below 0": (returned(value=np.linspace(-0.2, 0.7, 300)), None, ""),
    "wrong_sign: with large steps": (
        trained(2.3 * 1.02 ** np.arange(300), step__parameter_norm=at(np.where(LATE, 100.0, 10.0))),
        *(None, ""),
    ),
    "wrong_sign: a DQN's": (
        {name: its for name, its in trained(2.3 * 1.02 ** np.arange(300)).items() if name != "step/items_per_s"},
        *(None, ""),
    ),
    "loss_rose: a DQN's, 0 while its buffer fills": (
        runs.grad(runs.calm_norms(300), made=range(61, 301))
        | {"train/td_loss": series(np.where(np.arange(300) < 60, 0.0, 0.5 + 0.1 * runs.noise(300)))},
        *(None, ""),
    ),
    "wrong_sign: negative without bound": (trained(-5 * 1.02 ** np.arange(300)), "warning", "falls faster and faster"),
    "wrong_sign: a log-density": (trained(-0.1 - 3 * (1 - 0.98 ** np.arange(300))), None, ""),
    "small_updates: a loss of 1e-6 under SGD": (
        trained(1e-6 * (1 + 0.01 * runs.noise(300)), step__gradient_norm=at(1e-6)),
        *("warning", "Learning rate times gradient is at most 1e-10 of the parameters' norm|changed by less than 5%"),
    ),
    "small_updates: a loss of 1e-6 whose gradient was usual at first": (
        trained(1e-6 * (1 + 0.01 * runs.noise(300)), step__gradient_norm=at(np.where(STEPS < 3, 1.0, 1e-6))),
        *(None, ""),
    ),
    "not_learning: noise": (
        trained(FLAT) | outputs(0.6, 2.0),
        *("warning", "has changed by less than 5% in 299 iterations"),
    ),
    "not_learning: a trained model": (trained(FLAT) | outputs(0.7, 2.0), None, ""),
    "not_learning: without an optimizer step": (
        {name: its for name, its in trained(FLAT).items() if name != "grad/stepped"} | outputs(0.6, 2.0),
        *(None, ""),
    ),
    "not_learning: it fell": (trained(), None, ""),
    "not_monitored: 99 values of the loss": (
        trained() | {"train/loss": series(falling()[:99])},
        *("note", "that takes 100 values of it, and there are 99. Train for longer."),
    ),
    "not_monitored: a loss of one iteration in 20": (
        trained() | {"train/loss": (np.arange(20, 301, 20), np.linspace(2, 1, 15))},
        *("note", "and there are 15. Return"),
    ),
    "not_monitored: no loss": (
        {name: its for name, its in trained().items() if name != "train/loss"},
        *("note", "and there are 0. Return"),
    ),
    "overfitting: rises again": (
        trained(val__loss=(np.arange(20, 301, 20), np.abs(np.arange(15) - 5) * 0.1 + 1)),
        *("warning", "val/loss rose from 1 in iteration 120 to 1.8"),
    ),
    "overfitting: falls": (trained(val__loss=(np.arange(20, 301, 20), np.linspace(2, 1, 15))), None, ""),
    "periodic_spikes: of consecutive steps of an accumulation": (
        runs.grad(
            np.where((np.arange(400) >= 200) & (np.arange(400) < 224), 60.0, 1.0),
            [204, 208, 212, 216, 220, 224],
            made=range(4, 401, 4),
        ),
        *(None, ""),
    ),
    "periodic_spikes: most of them below a threshold that has adapted": (
        runs.grad(
            np.where(np.arange(1, 301) % 7 == 0, 60.0, runs.calm_norms(300)),
            [105, 112, 119, 126],
            thresholds=np.repeat([6.0, 99.0], [126, 174]),
        ),
        *("warning", "every 7 iterations"),
    ),
    "bad_batches: the next norm is as usual": (
        runs.grad(runs.with_spike([120]), [120]),
        "warning",
        "The norms before and after the largest are usual",
    ),
    "bad_batches: spikes in consecutive iterations, as after a change of the data": (
        runs.grad(runs.with_spike([*range(120, 128)]), range(120, 128)),
        *(None, ""),
    ),
    "bad_batches: many of one size, as on a rough surface": (
        runs.grad(runs.with_spike([50, 80, 90, 140]), [50, 80, 90, 140]),
        *(None, ""),
    ),
    "periodic_spikes: whatever follows each": (
        runs.grad(
            np.where(np.isin(np.arange(1, 201) % 25, (0, 1)), 60 - np.arange(1, 201) % 25 * 48, runs.calm_norms()),
            sorted([*range(50, 200, 25), *range(51, 200, 25)]),
        ),
        *("warning", "every 25 iterations"),
    ),
    "bad_batches: a small spike where the loss is high": (
        runs.grad(runs.with_spike([120], 7.0), [120]) | trained_loss([120]),
        *("warning", "The loss is far above its usual value in iteration 120 (train/loss)"),
    ),
    "spikes: a small one where the loss is one of a heavy tail": (
        runs.grad(runs.with_spike([120], 7.0), [120]) | {"train/loss": series(falling()[:200] + heavy_tail(120))},
        *("note", "Healthy runs have as many of this size"),
    ),
    "periodic_spikes: of the loss": (
        runs.grad(runs.with_spike([120], 7.0), [120]) | trained_loss(range(120, 201, 10)),
        *("warning", "in iterations 120, 130, 140, 150, 160, 170 and 3 more, every 10 iterations (train/loss)"),
    ),
    "bad_batches: it stays": (
        runs.grad(
            np.where(np.arange(200) < 119, 1.0, 60.0), range(120, 130), thresholds=np.repeat([6.0, 99.0], [130, 70])
        ),
        *(None, ""),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_cause_is_found_by_its_evidence(case):
    run, severity, words = CASES[case]
    findings = found(run, case.partition(":")[0])
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)
    for word in words.split("|"):
        assert not findings or word in findings[0].text, findings[0].text
    for finding in findings:
        assert set(finding.metrics) <= {*run}


def test_a_calm_run_has_no_cause():
    assert found(trained()) == []


def reported(*reports, run=None):
    recorded = make_run(trained() if run is None else run)
    recorded.reports = [RecordedReport(*report) for report in reports]
    return summarise("run.h5", recorded)


ZEROED = (3, "SetupCheck (setup)", "gradients_not_zeroed", "problem", "call optimizer.zero_grad()", (), 1)


def test_a_run_with_a_report_is_not_healthy():
    assert reported().healthy
    summary = reported(ZEROED)
    assert (summary.healthy, summary.assessment) == (False, "Needs attention: 1 problem.")
    assert summary.findings[0].text == "SetupCheck (setup), iteration 3: call optimizer.zero_grad()."
    assert reported((3, "M (m)", "any", "note", "is so", ("a",), 1)).healthy


def test_what_a_report_explains_comes_after_it():
    run = trained() | runs.with_dead_units()
    summary = reported(ZEROED, run=run)
    assert [finding.kind for finding in summary.findings] == ["gradients_not_zeroed", "dead_units"]
    assert summary.findings[1].action == "Probably a consequence of gradients_not_zeroed above."


@pytest.mark.parametrize("restarts", [[], [140]])
def test_what_changes_weights_between_two_runs_is_no_fault(restarts):
    """The trainer is run again with other weights, which are smaller by a factor of 40."""
    norms = np.where(STEPS > 140, 1.0, 40.0)
    moved = {"optimizer/update_norm": at(0.01), "optimizer/rms_median": at(1.0)}
    recording = runs.Recording(trained(step__parameter_norm=at(norms)) | moved)
    recording.restarts = restarts
    kinds = {it.kind for it in summarise("run.h5", Run(recording)).findings}
    assert ("weight_changed" in kinds, "large_updates" in kinds) == (not restarts, False)


@pytest.mark.parametrize("restarts", [[], [140]])
def test_the_loss_of_the_last_run_alone_is_judged(restarts):
    """The trainer is run again with another loss, which is higher from its first value on, and falls."""
    recording = runs.Recording(trained(np.append(falling(2.3, 1.0)[:140], falling(9.0, 5.0)[140:])))
    recording.restarts = restarts
    assert [it.kind for it in summarise("run.h5", Run(recording)).findings] == ["loss_rose"] * (not restarts)


def test_without_a_cause_the_first_sign_comes_first():
    norms = np.append(np.ones(150), 2.0 ** np.arange(50))
    norms[170:] = np.inf
    run = runs.grad(norms, range(154, 201), skipped=False)
    summary = summarise("run.h5", make_run(run))
    assert [it.kind for it in summary.findings] == ["spikes", "nonfinite_gradients"]
    assert [it.severity for it in summary.findings] == ["warning", "problem"]
    assert summary.assessment.endswith("Cause unknown; the first sign was spikes in iteration 155.")


def test_a_report_that_no_step_was_made_is_not_repeated():
    report = (100, "SetupCheck (setup)", "no_step", "problem", "Adam made no step", (), 1)
    summary = reported(report, run=runs.grad(runs.calm_norms(400), made=()))
    assert [it.what for it in summary.findings] == ["SetupCheck (setup), iteration 100: Adam made no step."]


def test_of_two_causes_the_one_of_the_same_iteration_is_named():
    norms = runs.with_spike([60])
    norms[79] = np.nan
    run = runs.grad(norms, [60, 80])
    summary = reported((80, "GradMonitor (grad)", "nonfinite_input", "warning", "is so", (), 1), run=run)
    (symptom,) = [finding for finding in summary.findings if finding.kind == "nonfinite_gradients"]
    assert [finding.kind for finding in summary.findings][:2] == ["bad_batches", "nonfinite_input"]
    assert symptom.action == "Probably a consequence of nonfinite_input above."


def test_a_cause_that_another_explains_comes_before_the_symptoms():
    norms = runs.calm_norms(300)
    norms[200:] = np.nan
    loss = (201, "GradMonitor (grad)", "nonfinite_loss", "warning", "It comes from the loss", (), 1)
    stuck = (250, "GradMonitor (grad)", "no_step_at_spikes", "problem", "50 spikes without a step", (), 1)
    summary = reported(loss, stuck, run=trained() | runs.grad(norms, range(201, 301), made=range(1, 201)))
    kinds = [finding.kind for finding in summary.findings]
    assert kinds[:3] == ["nonfinite_loss", "no_step_at_spikes", "nonfinite_gradients"]
    assert summary.findings[1].action == "Probably related to nonfinite_loss above."


def test_units_dead_from_the_beginning_explain_gradients_that_vanish_from_there_on():
    zero = {"activation/a/dead_fraction": at(1.0), "monitor/grad_max": at(2.0), "monitor/smallest_grad/a": at(0.0)}
    dead, vanishing = summarise("run.h5", make_run(trained() | zero)).findings
    assert (dead.kind, vanishing.kind) == ("dead_units", "vanishing_gradients")
    assert vanishing.action == "Probably a consequence of dead_units above."


@pytest.mark.parametrize(("iteration", "first"), [(1, "nonfinite_loss"), (3, "exploding_gradients")])
def test_a_loss_of_nan_explains_gradients_that_explode_with_it_but_none_from_before(iteration, first):
    run = trained() | {"monitor/exploding_count": at(4.0), "monitor/grad_max": at(np.inf)}
    loss = (iteration, "GradMonitor (grad)", "nonfinite_loss", "warning", "It comes from the loss", (), 1)
    assert reported(loss, run=run).findings[0].kind == first


def test_a_missing_step_explains_spikes_without_a_step():
    stuck = (249, "GradMonitor (grad)", "no_step_at_spikes", "problem", "50 spikes without a step", (), 1)
    grads = runs.grad(runs.calm_norms(300), range(200, 301), made=range(1, 197))
    first, second = reported(stuck, run=trained() | grads).findings[:2]
    assert (first.kind, second.kind) == ("no_step", "no_step_at_spikes")
    assert second.action == "Probably related to no_step above."


def test_reports_of_a_kind_are_one_finding():
    again = [(step, "M (m)", "odd", "warning", "is odd.", (), 1) for step in (7, 8, 9)]
    (finding,) = reported(*again).findings
    assert finding.text == "M (m), iteration 7: is odd. Reported in iterations 7-9."


@pytest.mark.parametrize("reached", [True, False])
def test_gradients_of_0_are_no_fault_where_the_loss_has_become_0(reached):
    begun = np.arange(300) < 120
    run = trained(np.where(begun, falling(), 0.0 if reached else 0.1)) | runs.grad(begun * runs.calm_norms(300))
    assert [finding.kind for finding in found(run)] == ["no_gradients"] * (not reached)


def test_of_unrelated_causes_the_problem_is_named_first():
    slow = trained(step__lr__group_0=at(np.where(STEPS < 100, 1e-3, 1e-9)))
    wrapper = (200, "SetupCheck (setup)", "ranks_differ", "problem", "rank 1 differs", (), 1)
    kinds = [finding.kind for finding in reported(wrapper, run=slow).findings]
    assert kinds == ["ranks_differ", "rate_vanished"]


def test_a_symptom_without_a_cause_says_so():
    summary = runs.summary(runs.healthy() | runs.with_dead_units())
    assert summary.assessment.endswith("Cause unknown; the first sign was dead_units in iteration 105.")


def test_causes_and_symptoms_have_known_effects():
    for kind in KINDS.values():
        assert {*kind.explains, *kind.explained_by} <= {"damage", "stillness"}


def test_a_rule_that_fails_is_a_line_and_an_exit_code(monkeypatch, tmp_path, capsys):
    def broken(run):
        raise ZeroDivisionError("float division")

    monkeypatch.setattr(summary_module, "RUN_RULES", (broken, *summary_module.RUN_RULES))
    summary = runs.summary(runs.healthy())
    assert (summary.failed, summary.healthy) == (["rule broken failed: ZeroDivisionError: float division"], None)
    monkeypatch.setattr("ignite_monitor.cli._read", lambda path: make_run(runs.healthy()))
    assert main(["summary", str(tmp_path / "run.h5")]) == FAILED
    assert "rule broken failed" in capsys.readouterr().out
    assert main(["summary", "run.h5", "--json"]) == FAILED
    assert json.loads(capsys.readouterr().out)["failed"] == summary.failed
