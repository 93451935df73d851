"""Two monitors that act on one optimizer: the step is changed once, as both ask, and restored once."""

from __future__ import annotations

import math

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.amp import GradScaler

from ignite_monitor import GradMonitor, RollbackHandler, StaticThreshold
from tests._helpers import Recorder, assert_same, grad_norm, make_step, mlp_batches, train, training_state
from tests._optimizers import FEW, FOREIGN, build

LIMIT = 60.0
BOTH = [("skip", "skip"), ("skip", "clip"), ("clip", "skip")]


def monitors_of(model, optimizer, actions, limits=(LIMIT, LIMIT), scaler=None, parts=False):
    """One monitor for each action, on one model or on the halves of it."""
    models = (model[0], model[2]) if parts else (model, model)
    return [
        GradMonitor(
            part, optimizer, threshold=StaticThreshold(limit), on_spike=action, scaler=scaler, prefix=name, flag=name,
            norm_type=2.0 if name == "one" else math.inf,
        )
        for part, action, limit, name in zip(models, actions, limits, ("one", "two"), strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("parts", [False, True], ids=["one model", "two models"])
@pytest.mark.parametrize("actions", BOTH)
@pytest.mark.parametrize("name", [*FEW, *FOREIGN])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_spike_that_any_of_them_skips_leaves_no_trace(name, actions, parts, scaled):
    """Forty steps after two spikes, one of them not finite, are those of a run without their batches."""
    limits = (2.0, 2.0) if "clip" not in actions else tuple(2.0 if action == "skip" else 1e9 for action in actions)
    batches = mlp_batches(46, [4], 1e4)
    batches[8] = mlp_batches(46, [9], 1e9 if scaled else math.nan)[8]  # AMP's own business if it is not finite
    model, optimizer = build(name)
    scaler = GradScaler("cpu", init_scale=4.0) if scaled else None
    for _, targets in batches:
        targets.mul_(1e-2)  # no norm but those of the spikes is above the limits
    recorder = train(
        make_step(model, optimizer, scaler=scaler),
        batches,
        *monitors_of(model, optimizer, actions, limits, scaler, parts),
    )
    other, other_optimizer = build(name)
    kept = [batch for i, batch in enumerate(batches, 1) if i not in (4, 9)]
    train(make_step(other, other_optimizer, scaler=GradScaler("cpu", init_scale=4.0) if scaled else None), kept)
    assert_same(training_state(model, optimizer), training_state(other, other_optimizer))
    for prefix in ("one", "two"):  # who has not asked knows of the skipped step too
        assert recorder.of(f"{prefix}/stepped") == [i not in (4, 9) for i in range(1, 47)]
    assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("name", FEW)
def test_two_that_clip_one_model_scale_it_to_the_smaller_norm_once(name):
    model, optimizer = build(name)
    used = []
    optimizer.register_step_post_hook(lambda *_: used.append(grad_norm(model)))
    monitors = monitors_of(model, optimizer, ("clip", "clip"), (9.0, 4.0))
    for monitor in monitors:
        monitor._detector._norm_type = 2.0
    train(make_step(model, optimizer), mlp_batches(6, [3], 1e4), *monitors)
    assert used[2] == pytest.approx(4.0, rel=1e-5)


def test_two_that_clip_two_models_scale_the_step_by_the_smaller_factor():
    model, optimizer = build("AdamW")
    used, before = [], []
    optimizer.register_step_post_hook(lambda *_: used.append([grad_norm(model[0]), grad_norm(model[2])]))
    monitors = monitors_of(model, optimizer, ("clip", "clip"), (3.0, 5.0), parts=True)
    for monitor in monitors:
        monitor._detector._norm_type = 2.0
    note = lambda _: before.append([grad_norm(model[0]), grad_norm(model[2])])  # noqa: E731
    train(make_step(model, optimizer, after_backward=note), mlp_batches(4, [2], 1e4), *monitors)
    factors = [limit / norm for limit, norm in zip((3.0, 5.0), before[1], strict=True)]
    assert max(factors) < 1
    assert used[1] == pytest.approx([min(factors) * norm for norm in before[1]], rel=1e-5)


@pytest.mark.parametrize("name", ["AdamW", "fused AdamW", "DecaysAlways"])
def test_a_rollback_beside_them_restores_a_state_that_goes_on(name):
    model, optimizer = build(name)
    monitors = monitors_of(model, optimizer, ("skip", "skip"))
    rollback = RollbackHandler({"model": model, "optimizer": optimizer}, every=5)
    engine = Engine(make_step(model, optimizer))
    for monitor in (*monitors, rollback):
        monitor.attach(engine)
    engine.add_event_handler(Events.ITERATION_STARTED(once=33), lambda: rollback.request("a test"))
    recorder, moved, before = Recorder(engine), [], []
    engine.add_event_handler(Events.ITERATION_STARTED, lambda: before.append(model[0].weight.detach().clone()))
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: moved.append(not torch.equal(before[-1], model[0].weight.detach()))
    )
    engine.run(mlp_batches(64, [30, 58], 1e4), max_epochs=1)
    assert recorder.of("rollback/count")[-1] == 1
    assert not moved[57]  # counted from 0: the batch of iteration 58 is skipped
    assert all(moved[58:])
    assert not hasattr(optimizer, "found_inf")


class Lookahead(torch.optim.Optimizer):
    """Slow weights, every second step, around another optimizer."""

    def __init__(self, optimizer, hooks=True):
        if hooks:
            super().__init__(optimizer.param_groups, {})
        self.inner, self.count = optimizer, 0
        self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, {}
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def zero_grad(self, set_to_none=True):
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for parameter, slow in self.slow.items():
                slow.lerp_(parameter, 0.5)
                parameter.copy_(slow)


@pytest.mark.parametrize("fused", [False, True])
def test_a_wrapper_with_work_of_its_own_is_skipped_as_a_whole_or_refused(fused):
    def run(batches, monitored):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = Lookahead(torch.optim.AdamW(model.parameters(), fused=fused))
        monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip")
        train(make_step(model, optimizer), batches, *[monitor] * monitored)
        return optimizer.count, model.weight.detach()

    batches = mlp_batches(9, [4], 1e5)
    (count, weight), (other_count, other) = run(batches, True), run([*batches[:3], *batches[4:]], False)
    assert count == other_count == 8
    assert_same(weight, other)
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="Lookahead cannot be skipped, since it has no step hooks"):
        GradMonitor(model, Lookahead(torch.optim.AdamW(model.parameters()), hooks=False), on_spike="skip")


@pytest.mark.parametrize("name", [*FEW, *FOREIGN])
def test_the_hooks_of_the_optimizer_see_its_gradients_and_what_they_zero_stays_zero(name):
    """A pre-hook of the user's needs every gradient, a post-hook sets them to zero."""

    def run(batches, monitored):
        model, optimizer = build(name)
        seen = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(sum(float(p.grad.norm()) for p in model.parameters())))
        optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
        monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip")
        train(make_step(model, optimizer, zero_at="never"), batches, *[monitor] * monitored)
        return training_state(model, optimizer), seen

    batches = mlp_batches(10, [5], 1e4)
    (state, seen), (other, _) = run(batches, True), run([*batches[:4], *batches[5:]], False)
    assert_same(state, other)
    assert sum(value > LIMIT for value in seen) == 1  # a step inside of a step has hooks of its own
