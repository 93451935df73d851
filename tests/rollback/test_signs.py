"""What counts as trouble, against plain arithmetic; and no rule learns from a row of spikes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from ignite_monitor import MeanStdThreshold, RobustThreshold
from ignite_monitor.judging.spikes import SpikeDetector
from ignite_monitor.judging.thresholds import CallableThreshold
from ignite_monitor.rollback.signs import AboveLevel, LossLevel, RunningStatistics, TimesMean

RULES = {
    "mean and deviation": MeanStdThreshold,
    "plain mean and deviation": lambda: MeanStdThreshold(k=3.0, decay=None),
    "robust": RobustThreshold,
    "function": lambda: CallableThreshold(lambda mean, std, count: mean + 4 * std),
    "above level": AboveLevel,
    "times mean": TimesMean,
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
        verdict = detector.judge(torch.tensor(100.0 * (i + 1), dtype=torch.float64))
        assert verdict.spike
        detector.observe(verdict)
        thresholds.append(float(verdict.threshold))
    assert thresholds[0] == before
    assert len(set(thresholds[1:])) == 1
    assert thresholds[1] < 1.3 * before


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


def test_loss_level():
    generator = torch.Generator().manual_seed(0)
    losses = (0.5 * torch.randn(120, generator=generator, dtype=torch.float64)).exp()
    losses[60:65] *= 20  # a row shorter than the patience
    losses[100:112] *= 20
    level = LossLevel(patience=10)
    told = [level.observe(loss) for loss in losses[:110].tolist()]
    assert told == expected_losses(losses[:110].tolist(), 10)
    assert [i for i, (_, trouble) in enumerate(told) if trouble] == [109]


@pytest.mark.parametrize("loss", [0.0, -1.0, math.inf, math.nan])
def test_a_loss_without_a_logarithm_is_not_judged(loss):
    level = LossLevel(patience=2)
    for _ in range(30):
        level.observe(1.0)
    state = copy.deepcopy(level.state_dict())
    assert level.observe(loss) == (False, False)
    assert level.state_dict() == state


def test_factor_and_deviations_both_have_to_be_exceeded():
    even, noisy = LossLevel(patience=3), LossLevel(patience=3)
    for i in range(40):
        even.observe(1.0 + 1e-4 * (i % 2))
        noisy.observe(math.exp(2.0 * (-1) ** i))
    assert even.observe(1.4) == (False, False)
    assert even.observe(1.6) == (True, False)
    assert noisy.observe(1.6) == (False, False)


@pytest.mark.parametrize("factor", [30.0, 1.2])
def test_running_statistics(factor):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Sequential(nn.BatchNorm1d(8, momentum=0.01)))
    frozen = nn.BatchNorm1d(8, track_running_stats=False)
    statistics = RunningStatistics()
    statistics.look_for([model, frozen])
    generator = torch.Generator().manual_seed(0)
    told = []
    for i in range(60):
        scale = factor if i >= 50 else 1.0
        model(scale * torch.randn(16, 6, generator=generator))
        told.append(statistics.observe().tolist())
    spikes = [i for i, (_, spike, _) in enumerate(told) if spike]
    trouble = [i for i, (_, _, changed) in enumerate(told) if changed]
    if factor == 30.0:
        assert spikes[:3] == [50, 51, 52]
        assert trouble[0] == 52
    else:
        assert spikes == trouble == []
    model[1].running_var[3] = math.nan
    assert statistics.observe()[0]


def test_a_mean_near_zero_may_vary():
    """A batch norm of one channel whose mean is noise: three times its level is nothing against its deviation."""
    norm = nn.BatchNorm1d(1)
    statistics = RunningStatistics()
    statistics.look_for([norm])
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        norm(torch.randn(8, 1, generator=generator))
        assert not statistics.observe().any()


def test_without_running_statistics_there_is_nothing_to_say():
    statistics = RunningStatistics()
    statistics.look_for([nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)])
    assert statistics.observe() is None
