"""Running moments against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ignite_monitor.detection.thresholds import Moments


def included(numbers, decay=1.0):
    moments = Moments.empty()
    for number in numbers:
        moments = moments.include(torch.tensor(number, dtype=torch.float64), decay)
    return moments


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_mean_and_sample_standard_deviation_of_equal_weights(scale):
    numbers = np.random.default_rng(0).lognormal(size=500) * scale
    moments = included(numbers)
    assert moments.count.item() == 500
    np.testing.assert_allclose(moments.mean.item(), numbers.mean(), rtol=1e-13)
    np.testing.assert_allclose(moments.std.item(), numbers.std(ddof=1), rtol=1e-12)


def test_small_spread_on_a_large_mean_is_not_lost():
    numbers = 1e9 + np.random.default_rng(1).normal(size=1000)
    np.testing.assert_allclose(included(numbers).std.item(), numbers.std(ddof=1), rtol=1e-6)


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.999])
def test_exponential_weights(decay):
    numbers = np.random.default_rng(2).lognormal(size=300)
    weights = decay ** np.arange(299, -1, -1.0)
    mean = np.average(numbers, weights=weights)
    unbiased = (weights * (numbers - mean) ** 2).sum() / (weights.sum() - (weights**2).sum() / weights.sum())
    moments = included(numbers, decay)
    np.testing.assert_allclose(moments.mean.item(), mean, rtol=1e-12)
    np.testing.assert_allclose(moments.std.item(), np.sqrt(unbiased), rtol=1e-12)


def test_there_is_no_standard_deviation_before_the_second_number():
    assert included([]).std.isnan()
    assert included([3.0]).std.isnan()
    assert included([3.0, 3.0]).std.item() == 0.0
