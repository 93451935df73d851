"""Triggers of a rollback, compared with plain arithmetic over the whole history."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from ignite_monitor.rollback.triggers import Findings, Triggers, second_moments


def expected_losses(losses, patience):
    """(unhealthy, unstable) of every loss, from the documented threshold in Python floats."""
    history, row, answers, lowest, first = [], 0, [], math.nan, math.nan
    for loss in losses:
        weights = [0.95 ** (len(history) - 1 - i) for i in range(len(history))]
        total, limit = math.fsum(weights), math.inf
        if len(history) >= 20:
            mean = math.fsum(w * v for w, v in zip(weights, history, strict=True)) / total
            spread = math.fsum(w * (v - mean) ** 2 for w, v in zip(weights, history, strict=True))
            std = math.sqrt(spread / (total - math.fsum(w * w for w in weights) / total))
            limit = mean + max(2 * std, mean / 2)
            first, lowest = (mean, mean) if math.isnan(lowest) else (first, min(lowest, mean))
            limit = min(limit, lowest + max(4 * std, first / 4, lowest / 2))
        row = row + 1 if loss > limit else 0
        answers.append((row > 0, row == patience))
        if row < 2:
            history.append(min(loss, limit))
    return answers


class Watch:
    def __init__(self, *modules, patience=10):
        self.triggers = Triggers(patience, modules)

    def __call__(self, loss=None):
        findings = self.triggers.collect(loss, [])
        return findings.is_unhealthy, bool(findings.reasons)


def test_threshold_of_the_loss():
    generator = torch.Generator().manual_seed(0)
    losses = (0.3 * torch.randn(120, generator=generator, dtype=torch.float64)).exp()
    losses[60:65] *= 4  # a row shorter than the patience
    losses[100:112] *= 4
    watch = Watch()
    answers = [watch(loss) for loss in losses[:110].tolist()]
    assert answers == expected_losses(losses[:110].tolist(), 10)
    assert [i for i, (_, unstable) in enumerate(answers) if unstable] == [109]


def test_slow_growth_is_noticed_before_a_quarter_of_the_descent_is_lost_twice():
    """A loss that falls from 2.3 to 0.1 and then grows by 1 % an iteration, which no threshold for jumps notices."""
    watch = Watch()
    losses = [2.3 * 0.97**i + 0.1 for i in range(200)]
    losses += [losses[-1] * 1.01**i for i in range(300)]
    unstable = [i for i, loss in enumerate(losses) if watch(loss)[1]]
    assert unstable[0] > 200
    assert losses[unstable[0]] < 0.1 + 2 * 2.3 / 4


@pytest.mark.parametrize("shift", [-100.0, 0.0, 100.0])
def test_signed_losses(shift):
    generator = torch.Generator().manual_seed(0)
    watch = Watch()
    for noise in torch.randn(60, generator=generator).tolist():
        assert not watch(shift - 1000.0 + 0.1 * noise)[1]
    assert [watch(shift - 990.0) for _ in range(10)] == [(True, False)] * 9 + [(True, True)]


@pytest.mark.parametrize(
    "losses", [(100.0,) * 3, (100.0, 2.0, 100.0, 2.0, 100.0), (100.0, 2.0, 2.0, 100.0, 2.0, 100.0)]
)
def test_far_above_the_threshold_in_three_of_five_iterations_is_decisive(losses):
    watch = Watch()
    for i in range(40):
        watch(1.0 + 0.01 * (i % 3))
    unstable = [watch(loss)[1] for loss in losses]
    assert unstable == [False] * (len(losses) - 1) + [len(losses) <= 5]


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_nonfinite_loss_updates_nothing(loss):
    watch = Watch(patience=2)
    for _ in range(30):
        watch(1.0)
    state = copy.deepcopy(watch.triggers.state_dict())
    findings = watch.triggers.collect(loss, [])
    assert (findings.check_state, findings.is_nonfinite, findings.is_unhealthy) == (True, True, False)
    torch.testing.assert_close(watch.triggers.state_dict()["rules"], state["rules"], rtol=0, atol=0, equal_nan=True)


class Monitor:
    """What there is of a GradMonitor after each iteration."""

    prefix, metrics = "grad", {}

    def counts(self):
        return torch.tensor(self.seen, dtype=torch.float64)


def test_an_overflow_that_a_scaler_handles_is_no_nonfinite_iteration():
    """It is counted as not finite and is no spike; without a scaler it is both. The state is looked at either way."""
    triggers, monitor, found = Triggers(10, []), Monitor(), []
    for monitor.seen in ((0, 0, 0), (0, 1, 0), (1, 2, 0), (1, 2, 0)):  # spikes, non-finite norms, resets
        findings = triggers.collect(None, [monitor])
        found.append((findings.check_state, findings.is_nonfinite))
    assert found == [(False, False), (True, False), (True, True), (False, False)]


def test_accepted_values_are_healthy_and_larger_ones_are_not():
    watch = Watch()
    for i in range(30):
        watch(1.0 + 0.01 * (i % 3))
    assert [watch(loss)[0] for loss in (4.9, 5.0)] == [True, True]
    watch.triggers.accept_peaks()
    watch.triggers.reset_threshold()
    for i in range(30):
        watch(1.0 + 0.01 * (i % 3))
    assert [watch(loss)[0] for loss in (5.0, 4.0, 5.1)] == [False, False, True]


@pytest.mark.parametrize("factor", [30.0, 1.2])
def test_running_statistics(factor):
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Sequential(nn.BatchNorm1d(8, momentum=0.01)))
    watch = Watch(model, nn.BatchNorm1d(8, track_running_stats=False))
    generator = torch.Generator().manual_seed(0)
    answers = []
    for i in range(60):
        model((factor if i >= 50 else 1.0) * torch.randn(16, 6, generator=generator))
        answers.append(watch())
    assert [i for i, (_, unstable) in enumerate(answers) if unstable][:1] == ([52] if factor == 30.0 else [])
    assert not any(unhealthy for unhealthy, _ in answers[:50])
    model[1].running_var[3] = math.nan
    assert watch.triggers.collect(None, []).check_state


def test_second_moments():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(2).double(), nn.BatchNorm1d(2).bfloat16())
    for i, norm in enumerate(model):
        norm.running_mean.fill_(i + 0.5)
        norm.running_var.fill_(2.0**i)
    (moments,) = second_moments([model, model[0]])
    assert moments.tolist() == pytest.approx([3.75, 8.5, 20.5])


def test_a_mean_near_zero_may_vary():
    """A mean that is noise beside its deviation: three times its baseline means nothing."""
    norm = nn.BatchNorm1d(1)
    watch = Watch(norm)
    generator = torch.Generator().manual_seed(0)
    for _ in range(2000):
        norm(torch.randn(8, 1, generator=generator))
        assert watch() == (False, False)


def test_without_anything_to_judge_there_are_no_findings():
    watch = Watch(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    assert watch.triggers.collect(None, []) == Findings()
    assert not watch.triggers.has_any


def test_state_continues():
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(60, generator=generator).tolist() + [9.0] * 12
    whole, resumed = Watch(), Watch()
    expected = [whole(loss) for loss in losses]
    answers = []
    for i, loss in enumerate(losses):
        if i % 7 == 0:
            state, resumed = copy.deepcopy(resumed.triggers.state_dict()), Watch()
            resumed.triggers.load_state_dict(state)
        answers.append(resumed(loss))
    assert answers == expected
