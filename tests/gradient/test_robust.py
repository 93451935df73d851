"""RobustThreshold against the contract's rule, and on norms whose faults are known."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import SpikeDetector
from tests._oracle import Oracle, robust

# The sums are the same up to the order of operations; 1e-12 leaves room for thousands of roundings of 1e-16.
RTOL = 1e-12


class Detections(NamedTuple):
    thresholds: np.ndarray
    spikes: np.ndarray


def detect(norms, detector=None, **arguments):
    """Return the detections of a SpikeDetector for consecutive norms."""
    detector = detector or SpikeDetector(RobustThreshold(**arguments))
    detections = []
    for norm in torch.as_tensor(np.asarray(norms), dtype=torch.float64).unbind():
        detections.append(detector.detect(norm))
        detector.observe(detections[-1])
    threshold, spike = (
        np.array([getattr(v, name).item() for v in detections]) for name in ("applied_threshold", "spike")
    )
    return Detections(np.nan_to_num(threshold, nan=np.inf), spike)


def expected(norms, k=5.25, warmup=20, decay=0.99, least=2.0):
    """The contract's rule, from the whole history at every norm."""
    oracle, detections = Oracle(robust(k, warmup, decay, least)), []
    for norm in norms:
        detections.append(oracle.detect(norm, reported=False))
        oracle.observe(detections[-1])
    return Detections(*(np.array([getattr(item, name) for item in detections]) for name in ("threshold", "spike")))


def noisy(n, seed=0, sigma=0.3, start=1.0, end=1.0):
    """Lognormal noise around a level that moves from ``start`` to ``end`` geometrically."""
    return np.geomspace(start, end, n) * np.random.default_rng(seed).lognormal(0.0, sigma, n)


def with_faults(norms, every=100):
    faults = np.zeros(len(norms), bool)
    faults[every::every] = True
    return np.where(faults, 5.0 * norms, norms), faults


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"k": 3.0, "warmup": 5, "decay": 0.9, "least": 1.0},
        {"k": 4.0, "warmup": 2, "decay": 0.5, "least": 3.0},
    ],
)
def test_equals_formula(arguments):
    norms, _ = with_faults(noisy(240), every=30)
    result, reference = detect(norms, **arguments), expected(norms, **arguments)
    assert reference.spikes.sum() >= 5
    np.testing.assert_array_equal(result.spikes, reference.spikes)
    np.testing.assert_allclose(result.thresholds, reference.thresholds, rtol=RTOL)


def test_norms_that_differ_by_rounding_alone_have_no_threshold():
    norms = 3.0 + 1e-9 * np.random.default_rng(0).random(200)
    norms[100] += 1e-7
    result = detect(norms, least=1.0)
    assert np.isinf(result.thresholds).all()
    assert not result.spikes.any()


def test_frequent_large_norms_become_the_rule():
    # Excluded from the statistics, they would be flagged for ever: the rest of the norms stays as even as it was.
    norms = noisy(1800, sigma=0.1)
    norms[500:] *= np.where(np.random.default_rng(1).random(1300) < 0.15, 8.0, 1.0)
    spikes = detect(norms).spikes
    assert spikes[500:600].any()
    assert not spikes[1500:].any()


def test_faults_are_found_and_noise_is_not():
    norms, faults = with_faults(noisy(3000, sigma=0.35, start=2.0, end=0.2))
    spikes = detect(norms).spikes
    assert spikes[faults].mean() >= 0.9
    assert 1000 * spikes[~faults].sum() / len(norms) <= 1.2
