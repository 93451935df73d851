"""RobustThreshold against the contract's rule, and on norms whose faults are known."""

from __future__ import annotations

import numpy as np
import torch

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import SpikeDetector


def detect(norms, **arguments):
    """Return the thresholds of a SpikeDetector for consecutive norms, and whether each is a spike."""
    detector, detections = SpikeDetector(RobustThreshold(**arguments)), []
    for norm in torch.as_tensor(np.asarray(norms), dtype=torch.float64).unbind():
        detections.append(detector.detect(norm))
        detector.observe(detections[-1])
    values = ([getattr(item, name).item() for item in detections] for name in ("applied_threshold", "spike"))
    return [np.nan_to_num(np.array(item), nan=np.inf) for item in values]


def noisy(n, seed=0, sigma=0.3, start=1.0, end=1.0):
    """Lognormal noise around a level that moves from ``start`` to ``end`` geometrically."""
    return np.geomspace(start, end, n) * np.random.default_rng(seed).lognormal(0.0, sigma, n)


def with_faults(norms, every=100):
    faults = np.zeros(len(norms), bool)
    faults[every::every] = True
    return np.where(faults, 5.0 * norms, norms), faults


def test_norms_that_differ_by_rounding_alone_have_no_threshold():
    norms = 3.0 + 1e-9 * np.random.default_rng(0).random(200)
    norms[100] += 1e-7
    thresholds, spikes = detect(norms, least=1.0)
    assert np.isinf(thresholds).all()
    assert not spikes.any()


def test_frequent_large_norms_become_the_rule():
    # Excluded from the statistics, they would be flagged for ever: the rest of the norms stays as even as it was.
    norms = noisy(1800, sigma=0.1)
    norms[500:] *= np.where(np.random.default_rng(1).random(1300) < 0.15, 8.0, 1.0)
    _, spikes = detect(norms)
    assert spikes[500:600].any()
    assert not spikes[1500:].any()


def test_faults_are_found_and_noise_is_not():
    norms, faults = with_faults(noisy(3000, sigma=0.35, start=2.0, end=0.2))
    _, spikes = detect(norms)
    assert spikes[faults].mean() >= 0.9
    assert 1000 * spikes[~faults].sum() / len(norms) <= 1.2
