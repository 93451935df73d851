"""Findings about everything but gradients, on either side of every limit, and their order."""

from __future__ import annotations

import math
import re
import time

import numpy as np
import pytest

from ignite_monitor.report import limits
from ignite_monitor.report.finding import KINDS, SEVERITIES, iterations, listed, number
from ignite_monitor.report.summary import measured
from tests.report import _runs as runs
from tests.report._runs import found, make_run, series, summary, weights

HALF = np.arange(40) < 20


def every(value, count=40):
    """A value in every fifth iteration."""
    return series(np.broadcast_to(value, count), 5)


def late(share, value):
    """0 at first, and a value in a share of the last quarter."""
    return series(np.where(np.arange(40) < 40 - round(10 * share), 0, value), 5)


def std(**modules):
    return {f"activation/{module}/std": every(value) for module, value in modules.items()}


def vanishing(share, name="0.weight"):
    """The smallest gradient in the second half, as a share of the largest."""
    return {"monitor/grad_max": every(2.0), f"monitor/smallest_grad/{name}": every(np.where(HALF, 1.0, 2 * share))}


def largest(factors, median=1e-3):
    run = weights(median=median)
    steps, median = run["monitor/update_ratio_median"]
    return run | {"monitor/update_ratio_max": (steps, factors * median)}


def groups(rate, factor, fast=1, median=5e-3):
    """Two groups; the largest update ratio is that of the second one's parameter, or else the first one's."""
    run = largest(factor / np.linspace(1, 3, 40), median)
    steps, ratios = run["monitor/update_ratio_max"]
    run |= {f"monitor/largest_update_ratio/group_{fast}/fast.w": (steps, ratios)}
    run |= {f"monitor/largest_update_ratio/group_{1 - fast}/slow.w": (steps, ratios / factor)}
    return run | {"step/lr/group_0": every(1e-3), "step/lr/group_1": every(rate)}


def loss(end):
    values = np.concatenate([np.linspace(3, 1, 100), np.linspace(1, end, 50), np.full(50, end)])
    return {"train/loss": series(values + 0.02 * runs.noise(200))}


def steady(end):
    """The loss that attach_monitors records, which rises from 1 on."""
    values = np.append(np.linspace(1, 0.99, 40), np.linspace(0.99, end, 160))
    return {"loss/loss": series(values + 0.01 * runs.noise(200))}


def nan_from(place, name="train/loss", count=100):
    return {name: series(np.where(np.arange(1, count + 1) < place, np.linspace(3, 1, count), math.nan))}


def summed_loss(size):
    """A loss that falls from 3,000 to 1,800, and gradients of the same size throughout."""
    run = {"train/loss": series(np.linspace(3e3, 1.8e3, 200)), "monitor/exploding_count": every(2.0)}
    return run | {"monitor/grad_max": every(size)}


def rate(values, at=101):
    """A learning rate in every iteration, and spikes whose first is in iteration ``at``."""
    return runs.grad(runs.with_spike([at, at + 7]), [at, at + 7], skipped=False) | {"step/lr/group_0": series(values)}


def jump(factor, at=100):
    return np.where(np.arange(1, 201) < at, 1.0, factor)


def shrinking(end, every=5):
    return {"step/parameter_norm": series(np.linspace(8, end, 40), every)}


def few_items(count):
    sizes = {"step/items_per_s": every(count / 0.02), "step/time_ms": every(20.0)}
    return {"activation/a/dead_fraction": every(0.65)} | sizes


