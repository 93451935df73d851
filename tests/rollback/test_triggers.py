"""What counts as trouble, against plain arithmetic; and no rule learns from a row of spikes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ignite_monitor import MeanStdThreshold, RobustThreshold
from ignite_monitor.detection.spikes import SpikeDetector
from ignite_monitor.detection.thresholds import CallableThreshold, ThresholdRule
from ignite_monitor.rollback.triggers import Signs, Watch, loss_levels, second_moments, statistics_in, statistics_levels

RULES = {
    "mean and deviation": MeanStdThreshold,
    "plain mean and deviation": lambda: MeanStdThreshold(k=3.0, decay=None),
    "robust": RobustThreshold,
    "function": lambda: CallableThreshold(lambda mean, std, count: mean + 4 * std),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_row_does_not_widen_its_own_threshold(rule):
    """Of consecutive spikes only the first enters, clipped: after it nothing moves, whatever comes."""
    detector = SpikeDetector(RULES[rule](), max_consecutive_spikes=1000)
    generator = torch.Generator().manual_seed(0)
    for value in 5 + torch.rand(300, generator=generator, dtype=torch.float64):
        detector.observe(detector.judge(value))
    before = detector.judge(torch.tensor(5.5, dtype=torch.float64)).limit
    thresholds = []
    for i in range(100):
        detection = detector.judge(torch.tensor(100.0 * (i + 1), dtype=torch.float64))
        assert detection.spike
        detector.observe(detection)
        thresholds.append(float(detection.threshold))
    assert thresholds[0] == before
    assert len(set(thresholds[1:])) == 1
    assert thresholds[1] < 1.3 * before


@pytest.mark.parametrize("levels", [loss_levels, statistics_levels])
def test_neither_does_a_row_widen_a_level(levels):
    levels = levels(1000) if levels is loss_levels else levels()
    for i in range(60):
        assert levels.observe([5.0 + 0.1 * (i % 3)]) == (False, False)
    known = []
    for i in range(2):
        levels.observe([100.0 * (i + 1)])
        known.append(levels.state()[0, :5].clone())
    assert torch.equal(*known)
    assert known[0][3] < 6.0


def expected_losses(losses, patience):
    """The contract's words in Python floats, over the whole history."""
    history, row, told = [], 0, []
    for loss in losses:
        weights = [0.95 ** (len(history) - 1 - i) for i in range(len(history))]
        total, limit, x = math.fsum(weights), math.inf, math.log(loss)
        if len(history) >= 20:
            mean = math.fsum(w * v for w, v in zip(weights, history, strict=True)) / total
            spread = math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, history, strict=True))
            std = math.sqrt(spread / (total - math.fsum(w * w for w in weights) / total))
            limit = max(mean + 2 * std, mean + math.log(1.5))
        row = row + 1 if x > limit else 0
        told.append((row > 0, row == patience))
        if row < 2:
            history.append(min(x, limit))
    return told


class NoMonitors:
    """A watch of the loss, and of modules' running statistics."""

    def __init__(self, *modules, patience=10):
        self.watch = Watch(patience, modules)

    def __call__(self, loss=None):
        return self.watch.signs(loss, [])

    def told(self, loss=None):
        signs = self(loss)
        return signs.spike, bool(signs.trouble)


def test_loss_level():
    generator = torch.Generator().manual_seed(0)
    losses = (0.5 * torch.randn(120, generator=generator, dtype=torch.float64)).exp()
    losses[60:65] *= 20  # a row shorter than the patience
    losses[100:112] *= 20
    watch = NoMonitors()
    told = [watch.told(loss) for loss in losses[:110].tolist()]
    assert told == expected_losses(losses[:110].tolist(), 10)
    assert [i for i, (_, trouble) in enumerate(told) if trouble] == [109]


