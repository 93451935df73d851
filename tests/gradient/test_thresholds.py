"""Threshold rules against their definitions over whole histories."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ignite_monitor.detection.thresholds import CallableThreshold, MeanStdThreshold, ThresholdRule


def feed(rule, norms):
    """The threshold before each norm."""
    thresholds = []
    for norm in norms:
        thresholds.append(rule.statistics()[0].nan_to_num(math.inf, math.inf).item())
        rule.observe(torch.tensor(norm, dtype=torch.float64))
    return thresholds


NORMS = np.random.default_rng(0).lognormal(size=60)


@pytest.mark.parametrize("opinion", [math.nan, math.inf])
def test_a_rule_without_an_opinion_allows_everything(opinion):
    assert feed(CallableThreshold(lambda mean, std, count: opinion), NORMS[:5]) == [math.inf] * 5


def test_a_rule_of_ones_own():
    class TwiceTheMean(ThresholdRule):
        def __call__(self, mean, std, count):
            return 2 * mean

    thresholds = feed(TwiceTheMean(warmup=3), NORMS[:10])
    np.testing.assert_allclose(thresholds, [math.inf] * 3 + [2 * NORMS[:i].mean() for i in range(3, 10)], rtol=1e-12)


def test_a_restart_forgets_everything_before_it():
    one, other = MeanStdThreshold(warmup=2), MeanStdThreshold(warmup=2)
    feed(one, NORMS[:20])
    one.observe(torch.tensor(5.0, dtype=torch.float64), reset=torch.tensor(True))
    other.observe(torch.tensor(5.0, dtype=torch.float64), reset=torch.tensor(False))
    assert one.state_dict() == other.state_dict()


def test_the_state_of_another_rule_is_refused():
    class Richer(MeanStdThreshold):
        def empty(self):
            return super().empty() | {"window": torch.zeros(())}

    with pytest.raises(ValueError, match="window"):
        MeanStdThreshold().load_state_dict(Richer().state_dict())


def test_a_small_spread_on_a_large_mean_is_not_lost():
    rule, numbers = MeanStdThreshold(decay=None), 1e9 + np.random.default_rng(1).normal(size=1000)
    feed(rule, numbers)
    np.testing.assert_allclose(rule.statistics()[2].item(), numbers.std(ddof=1), rtol=1e-6)


def test_there_is_no_mean_before_the_first_number_and_no_deviation_before_the_second():
    rule = MeanStdThreshold()
    assert all(number.isnan() for number in rule.statistics())
    feed(rule, [3.0])
    assert [number.isnan().item() for number in rule.statistics()] == [True, False, True]


@pytest.mark.parametrize(("spread", "is_compared"), [(0.5e-6, False), (2e-6, True)])
def test_no_threshold_without_a_spread_above_a_millionth_of_the_mean(spread, is_compared):
    thresholds = feed(MeanStdThreshold(warmup=2, decay=None), [1.0 - spread, 1.0 + spread] * 10)
    assert math.isfinite(thresholds[-1]) is is_compared