# kind: case -> run, severity (None: not found), what the text says
CASES = {
    "group_rate: 100 times": (
        groups(0.1, 12.0),
        *("warning", "Parameter group 1 has a learning rate of 0.1|100 times|a step moves fast.w by 0.03 of its norm"),
    ),
    "group_rate: 20 times": (groups(0.02, 12.0), None, ""),
    "group_rate: 100 times, of the head of a model that is fine-tuned": (groups(0.1, 50.0, median=2e-4), None, ""),
    "exploding_gradients: four": (
        weights() | {"monitor/exploding_count": late(0.6, 4), "monitor/topk_grad/a": every(1e9)},
        *("warning", "exploding gradients: 4 (monitor/exploding_count), since iteration 175; largest in a."),
    ),
    "exploding_gradients: of a loss that is a sum": (
        summed_loss(40.0),
        *("note", "exploding gradients: 2 (monitor/exploding_count), from the first measurement on"),
    ),
    "exploding_gradients: larger than the loss": (summed_loss(4000.0), "warning", "exploding gradients: 2"),
    "vanishing_gradients: weights": (vanishing(1e-9), "warning", "0.weight (1e-09, since iteration 105)"),
    "vanishing_gradients: among the smallest in 7 of 40 measurements": (
        {"monitor/grad_max": every(5.0), "monitor/smallest_grad/0.weight": (np.arange(170, 201, 5), np.full(7, 1e-12))},
        *("warning", "0.weight (2e-13, since iteration 170)"),
    ),
    "vanishing_gradients: among the smallest in 4 of 40 measurements": (
        {"monitor/grad_max": every(5.0), "monitor/smallest_grad/0.weight": (np.arange(185, 201, 5), np.full(4, 1e-12))},
        *(None, ""),
    ),
    "vanishing_gradients: 1e-6": (vanishing(1e-6), None, ""),
    "vanishing_gradients: biases that a normalization cancels": (vanishing(1e-9, "0.bias"), None, ""),
    "lost_updates: 90 %": (weights() | {"monitor/lost_update_fraction": every(0.9)}, "warning", "takes 90% of"),
    "stale_moments: 6 times": (
        {"optimizer/rms_p95": every(6.0), "optimizer/topk_rms/a.w": every(9.0)},
        *("warning", "6 times what|largest in a.w"),
    ),
    "dead_units: from the start": (
        {"t/activation/a/dead_fraction": series(np.full(40, 0.65))} | {"grad/stepped": series(np.ones(200))},
        *("warning", "a (0.65, from the first measurement on)|re-initialize a layer"),
    ),
    "dead_units: in batches of 8 items": (few_items(8), "warning", "a (0.65, from the first measurement on)"),
    "dead_units: in batches of 7 items": (few_items(7), None, ""),
    "small_updates: those of a training that converges": (
        weights(median=np.where(np.arange(40) < 3, 1e-3, 1e-9)),
        *(None, ""),
    ),
    "dead_units: died": (
        {"activation/a/dead_fraction": every(np.where(HALF, 0.1, 0.95))},
        *("problem", "a (0.95, since iteration 105)|lower learning rate"),
    ),
    "activation_outlier: 90 times": (std(a=0.5, b=1.0, c=1.5, d=90.0, e=1.0), None, ""),
    "activation_outlier: 110 times": (
        std(a=0.5, b=1.0, c=1.5, d=110.0, e=1.0),
        *("warning", "d (110, from the first measurement on)|module is 1)"),
    ),
    "activation_outlier: usual among small ones": (std(a=0.01, b=0.01, c=0.01, d=5.0), None, ""),
    "large_logits: 200": (
        {"attention_logit_max/a/head_0": every(np.linspace(5, 200, 40))},
        *("warning", "a/head_0 (1.8e+02, since iteration 105)"),
    ),
    "loss_rose_again: a little": (loss(1.8), None, ""),
    "loss_rose_again: more": (loss(2.3), "warning", "and rose again to 2.2"),
    "loss_rose_again: far above its best": (
        {"train/loss": series(np.append(10 * np.exp(-np.arange(300) / 50) + 0.03, np.linspace(0.03, 1.0, 100)))},
        *("warning", "lowest about iteration"),
    ),
    "loss_rose_again: a fall within the noise": (steady(1.3), None, ""),
    "loss_rose: steadily by 30 %": (steady(1.3), "problem", "ended above its start, at 1.2"),
    "loss_rose: steadily by 10 %": (steady(1.1), None, ""),
    "loss_rose: above its start": (loss(6.0), "problem", "ended above its start, at 5.9"),
    "loss_rose: accuracy": ({"val/accuracy": series(np.append(np.linspace(3, 1, 100), np.full(100, 3)))}, None, ""),
    "nonfinite_metric: NaN": (nan_from(61), "problem", "train/loss is NaN from iteration 61 to the end (40 of 100"),
    "nonfinite_metric: inf once": (
        {"train/loss": series([3, 2, math.inf, 1.0])},
        *("warning", "inf or NaN in iteration 3"),
    ),
    "nonfinite_metric: NaN of another metric": (nan_from(61, "val/f1"), "warning", ""),
    "nonfinite_metric: never a value": (nan_from(1, "val/f1"), "note", "(100 of 100 values)"),
    "rate_rose: 12 times": (
        rate(jump(12.0)),
        *("problem", "rose from 1 to 12 (step/lr/group_0) in iteration 100, and damage"),
    ),
    "rate_rose: after some iterations at 0": (
        rate(np.where((np.arange(200) > 40) & (np.arange(200) < 99), 0, jump(12.0))),
        *("problem", "rose from 0 to 12"),
    ),
    "rate_rose: 8 times": (rate(jump(8.0)), None, ""),
    "rate_rose: later": (rate(jump(12.0), 60), None, ""),
    "rate_rose: long before": (rate(jump(12.0, 40)), None, ""),
    "rate_rose: without damage": ({"step/lr/group_0": series(jump(1e6))}, None, ""),
    "rate_rose: 3 % per iteration": (
        rate(1.03 ** np.arange(200)),
        *("problem", "rose from 2.09 to 359 (step/lr/group_0) in iterations 27-200,"),
    ),
    "rate_rose: warm-up": (rate(np.minimum(np.arange(1, 201) / 150, 1.0)), None, ""),
    "rate_rose: warm restarts": (rate(1 + np.cos(np.pi * np.arange(200) % 50 / 50)), None, ""),
    "weights_shrank: to 5": (shrinking(5.0), "warning", "fell from 8 to 5 in iterations 5 to 200 (step/"),
    "weights_shrank: to 5.5": (shrinking(5.5), None, ""),
    "weights_shrank: slowly": (shrinking(5.0, 25), None, ""),
}


