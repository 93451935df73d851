"""Which norms are spikes, and what enters the statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ignite_monitor.gradient.spikes import SpikeDetector
from ignite_monitor.gradient.thresholds import MeanStdThreshold, StaticThreshold


def judge_all(detector, norms):
    spikes = []
    for norm in norms:
        verdict = detector.judge(torch.tensor(norm, dtype=torch.float64))
        spikes.append(bool(verdict.spike))
        detector.observe(verdict)
    return spikes


def calm(n, level=1.0, seed=0):
    return list(level * (1 + 0.1 * np.random.default_rng(seed).uniform(-1, 1, size=n)))


def test_a_spike_enters_the_statistics_clipped_to_the_threshold_it_exceeded():
    norms = calm(30)
    limit = np.mean(norms) + 3 * np.std(norms, ddof=1)
    detector = SpikeDetector(MeanStdThreshold())
    assert judge_all(detector, [*norms, 100.0]) == [False] * 30 + [True]
    moments = detector.rule.moments
    np.testing.assert_allclose(moments.mean.item(), np.mean([*norms, limit]), rtol=1e-12)
    np.testing.assert_allclose(moments.std.item(), np.std([*norms, limit], ddof=1), rtol=1e-12)


def test_one_spike_does_not_hide_the_next():
    assert judge_all(SpikeDetector(MeanStdThreshold()), [*calm(30), 100.0, 1.0, 5.0]) == [False] * 30 + [
        True,
        False,
        True,
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("overflow_is_spike", [True, False])
def test_non_finite_norms_are_counted_and_stay_out(bad, overflow_is_spike):
    norms = calm(30)
    one = SpikeDetector(MeanStdThreshold(), overflow_is_spike=overflow_is_spike)
    other = SpikeDetector(MeanStdThreshold())
    assert judge_all(one, [*norms[:5], bad, *norms[5:], bad]) == (
        [False] * 5 + [overflow_is_spike] + [False] * 25 + [overflow_is_spike]
    )
    judge_all(other, norms)
    assert one.nonfinite_count.item() == 2
    assert one.spike_count.item() == 2 * overflow_is_spike
    assert one.rule.state_dict() == other.rule.state_dict()


def test_a_new_level_costs_at_most_so_many_steps():
    detector = SpikeDetector(MeanStdThreshold(), max_consecutive_spikes=7)
    spikes = judge_all(detector, [*calm(50), *calm(200, level=10.0, seed=1)])
    assert spikes == [False] * 50 + [True] * 7 + [False] * 193
    assert detector.restarts.item() == 1
    # and what is a spike on the new level is one
    assert judge_all(detector, [30.0, 10.0]) == [True, False]


def test_non_finite_norms_are_no_new_level_and_break_no_row():
    detector = SpikeDetector(StaticThreshold(2.0), max_consecutive_spikes=3)
    assert judge_all(detector, [5.0, math.nan, 5.0, math.nan, math.nan, math.nan, 5.0, 5.0]) == [True] * 7 + [False]


def test_above_a_static_threshold_for_good_training_goes_on_until_norms_fall_below_again():
    detector = SpikeDetector(StaticThreshold(2.0), max_consecutive_spikes=4)
    assert judge_all(detector, [5.0] * 100) == [True] * 4 + [False] * 96
    assert judge_all(detector, [1.0, 5.0]) == [False, True]


def test_constant_and_zero_norms_are_no_spikes():
    for level in (0.0, 1.0, 1e-30):
        assert not any(judge_all(SpikeDetector(MeanStdThreshold()), [level] * 200))


def test_judging_changes_nothing():
    detector = SpikeDetector(MeanStdThreshold())
    judge_all(detector, calm(30))
    before = detector.state_dict()
    first = detector.judge(torch.tensor(9.0, dtype=torch.float64))
    second = detector.judge(torch.tensor(9.0, dtype=torch.float64))
    assert first == second
    assert detector.state_dict() == before


def test_an_observation_under_a_false_condition_changes_nothing():
    detector = SpikeDetector(MeanStdThreshold())
    judge_all(detector, [*calm(30), 50.0])
    before = detector.state_dict()
    for norm in (1.0, 50.0, math.nan, math.inf):
        detector.observe(detector.judge(torch.tensor(norm, dtype=torch.float64)), torch.tensor(False))
    assert detector.state_dict() == before


def test_state_continues():
    norms = [*calm(30), 50.0, 50.0, math.nan, 50.0, *calm(30, level=50.0, seed=1), 500.0]
    whole, first, second = (SpikeDetector(MeanStdThreshold(), max_consecutive_spikes=5) for _ in range(3))
    expected = judge_all(whole, norms)
    assert judge_all(first, norms[:33]) == expected[:33]
    second.load_state_dict(first.state_dict())
    assert judge_all(second, norms[33:]) == expected[33:]
    assert second.state_dict() == whole.state_dict()


def test_a_state_with_a_part_missing_is_refused():
    state = SpikeDetector(MeanStdThreshold()).state_dict()
    del state["restarts"]
    with pytest.raises(ValueError, match="restarts"):
        SpikeDetector(MeanStdThreshold()).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "error", "named"),
    [
        ({"rule": 3.0}, TypeError, "rule"),
        ({"max_consecutive_spikes": 0}, ValueError, "max_consecutive_spikes"),
        ({"max_consecutive_spikes": 1.5}, TypeError, "max_consecutive_spikes"),
        ({"overflow_is_spike": 1}, TypeError, "overflow_is_spike"),
    ],
)
def test_bad_arguments_are_named(arguments, error, named):
    with pytest.raises(error, match=f"Argument {named} "):
        SpikeDetector(**{"rule": MeanStdThreshold(), **arguments})
