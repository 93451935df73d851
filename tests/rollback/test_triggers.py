"""Triggers of a rollback, compared with plain arithmetic over the whole history."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from ignite_monitor.rollback.triggers import Triggers
from tests._oracle import mean_of, std_of


def expected_losses(losses, patience):
    """(unhealthy, unstable) of every loss, from the documented threshold in Python floats."""
    history, row, answers, lowest, first = [], 0, [], math.nan, math.nan
    for loss in losses:
        limit = math.inf
        if len(history) >= 20:
            mean, std = mean_of(history, 0.95), std_of(history, 0.95)
            limit = mean + max(2 * std, mean / 2)
            first, lowest = (mean, mean) if math.isnan(lowest) else (first, min(lowest, mean))
            limit = min(limit, lowest + max(4 * std, first / 4, lowest / 2))
        row = row + 1 if loss > limit else 0
        answers.append((row > 0, row == patience))
        if row < 2:
            history.append(min(loss, limit))
    return answers


class Watch:
    def __init__(self, patience=10):
        self.triggers = Triggers(patience)
        self.loss = self.triggers.loss

    def __call__(self, loss=None):
        findings = self.collect(loss)
        return findings.is_unhealthy, bool(findings.reasons)

    def collect(self, loss=None, monitors=()):
        return self.triggers.collect(loss, monitors, torch.device("cpu"))

    def state(self):
        return copy.deepcopy([self.loss.state_dict(), {name: getattr(self.triggers, name) for name in Triggers.SAVED}])


def test_threshold_of_the_loss():
    generator = torch.Generator().manual_seed(0)
    losses = (0.3 * torch.randn(120, generator=generator, dtype=torch.float64)).exp()
    losses[60:65] *= 4  # a row shorter than the patience
    losses[100:112] *= 4
    watch = Watch()
    answers = [watch(loss) for loss in losses[:110].tolist()]
    assert answers == expected_losses(losses[:110].tolist(), 10)
    assert [i for i, (_, unstable) in enumerate(answers) if unstable] == [109]


def test_slow_growth_of_negative_losses():
    """A quarter of the descent from -10 to -50 is allowed."""
    watch = Watch()
    losses = [-10.0] * 20 + [-10.0 - i for i in range(40)] + [-50.0] * 100
    assert not any(watch(loss)[0] for loss in losses)
    rising = [-50.0 + 0.1 * i for i in range(150)]
    assert next(loss for loss in rising if watch(loss)[0]) == pytest.approx(-39.9)


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
    assert watch(shift - 1000.0 + 0.28) == (False, False)  # below 4 standard deviations
    assert [watch(shift - 990.0) for _ in range(10)] == [(True, False)] * 9 + [(True, True)]


@pytest.mark.parametrize(
    "losses", [(100.0,) * 3, (100.0, 2.0, 2.0, 2.0, 100.0, *[2.0] * 4, 100.0), (100.0, 100.0, *[1.0] * 8, 100.0)]
)
def test_far_above_the_threshold_in_three_of_ten_iterations_is_decisive(losses):
    watch = Watch()
    for i in range(40):
        watch(1.0 + 0.01 * (i % 3))
    unstable = [watch(loss)[1] for loss in losses]
    assert unstable == [False] * (len(losses) - 1) + [len(losses) <= 10]


@pytest.mark.parametrize(
    ("losses", "age", "margin"),
    [
        ((100.0,) * 3, 3, 0),
        ((100.0, 1.0, 100.0, 1.0, 1.0, 100.0), 6, 2),
        ((100.0, *[1.0] * 6, 100.0, 1.0, 100.0, 100.0), 11, 6),
        ((3.0, 1.0, 3.0, *[3.0] * 8), 11, 20),
    ],
)
def test_first_sign_and_margin(losses, age, margin):
    """Far above the threshold: the longest interruption of the signs. Slow detections: twice their delay."""
    watch = Watch()
    for i in range(40):
        watch(1.0 + 0.01 * (i % 3))
    *_, last = [watch.collect(loss) for loss in losses]
    assert (last.age, last.margin, len(last.reasons)) == (age, margin, 1)


def test_first_sign_and_margin_of_a_reset():
    watch, monitor = Watch(), Monitor()
    for i in range(5):
        monitor.seen = i, 0, i // 4  # spikes, non-finite norms, resets
        findings = watch.collect(None, [monitor])
    assert (findings.age, findings.margin) == (4, 6)
    findings.add("a reason with an earlier first sign", 9, 16)
    assert (findings.age, findings.margin) == (4, 6)
    findings.add("a reason with a later one", 3)
    assert (findings.age, findings.margin) == (3, 0)


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_nonfinite_loss_updates_nothing(loss):
    watch = Watch(patience=2)
    for _ in range(30):
        watch(1.0)
    state = watch.loss.state_dict()
    findings = watch.collect(loss)
    assert (findings.is_nonfinite, findings.is_unhealthy) == (True, False)
    assert watch.loss.state_dict() == state


@pytest.mark.parametrize("huge", [1e200, -1e200])
def test_losses_whose_square_overflows_update_nothing(huge):
    watch = Watch()
    for loss in (huge, *[1.0, 1.1, 0.9] * 10):
        watch(loss)
    assert watch(3.0) == (True, False)


class Monitor:
    """Metrics of a GradMonitor after each iteration."""

    prefix, metrics = "grad", {}

    def counts(self):
        return torch.tensor(self.seen, dtype=torch.float64)


def test_an_overflow_that_a_scaler_handles_is_no_nonfinite_iteration():
    """It is counted as not finite and is no spike; without a scaler it is both."""
    watch, monitor, result = Watch(), Monitor(), []
    for monitor.seen in ((0, 0, 0), (0, 1, 0), (1, 2, 0), (1, 2, 0)):  # spikes, non-finite norms, resets
        result.append(watch.collect(None, [monitor]).is_nonfinite)
    assert result == [False, False, True, False]


def test_a_reset_at_an_accepted_value_is_no_instability():
    watch, monitor, reasons = Watch(), Monitor(), []
    for i, value in enumerate((1.0, 5.0, 5.0, 7.0, 7.1)):
        monitor.seen = i, 0, max(i - 1, 0)  # spikes, non-finite norms, resets
        monitor.metrics = {"grad/norm": value, "grad/threshold": 3.0}
        reasons.append(watch.collect(None, [monitor]).reasons)
        if value == 7.0:
            watch.triggers.accept_peak(even_far=True)  # values up to 9
    assert reasons == [[], [], *[["the statistics of grad were reset"]] * 2, []]


@pytest.mark.parametrize(("shift", "peak", "even_far"), [(0.0, 5.0, False), (0.0, 50.0, True), (-100.0, 5.0, True)])
def test_accepted_values_are_healthy_and_larger_ones_are_not(shift, peak, even_far):
    """The peak and half of its excess above the threshold are accepted; far values by a regime change only."""
    watch = Watch()
    for i in range(30):
        watch(shift + 1.0 + 0.01 * (i % 3))
    assert [watch(loss + shift)[0] for loss in (4.9, peak)] == [True, True]
    accepted = 1.5 * (peak + shift) - 0.5 * watch.loss.statistics()[0].item()
    watch.triggers.accept_peak(even_far=False)
    assert watch(peak + shift)[0] == even_far
    watch.triggers.accept_peak(even_far=True)
    watch.loss.reset()
    for i in range(30):
        watch(shift + 1.0 + 0.01 * (i % 3))
    assert [watch(loss)[0] for loss in (accepted + 1e-6, accepted - 1e-6)] == [True, False]


def test_state_continues():
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(60, generator=generator).tolist() + [9.0] * 12
    whole, resumed = Watch(), Watch()
    expected = [whole(loss) for loss in losses]
    answers = []
    for i, loss in enumerate(losses):
        if i % 7 == 0:
            (loss_state, state), resumed = resumed.state(), Watch()
            resumed.loss.load_state_dict(loss_state)
            vars(resumed.triggers).update(state)
        answers.append(resumed(loss))
    assert answers == expected
