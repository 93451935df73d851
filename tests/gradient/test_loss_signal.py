"""The loss as a signal, against its formula in Python floats over the whole history."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import MeanStdThreshold
from ignite_monitor.gradient.loss import LossDetector
from tests._oracle import spikes_in_losses


def losses_of(n, seed=0):
    random = np.random.default_rng(seed)
    return np.geomspace(4.0, 0.5, n) * random.lognormal(sigma=0.1, size=n)


def spikes_of(signal, losses, dtype=torch.float64, limits=None):
    spikes = []
    for loss in losses:
        detection = signal.detect(torch.tensor(loss, dtype=dtype))
        signal.observe(detection)
        spikes.append(bool(detection.spike))
        if limits is not None:
            limits.append(float(detection.rule_threshold))
    return spikes


def test_equals_the_formula():
    losses = losses_of(300)
    losses[[60, 61, 62, 150]] *= 12
    losses[[30, 90, 200, 210, 220]] = [0.0, -1.0, math.nan, math.inf, -math.inf]
    limits = []
    result = spikes_of(LossDetector(), [*losses, 1.0], limits=limits)[:-1]
    # -inf is as non-finite as inf, but it is no large loss: it has no logarithm, like every number below zero.
    reference, limit = spikes_in_losses(np.where(losses == -math.inf, 0.0, losses))
    assert result == reference
    assert limits[-1] == pytest.approx(limit, rel=1e-12)
    assert [i for i, spike in enumerate(result) if spike] == [60, 61, 62, 150, 200, 210]


def test_a_steep_fall_hides_no_leap():
    """With the standard deviation around the mean, which a descent increases, none of these is a spike."""
    random = np.random.default_rng(0)
    falling = np.geomspace(5.0, 0.5, 800) * random.lognormal(sigma=0.02, size=800)
    leaps = list(range(500, 800, 50))
    falling[leaps] *= 1.3
    assert [i for i, spike in enumerate(spikes_of(LossDetector(), falling)) if spike] == leaps
    detector = SpikeDetector(MeanStdThreshold(k=4.0, decay=0.98))
    assert not any(spikes_of(detector, np.log(falling)))


def test_without_a_scaler_an_overflow_is_a_spike():
    assert spikes_of(LossDetector(), [math.inf, math.nan]) == [True, True]
    assert spikes_of(LossDetector(overflow_is_spike=False), [math.inf, math.nan]) == [False, False]


def test_losses_near_zero_and_of_narrow_dtypes():
    tiny = np.random.default_rng(0).lognormal(sigma=3, size=200) * 1e-300
    assert not any(spikes_of(LossDetector(k=6.0), tiny))
    assert not any(spikes_of(LossDetector(), [0.0] * 100))
    assert spikes_of(LossDetector(), [*losses_of(100), 40.0], torch.bfloat16) == [False] * 100 + [True]
