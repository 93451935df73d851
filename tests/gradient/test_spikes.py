"""Detection of spikes: threshold rules, detectors, and the values that update their statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import CallableThreshold, MeanStdThreshold, StaticThreshold, ThresholdRule
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
        assert detector.state_dict()["count"].item() == len(oracle.history)
        resets += is_reset
    assert resets > 0


def test_values_side_by_side_are_compared_as_if_alone():
    random = np.random.default_rng(0)
    columns = random.lognormal(sigma=0.3, size=(300, 5)) * [1e-6, 1.0, 3.0, 1e4, 1.0]
    columns[random.random((300, 5)) < 0.03] *= 10
    columns[150:, 2] *= 40
    columns[[50, 80], [1, 4]] = [math.nan, math.inf]
    alone = [SpikeDetector(MeanStdThreshold(k=4.0)) for _ in range(5)]
    saved, together = (SpikeDetector(MeanStdThreshold(k=4.0), shape=(5,)) for _ in range(2))
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
    saved.load_state_dict(together.state_dict())
    detections = [item.detect(torch.tensor(columns[7])) for item in (saved, together)]
    assert_same(detections[0].applied_threshold, detections[1].applied_threshold)


@pytest.mark.parametrize("is_undone", [False, True])
def test_a_detection_and_an_observation_that_does_not_count_change_nothing(is_undone):
    detector = SpikeDetector(MeanStdThreshold())
    detect_all(detector, [*calm(30), 50.0])
    before, earlier = detector.state_dict(), detector.rows
    for norm in (1.0, 9.0, 50.0, math.nan, math.inf):
        detection = detector.detect(torch.tensor(norm, dtype=torch.float64))
        assert detector.state_dict() == before
        detector.observe(detection, None if is_undone else torch.tensor(False))
        if is_undone:
            detector.rows = earlier
    assert detector.state_dict() == before


def test_a_state_with_a_part_missing_is_refused():
    state = SpikeDetector(MeanStdThreshold()).state_dict()
    del state["after_spike"]
    with pytest.raises(ValueError, match="after_spike"):
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
    assert detector.rows.is_meta


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
    for tensor in saved.values():
        tensor.fill_(1)
    detector.reset_threshold()
    assert [float(value) for value in detector.state_dict().values()] == [0.0] * 6


# Threshold rules, against their definitions


NO, YES = torch.tensor(False), torch.tensor(True)


def feed(rule, norms):
    """What is detected at each norm if all norms update the statistics, spikes too; and the detector."""
    detector, detections = SpikeDetector(rule), []
    for norm in norms:
        detections.append(detector.detect(torch.tensor(norm, dtype=torch.float64)))
        detector.observe(detections[-1]._replace(above=NO, threshold_reset=NO))
    return detections, detector


def thresholds_of(rule, norms):
    return [detection.rule_threshold.nan_to_num(math.inf, math.inf).item() for detection in feed(rule, norms)[0]]


NORMS = np.random.default_rng(0).lognormal(size=60)


@pytest.mark.parametrize("opinion", [math.nan, math.inf])
def test_a_rule_without_an_opinion_allows_everything(opinion):
    assert thresholds_of(CallableThreshold(lambda mean, std, count: opinion), NORMS[:5]) == [math.inf] * 5


def test_a_rule_of_ones_own():
    class TwiceTheMean(ThresholdRule):
        def __call__(self, mean, std, count):
            return 2 * mean

    thresholds = thresholds_of(TwiceTheMean(warmup=3), NORMS[:10])
    np.testing.assert_allclose(thresholds, [math.inf] * 3 + [2 * NORMS[:i].mean() for i in range(3, 10)], rtol=1e-12)


def test_a_restart_forgets_everything_before_it():
    _, one = feed(MeanStdThreshold(warmup=2), NORMS[:20])
    one.observe(one.detect(torch.tensor(5.0, dtype=torch.float64))._replace(above=YES, threshold_reset=YES))
    assert one.state_dict() == feed(MeanStdThreshold(warmup=2), [5.0])[1].state_dict() | {"awaits_normal_value": 1.0}


def test_the_state_of_another_rule_is_refused():
    class Richer(MeanStdThreshold):
        def empty(self):
            return super().empty() | {"window": torch.zeros(())}

    with pytest.raises(ValueError, match="window"):
        SpikeDetector(MeanStdThreshold()).load_state_dict(SpikeDetector(Richer()).state_dict())


def test_a_small_spread_on_a_large_mean_is_not_lost():
    numbers = 1e9 + np.random.default_rng(1).normal(size=1001)
    detections, _ = feed(MeanStdThreshold(decay=None), numbers)
    np.testing.assert_allclose(detections[-1].std.item(), numbers[:-1].std(ddof=1), rtol=1e-6)


def test_there_is_no_mean_before_the_first_number_and_no_deviation_before_the_second():
    detections, _ = feed(MeanStdThreshold(), [3.0, 3.0])
    numbers = [(item.rule_threshold, item.mean, item.std) for item in detections]
    assert [[bool(number.isnan()) for number in row] for row in numbers] == [[True] * 3, [True, False, True]]


@pytest.mark.parametrize(("spread", "is_compared"), [(0.5e-6, False), (2e-6, True)])
def test_no_threshold_without_a_spread_above_a_millionth_of_the_mean(spread, is_compared):
    thresholds = thresholds_of(MeanStdThreshold(warmup=2, decay=None), [1.0 - spread, 1.0 + spread] * 10)
    assert math.isfinite(thresholds[-1]) is is_compared


# RobustThreshold, on norms whose faults are known


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
