"""Any train step: what GradMonitor and WeightUpdateHandler say at each moment of it, and that it is left alone.

``HARD_USE_EXAMPLES=50`` tries 50 times as many programs, see :mod:`tests.stress._profile`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ignite.engine import Engine, Events

from ignite_monitor import GradMonitor, WeightUpdateHandler
from tests._helpers import assert_same, footprint, hooks_only
from tests._oracle import Moment, Rule, WindowTruth, mean_std, static
from tests._truth import UpdateTruth
from tests.stress._profile import examples
from tests.stress._steps import (
    PROGRAMS,
    SETTINGS,
    Backward,
    ByHand,
    Clip,
    Closure,
    Estimated,
    Replace,
    Sam,
    Setting,
    Step,
    Training,
    Zero,
)

RULE = static(0.3)
RULES = st.sampled_from([mean_std(0.5, 2, None), mean_std(1.0, 3, 0.9), RULE])
CLIPPED = Setting("", ("sgd", "adamw"), watched=0, zeroing=False)
GROWING = Setting("", ("sgd",), watched=0, zeroing=None)
SECOND = Setting("", ("sgd", "adamw"), watched=1, zeroing=True)
LBFGS = Setting("", ("lbfgs",), watched=0, zeroing=True)
BOTH = Setting("", ("sgd", "adamw"), watched=None, zeroing=None)
EVERY_SECOND = Setting("", ("sgd",), watched=0, zeroing=None, every=2)
GAN = Setting("", ("sgd",), watched=0, zeroing=None, other=True)
SPIKE = Backward("ab", factor=30.0)


class Reported:
    """Flag and norm of a GradMonitor at each moment, and the spikes that it announces."""

    def __init__(self, training: Training, monitor: GradMonitor) -> None:
        self.training, self.monitor = training, monitor
        self.moments: list[Moment] = []
        self.announced: list[int] = []
        monitor.on_spike = lambda engine, norm: self.announced.append(engine.state.iteration)

    def moment(self) -> None:
        state = self.training.engine.state
        flag, norm = getattr(state, self.monitor.flag), getattr(state, f"{self.monitor.prefix}_norm")
        assert type(flag) is bool
        assert norm is None or type(norm) is float
        self.moments.append((flag, norm))


def state_of(training: Training) -> dict[str, Any]:
    """Parameters, gradients and optimizer states, copied."""
    gradients = [parameter.grad for parameter in training.parameters.values()]
    return {
        "parameters": [item.detach().clone() for item in training.parameters.values()],
        "gradients": [None if item is None else item.detach().clone() for item in gradients],
        "optimizers": copy.deepcopy([optimizer.state_dict() for optimizer in training.optimizers]),
    }


def monitored(
    setting: Setting, program: list[list[Any]], rule: Rule
) -> tuple[list[Reported], list[dict[str, float]], list[Any]]:
    training = Training(setting, program)
    before = footprint(training.engine, training.model, training.optimizers[0])
    published: list[dict[str, float]] = []
    states: list[Any] = []
    watched = None if training.watched is None else training.optimizers[training.watched]
    monitors: list[Any] = [
        GradMonitor(training.model, watched, threshold=rule.make()),
        WeightUpdateHandler(training.model, watched, top_k=0),
    ]
    if setting.other:
        monitors.append(
            GradMonitor(training.other, training.optimizers[-1], threshold=rule.make(), prefix="other", flag="bad")
        )
    reported = [Reported(training, monitor) for monitor in monitors if isinstance(monitor, GradMonitor)]
    training.at_moment = lambda: [item.moment() for item in reported]
    for monitor in monitors:
        monitor.attach(training.engine, Events.ITERATION_STARTED(every=setting.every))

    @training.engine.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        training.moment()
        published.append({name: float(value) for name, value in engine.state.metrics.items()})
        states.append(state_of(training))

    training.run()
    assert hooks_only(footprint(training.engine, training.model, training.optimizers[0])) == hooks_only(before)
    return reported, published, states


def check(setting: Setting, program: list[list[Any]], rule: Rule) -> None:
    reported, published, states = monitored(setting, program, rule)
    training = Training(setting, program)

    @training.engine.on(Events.ITERATION_COMPLETED)
    def compare(engine: Engine) -> None:
        training.moment()
        assert_same(states[engine.state.iteration - 1], state_of(training))

    training.run()
    truths, update = truth_of(training, rule, reported)
    for of_monitor, truth in zip(reported, truths, strict=True):
        for place, (result, expected) in enumerate(zip(of_monitor.moments, truth.moments, strict=True)):
            assert result[0] is expected[0], place
            assert result[1] == (None if expected[1] is None else pytest.approx(expected[1], rel=1e-9, abs=1e-30)), (
                place
            )
        assert of_monitor.announced == truth.announced
    for place, values in enumerate(published):
        expected = dict(update.published[place])
        for of_monitor, truth in zip(reported, truths, strict=True):
            expected |= {f"{of_monitor.monitor.prefix}/{name}": x for name, x in truth.published[place].items()}
        assert values == pytest.approx(expected, rel=1e-8, abs=1e-12), place


def truth_of(training: Training, rule: Rule, reported: list[Reported]) -> tuple[list[WindowTruth], UpdateTruth]:
    def is_monitored(iteration: int) -> bool:
        return iteration % training.setting.every == 0

    def held(optimizer: int) -> set[str]:
        return {training.names[id(item)] for item in training.held_by(optimizer)}

    model = {name for name in training.parameters if not name.startswith("other.")}
    other = set(training.parameters) - model
    watched, last = training.watched, len(training.optimizers) - 1
    own = model if watched is None else held(watched)
    truths = [
        WindowTruth(
            rule,
            own,
            lambda place: bool(held(place) & model) if watched is None else place == watched,
            other if training.setting.other else (),
            reported[0].moments,
        )
    ]
    if training.setting.other:
        truths.append(WindowTruth(rule, other, lambda place: place == last, model, reported[1].moments))
    trained = {name for name, item in training.parameters.items() if item.requires_grad}
    update = UpdateTruth(own, lambda place: held(place) & trained)
    for truth in (*truths, update):
        truth.follow(training.events, is_monitored)
    return truths, update


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@given(SETTINGS, PROGRAMS, RULES)
@example(CLIPPED, [[Backward("a"), Clip(0, 0.01), Backward("b", body=False), Step(0)]] * 3, RULE)
@example(GROWING, [[SPIKE], [Backward("ab")], [Backward("ab"), Step(0)]] * 2, RULE)
@example(GROWING, [[Backward("ab"), Step(0)], [Clip(0, 0.01), Step(0)], [Backward("a")], [Step(0)]] * 2, RULE)
@example(GROWING, [[SPIKE], [Zero(None, "data"), SPIKE], [Zero(None, "numpy"), Backward("ab"), Step(0)]], RULE)
@example(GROWING, [[ByHand("ab", "data.copy_"), Step(0)]] * 4, RULE)
@example(GROWING, [[Estimated(0)], [SPIKE, Replace(0, 0.01, "="), Step(0)]] * 2, RULE)
@example(GROWING, [[Backward("ab", create_graph=True, factor=30.0)]] * 2 + [[Backward("ab"), Step(0)]], RULE)
@example(EVERY_SECOND, [[Backward("ab")], [SPIKE], [Backward("ab")], [SPIKE], [Step(0)]], RULE)
@example(GROWING, [[SPIKE, Step(0), Step(0)], [Zero(None, "none"), Backward("ab"), Step(0), Step(0)]] * 2, RULE)
@example(SECOND, [[SPIKE, Step(0, 0.01), Step(1, 0.01)]] * 3, RULE)
@example(SECOND, [[Sam(1, "ab")], [Sam(0, "b"), Step(1)]], RULE)
@example(
    GAN, [[Backward("ab", through=True, factor=30.0), Step(1), Zero(None, "none"), Backward("a"), Step(0)]] * 2, RULE
)
@example(GAN, [[Backward("a"), Step(0)], [Backward("ab", through=True, factor=30.0), Step(1)]] * 2, RULE)
@example(GAN, [[Backward("a"), Step(0), Backward("ab", through=True, factor=30.0), Step(1)]] * 2, RULE)
@example(GAN, [[Backward("ab", through=True, factor=30.0), Step(1, 0.01), Step(0, 0.01)]] * 2, RULE)
@example(GAN, [[Backward("a"), Backward("ab", through=True, factor=30.0), Step(0)]] * 2, RULE)
@example(SECOND, [[Backward("ab"), Step(0), Backward("ab"), Step(1), Backward("b"), Step(1)]] * 2, RULE)
@example(LBFGS, [[Closure(0, "ab")]] * 3, RULE)
@example(BOTH, [[Backward("a"), Step(0), Backward("ab", factor=30.0), Step(1)]] * 2, RULE)
@example(
    BOTH, [[Zero(0, "none"), Backward("a"), Step(0)], [Zero(1, "none"), Backward("b", body=False), Step(1)]] * 2, RULE
)
@examples(60)
def test_any_train_step(setting, program, rule):
    check(setting, program, rule)
