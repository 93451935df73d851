"""Findings about gradients, on either side of every limit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ignite_monitor.report.gradients import norms_of
from ignite_monitor.report.summary import diagnose
from tests.report._runs import calm_norms, found, grad, make_run, only, series, summary, weights, with_spike

ALL = range(1, 201)
KINDS = "spikes", "bad_batches", "periodic_spikes"


# name: run, severities of "spikes", what the text says (or not, with a minus)
SPIKES = {
    "one": (
        grad(with_spike([120]), [120]),
        ["warning"],
        "1 gradient spike (grad/norm): iteration 120. The largest, in iteration 120, was 60, "
        "10 times its threshold of 6.|Steps at spikes: 1 skipped.|Inspect these batches.",
    ),
    "two": (grad(with_spike([50, 90]), [50, 90]), ["warning"], "2 gradient spikes (grad/norm): iterations 50 and 90."),
    "twice the threshold": (grad(with_spike([120], 11.9), [120]), ["note"], "Healthy runs|No action"),
    "above it": (grad(with_spike([120], 12.1), [120]), ["warning"], "-Healthy runs"),
    "1 in 100": (grad(with_spike([40, 70], 10.0), [40, 70]), ["note"], "Healthy runs"),
    "more": (grad(with_spike([40, 70, 95], 10.0), [40, 70, 95]), ["warning"], "-Healthy runs"),
    "many small": (grad(with_spike(range(40, 180, 7), 8.9), range(40, 180, 7)), ["note"], "Healthy runs|No action"),
    "more than 1 in 10": (grad(with_spike(range(40, 187, 7), 8.9), range(40, 187, 7)), ["warning"], "-Healthy runs"),
    "many larger": (grad(with_spike(range(40, 180, 7), 9.1), range(40, 180, 7)), ["warning"], "-Healthy runs"),
    "just above": (grad(with_spike([120], 6.01), [120]), ["note"], "6.01, 1.002 times its threshold of 6"),
    "no threshold": (grad(with_spike([120]), [120], thresholds=math.nan), ["warning"], "iteration 120.|-largest"),
    "skipped, clipped, made, omitted": (
        grad(with_spike([50, 60, 80, 110, 120]), [50, 60, 80, 110, 120], made={*ALL} - {80, 120})
        | {"grad/skipped_count": series(np.isin(ALL, range(80, 201)))}
        | {"grad/clipped_count": series(np.isin(ALL, range(50, 201)))},
        ["warning"],
        "Steps at spikes: 1 clipped, 2 made, 1 skipped and 1 not made.|on_spike=",
    ),
    "not handled": (grad(with_spike([50]), [50], skipped=False), ["warning"], "Steps at spikes: 1 made."),
    "periodic": (grad(with_spike(range(25, 200, 25)), range(25, 200, 25)), ["warning"], "every 25 iterations"),
    "periodic in one of 3 iterations": (
        grad(with_spike(range(20, 200, 8)), range(20, 200, 8), every=3),
        ["warning"],
        "every 24 iterations",
    ),
    "not periodic": (grad(with_spike([50, 90, 97, 160]), [50, 90, 97, 160]), ["warning"], "-every"),
    "prefix": (grad(with_spike([120]), [120], root="a/b/generator"), ["warning"], "(a/b/generator/norm)"),
    "reset counter": (
        grad(with_spike([50, 150]), [50, 150], skipped=False)
        | {"grad/spike_count": series([0] * 49 + [1] * 50 + [0] * 50 + [1] * 51)},
        ["warning"],
        "iterations 50 and 150",
    ),
    "in another step of the iteration": (
        grad(calm_norms(), []) | {"grad/spike_count": series([0] * 59 + [1] * 60 + [3] * 81)},
        ["note"],
        "3 more gradient spikes (grad/spike_count): not the last gradients|Inspect these batches.|-on_spike=",
    ),
    "retracted": (
        grad(with_spike([50, 90]), [50, 90], skipped=False)
        | {"grad/spike_count": series([0] * 49 + [1] + [0] * 39 + [1] * 111)},
        ["warning"],
        "1 gradient spike (grad/norm): iteration 90.",
    ),
    "retracted in an iteration that is in the file": (
        grad(with_spike([50, 51, 90]), [50, 51, 90], skipped=False)
        | {"grad/spike_count": series([0] * 49 + [1] * 40 + [3] * 111)},
        ["warning", "note"],
        "2 gradient spikes (grad/norm): iterations 51 and 90.|-not in the file",
    ),
    "of accumulated gradients": (
        grad(with_spike([52, 90, 91]), [52, 92], skipped=False, made=range(4, 201, 4)),
        ["warning"],
        "-zero_grad",
    ),
}


@pytest.mark.parametrize("name", SPIKES)
def test_spikes(name):
    run, severities, words = SPIKES[name]
    findings = found(run, *KINDS)
    assert [finding.severity for finding in findings] == severities
    for word in words.split("|") if findings else ():
        assert (word.removeprefix("-") in findings[0].text) is not word.startswith("-"), findings[0].text


def test_spikes_in_iterations_that_are_not_in_the_file_are_counted():
    run = {
        name: (at[99::100], values[99::100]) for name, (at, values) in grad(with_spike([50, 120]), [50, 120]).items()
    }
    text = only(run, *KINDS).text
    assert "2 gradient spikes (grad/norm): 2 not in the file. Steps at spikes: not known." in text
    run["grad/spike"][1][0] = 1
    finding = only(run, *KINDS)
    assert finding.values["count"] == 2
    assert "; 1 not in the file" in finding.text


def test_spikes_of_partial_gradients_count_once_per_step():
    """Four micro-batches a step: 27 gradients are flagged, in 11 steps."""
    flags, counts, total = np.zeros(400), np.zeros(400), 0
    for place in range(400):
        step, part = divmod(place, 4)
        if 40 <= step < 51 and (part == 3 or (part >= 1 and step < 48)):
            flags[place] = 1
            total += 0 if part == 2 or (part == 3 and step < 48) else 1  # that of the partial gradient is retracted
        counts[place] = total
    run = grad(np.tile([1.0, 2.0, 3.0, 4.0], 100), thresholds=100.0, made=range(4, 401, 4), skipped=False)
    run |= {"grad/spike": series(flags), "grad/spike_count": series(counts)}
    assert (flags.sum(), counts[-1]) == (27, 11)
    assert only(run, *KINDS).values["count"] == 11
    assert norms_of(make_run(run).of("grad")[0]).norm.iterations.tolist() == [*range(4, 401, 4)]


# Other findings


def test_finite_and_nonfinite_spikes_are_counted_apart():
    norms = with_spike([50, 80, 110])
    norms[99] = np.nan
    run = grad(norms, [50, 80, 100, 110])
    assert "Steps at spikes: 3 skipped." in only(run, *KINDS).text
    finding = only(run, "nonfinite_gradients")
    assert (finding.severity, finding.iterations) == ("warning", (100,))
    assert "1 gradient with inf or NaN (grad/norm): iteration 100. Steps at spikes: 1 skipped." in finding.text
    assert "on_spike" not in finding.text


def test_gradients_that_stay_nonfinite_are_a_problem():
    norms = calm_norms()
    norms[150:] = math.nan
    finding = only(grad(norms, range(151, 201)), "nonfinite_gradients")
    assert (finding.severity, finding.action[:48]) == ("problem", "Restore a checkpoint from before iteration 151, ")
    all_nan = grad(np.full(50, math.nan), range(1, 51), thresholds=math.nan)
    assert summary(all_nan).healthy is False
    assert only(all_nan, "nonfinite_gradients").severity == "problem"


def test_overflows_of_a_scaler():
    """More than 1 in 20 norms, and more than 20."""
    for count, times, reported in ((1, 10, []), (20, 1, []), (21, 1, [21]), (21, 10, [210]), (10, 10, [])):
        norms = calm_norms()
        norms[:count] = math.inf
        assert [finding.values["count"] for finding in found(grad(np.tile(norms, times)), "overflows")] == reported


@pytest.mark.parametrize(("count", "severity"), [(2, "note"), (3, "warning")])
def test_spikes_of_a_spike_monitor(count, severity):
    flags = np.isin(ALL, range(50, 50 + 20 * count, 20)) * 1.0
    run = {"l/value": series(np.ones(200)), "l/spike": series(flags), "l/spike_count": series(flags.cumsum())}
    assert only(run, "loss_spikes").severity == severity


@pytest.mark.parametrize(
    ("made", "kind", "severity", "words"),
    [
        (range(1, 101), "no_step", "problem", "no step in 400 monitored iterations|zero_grad"),
        ((), "no_step", "warning", "no step in 500 monitored iterations|Call step() of the optimizer"),
        (range(1, 450), None, None, ""),
        (range(4, 501, 4), None, None, ""),
    ],
)
def test_an_optimizer_that_makes_no_step(made, kind, severity, words):
    findings = found(grad(calm_norms(500), made=made))
    assert [(finding.kind, finding.severity) for finding in findings] == [(kind, severity)] * bool(kind)
    assert all(word in findings[0].text for word in words.split("|") if findings)


@pytest.mark.parametrize("accumulated", [4, 6])
def test_steps_in_iterations_that_are_not_in_the_file_are_not_denied(accumulated):
    """Steps are made in odd iterations, and every tenth iteration is in the file."""
    run = grad(calm_norms(1500), made=range(accumulated - 1, 1501, accumulated))
    part = {name: (at[9::10], values[9::10]) for name, (at, values) in run.items()}
    assert not part["grad/stepped"][1].any()
    assert found(part) == []


def test_norms_of_a_sum_that_no_step_uses_are_no_spikes():
    norms = np.append(with_spike([50]), np.linspace(7, 60, 200))
    run = grad(norms, [50, 350, 400], skipped=False, made=range(1, 201))
    assert {finding.kind for finding in found(run)} == {"no_step", "bad_batches"}
    assert only(run, "bad_batches").iterations == (50,)
    run |= grad(norms, [350, 400], skipped=False, made=range(1, 201))
    assert [finding.kind for finding in found(run)] == ["no_step"]


def test_without_norms_it_is_known_too():
    assert only({"grad/stepped": series(np.zeros(300))}, "no_step").values["count"] == 300
    short = {"grad/stepped": series(np.zeros(3))}  # of an accumulation over 4
    assert summary(short).healthy is None
    assert found(grad(np.full(300, 60.0), range(1, 301), made=()), "no_step") == []  # all skipped


# Without a threshold


def test_a_run_without_a_threshold_is_not_called_healthy():
    warming_up = {name: its for name, its in grad(calm_norms(15)).items() if name != "grad/threshold"}
    for run, words in (
        (warming_up, "No gradient norm (grad/norm) of 15 iterations was compared with a threshold"),
        (weights(), "The file has no gradient norms. Check that a GradMonitor of the trained model is attached"),
    ):
        ((finding,), _) = diagnose(make_run(run))
        assert (finding.kind, finding.severity) == ("not_monitored", "note")
        assert words in finding.text
        assert summary(run).healthy is None
