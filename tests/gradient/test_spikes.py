"""Which norms are spikes, and what enters the statistics."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import MeanStdThreshold, StaticThreshold


def judge_all(detector, norms):
    spikes = []
    for norm in norms:
        detection = detector.judge(torch.tensor(norm, dtype=torch.float64))
        spikes.append(bool(detection.spike))
        detector.observe(detection)
    return spikes


def calm(n, level=1.0, seed=0):
    return list(level * (1 + 0.1 * np.random.default_rng(seed).uniform(-1, 1, size=n)))


def test_a_spike_enters_the_statistics_clipped_to_the_threshold_it_exceeded():
    norms = calm(30)
    limit = np.mean(norms) + 3 * np.std(norms, ddof=1)
    detector = SpikeDetector(MeanStdThreshold(k=3.0, decay=None))
    assert judge_all(detector, [*norms, 100.0]) == [False] * 30 + [True]
    moments = detector.rule.moments
    np.testing.assert_allclose(moments.mean.item(), np.mean([*norms, limit]), rtol=1e-12)
    np.testing.assert_allclose(moments.std.item(), np.std([*norms, limit], ddof=1), rtol=1e-12)


class Oracle:
    """The rule over its whole history, in Python floats: of spikes in a row only the first enters, clipped."""

    def __init__(self, k, warmup, decay, patience):
        self.k, self.warmup, self.decay, self.patience = k, warmup, decay, patience
        self.history, self.row, self.suspended, self.restarts = [], 0, False, 0

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
            return True
        if norm <= limit < math.inf:
            self.suspended = False
        if self.suspended or norm <= limit:
            self.row = 0
            self.history.append(norm)
            return False
        self.row += 1
        if self.row == self.patience:
            self.history, self.row, self.suspended = [norm], 0, True
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
        detection = detector.judge(torch.tensor(norm, dtype=torch.float64))
        detector.observe(detection)
        np.testing.assert_allclose(detection.limit.item(), limit, rtol=1e-9)
        assert bool(detection.spike) == said
        assert bool(detection.threshold_reset) == (oracle.restarts > before)
        assert detector.rule.moments.count.item() == len(oracle.history)
    assert oracle.restarts > 0
    assert detector.counts[2].item() == oracle.restarts


def test_a_row_does_not_widen_its_own_threshold():
    # With a decay of 0.99 and all of them in the statistics, seven norms of a bad level are learned without a word.
    detector = SpikeDetector(MeanStdThreshold(k=6.0, decay=0.99))
    assert judge_all(detector, [*calm(100), *[3.0] * 10]) == [False] * 100 + [True] * 10
    assert detector.counts[2].item() == 1


def test_a_detection_tells_where_the_level_changes():
    detector, told = SpikeDetector(StaticThreshold(2.0), max_consecutive_spikes=3), []
    for norm in [5.0, 5.0, 5.0, 5.0, 1.0, 5.0, 1.0, 5.0, math.nan, 5.0, 5.0, 5.0]:
        detection = detector.judge(torch.tensor(norm, dtype=torch.float64))
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
        detection = together.judge(torch.tensor(row))
        together.observe(detection, torch.tensor(use))
        for i, (detector, value) in enumerate(zip(alone, row, strict=True)):
            own = detector.judge(torch.tensor(value))
            assert bool(detection.spike[i]) == bool(own.spike)
            np.testing.assert_allclose(detection.threshold[i].item(), own.threshold.item(), rtol=1e-12)
            detector.observe(own, torch.tensor(bool(use[i])))
    assert together.counts[0].tolist() == [detector.counts[0].item() for detector in alone]
    assert together.counts[2].tolist() == [0, 0, 1, 0, 0]
    saved = SpikeDetector(MeanStdThreshold(k=4.0))
    saved.to(torch.zeros(5, dtype=torch.float64))
    saved.load_state_dict(together.state_dict())
    detections = [each.judge(torch.tensor(columns[7])) for each in (saved, together)]
    assert torch.equal(detections[0].threshold, detections[1].threshold)


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
    assert one.counts[1].item() == 2
    assert one.counts[0].item() == 2 * overflow_is_spike
    assert one.rule.state_dict() == other.rule.state_dict()


def test_a_new_level_costs_at_most_so_many_steps():
    detector = SpikeDetector(MeanStdThreshold(), max_consecutive_spikes=7)
    spikes = judge_all(detector, [*calm(50), *calm(200, level=10.0, seed=1)])
    assert spikes == [False] * 50 + [True] * 7 + [False] * 193
    assert detector.counts[2].item() == 1
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
    assert all(torch.equal(one, other) for one, other in zip(first[:-1], second[:-1], strict=True))
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
