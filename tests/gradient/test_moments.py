"""Running moments against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ignite_monitor.detection.thresholds import MeanStdThreshold


def mean_and_std(numbers, decay=1.0):
    rule = MeanStdThreshold(decay=None if decay == 1.0 else decay)
    for number in numbers:
        rule.observe(torch.tensor(number, dtype=torch.float64))
    return rule.statistics()[1:]


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_mean_and_sample_standard_deviation_of_equal_weights(scale):
    numbers = np.random.default_rng(0).lognormal(size=500) * scale
    mean, std = mean_and_std(numbers)
    np.testing.assert_allclose(mean.item(), numbers.mean(), rtol=1e-13)
    np.testing.assert_allclose(std.item(), numbers.std(ddof=1), rtol=1e-12)


def test_small_spread_on_a_large_mean_is_not_lost():
    numbers = 1e9 + np.random.default_rng(1).normal(size=1000)
    np.testing.assert_allclose(mean_and_std(numbers)[1].item(), numbers.std(ddof=1), rtol=1e-6)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_exponential_weights(decay):
    numbers = np.random.default_rng(2).lognormal(size=300)
    weights = decay ** np.arange(299, -1, -1.0)
    mean = np.average(numbers, weights=weights)
    unbiased = (weights * (numbers - mean) ** 2).sum() / (weights.sum() - (weights**2).sum() / weights.sum())
    average, std = mean_and_std(numbers, decay)
    np.testing.assert_allclose(average.item(), mean, rtol=1e-12)
    np.testing.assert_allclose(std.item(), np.sqrt(unbiased), rtol=1e-12)


def test_there_is_no_standard_deviation_before_the_second_number():
    assert mean_and_std([])[1].isnan()
    assert mean_and_std([3.0])[1].isnan()
    assert mean_and_std([3.0, 3.0])[1].item() == 0.0