@pytest.mark.parametrize("case", CASES)
def test_limits(case):
    run, severity, words = CASES[case]
    findings = found(run, case.partition(":")[0])
    assert [finding.severity for finding in findings] == [severity] * (severity is not None)
    for word in words.split("|"):
        assert not findings or word in findings[0].text, findings[0].text


PERSISTENT = {
    "no_gradients": 1e-30,
    "dead_units": 0.6,
    "nonfinite_activations": 0,
    "large_logits": 100.0,
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
    name = (
        limit.key.format("a/head_0" if "attention" in limit.key else "a")
        if "{}" in limit.key
        else f"{prefix}/{limit.key}"
    )
    findings = [found({name: every(size)}, limit.kind) for size in sizes]
    assert [len(its) for its in findings] == ([1, 0] if limit.below else [0, 1])


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


# Order and form


def test_the_first_event_comes_first():
    run = runs.grad(runs.with_spike([50]), [50]) | runs.with_dead_units() | {"step/data_wait_share": every(0.6)}
    run |= nan_from(101, count=200, name="val/f1")
    kinds = [finding.kind for finding in found(run)]
    assert kinds == ["bad_batches", "nonfinite_metric", "dead_units", "data_wait"]


def test_form_of_findings():
    run = runs.grad(runs.with_spike([50], math.nan), [50]) | weights(frozen=2, median=0.5, spread=1e4)
    run |= std(a=1, b=1, c=1, d=1e5) | {"activation/x/dead_fraction": series([1.0] * 5)}
    findings = found(run | {"\x1b[31mloss": series([1.0, math.nan])})
    assert len(findings) > 3
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
    assert time.process_time() - begin < 2
    assert "10000 gradient spikes" in " ".join(finding.text for finding in findings)


def test_words():
    assert [number(value) for value in (3.0, 0.12345, 1e6, -2.0)] == ["3", "0.1235", "1e+06", "-2"]
    assert listed("ab") == "a and b"
    assert listed("abcdef") == "a, b, c, d, e and f"
    assert listed("abcdefg") == "a, b, c, d, e and 2 more"
    assert listed([]) == ""
    assert iterations(np.array([7])) == "iteration 7"
    assert iterations(np.array([7, 20, 21, 22, 90])) == "iterations 7, 20-22 and 90"
    assert iterations(np.arange(0, 20, 2)) == "iterations 0, 2, 4, 6, 8, 10 and 4 more"