@pytest.mark.parametrize("resumed", [False, True])
def test_levels_are_those_of_a_detector(resumed):
    """A new level, what is not finite, and numbers side by side: as the judge of tensors has it."""

    class Rule(ThresholdRule):
        def __call__(self, mean, std, count):
            return torch.maximum(mean + 2 * std, mean + math.log(1.5))

    generator = torch.Generator().manual_seed(0)
    values = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    values[60:64, 0] += 9
    values[100:, 1] += 20  # for good
    values[140, 2], values[150:155, 2] = math.inf, math.nan
    detector = SpikeDetector(Rule(decay=0.95), max_consecutive_spikes=4, overflow_is_spike=False)
    levels = loss_levels(4)
    for i, row in enumerate(values):
        detection = detector.judge(row)
        detector.observe(detection)
        if resumed and i % 7 == 0:
            levels, before = loss_levels(4), levels
            levels.load(before.state())
        assert levels.observe(row.tolist()) == (bool(detection.spike.any()), bool(detection.threshold_reset.any()))
    assert detector.counts[2].tolist() == [1, 1, 0]
    moments = torch.stack([*detector.rule.moments], 1)
    torch.testing.assert_close(levels.state()[:, :5], moments, rtol=1e-12, atol=0)


@pytest.mark.parametrize("loss", [0.0, -1.0, math.inf, math.nan])
def test_a_loss_without_a_logarithm_is_not_judged(loss):
    watch = NoMonitors(patience=2)
    for _ in range(30):
        watch(1.0)
    state = watch.watch.state_dict()["loss"]
    signs = watch(loss)
    assert (signs.look, signs.nonfinite) == (not math.isfinite(loss),) * 2
    assert not signs.spike
    assert torch.equal(watch.watch.state_dict()["loss"], state)


def test_factor_and_deviations_both_have_to_be_exceeded():
    even, noisy = NoMonitors(patience=3), NoMonitors(patience=3)
    for i in range(40):
        even(1.0 + 1e-4 * (i % 2))
        noisy(math.exp(2.0 * (-1) ** i))
    assert even.told(1.4) == (False, False)
    assert even.told(1.6) == (True, False)
    assert noisy.told(1.6) == (False, False)


@pytest.mark.parametrize("factor", [30.0, 1.2])
def test_running_statistics(factor):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Sequential(nn.BatchNorm1d(8, momentum=0.01)))
    frozen = nn.BatchNorm1d(8, track_running_stats=False)
    watch = NoMonitors(model, frozen)
    generator = torch.Generator().manual_seed(0)
    told = []
    for i in range(60):
        scale = factor if i >= 50 else 1.0
        model(scale * torch.randn(16, 6, generator=generator))
        told.append(watch.told())
    spikes = [i for i, (spike, _) in enumerate(told) if spike]
    trouble = [i for i, (_, trouble) in enumerate(told) if trouble]
    if factor == 30.0:
        assert spikes[:3] == [50, 51, 52]
        assert trouble[0] == 52
    else:
        assert spikes == trouble == []
    model[1].running_var[3] = math.nan
    assert watch().look


def test_what_running_statistics_stand_for():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2).double(), nn.BatchNorm1d(2).bfloat16())
    for i, norm in enumerate(model):
        norm.running_mean.fill_(i + 0.5)
        norm.running_var.fill_(2.0**i)
    (moments,) = second_moments(statistics_in([model, model[0]]))
    assert moments.tolist() == pytest.approx([3.75, 8.5, 20.5])


def test_a_mean_near_zero_may_vary():
    """A batch norm of one channel whose mean is noise: three times its level is nothing against its deviation."""
    norm = nn.BatchNorm1d(1)
    watch = NoMonitors(norm)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        norm(torch.randn(8, 1, generator=generator))
        assert watch.told() == (False, False)


def test_without_running_statistics_there_is_nothing_to_say():
    watch = NoMonitors(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    assert watch() == Signs(0.0, 0.0)
    assert not watch.watch.has_signs
