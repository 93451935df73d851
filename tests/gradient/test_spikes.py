"""Which norms are spikes, and what enters the statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ignite_monitor.detection.robust import RobustThreshold
from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import MeanStdThreshold, StaticThreshold


def detect_all(detector, norms):
    spikes = []
    for norm in norms:
        detection = detector.detect(torch.tensor(norm, dtype=torch.float64))
        spikes.append(bool(detection.spike))
        detector.observe(detection)
    return spikes


def calm(n, level=1.0, seed=0):
    return list(level * (1 + 0.1 * np.random.default_rng(seed).uniform(-1, 1, size=n)))


def test_a_spike_enters_the_statistics_clipped_to_the_threshold_it_exceeded():
    norms = calm(30)
    limit = np.mean(norms) + 3 * np.std(norms, ddof=1)
    detector = SpikeDetector(MeanStdThreshold(k=3.0, decay=None))
    assert detect_all(detector, [*norms, 100.0]) == [False] * 30 + [True]
    _, mean, std = detector.rule.statistics()
    np.testing.assert_allclose(mean.item(), np.mean([*norms, limit]), rtol=1e-12)
    np.testing.assert_allclose(std.item(), np.std([*norms, limit], ddof=1), rtol=1e-12)


class Oracle:
    """The rule over its whole history, in Python floats."""

    def __init__(self, k, warmup, decay, patience):
        self.k, self.warmup, self.decay, self.patience = k, warmup, decay, patience
        self.history, self.recent, self.row, self.suspended, self.restarts = [], 0.0, 0, False, 0

    def limit(self):
        if len(self.history) < self.warmup:
            return math.inf
        weights = [self.decay ** (len(self.history) - 1 - i) for i in range(len(self.history))]
        total = math.fsum(weights)
        mean = math.fsum(w * x for w, x in zip(weights, self.history, strict=True)) / total
        spread = math.fsum(w * (x - mean) ** 2 for w, x in zip(weights, self.history, strict=True))
        return mean + self.k * math.sqrt(spread / (total - math.fsum(w * w for w in weights) / total))

    def spike(self, norm):
        limit = self.limit()
        if not math.isfinite(norm):
            self.row = 0
            return True
        if norm <= limit < math.inf:
            self.suspended = False
        if self.suspended or norm <= limit:
            self.recent, self.row = max(self.recent - 0.25, 0.0), 0
            self.history.append(norm)
            return False
        self.recent += 1.0
        self.row += 1
        if self.recent >= self.patience:
            self.history, self.recent, self.row, self.suspended = [norm], 0.0, 0, self.warmup < max(self.patience, 10)
            self.restarts += 1
        elif self.row == 1:
            self.history.append(limit)
        return True


@pytest.mark.parametrize("decay", [1.0, 0.99, 0.9])
@pytest.mark.parametrize("patience", [1, 4, 10])
def test_of_spikes_in_a_row_only_the_first_enters(decay, patience):
    random = np.random.default_rng(patience)
    norms = random.lognormal(sigma=0.3, size=400)
    norms[random.random(400) < 0.05] *= 8
    norms[[60, 61, 62, 150]] = [9.0, math.nan, 9.0, math.inf]
    norms[200:207] *= 20  # a row shorter than the longest patience
    norms[300:] *= 30  # a new level
    oracle = Oracle(3.0, 20, decay, patience)
    detector = SpikeDetector(
        MeanStdThreshold(decay=None if decay == 1.0 else decay, k=3.0), max_consecutive_spikes=patience
    )
    for norm in norms.tolist():
        before = oracle.restarts
        limit, said = oracle.limit(), oracle.spike(norm)
        detection = detector.detect(torch.tensor(norm, dtype=torch.float64))
        detector.observe(detection)
        np.testing.assert_allclose(detection.limit.nan_to_num(math.inf).item(), limit, rtol=1e-9)
        assert bool(detection.spike) == said
        assert bool(detection.threshold_reset) == (oracle.restarts > before)
        assert detector.rule.state["count"].item() == len(oracle.history)
    assert oracle.restarts > 0


def test_a_row_does_not_widen_its_own_threshold():
    # With a decay of 0.99 and all of them in the statistics, seven norms of a bad level are learned without a word.
    detector = SpikeDetector(MeanStdThreshold(k=6.0, decay=0.99))
    assert detect_all(detector, [*calm(100), *[3.0] * 10]) == [False] * 100 + [True] * 10


def test_a_detection_tells_where_the_level_changes():
    detector, told = SpikeDetector(StaticThreshold(2.0), max_consecutive_spikes=3), []
    for norm in [5.0, 5.0, 5.0, 5.0, 1.0, 5.0, 1.0, 5.0, math.nan, 5.0, 5.0, 5.0]:
        detection = detector.detect(torch.tensor(norm, dtype=torch.float64))
        detector.observe(detection)
        told.append(bool(detection.threshold_reset))
    assert [i for i, changed in enumerate(told) if changed] == [2, 10]


def test_values_side_by_side_are_judged_like_each_alone():
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
            np.testing.assert_allclose(detection.threshold[i].item(), own.threshold.item(), rtol=1e-12)
            detector.observe(own, torch.tensor(bool(use[i])))
    saved = SpikeDetector(MeanStdThreshold(k=4.0))
    saved.to(torch.zeros(5, dtype=torch.float64))
    saved.load_state_dict(together.state_dict())
    detections = [each.detect(torch.tensor(columns[7])) for each in (saved, together)]
    assert torch.equal(detections[0].threshold, detections[1].threshold)


def test_one_spike_does_not_hide_the_next():
    assert detect_all(SpikeDetector(MeanStdThreshold()), [*calm(30), 100.0, 1.0, 5.0]) == [False] * 30 + [
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
    assert detect_all(one, [*norms[:5], bad, *norms[5:], bad]) == (
        [False] * 5 + [overflow_is_spike] + [False] * 25 + [overflow_is_spike]
    )
    detect_all(other, norms)
    assert one.rule.state_dict() == other.rule.state_dict()


def test_a_new_level_costs_at_most_so_many_steps():
    detector = SpikeDetector(MeanStdThreshold(), max_consecutive_spikes=7)
    spikes = detect_all(detector, [*calm(50), *calm(200, level=10.0, seed=1)])
    assert spikes == [False] * 50 + [True] * 7 + [False] * 193
    # and what is a spike on the new level is one
    assert detect_all(detector, [30.0, 10.0]) == [True, False]


def test_non_finite_norms_are_no_new_level_and_break_no_row():
    detector = SpikeDetector(StaticThreshold(2.0), max_consecutive_spikes=3)
    assert detect_all(detector, [5.0, math.nan, 5.0, math.nan, math.nan, math.nan, 5.0, 5.0]) == [True] * 7 + [False]


def test_above_a_static_threshold_for_good_training_goes_on_until_norms_fall_below_again():
    detector = SpikeDetector(StaticThreshold(2.0), max_consecutive_spikes=4)
    assert detect_all(detector, [5.0] * 100) == [True] * 4 + [False] * 96
    assert detect_all(detector, [1.0, 5.0]) == [False, True]


def test_constant_and_zero_norms_are_no_spikes():
    for level in (0.0, 1.0, 1e-30):
        assert not any(detect_all(SpikeDetector(MeanStdThreshold()), [level] * 200))


def test_judging_changes_nothing():
    detector = SpikeDetector(MeanStdThreshold())
    detect_all(detector, calm(30))
    before = detector.state_dict()
    first = detector.detect(torch.tensor(9.0, dtype=torch.float64))
    second = detector.detect(torch.tensor(9.0, dtype=torch.float64))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert detector.state_dict() == before


def test_an_observation_under_a_false_condition_changes_nothing():
    detector = SpikeDetector(MeanStdThreshold())
    detect_all(detector, [*calm(30), 50.0])
    before = detector.state_dict()
    for norm in (1.0, 50.0, math.nan, math.inf):
        detector.observe(detector.detect(torch.tensor(norm, dtype=torch.float64)), torch.tensor(False))
    assert detector.state_dict() == before


def test_state_continues():
    norms = [*calm(30), 50.0, 50.0, math.nan, 50.0, *calm(30, level=50.0, seed=1), 500.0]
    whole, first, second = (SpikeDetector(MeanStdThreshold(), max_consecutive_spikes=5) for _ in range(3))
    expected = detect_all(whole, norms)
    assert detect_all(first, norms[:33]) == expected[:33]
    second.load_state_dict(first.state_dict())
    assert detect_all(second, norms[33:]) == expected[33:]
    assert second.state_dict() == whole.state_dict()


def test_a_state_with_a_part_missing_is_refused():
    state = SpikeDetector(MeanStdThreshold()).state_dict()
    del state["previous"]
    with pytest.raises(ValueError, match="previous"):
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


def test_zeros_and_equal_values_give_no_threshold():
    """As of a sparse reward or a masked loss: what comes after them is no spike, and is learned."""
    random = np.random.default_rng(0)
    later = calm(40, seed=1)
    detector = SpikeDetector(MeanStdThreshold())
    assert not any(detect_all(detector, [0.0] * 30 + [later[i // 3] * (i % 3 == 0) for i in range(120)]))
    assert detector.rule.state["count"].item() == 40
    levels = [512.0] * 20 + random.choice([512.0, 513.0], size=200).tolist()
    assert not any(detect_all(SpikeDetector(MeanStdThreshold()), levels))


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_many_spikes_in_a_short_time_reset_the_rule_though_none_are_consecutive_enough(share):
    random = np.random.default_rng(0)
    tiny = 1e-9 * random.random(2020)
    values = np.where(random.random(2020) < share, 0.02, tiny)
    values[:20] = tiny[:20]
    assert sum(detect_all(SpikeDetector(MeanStdThreshold()), values.tolist())) <= 40


@pytest.mark.parametrize("every", [6, 20])
def test_rare_spikes_do_not_reset_the_rule(every):
    detector = SpikeDetector(StaticThreshold(2.0))
    for i in range(300):
        detection = detector.detect(torch.tensor(5.0 if i % every == 0 else 1.0, dtype=torch.float64))
        detector.observe(detection)
        assert bool(detection.spike) is (i % every == 0)
        assert not detection.threshold_reset


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
    assert detector.rule.threshold().is_meta
