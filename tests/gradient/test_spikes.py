"""Spikes among norms, and the values that update the statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import MeanStdThreshold, StaticThreshold
from tests._helpers import assert_same
from tests._oracle import Oracle, mean_std


def detect_all(detector, norms):
    spikes = []
    for norm in norms:
        detection = detector.detect(torch.tensor(norm, dtype=torch.float64))
        spikes.append(bool(detection.spike))
        detector.observe(detection)
    return spikes


def calm(n, seed=0):
    return list(1 + 0.1 * np.random.default_rng(seed).uniform(-1, 1, size=n))


@pytest.mark.parametrize("decay", [1.0, 0.99, 0.9])
@pytest.mark.parametrize("patience", [1, 4, 10])
def test_of_spikes_in_a_row_only_the_first_enters(decay, patience):
    random = np.random.default_rng(patience)
    norms = random.lognormal(sigma=0.3, size=400)
    norms[random.random(400) < 0.05] *= 8
    norms[[60, 61, 62, 150]] = [9.0, math.nan, 9.0, math.inf]
    norms[200:207] *= 20  # a row shorter than the longest patience
    norms[300:] *= 30  # a new level
    oracle, resets = Oracle(mean_std(3.0, 20, decay), patience), 0
    detector = SpikeDetector(
        MeanStdThreshold(decay=None if decay == 1.0 else decay, k=3.0), max_consecutive_spikes=patience
    )
    for norm in norms.tolist():
        before, expected = len(oracle.history), oracle.detect(norm, reported=False)
        oracle.observe(expected)
        is_reset = len(oracle.history) == 1 < before
        detection = detector.detect(torch.tensor(norm, dtype=torch.float64))
        detector.observe(detection)
        np.testing.assert_allclose(detection.rule_threshold.nan_to_num(math.inf).item(), expected.limit, rtol=1e-9)
        assert bool(detection.spike) == expected.spike
        assert bool(detection.threshold_reset) == is_reset
        assert detector.rule.state["count"].item() == len(oracle.history)
        resets += is_reset
    assert resets > 0


def test_values_side_by_side_are_compared_as_if_alone():
    random = np.random.default_rng(0)
    columns = random.lognormal(sigma=0.3, size=(300, 5)) * [1e-6, 1.0, 3.0, 1e4, 1.0]
    columns[random.random((300, 5)) < 0.03] *= 10
    columns[150:, 2] *= 40
    columns[[50, 80], [1, 4]] = [math.nan, math.inf]
    alone = [SpikeDetector(MeanStdThreshold(k=4.0)) for _ in range(5)]
    together = SpikeDetector(MeanStdThreshold(k=4.0))
    when = random.random((300, 5)) < 0.9
    for row, use in zip(columns, when, strict=True):
        detection = together.detect(torch.tensor(row))
        together.observe(detection, torch.tensor(use))
        for i, (detector, value) in enumerate(zip(alone, row, strict=True)):
            own = detector.detect(torch.tensor(value))
            assert bool(detection.spike[i]) == bool(own.spike)
            np.testing.assert_allclose(detection.applied_threshold[i].item(), own.applied_threshold.item(), rtol=1e-12)
            if use[i]:
                detector.observe(own)
    saved = SpikeDetector(MeanStdThreshold(k=4.0))
    saved.to(torch.zeros(5, dtype=torch.float64))
    saved.load_state_dict(together.state_dict())
    detections = [item.detect(torch.tensor(columns[7])) for item in (saved, together)]
    assert_same(detections[0].applied_threshold, detections[1].applied_threshold)


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_detection_and_an_observation_that_does_not_count_change_nothing(is_undone):
    detector = SpikeDetector(MeanStdThreshold())
    detect_all(detector, [*calm(30), 50.0])
    before, earlier = detector.state_dict(), detector.snapshot()
    for norm in (1.0, 9.0, 50.0, math.nan, math.inf):
        detection = detector.detect(torch.tensor(norm, dtype=torch.float64))
        assert detector.state_dict() == before
        detector.observe(detection, None if is_undone else torch.tensor(False))
        if is_undone:
            detector.restore(earlier)
    assert detector.state_dict() == before
    detector.detect(torch.ones(2))
    detector.restore(earlier)
    assert detector.state_dict() == before


def test_a_state_with_a_part_missing_is_refused():
    state = SpikeDetector(MeanStdThreshold()).state_dict()
    del state["was_normal"]
    with pytest.raises(ValueError, match="was_normal"):
        SpikeDetector(MeanStdThreshold()).load_state_dict(state)


@pytest.mark.parametrize("rule", [MeanStdThreshold, RobustThreshold])
def test_values_below_zero_are_compared(rule):
    values = (-5 + 0.1 * np.random.default_rng(0).standard_normal(300)).tolist()
    values[100], values[250] = 1e3, -3.0
    assert [i for i, spike in enumerate(detect_all(SpikeDetector(rule()), values)) if spike] == [100, 250]


def test_the_state_follows_values_to_another_device_and_dtype():
    detector = SpikeDetector(MeanStdThreshold())
    detect_all(detector, calm(30))
    assert detector.detect(torch.tensor(9.0, dtype=torch.float32)).spike
    detector.observe(detector.detect(torch.zeros((), dtype=torch.float64, device="meta")))
    assert detector.rule.statistics()[0].is_meta


@pytest.mark.parametrize(
    ("warmup", "patience", "suspends"), [(9, 3, True), (11, 12, True), (10, 10, False), (12, 12, False)]
)
def test_a_rule_with_a_short_warm_up_is_suspended_after_a_reset(warmup, patience, suspends):
    detector = SpikeDetector(MeanStdThreshold(warmup=warmup), max_consecutive_spikes=patience)
    assert ("awaits_normal_value" in detector.state_dict()) is suspends
    detector = SpikeDetector(StaticThreshold(2.0), max_consecutive_spikes=3)
    assert detect_all(detector, [5.0, 5.0, 5.0, 5.0, 3.0, 5.0, 1.0, 3.0]) == [True] * 3 + [False] * 4 + [True]


def test_a_state_that_is_loaded_in_place_does_not_change_what_a_reset_restores():
    detector = SpikeDetector(MeanStdThreshold())
    saved = detector.state_dict()
    for tensor in (*saved.pop("rule").values(), *saved.values()):
        tensor.fill_(1)
    detector.reset_threshold()
    assert [float(value) for value in detector.rule.state.values()] == [0.0] * 4
    assert [float(value) for value in detector._state.values()] == [0.0, 1.0]
