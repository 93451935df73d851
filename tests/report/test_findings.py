"""Series with known answers, on either side of every threshold."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from ignite_monitor.report import limits
from ignite_monitor.report.finding import KINDS, SEVERITIES
from ignite_monitor.report.summary import find, healthy, measured
from tests.report import _runs as runs
from tests.report._runs import tidy


def found(run, *kinds):
    """The findings, of the given kinds alone where some are given; else without that there is no GradMonitor."""
    every = find(tidy(run))
    return [each for each in every if (each.kind in kinds if kinds else each.kind != "not_monitored")]


def only(run, kind):
    findings = found(run, kind)
    assert len(findings) == 1, findings
    return findings[0]


# A healthy run


@pytest.mark.parametrize("count", [1, 2, 5, 20, 200, 2000])
def test_a_healthy_run_is_healthy(count):
    run = {name: (steps[:count], values[:count]) for name, (steps, values) in runs.healthy(max(count, 25)).items()}
    assert healthy(found(run)), found(run)


@pytest.mark.parametrize("seed", range(20))
def test_noise_raises_no_alarm(seed):
    """Losses at a plateau, norms that drift: twenty different ones."""
    random = np.random.default_rng(seed)
    norms = np.exp(0.3 * random.standard_normal(500)) * np.linspace(1, 3, 500)
    run = runs.grad(norms, thresholds=100.0)
    run["train/loss"] = runs.series(2 + np.exp(-np.arange(500) / 60) + 0.3 * random.standard_normal(500))
    run["flat/loss"] = runs.series(0.7 + 0.2 * random.standard_normal(500))
    run["GAN/generator"] = runs.series(random.standard_normal(500).cumsum())
    assert found(run) == []


def test_an_empty_run_has_no_findings():
    assert found({}) == []
    assert measured(tidy({})) == []


def test_the_measurements_are_named():
    told = " ".join(measured(tidy(runs.healthy())))
    for words in (
        "200 gradient norms (grad/norm, 1",
        "weight updates in 40",
        "3 modules",
        "3 attention heads",
        "3 layers",
    ):
        assert words in told
    assert measured(tidy({"train/loss": runs.series([1, 2])})) == []


# Spikes


def test_a_spike_is_told_with_iteration_and_numbers():
    finding = only(runs.grad(runs.with_spike([120]), [120]), "spikes")
    assert finding.severity == "warning"
    assert finding.iterations == (120,)
    assert finding.values["worst_factor"] == pytest.approx(10.0)
    for words in (
        "1 gradient spike (grad/norm)",
        "iteration 120.",
        "was 60, 10 times its threshold of 6",
        "The step was skipped.",
    ):
        assert words in finding.text


def test_of_several_spikes_the_largest_is_told():
    norms = runs.with_spike([50, 90])
    norms[89] = 90.0
    finding = only(runs.grad(norms, [50, 90]), "spikes")
    assert "2 gradient spikes (grad/norm): iterations 50 and 90." in finding.text
    assert "The largest, in iteration 90, was 90, 15 times its threshold of 6." in finding.text
    assert "All 2 steps were skipped." in finding.text


@pytest.mark.parametrize(("size", "severity"), [(11.9, "note"), (12.1, "warning")])
def test_a_lone_norm_just_above_the_threshold_is_noise(size, severity):
    finding = only(runs.grad(runs.with_spike([120], size), [120]), "spikes")
    assert finding.severity == severity
    assert ("noise" in finding.text) is (severity == "note")


@pytest.mark.parametrize(("count", "severity"), [(2, "note"), (3, "warning")])
def test_several_norms_above_the_threshold_are_not(count, severity):
    at = range(40, 40 + 30 * count, 30)
    assert only(runs.grad(runs.with_spike(list(at), 10.0), at), "spikes").severity == severity


@pytest.mark.parametrize(
    ("count", "size", "severity"),
    [(20, 8.9, "note"), (20, 9.1, "warning"), (21, 8.9, "warning"), (3, 8.9, "note"), (3, 9.1, "warning")],
)
def test_many_norms_barely_above_the_threshold_are_a_note_that_knows_better(count, size, severity):
    at = range(40, 40 + 7 * count, 7)
    finding = only(runs.grad(runs.with_spike(list(at), size), at), "spikes")
    assert finding.severity == severity
    assert ("RobustThreshold()" in finding.text) is (severity == "note")


@pytest.mark.parametrize(("size", "words"), [(6.01, "just above its"), (6.6, "1.1 times its")])
def test_how_far_a_norm_was_above_its_threshold(size, words):
    finding = only(runs.grad(runs.with_spike([120], size), [120]), "spikes")
    assert f"It was {size}, {words} threshold of 6." in finding.text


def with_stepped(run, left_out=(), root="grad"):
    steps, _ = run[f"{root}/norm"]
    return run | {f"{root}/stepped": (steps, 1.0 - np.isin(steps, list(left_out)))}


def test_steps_that_were_made_all_the_same_are_known():
    """Whatever iterations the weights were watched in."""
    run = runs.grad(runs.with_spike([50, 52, 100]), [50, 52, 100], skipped=False) | runs.weights()
    text = only(with_stepped(run, [100]), "spikes").text
    assert "The step was made in iterations 50 and 52." in text
    assert "The train step made no step in iteration 100." in text
    assert "not known" not in text


def test_steps_that_the_handler_skipped_were_not_left_out_by_the_train_step():
    text = only(with_stepped(runs.grad(runs.with_spike([50]), [50]), [50]), "spikes").text
    assert "The step was skipped." in text
    assert "train step" not in text


def test_in_files_that_do_not_tell_nothing_is_claimed():
    text = only(runs.grad(runs.with_spike([50]), [50], skipped=False), "spikes").text
    assert "No step was skipped or clipped by the handler." in text


@pytest.mark.parametrize(("factor", "severity"), [(2.5, "warning"), (3.5, "problem")])
def test_norms_that_stay_large_after_a_spike_are_damage(factor, severity):
    norms = np.ones(200)
    norms[100:] = factor
    norms[99] = 60
    finding = only(runs.grad(norms, [100], skipped=False), "spikes")
    assert finding.severity == severity
    assert finding.values["aftermath_factor"] == pytest.approx(factor)
    assert ("stayed 3.5 times as large" in finding.text) is (severity == "problem")


def test_a_step_that_was_skipped_has_done_no_damage():
    norms = np.ones(200)
    norms[100:] = 5.0
    norms[99] = 60
    finding = only(runs.grad(norms, [100]), "spikes")
    assert finding.severity == "warning"
    assert "damage" not in finding.text
    run = runs.grad(norms, [100], skipped=False)
    assert only(with_stepped(run, [100]), "spikes").severity == "warning"  # the train step left it out
    assert only(with_stepped(run), "spikes").severity == "problem"


def test_of_spikes_of_which_some_were_skipped_only_the_others_do_damage():
    norms = np.ones(200)
    norms[[59, 119]] = 60
    norms[120:] = 5.0
    for made, severity in ((60, "warning"), (120, "problem")):
        run = runs.grad(norms, [60, 120])
        steps, counts = run["grad/skipped_count"]
        run["grad/skipped_count"] = steps, counts - (steps >= made)
        assert only(run, "spikes").severity == severity


def test_a_norm_that_comes_back_has_not_stayed():
    norms = np.ones(300)
    norms[200:210] = 200.0  # ten spikes, and a few calm ones that are still large
    norms[210:225] = 10.0
    finding = only(runs.grad(norms, range(201, 211), skipped=False), "spikes")
    assert finding.severity == "warning"
    assert finding.values["aftermath_factor"] == pytest.approx(1.0)


def test_a_norm_that_spikes_to_the_end_has_stayed():
    norms = np.ones(200)
    norms[150:] = 200.0
    finding = only(runs.grad(norms, range(151, 201), skipped=False), "spikes")
    assert finding.severity == "problem"
    assert finding.values["aftermath_factor"] == pytest.approx(200.0)


def test_spikes_in_iterations_that_are_not_in_the_file_are_counted():
    run = runs.grad(runs.with_spike([50, 120]), [50, 120])
    for name in run:
        steps, values = run[name]
        run[name] = (steps[steps % 100 == 0], values[steps % 100 == 0])
    finding = only(run, "spikes")
    assert finding.values["count"] == 2
    assert "2 gradient spikes (grad/norm): all in iterations that are not in the file." in finding.text
    run["grad/spike"][1][0] = 1
    assert "1 of them in iterations that are not in the file" in only(run, "spikes").text


@pytest.mark.parametrize(("length", "told"), [(9, False), (10, True), (25, True)])
def test_spikes_in_a_row_are_a_new_level(length, told):
    norms = np.ones(200)
    norms[100 : 100 + length] = 60
    findings = found(runs.grad(norms, range(101, 101 + length)), "regime_change")
    assert [finding.iterations for finding in findings] == [(110,)] * told


@pytest.mark.parametrize("root", ["grad", "train/grad", "generator", "a/b/discriminator"])
def test_prefix_and_tag_are_the_users(root):
    finding = only(runs.grad(runs.with_spike([120]), [120], root=root), "spikes")
    assert f"({root}/norm)" in finding.text
    assert finding.metrics == (f"{root}/norm", f"{root}/spike")


def test_two_monitors_each_have_their_own_findings():
    run = runs.grad(runs.with_spike([50]), [50], root="g") | runs.grad(runs.with_spike([90]), [90], root="d")
    assert sorted(finding.iterations for finding in found(run, "spikes")) == [(50,), (90,)]


# Norms that are not finite


def test_a_gradient_that_is_not_finite_and_no_scaler():
    norms = runs.calm_norms()
    norms[[49, 50]] = math.nan, math.inf
    findings = found(runs.grad(norms, [50, 51]))
    assert [finding.kind for finding in findings] == ["nonfinite_gradients"]
    assert "2 gradients with inf or NaN (grad/norm): iterations 50-51." in findings[0].text
    assert findings[0].severity == "warning"


def test_gradients_that_stay_so_are_a_problem():
    norms = runs.calm_norms()
    norms[150:] = math.nan
    finding = only(runs.grad(norms, range(151, 201)), "nonfinite_gradients")
    assert finding.severity == "problem"
    assert "No finite norm since iteration 150" in finding.text


@pytest.mark.parametrize(("count", "severity"), [(1, "note"), (20, "note"), (21, "warning")])
def test_overflows_are_the_scalers_business_unless_they_are_many(count, severity):
    norms = runs.calm_norms()
    norms[:count] = math.inf
    finding = only(runs.grad(norms), "overflows")
    assert finding.severity == severity
    assert finding.values["count"] == count
    norms = runs.calm_norms(2000)
    norms[:100:4] = math.inf  # 25 of 2,000 are few
    assert only(runs.grad(norms), "overflows").severity == "note"


def test_a_run_of_nothing_but_nan():
    run = runs.grad(np.full(50, math.nan), range(1, 51)) | {"train/loss": runs.series(np.full(50, math.nan))}
    assert {finding.severity for finding in found(run)} == {"problem"}
    assert [finding.kind for finding in found(run)] == ["nonfinite_gradients", "nonfinite_metric"]


# Weights


def test_frozen_parameters_are_named_with_their_beginning():
    frozen = np.zeros(40)
    frozen[22:] = 1
    frozen[30:] = 2
    run = runs.weights(frozen=frozen)
    run["monitor/topk_frozen/blocks.0.weight"] = runs.series(np.arange(3, 21), 5, start=5 * 23)
    run["monitor/topk_frozen/head.bias"] = runs.series(np.arange(3, 13), 5, start=5 * 31)
    finding = only(run, "frozen_parameters")
    assert finding.severity == "problem"
    # The third monitored step without a move is the 23rd monitored iteration, so the first is the 21st.
    assert "2 parameters no longer move (monitor/frozen_count): " in finding.text
    assert "blocks.0.weight since iteration 105 and head.bias since iteration 145" in finding.text
    assert finding.iterations == (105, 145)


def test_frozen_parameters_beyond_the_named_are_counted():
    run = runs.weights(frozen=7)
    run["monitor/topk_frozen/head.bias"] = runs.series(np.arange(100, 140), 5)
    text = only(run, "frozen_parameters").text
    assert "7 parameters no longer move" in text
    assert "head.bias since iteration 5 and 6 more" in text
    assert "first in iteration 5" in only(runs.weights(frozen=7), "frozen_parameters").text


def test_parameters_that_move_again_are_a_note():
    frozen = np.zeros(40)
    frozen[10:13] = 3
    finding = only(runs.weights(frozen=frozen), "frozen_for_a_while")
    assert finding.severity == "note"
    assert "Up to 3 parameters stood still in iterations 55, 60 and 65" in finding.text
    assert found(runs.weights(frozen=frozen), "frozen_parameters") == []


@pytest.mark.parametrize(
    ("median", "kind"),
    [(0.2, "large_updates"), (0.05, None), (1e-3, None), (5e-6, None), (5e-7, "small_updates")],
)
def test_update_ratios_too_large_or_small(median, kind):
    assert [finding.kind for finding in found(runs.weights(median=median))] == [kind] * (kind is not None)


def with_largest(factors, count=40):
    """Weights of which the largest ratio is so many times the median one."""
    run = runs.weights(count)
    steps, median = run["monitor/update_ratio_median"]
    return run | {"monitor/update_ratio_max": (steps, factors * median)}


@pytest.mark.parametrize(
    ("factor", "severities"), [(11.5, []), (12.5, ["note"]), (14.5, ["note"]), (15.5, ["warning"]), (2000, ["warning"])]
)
def test_a_parameter_that_moves_far_more_than_the_others(factor, severities):
    findings = found(with_largest(factor), "update_ratio_outlier")
    assert [finding.severity for finding in findings] == severities
    assert all("One parameter moves" in finding.text and "more for its size" in finding.text for finding in findings)


@pytest.mark.parametrize(("power", "count"), [(-0.05, 1), (-0.5, 0), (-1.0, 0)])
def test_parameters_that_began_at_zero_are_no_outliers(power, count):
    """A steady drift from zero moves by 1/n of its size in step n, a random walk by a root of it."""
    factors = 55 * (np.arange(1, 41) / 40) ** power
    assert len(found(with_largest(factors), "update_ratio_outlier")) == count


@pytest.mark.parametrize(("spread", "count"), [(500, 0), (2000, 1)])
def test_a_parameter_that_moves_far_less_than_the_others(spread, count):
    run = with_largest(5.0) | {"monitor/update_ratio_min": runs.weights(spread=spread)["monitor/update_ratio_min"]}
    findings = found(run, "update_ratio_outlier")
    assert [finding.severity for finding in findings] == ["note"] * count
    assert all("2000 times less for its size" in finding.text for finding in findings)


def with_vanishing(counts, known=8):
    run = runs.weights(len(counts)) | {"monitor/vanishing_count": runs.series(counts, 5)}
    return run | {f"monitor/topk_grad/{name}": runs.series(np.ones(len(counts)), 5) for name in range(known)}


@pytest.mark.parametrize(
    ("begin", "end", "known", "severity"),
    [
        (1, 1, 0, "note"),  # a convolution's bias before a BatchNorm
        (2, 2, 0, "note"),
        (3, 3, 0, "warning"),
        (8, 8, 24, "note"),
        (9, 9, 24, "warning"),
        (0, 1, 24, "warning"),
        (1, 2, 24, "warning"),  # it grows
        (2, 1, 24, "note"),
    ],
)
def test_few_gradients_that_vanish_from_the_beginning_are_a_note(begin, end, known, severity):
    run = with_vanishing([0] + [begin] * 19 + [end] * 20, known)
    finding = only(run, "vanishing_gradients")
    assert finding.severity == severity
    assert ("from the beginning, while the rest learn" in finding.text) is (severity == "note")


def test_one_parameter_is_one():
    frozen = np.zeros(40)
    frozen[10] = 1
    assert (
        "Up to 1 parameter stood still in iteration 55" in only(runs.weights(frozen=frozen), "frozen_for_a_while").text
    )
    finding = only(with_vanishing([0] * 30 + [1] * 10), "vanishing_gradients")
    assert "1 parameter with a gradient norm below" in finding.text


@pytest.mark.parametrize(("share", "count"), [(0.4, 0), (0.6, 1)])
@pytest.mark.parametrize("what", ["vanishing", "exploding"])
def test_gradients_beyond_the_thresholds_to_the_end(what, share, count):
    run = runs.weights()
    values = np.zeros(40)
    values[40 - round(10 * share) :] = 4
    run[f"monitor/{what}_count"] = runs.series(values, 5)
    findings = found(run, f"{what}_gradients")
    assert len(findings) == count
    assert all("4 parameters with a gradient norm" in finding.text for finding in findings)


# Gaps


@pytest.mark.parametrize("every", [1, 10])
def test_a_gap_in_the_norms_is_told(every):
    run = runs.grad(runs.calm_norms(), every=every)
    steps = run["grad/norm"][0]
    kept = (steps <= 99 * every) | (steps > 101 * every)
    gone = {name: (steps[kept], values[kept]) for name, (_, values) in run.items()}
    finding = only(gone, "gap")
    assert finding.severity == "note"
    assert f"between iterations {99 * every} and {102 * every}" in finding.text
    assert found(run, "gap") == []


def test_norms_at_odd_iterations_have_no_gaps():
    run = runs.grad(runs.calm_norms(200))
    steps = np.cumsum(np.random.default_rng(0).integers(1, 5, 200))
    assert found({name: (steps, values) for name, (_, values) in run.items()}, "gap") == []


# Activations and attention


@pytest.mark.parametrize(("dead", "severity"), [(0.45, None), (0.55, "warning"), (0.95, "problem")])
def test_dead_units(dead, severity):
    values = np.linspace(0.1, dead, 40)
    values[30:] = dead
    run = {"activation/blocks.0.mlp.1/dead_fraction": runs.series(values, 5)}
    findings = found(run, "dead_units")
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)
    assert all(f"module blocks.0.mlp.1: {100 * dead:.0f} %" in finding.text for finding in findings)


def test_since_when_half_of_the_units_are_dead():
    values = np.where(np.arange(40) < 20, 0.1, 0.8)
    run = {
        "t/activation/a/dead_fraction": runs.series(values, 5),
        "t/activation/b/dead_fraction": runs.series([0.9] * 40),
    }
    text = only(run, "dead_units").text
    assert "module b: 90 % from the beginning and module a: 80 % (half of them since iteration 105)" in text
    assert "(t/activation/" in text


def test_activations_that_are_not_finite():
    counts = np.zeros(40)
    counts[7] = 3
    quiet = runs.series(np.zeros(40), 5)
    run = {"activation/a/nonfinite_count": quiet, "activation/b/nonfinite_count": runs.series(counts, 5)}
    finding = only(run, "nonfinite_activations")
    assert (finding.severity, finding.iterations) == ("warning", (40,))
    assert "first in b: iteration 40." in finding.text
    counts[7:] = 3
    assert only(run, "nonfinite_activations").severity == "problem"


@pytest.mark.parametrize(("end", "collapsed"), [(0.12, False), (0.08, True)])
def test_attention_that_collapsed(end, collapsed):
    values = np.linspace(2.5, end, 30)
    values = np.concatenate([values, np.full(10, end)])
    steady = runs.series(np.full(40, 2.0), 5)
    run = {f"attention_entropy/h.0.attn/head_{head}": steady for head in range(12)}
    run["attention_entropy/h.0.attn/head_3"] = runs.series(values, 5)
    findings = found(run, "attention_collapse")
    assert len(findings) == collapsed
    for finding in findings:
        assert finding.severity == "warning"
        assert "1 of 12 attention heads attend to a single position" in finding.text
        assert "h.0.attn head 3 (since iteration" in finding.text
        onset = int(re.search(r"since iteration (\d+)", finding.text)[1])
        assert values[onset // 5 - 1] < limits.COLLAPSED_ENTROPY <= values[onset // 5 - 2]


def test_some_heads_may_be_sharp_from_the_beginning_but_not_all_of_a_module():
    sharp, wide = (runs.series(np.full(40, value), 5) for value in (0.01, 2.0))
    some = {f"attention_entropy/a/head_{head}": sharp if head else wide for head in range(4)}
    assert found(some) == []
    assert found(some | {"attention_entropy/a/head_1": runs.series(np.linspace(0.3, 0.01, 40), 5)}) == []
    every = {
        f"attention_entropy/{module}/head_{head}": sharp if module == "a" else wide
        for module in "abc"
        for head in (0, 1)
    }
    finding = only(every, "attention_collapse")
    assert finding.severity == "warning"
    assert "2 of 6 attention heads" in finding.text
    assert "a heads 0 and 1 (from the first measurement on)" in finding.text
    assert finding.iterations == (5,)
    del every["attention_entropy/c/head_0"], every["attention_entropy/c/head_1"]
    assert only(every, "attention_collapse").severity == "problem"


def test_attention_with_a_single_place_to_look_at_is_no_problem():
    zero = runs.series(np.zeros(40), 5)
    assert only({"attention_entropy/a/head_0": zero}, "attention_collapse").severity == "note"
    both = {"attention_entropy/a/head_0": zero, "attention_entropy/b/head_0": runs.series(np.full(40, 2.0), 5)}
    assert only(both, "attention_collapse").severity == "problem"


def test_when_half_of_the_heads_collapse_it_is_a_problem():
    falling = runs.series([2.0] * 20 + [0.01] * 20, 5)
    run = {f"attention_entropy/a/head_{head}": falling for head in (2, 10)}
    finding = only(run, "attention_collapse")
    assert finding.severity == "problem"
    assert "a heads 2 and 10 (since iteration 105)" in finding.text


# Coordinate check, spectral norms


def rcc(**layers):
    run = {}
    for layer, (update, drift) in layers.items():
        run[f"rcc/weight_update/{layer}"] = runs.series(np.linspace(0, update, 200))
        if drift is not None:
            run[f"rcc/input_drift/{layer}"] = runs.series(np.linspace(0, drift, 200))
    return run


def test_drift_is_set_against_weight_update():
    finding = only(rcc(embedding=(1.0, None), low=(1.0, 1.0), mid=(1.0, 2.9), top=(1.0, 3.1)), "input_drift")
    assert finding.severity == "note"
    assert finding.values["weight_share"] == pytest.approx(1 / 3.9)
    assert "top (3" in finding.text
    assert "mid (" not in finding.text


def test_drift_that_outweighs_nothing_is_a_number_and_no_finding():
    run = rcc(low=(1.0, 1.0), mid=(1.0, 2.9), high=(1.0, 3.0))
    assert found(run) == []
    assert "3 layers, 26 % of whose change is due to their own weights" in " ".join(measured(tidy(run)))


@pytest.mark.parametrize(("factor", "count"), [(50, 0), (200, 1), (0.02, 0), (0.005, 1)])
def test_layers_whose_update_is_far_from_the_others(factor, count):
    findings = found(rcc(a=(1, 1), b=(1, 1), c=(1, 1), d=(1, 1), far=(factor, 1)), "weight_update_outlier")
    assert len(findings) == count
    assert all("far (" in finding.text and "a (" not in finding.text for finding in findings)


@pytest.mark.parametrize(("end", "count"), [(9, 0), (11, 1)])
def test_spectral_norms_that_grow(end, count):
    values = np.concatenate([np.linspace(1, end, 20), np.full(20, end)])
    assert len(found({"spectral/norm_max": runs.series(values, 5)}, "spectral_growth")) == count


# The user's own metrics


def test_a_loss_that_becomes_nan_and_stays_so():
    values = np.linspace(3, 1, 100)
    values[60:] = math.nan
    finding = only({"train/loss": runs.series(values)}, "nonfinite_metric")
    assert finding.severity == "problem"
    assert "train/loss is NaN from iteration 61 to the end (40 of 100 values)" in finding.text


def test_a_loss_that_is_inf_once():
    values = np.linspace(3, 1, 100)
    values[60] = math.inf
    finding = only({"train/loss": runs.series(values)}, "nonfinite_metric")
    assert (finding.severity, finding.iterations) == ("warning", (61,))


def test_a_metric_that_never_had_a_value_is_worth_a_note():
    finding = only({"val/f1": runs.series([math.nan] * 5)}, "nonfinite_metric")
    assert finding.severity == "note"
    assert "val/f1 is NaN from iteration 1 to the end (5 of 5 values)" in finding.text
    assert only({"val/loss": runs.series([math.nan] * 5)}, "nonfinite_metric").severity == "problem"
    assert only({"val/f1": runs.series([0.5] + [math.nan] * 5)}, "nonfinite_metric").severity == "warning"


@pytest.mark.parametrize(
    ("end", "kind"), [(1.8, None), (2.3, "loss_rose_again"), (2.6, "loss_rose_again"), (6.0, "loss_rose")]
)
def test_a_loss_that_loses_what_it_gained(end, kind):
    values = np.concatenate([np.linspace(3, 1, 100), np.linspace(1, end, 50), np.full(50, end)])
    kinds = [finding.kind for finding in found({"train/loss": runs.series(values + 0.02 * runs.noise(200))})]
    assert kinds == [kind] * (kind is not None)


def test_what_is_better_when_larger_is_no_loss():
    values = np.concatenate([np.linspace(3, 1, 100), np.full(100, 3)])
    assert found({"val/accuracy": runs.series(values), "weird": runs.series(values)}) == []


# Order and form


def test_what_happened_first_comes_first():
    norms = runs.with_spike([50])
    run = runs.grad(norms, [50]) | runs.weights(frozen=2) | rcc(a=(1, 5))
    run["train/loss"] = runs.series(np.concatenate([np.linspace(3, 1, 100), np.full(100, math.nan)]))
    kinds = [finding.kind for finding in found(run)]
    assert kinds == ["frozen_parameters", "spikes", "nonfinite_metric", "input_drift"]


def test_every_finding_has_a_known_kind_severity_and_metrics():
    run = runs.grad(runs.with_spike([50], math.nan), [50]) | runs.weights(frozen=2, median=0.5, spread=1e4)
    run |= rcc(a=(1, 5), b=(1, 1), c=(1, 1), d=(1e5, 1)) | {"activation/x/dead_fraction": runs.series([1.0] * 5)}
    findings = found(run)
    assert len(findings) > 5
    for finding in findings:
        assert finding.kind in KINDS
        assert finding.severity in SEVERITIES
        assert set(finding.metrics) <= set(run)
        assert all(type(each) is int for each in finding.iterations)
        assert all(math.isfinite(value) for value in finding.values.values())
        assert re.search(r"[.]$", finding.what)
        assert re.search(r"\w[^.]+[.]$", finding.action)


def test_control_characters_in_names_stay_out_of_the_words():
    run = {"\x1b[31mloss": runs.series([1.0, math.nan])}
    assert "\x1b" not in only(run, "nonfinite_metric").text


def test_steps_that_are_out_of_order_are_put_into_it():
    steps, values = runs.series(np.arange(10.0))
    tidied = tidy({"a": (steps[::-1], values[::-1]), "empty": ([], [])})
    assert list(tidied) == ["a"]
    assert tidied["a"].values.tolist() == values.tolist()


def test_scores_of_attention_that_are_too_large():
    run = {"attention_logit_max/a/head_0": runs.series(np.linspace(5, 180, 36), 5)}
    run["attention_logit_max/a/head_1"] = runs.series(np.full(36, 99.0), 5)
    finding = only(run, "large_logits")
    assert (finding.severity, finding.iterations) == ("warning", (105,))
    assert "a/head_0 (180, since iteration 105)" in finding.text
    assert found({"attention_logit_max/a/head_1": runs.series(np.full(36, 99.0), 5)}) == []


def test_ranks_that_differ_and_steps_that_wait_for_data():
    values = np.ones(20)
    assert found({"replicas/in_sync": runs.series(values, 5)}) == []
    values[7:] = 0
    run = {"replicas/in_sync": runs.series(values, 5), "replicas/differing_count": runs.series(3 * (1 - values), 5)}
    finding = only(run, "ranks_differ")
    assert (finding.severity, finding.iterations[0]) == ("problem", 40)
    assert "up to 3 tensors" in finding.text
    assert found({"step/data_wait_share": runs.series(np.full(20, 0.2))}) == []
    assert only({"step/data_wait_share": runs.series(np.full(20, 0.6))}, "data_wait").values == {"share": 0.6}


def test_second_moments_that_are_stale_and_steps_where_eps_rules():
    assert (
        found(
            {
                "optimizer/rms_p95": runs.series(np.full(40, 1.1)),
                "optimizer/epsilon_dominated_median": runs.series(np.zeros(40)),
            }
        )
        == []
    )
    run = {
        "optimizer/rms_p95": runs.series(np.full(40, 4.0)),
        "optimizer/epsilon_dominated_median": runs.series(np.ones(40)),
    }
    assert only(run, "stale_moments").severity == "warning"
    assert only(run, "epsilon_dominated").values == {"share": 1.0}
