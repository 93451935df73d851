"""Any train step: what GradMonitor and WeightUpdateHandler say at each moment of it, and that it is left alone.

``HARD_USE_EXAMPLES=50`` tries 50 times as many programs, see :mod:`tests.hard_use._profile`.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ignite.engine import Engine, Events

from ignite_monitor import GradMonitor, WeightUpdateHandler
from tests._helpers import footprint, hooks_only
from tests._trainers import assert_same
from tests.hard_use._judge import Rule, mean_std, static
from tests.hard_use._profile import examples
from tests.hard_use._steps import PROGRAMS, SETTINGS, Backward, Clip, Setting, Step, Training, Truth, Watcher

RULE = static(0.3)
RULES = st.sampled_from([mean_std(0.5, 2, None), mean_std(1.0, 3, 0.9), RULE])
CLIPPED = Setting("", ("sgd", "adamw"), watched=0, zeroing=False)
GROWING = Setting("", ("sgd",), watched=0, zeroing=None)


class Moments(Watcher):
    """Reads what a monitor says of each moment."""

    def __init__(self) -> None:
        self.said: list[tuple[bool, float | None]] = []
        self.training: Training | None = None

    def iteration_started(self) -> None:
        self.moment()

    def iteration_completed(self) -> None:
        self.moment()

    def moment(self) -> None:
        state = self.training.engine.state
        norm = getattr(state, "grad_norm", None)
        self.said.append((bool(getattr(state, "unhealthy_spike", False)), None if norm is None else float(norm)))


def state_of(training: Training) -> dict[str, Any]:
    """Parameters, gradients and optimizer states, copied."""
    gradients = [parameter.grad for parameter in training.model.parameters()]
    return {
        "parameters": [each.detach().clone() for each in training.model.parameters()],
        "gradients": [None if each is None else each.detach().clone() for each in gradients],
        "optimizers": copy.deepcopy([optimizer.state_dict() for optimizer in training.optimizers]),
    }


def monitored(
    setting: Setting, program: list[list[Any]], rule: Rule
) -> tuple[Moments, list[dict[str, float]], list[Any]]:
    moments = Moments()
    training = moments.training = Training(setting, program, moments)
    before = footprint(training.engine, training.model, training.optimizers[0])
    published: list[dict[str, float]] = []
    states: list[Any] = []
    monitors = [
        GradMonitor(training.model, training.watched, threshold=rule.make()),
        WeightUpdateHandler(training.model, training.watched, top_k=0),
    ]
    for monitor in monitors:
        monitor.attach(training.engine)

    @training.engine.on(Events.ITERATION_COMPLETED)
    def note(engine: Engine) -> None:
        moments.iteration_completed()
        published.append({name: float(value) for name, value in engine.state.metrics.items()})
        states.append(state_of(training))

    training.run()
    assert hooks_only(footprint(training.engine, training.model, training.optimizers[0])) == hooks_only(before)
    return moments, published, states


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@given(SETTINGS, PROGRAMS, RULES)
@example(CLIPPED, [[Backward("a"), Clip(0, 0.01), Backward("b", body=False), Step(0)]] * 3, RULE)
@example(GROWING, [[Backward("ab", factor=30.0)], [Backward("ab")], [Backward("ab"), Step(0)]] * 2, RULE)
@example(GROWING, [[Backward("ab"), Step(0)], [Clip(0, 0.01), Step(0)], [Backward("a")], [Step(0)]] * 2, RULE)
@examples(100)
def test_any_train_step(setting, program, rule):
    moments, published, states = monitored(setting, program, rule)

    truth = Truth(rule, moments.said)
    training = Training(setting, program, truth)
    truth.follow(training)

    @training.engine.on(Events.ITERATION_COMPLETED)
    def compare(engine: Engine) -> None:
        truth.iteration_completed()
        assert_same(states[engine.state.iteration - 1], state_of(training))

    training.run()
    for place, (said, expected) in enumerate(zip(moments.said, truth.moments, strict=True)):
        assert said[0] is expected[0], place
        assert (said[1] is None) is (expected[1] is None), place
        assert said[1] is None or said[1] == pytest.approx(expected[1], rel=1e-9, abs=1e-30), place
    for place, (values, grad, update) in enumerate(zip(published, truth.grad, truth.update, strict=True)):
        assert values == pytest.approx(grad | update, rel=1e-8, abs=1e-12), place
