"""Triggers of a rollback, compared with plain arithmetic over the whole history."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from ignite_monitor.monitor.ranks import Ranks
from ignite_monitor.rollback.snapshots import public
from ignite_monitor.rollback.triggers import LossStatistics, Triggers
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
    """Triggers of a loss that has fallen, which is a measure of progress."""

    def __init__(self, patience=10, measures_progress=True):
        self.triggers = Triggers(patience)
        self.triggers.measures_progress = measures_progress

    def __call__(self, loss=None):
        signals = self.collect(loss)
        return signals.is_above, bool(signals.reasons)

    def collect(self, loss=None, monitors=()):
        return self.triggers.collect(loss, monitors, Ranks(None), torch.device("cpu"), 1)

    def state(self):
        return copy.deepcopy(public(self.triggers))


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


@pytest.mark.parametrize(
    ("losses", "age"),
    [
        ((100.0,) * 3, 3),
        ((100.0, 1.0, 100.0, 1.0, 1.0, 100.0), 6),
        ((100.0, 1.0, 1.0, 1.0, 100.0, 1.0, 1.0, 100.0), 8),
        ((100.0, 100.0, *[1.0] * 6, 100.0), None),  # not within eight iterations
        ((100.0, *[1.0] * 6, 100.0, 1.0, 100.0, 100.0), 4),
        ((3.0, 1.0, 3.0, *[3.0] * 8), 11),
    ],
)
def test_first_sign(losses, age):
    watch = Watch()
    for i in range(40):
        watch(1.0 + 0.01 * (i % 3))
    collected = [watch.collect(loss) for loss in losses]
    assert not any(signals.reasons for signals in collected[:-2])
    assert len(collected[-1].reasons) == int(age is not None)
    if age is not None:
        assert collected[-1].age == age


def test_first_sign_of_a_reset():
    watch, monitor = Watch(), Monitor()
    for i in range(5):
        monitor.seen = i, 0, i // 4  # spikes, non-finite norms, resets
        signals = watch.collect(None, [monitor])
    assert signals.age == 4
    signals.add("a reason with an earlier first sign", 9)
    assert signals.age == 4
    signals.add("a reason with a later one", 3)
    assert signals.age == 3


@pytest.mark.parametrize("loss", [math.inf, math.nan])
def test_a_nonfinite_loss_updates_nothing(loss):
    watch = Watch(patience=2)
    for _ in range(30):
        watch(1.0)
    state = watch.triggers.loss
    signals = watch.collect(loss)
    assert (signals.is_nonfinite, signals.is_above) == (True, False)
    assert watch.triggers.loss == state


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


@pytest.mark.parametrize(
    ("losses", "is_measure"),
    [
        ([1.0] * 60, False),  # has never fallen
        ([0.0] * 30 + [0.01 * i for i in range(60)], False),  # TD error: rises while values are learnt
        ([3.0 * 0.9**i + 1.0 for i in range(60)], True),
        ([3.0 * 0.9**i - 9.0 for i in range(60)], False),  # negative throughout
        ([3.0 * 0.9**i - 1.0 for i in range(60)], False),  # changes sign
        ([0.5 * (-1) ** i for i in range(60)], False),  # policy gradient with a baseline
    ],
)
def test_a_loss_triggers_only_if_it_measures_progress(losses, is_measure):
    watch = Watch(measures_progress=False)
    for loss in losses:
        assert watch(loss) == (False, False)
    assert any(watch(1000.0)[1] for _ in range(10)) == is_measure


def test_a_loss_that_falls_on_changed_data_alone_measures_no_progress():
    """A TD error that rises while values are learnt, and falls after a change of data."""
    watch = Watch(measures_progress=False)
    for i in range(60):
        watch(0.1 * i)
    watch.triggers.start_regime()
    for i in range(60):
        watch(6.0 * 0.97**i)
    assert not any(watch(1000.0)[1] for _ in range(10))


@pytest.mark.parametrize(
    ("loss", "triggers"),
    [(None, True), (2.0, False), (9.0, True)],  # no loss, a healthy one, one above its threshold
)
def test_a_norm_alone_triggers_only_without_a_loss(loss, triggers):
    watch, monitor = Watch(), Monitor()
    for i in range(40):
        monitor.seen = 0, 0, 0
        monitor.metrics = {"grad/norm": 1.0, "grad/threshold": 3.0}
        watch.collect(None if loss is None else 2.0 + 0.01 * (i % 3), [monitor])
    monitor.seen = 1, 0, 1
    assert bool(watch.collect(loss, [monitor]).reasons) == triggers


@pytest.mark.parametrize(("peak", "accepted"), [(5.0, True), (50.0, False)])
def test_losses_of_accepted_data_are_healthy_for_1000_iterations(peak, accepted):
    """The largest loss and half of its excess above the threshold; values far above the threshold never are."""
    watch = Watch()
    for i in range(30):
        watch(1.0 + 0.01 * (i % 3))
    limit = LossStatistics(*watch.triggers.loss).limit
    watch.triggers.former_limit = limit
    watch.triggers.accept([4.9, peak], iteration=1)
    edge = peak + (peak - limit) / 2.0
    assert [watch(loss)[0] for loss in (edge + 1e-6, edge - 1e-6)] == [True, not accepted]
    assert watch.triggers.collect(edge - 1e-6, (), Ranks(None), torch.device("cpu"), 1001).is_above


def test_state_continues():
    generator = torch.Generator().manual_seed(0)
    losses = torch.rand(60, generator=generator).tolist() + [9.0] * 12
    whole, resumed = Watch(), Watch()
    expected = [whole(loss) for loss in losses]
    answers = []
    for i, loss in enumerate(losses):
        if i % 7 == 0:
            state, resumed = resumed.state(), Watch()
            vars(resumed.triggers).update(state)
        answers.append(resumed(loss))
    assert answers == expected
