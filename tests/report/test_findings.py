"""Findings about everything but gradients, on either side of every limit, and their order."""

from __future__ import annotations

import math
import re
import time

import numpy as np
import pytest

from ignite_monitor.report import limits
from ignite_monitor.report.finding import KINDS, SEVERITIES, iterations, listed, number, times
from ignite_monitor.report.summary import diagnose, measured
from tests.report import _runs as runs
from tests.report._runs import found, make_run, only, rollback, series, summary, weights

HALF = np.arange(40) < 20


def every(value, count=40):
    """A value in every fifth iteration."""
    return series(np.broadcast_to(value, count), 5)


def late(share, value):
    """0 at first, and a value in a share of the last quarter."""
    return series(np.where(np.arange(40) < 40 - round(10 * share), 0, value), 5)


def entropy(end, heads=12, falling=(3,)):
    fall = np.concatenate([np.linspace(2.5, end, 30), np.full(10, end)])
    return {f"attention_entropy/h.0/head_{i}": every(fall if i in falling else 2.0) for i in range(heads)}


def std(**modules):
    return {f"activation/{module}/std": every(value) for module, value in modules.items()}


def vanishing(share, name="0.weight"):
    """The smallest gradient in the second half, as a share of the largest."""
    return {"monitor/grad_max": every(2.0), f"monitor/smallest_grad/{name}": every(np.where(HALF, 1.0, 2 * share))}


def largest(factors):
    run = weights()
    steps, median = run["monitor/update_ratio_median"]
    return run | {"monitor/update_ratio_max": (steps, factors * median)}


def groups(rate, factor, fast=1):
    """Two groups; the largest update ratio is that of the second one's parameter, or else the first one's."""
    run = largest(factor / np.linspace(1, 3, 40))
    steps, ratios = run["monitor/update_ratio_max"]
    run |= {f"monitor/largest_update_ratio/group_{fast}/fast.w": (steps, ratios)}
    run |= {f"monitor/largest_update_ratio/group_{1 - fast}/slow.w": (steps, ratios / factor)}
    return run | {"step/lr/group_0": every(1e-3), "step/lr/group_1": every(rate)}


def loss(end):
    values = np.concatenate([np.linspace(3, 1, 100), np.linspace(1, end, 50), np.full(50, end)])
    return {"train/loss": series(values + 0.02 * runs.noise(200))}


def nan_from(place, name="train/loss", count=100):
    return {name: series(np.where(np.arange(1, count + 1) < place, np.linspace(3, 1, count), math.nan))}


def rate(values, at=101):
    """A learning rate in every iteration, and spikes whose first is in iteration ``at``."""
    return runs.grad(runs.with_spike([at, at + 7]), [at, at + 7], skipped=False) | {"step/lr/group_0": series(values)}


def jump(factor, at=100):
    return np.where(np.arange(1, 201) < at, 1.0, factor)


def peak(size, at=150):
    values = np.linspace(3, 1, 200)
    values[at - 1 : at + 2] = size
    return {"train/loss": series(values)}


def shrinking(end, every=5):
    return {"step/parameter_norm": series(np.linspace(8, end, 40), every)}


def noise_scale(value, low, high, batch=32):
    names = {"value": value, "low": low, "high": high, "batch": batch}
    return {f"noise_scale/{name}": every(number) for name, number in names.items()}


def sharpness(*shares, metric="hessian_max_eigenvalue"):
    run = {"curvature/stability_threshold": series([40.0] * 4), "curvature/hessian_max_eigenvalue": series([1e9] * 4)}
    return run | {f"curvature/{metric}": series(40 * np.array(shares))}


GROWN = [1.0] + [9.0] * 39
PRECONDITIONED = {"metric": "hessian_max_eigenvalue_preconditioned"}
# kind: case -> run, severity (None: not found), what the text says
CASES = {
    "frozen_parameters: two": (weights(frozen=2), "problem", "2 parameters no longer move (monitor/frozen_count)"),
    "frozen_parameters: for a while": (weights(frozen=np.isin(np.arange(40), [10, 11, 12]) * 3), None, ""),
    "frozen_parameters: idle bias": (
        weights(frozen=1) | {"monitor/topk_frozen/0.bias": series(np.arange(3, 43), 5)},
        *("note", "0.bias since iteration 5. These are biases whose weights move."),
    ),
    "frozen_parameters: bias and weight": (
        weights(frozen=2) | {f"monitor/topk_frozen/0.{it}": series(np.arange(3, 43), 5) for it in ("bias", "weight")},
        *("problem", "0.bias since iteration 5 and 0.weight since iteration 5"),
    ),
    "group_rate: 100 times": (
        groups(0.1, 12.0),
        *("warning", "Parameter group 1 (with fast.w) has a learning rate of 0.1|100 times|and moves fast.w up to 9"),
    ),
    "group_rate: another group moves": (groups(0.1, 12.0, fast=0), "note", "group 1 (with slow.w) has"),
    "group_rate: 0": (groups(0, 2.0), "warning", "group 1 (with fast.w) has a learning rate of 0 "),
    "group_rate: falls to 0": (groups(0, 2.0) | {"step/lr/group_1": every(np.linspace(1e-3, 0, 40))}, None, ""),
    "group_rate: of the first group": (
        groups(1e-3, 12.0, fast=0) | {"step/lr/group_0": every(0.1)},
        *("warning", "Parameter group 0 (with fast.w) has"),
    ),
    "group_rate: of another tag": (
        {name.replace("step/", "b/step/"): value for name, value in groups(0.1, 12.0).items()},
        *("note", "group 1 has a learning rate"),
    ),
    "group_rate: small updates": (groups(0.1, 2.0), "note", ""),
    "group_rate: growth of 3.9": (
        groups(0.1, 2.0) | {"step/parameter_norm": every(np.linspace(1, 4, 40))},
        *("warning", "and the norm of all parameters grew 3.9 times"),
    ),
    "group_rate: growth of 1.9": (
        groups(0.1, 2.0) | {"step/parameter_norm": every(np.linspace(1, 1.9, 40))},
        *("note", ""),
    ),
    "group_rate: 20 times": (groups(0.02, 12.0), None, ""),
    "small_updates: of a group": (
        groups(1e-9, 2.0) | {"monitor/largest_update_ratio/group_1/fast.w": every(1e-8)},
        *("warning", "group 1 (with fast.w) moves no parameter by more than 1e-08 of its size"),
    ),
    "exploding_gradients: four": (
        weights() | {"monitor/exploding_count": late(0.6, 4), "monitor/topk_grad/a": every(1e9)},
        *("warning", "exploding gradients: 4 (monitor/exploding_count), since iteration 175; largest in a."),
    ),
    "vanishing_gradients: weights": (vanishing(1e-9), "warning", "0.weight (1e-09, since iteration 105)"),
    "vanishing_gradients: 1e-6": (vanishing(1e-6), None, ""),
    "vanishing_gradients: biases that a normalization cancels": (vanishing(1e-9, "0.bias"), None, ""),
    "lost_updates: 90 %": (weights() | {"monitor/lost_update_fraction": every(0.9)}, "warning", "takes 90% of"),
    "stale_moments: 6 times": (
        {"optimizer/rms_p95": every(6.0), "optimizer/topk_rms/a.w": every(9.0)},
        *("warning", "6 times what|largest in a.w"),
    ),
    "dead_units: healthy ReLU": ({"activation/a/dead_fraction": every(0.45)}, None, ""),
    "dead_units: from the start": (
        {"t/activation/a/dead_fraction": series(np.full(40, 0.55))} | {"grad/stepped": series(np.ones(200))},
        *("warning", "a (0.55, from the first measurement on)|Raise the biases"),
    ),
    "dead_units: died": (
        {"activation/a/dead_fraction": every(np.where(HALF, 0.1, 0.95))},
        *("problem", "a (0.95, since iteration 105)|lower learning rate"),
    ),
    "activation_outlier: 90 times": (std(a=0.5, b=1.0, c=1.5, d=90.0, e=1.0), None, ""),
    "activation_outlier: 110 times": (
        std(a=0.5, b=1.0, c=1.5, d=110.0, e=1.0),
        *("warning", "d (110, from the first measurement on)|at the end"),
    ),
    "activation_outlier: usual among small ones": (std(a=0.01, b=0.01, c=0.01, d=5.0), None, ""),
    "attention_collapse: 0.12 nats": (entropy(0.12), None, ""),
    "attention_collapse: 0.08 nats": (
        entropy(0.08),
        *("warning", "1 of 12 attention heads|h.0/head_3 (0.08, since iteration 150)"),
    ),
    "attention_collapse: most heads": (entropy(0.01, 3, (0, 1)), "problem", "2 of 3 attention heads"),
    "attention_collapse: always sharp": (
        entropy(0.5) | {"attention_entropy/h.0/head_0": every(0.01), "attention_entropy/h.0/head_1": every(0.01)},
        *(None, ""),
    ),
    "attention_collapse: a module that always was": (
        entropy(0.5) | {f"attention_entropy/a/head_{head}": every(0.01) for head in (0, 1)},
        *("warning", "a/head_0 (0.01, from the first measurement on)"),
    ),
    "attention_collapse: a single position": ({"attention_entropy/a/head_0": every(0.0)}, None, ""),
    "large_logits: 99": ({"attention_logit_max/a/head_0": every(99.0)}, None, ""),
    "large_logits: 200": (
        {"attention_logit_max/a/head_0": every(np.linspace(5, 200, 40))},
        *("warning", "a/head_0 (1.8e+02, since iteration 105)"),
    ),
    "spectral_growth: 9 times": ({"spectral/norm_max": every(GROWN)}, None, ""),
    "spectral_growth: 11 times": ({"spectral/norm_max": every([0.8, *GROWN[1:]])}, "warning", "grew 11 times"),
    "ranks_differ: in sync": ({"replicas/in_sync": every(1.0)}, None, ""),
    "ranks_differ: out of sync": ({"replicas/in_sync": every(HALF)}, "problem", "the log names them"),
    "batch_size: small": (
        noise_scale(300, 200, 400),
        *("note", "300 items (200 to 400, |a step uses 32|Use larger batches"),
    ),
    "batch_size: large": (noise_scale(3, 2, 7), "note", "Use smaller batches"),
    "batch_size: in between": (noise_scale(300, 100, 900), "note", "a larger batch saves steps"),
    "near_curvature: flat": (sharpness(2.0, 0.1, 2.0, 0.1), None, ""),
    "near_curvature: near": (sharpness(1.05, 0.95, 1.0, 1.04), "note", "learning rate"),
    "near_curvature: near, preconditioned": (sharpness(0.1, 0.4, 0.1, 0.5, **PRECONDITIONED), "note", "0.4 times"),
    "large_curvature: sharp": (sharpness(0.5, 1.4, 0.9, 1.5), "warning", "1.4 times the stability threshold"),
    "loss_rose_again: a little": (loss(1.8), None, ""),
    "loss_rose_again: more": (loss(2.3), "warning", "and rose again to 2.2"),
    "loss_rose_again: far above its best": (
        {"train/loss": series(np.append(10 * np.exp(-np.arange(300) / 50) + 0.03, np.linspace(0.03, 1.0, 100)))},
        *("warning", "lowest about iteration"),
    ),
    "loss_rose_again: of a SpikeMonitor": (
        {"l/value": series(np.append(10 * np.exp(-np.arange(300) / 50) + 0.03, np.linspace(0.03, 1.0, 100)))}
        | {"l/spike": series(np.zeros(400))},
        *("warning", "l/value"),
    ),
    "loss_rose: above its start": (loss(6.0), "problem", "ended above its start, at 5.9"),
    "loss_rose: accuracy": ({"val/accuracy": series(np.append(np.linspace(3, 1, 100), np.full(100, 3)))}, None, ""),
    "nonfinite_metric: NaN": (nan_from(61), "problem", "train/loss is NaN from iteration 61 to the end (40 of 100"),
    "nonfinite_metric: inf once": (
        {"train/loss": series([3, 2, math.inf, 1.0])},
        *("warning", "inf or NaN in iteration 3"),
    ),
    "nonfinite_metric: NaN of another metric": (nan_from(61, "val/f1"), "warning", ""),
    "nonfinite_metric: never a value": (nan_from(1, "val/f1"), "note", "(100 of 100 values)"),
    "loss_peak: 60": (peak(60), "warning", "train/loss was 60 in iteration 150, far above its start of 2.905"),
    "loss_peak: 12": (peak(12), None, ""),
    "loss_peak: peak at first": (peak(60, 2), None, ""),
    "loss_peak: peak, then NaN": ({"train/loss": series(np.append(peak(60)["train/loss"][1], math.nan))}, None, ""),
    "rate_rose: 12 times": (
        rate(jump(12.0)),
        *("problem", "rose 12 times (step/lr/group_0), from 1 to 12, in iteration 100, and damage"),
    ),
    "rate_rose: 8 times": (rate(jump(8.0)), None, ""),
    "rate_rose: later": (rate(jump(12.0), 60), None, ""),
    "rate_rose: long before": (rate(jump(12.0, 40)), None, ""),
    "rate_rose: without damage": ({"step/lr/group_0": series(jump(1e6))}, None, ""),
    "rate_rose: 3 % per iteration": (
        rate(1.03 ** np.arange(200)),
        *("problem", "rose 171 times (step/lr/group_0), from 2.09 to 359, in iterations 27-200,"),
    ),
    "rate_rose: warm-up": (rate(np.minimum(np.arange(1, 201) / 150, 1.0)), None, ""),
    "rate_rose: warm restarts": (rate(1 + np.cos(np.pi * np.arange(200) % 50 / 50)), None, ""),
    "weights_shrank: to 5": (shrinking(5.0), "warning", "fell from 8 to 5 in iterations 5 to 200 (step/"),
    "weights_shrank: to 5.5": (shrinking(5.5), None, ""),
    "weights_shrank: slowly": (shrinking(5.0, 25), None, ""),
    "rolled_back: once": (
        rollback([(80, 50, 20)], "t/mine"),
        *("warning", "Rolled back to iteration 50 at iteration 80 (t/mine/count): 30 batches skipped, 20 "),
    ),
    "rolled_back: never": (rollback([]), None, ""),
    "nonfinite_activations: once": (
        {"activation/a/nonfinite_count": every(0), "activation/b/nonfinite_count": every(np.arange(40) == 7)},
        *("warning", "first in b: iteration 40."),
    ),
    "nonfinite_activations: to the end": (
        {"activation/a/nonfinite_count": every(np.arange(40) >= 7)},
        *("problem", "to the end"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_limits(case):
    run, severity, words = CASES[case]
    findings = found(run, case.partition(":")[0])
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)
    for word in words.split("|"):
        assert not findings or word in findings[0].text, findings[0].text


PERSISTENT = {
    "exploding_gradients": 0,
    "lost_updates": 0.5,
    "small_updates": 1e-6,
    "stale_moments": 5.0,
    "epsilon_dominated": 0.5,
    "data_wait": 0.3,
}


@pytest.mark.parametrize("limit", limits.PERSISTENT, ids=lambda limit: limit.kind)
def test_persistent_limits(limit):
    prefix, expected = {"weights": "monitor"}.get(limit.monitor, limit.monitor), PERSISTENT[limit.kind]
    sizes = [expected * 0.99, expected * 1.01 or 0.01]
    findings = [found({f"{prefix}/{limit.key}": every(size)}, limit.kind) for size in sizes]
    assert [len(its) for its in findings] == ([1, 0] if limit.kind == "small_updates" else [0, 1])


@pytest.mark.parametrize("count", [1, 2, 5, 20, 200, 2000])
def test_a_healthy_run_is_healthy(count):
    run = {name: (steps[:count], values[:count]) for name, (steps, values) in runs.healthy(max(count, 25)).items()}
    assert summary(run).healthy, found(run)


@pytest.mark.parametrize("seed", range(20))
def test_noise_raises_no_alarm(seed):
    """Losses at a plateau, norms that drift: twenty different ones."""
    random = np.random.default_rng(seed)
    norms = np.exp(0.3 * random.standard_normal(500)) * np.linspace(1, 3, 500)
    run = runs.grad(norms, thresholds=100.0)
    run["train/loss"] = series(2 + np.exp(-np.arange(500) / 60) + 0.3 * random.standard_normal(500))
    run["flat/loss"] = series(0.7 + 0.2 * random.standard_normal(500))
    run["GAN/generator"] = series(random.standard_normal(500).cumsum())
    assert found(run) == []


def test_measurements_are_named():
    words = " ".join(measured(make_run(runs.healthy())))
    for word in ("6 grad metrics (grad/*) in 200 iterations", "11 weights metrics (monitor/*) in 40 iterations"):
        assert word in words
    assert found({}) == measured(make_run({"train/loss": series([1, 2])})) == []


@pytest.mark.parametrize("interval", [1, 10])
def test_since_when_a_parameter_is_frozen(interval):
    """Also if it is logged less often than measured."""
    steps = np.arange(interval, 1001, interval)
    still = np.maximum(0, steps - 950).astype(float)
    run = {"monitor/frozen_count": (steps, (still >= 3) * 1.0)}
    run["monitor/topk_frozen/b.weight"] = (steps[still >= 3], still[still >= 3])
    assert only(run, "frozen_parameters").iterations == (951,)


def test_the_first_nonfinite_module_is_named_in_the_order_of_execution():
    """A container has its output later, and its name may come earlier in the alphabet."""
    bad, good = series([0, 0, 5, 5.0]), series([0, 0, 0, 0.0])
    modules = {"z.embed": good, "m.lin": bad, "b.lin": bad, "m": bad, "b": bad, "_root_": bad}
    run = {f"activation/{module}/nonfinite_count": counts for module, counts in modules.items()}
    assert "first in m.lin, and in 4 more modules" in only(run, "nonfinite_activations").text
    backwards = dict(reversed(run.items()))  # recorded in another order, containers are still not the first
    assert "first in b.lin," in only(backwards, "nonfinite_activations").text


def test_one_finding_for_each_rollback():
    first, second = found(rollback([(80, 50, 20), (150, 120, 0)]), "rolled_back")
    assert (first.iterations, second.iterations) == ((80,), (150,))
    assert (first.values, second.values) == ({"target": 50, "discarded": 20}, {"target": 120, "discarded": 0})


# Order and form


def test_the_first_event_comes_first():
    run = runs.grad(runs.with_spike([50]), [50]) | weights(frozen=2) | {"step/data_wait_share": every(0.6)}
    run |= nan_from(101, count=200)
    kinds = [finding.kind for finding in found(run)]
    assert kinds == ["frozen_parameters", "bad_batches", "nonfinite_metric", "data_wait"]


def test_no_advice_contradicts_another():
    """Dead units, from iteration 105 on; parameters that no longer move and small updates follow."""
    run = {"activation/a/dead_fraction": every(np.where(HALF, 0.1, 0.95))} | runs.grad(runs.calm_norms())
    run |= weights(frozen=np.where(np.arange(40) < 22, 0, 2), median=5e-7)
    findings = diagnose(make_run(run)).findings
    assert [finding.kind for finding in findings] == ["small_updates", "dead_units", "frozen_parameters"]
    assert [finding.action[:5] for finding in findings] == ["Raise", "Follo", "Proba"]


def test_form_of_findings():
    run = runs.grad(runs.with_spike([50], math.nan), [50]) | weights(frozen=2, median=0.5, spread=1e4)
    run |= std(a=1, b=1, c=1, d=1e5) | {"activation/x/dead_fraction": series([1.0] * 5)}
    findings = found(run | {"\x1b[31mloss": series([1.0, math.nan])})
    assert len(findings) > 4
    for finding in findings:
        assert finding.kind in KINDS
        assert finding.severity in SEVERITIES
        assert set(finding.metrics) <= {*run, "\x1b[31mloss"}
        assert "\x1b" not in finding.text
        assert all(type(step) is int for step in finding.iterations)
        assert all(math.isfinite(value) for value in finding.values.values())
        assert re.search(r"[.]$", finding.what)
        assert re.search(r"\w[^.]+[.]$", finding.action)


def test_steps_out_of_order_are_sorted():
    steps, values = series(np.arange(10.0))
    run = make_run({"a": (steps[::-1], values[::-1]), "empty": ([], [])})
    assert list(run.series) == ["a"]
    assert run.series["a"].values.tolist() == values.tolist()


def test_a_million_iterations_with_ten_thousand_spikes():
    count, random = 1_000_000, np.random.default_rng(0)
    spikes = np.sort(random.choice(count, 10_000, replace=False)) + 1
    norms = 1 + 0.1 * random.random(count)
    norms[spikes - 1] = 60.0
    run = runs.grad(norms, spikes, skipped=False) | {"grad/stepped": series(np.ones(count))}
    begin = time.process_time()
    findings = summary(run | {"train/loss": series(1 / norms)}).findings
    assert time.process_time() - begin < 4  # about 1 s on a quiet machine
    assert "10000 gradient spikes" in " ".join(finding.text for finding in findings)


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
