"""on_spike with optimizers that torch does not have: exact, or refused with the fix.

``test_skip_step.py`` and ``test_clip.py`` compare the steps.
"""

from __future__ import annotations

import copy

import pytest
import torch
from ignite.engine import Engine
from torch import nn
from torch.optim.lr_scheduler import StepLR

from ignite_monitor import GradMonitor, StaticThreshold
from tests._helpers import assert_same, make_step, mlp_batches, mse_loss, train, training_state
from tests._models import make_mlp
from tests._optimizers import MuonLike, build

LIMIT = 60.0


@pytest.mark.parametrize("name", ["MuonLike", "NeedsAll"])
def test_it_leaves_the_optimizer_as_it_came(name):
    model, optimizer = build(name)
    StepLR(optimizer, 3)  # which puts a step of its own in place of the method
    before = dict(vars(optimizer)), dict(optimizer._optimizer_step_pre_hooks)

    def fail(engine):
        if engine.state.iteration == 3:
            raise KeyError("mine")

    engine = Engine(make_step(model, optimizer, before_step=fail))
    GradMonitor(model, optimizer, on_spike="skip", threshold=StaticThreshold(LIMIT)).attach(engine)
    with pytest.raises(KeyError, match="mine"):
        engine.run(mlp_batches(5, (3,)))
    assert vars(optimizer)["step"] is before[0]["step"]
    assert dict(optimizer._optimizer_step_pre_hooks) == before[1]


class NoConstructor(torch.optim.Optimizer):
    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]
        self.state = {}

    def step(self, closure=None):
        pass


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, NoConstructor])
def test_what_is_known_beforehand_is_refused_in_the_constructor(kind):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"{kind.__name__}.*unhealthy_spike"):
        GradMonitor(model, kind(model.parameters()), on_spike="skip")


def test_a_closure_is_refused_at_the_first_step_before_anything_has_moved():
    model = make_mlp()
    optimizer = MuonLike(model.parameters())
    before = copy.deepcopy(training_state(model, optimizer))

    def step(engine, batch):
        optimizer.step(lambda: mse_loss(model, batch))

    GradMonitor(model, optimizer, on_spike="skip").attach(engine := Engine(step))
    with pytest.raises(ValueError, match=r"MuonLike.*closure.*unhealthy_spike"):
        engine.run(mlp_batches(2))
    assert_same(training_state(model, optimizer), before)


@pytest.mark.parametrize("name", ["SGD", "MuonLike"])
def test_a_scheduler_may_be_created_in_the_train_step(name):
    model, optimizer = build(name)
    schedulers = []

    def create(engine):
        if not schedulers:
            schedulers.append(StepLR(optimizer, 3))

    monitor = GradMonitor(model, optimizer, on_spike="skip", threshold=StaticThreshold(LIMIT))
    recorder = train(make_step(model, optimizer, before_step=create), mlp_batches(5, (1, 3)), monitor)
    assert recorder.of("grad/skipped_count")[-1] == 2
    assert optimizer._opt_called  # what the scheduler has put in place is called


class Slow(torch.optim.Optimizer):
    """Steps with an optimizer whose parameter groups it shares, and every second time goes back half of the way."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups, self.count = inner, inner.param_groups, 0
        self.kept = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            for kept, parameter in zip(self.kept, self.param_groups[0]["params"], strict=True):
                kept.copy_(parameter.lerp_(kept, 0.5))


def train_slow(batches, given=None, **options):
    model = make_mlp()
    optimizer = Slow(torch.optim.AdamW(model.parameters(), lr=1e-2))
    monitors = [GradMonitor(model, given(optimizer), threshold=StaticThreshold(LIMIT), **options)] if given else []
    recorder = train(make_step(model, optimizer), batches, *monitors)
    return [*model.parameters()], recorder, monitors


def test_an_optimizer_within_the_one_that_steps_is_measured_and_its_steps_are_made():
    batches = mlp_batches(7, (3, 4))
    weights, recorder, [monitor] = train_slow(batches, lambda optimizer: optimizer.inner, on_spike="skip")
    plain, expected, _ = train_slow(batches, lambda optimizer: optimizer.inner)
    assert_same(weights, train_slow(batches)[0])
    assert_same(plain, weights)
    assert recorder.of("grad/norm") == expected.of("grad/norm")
    assert recorder.of("grad/stepped") == [1.0] * 7
    [report] = monitor.reports
    assert report.iteration == 1
    assert "Slow" in report.text


def test_the_optimizer_that_steps_is_skipped_as_a_whole():
    batches = mlp_batches(7, (3, 4))
    weights, recorder, _ = train_slow(batches, lambda optimizer: optimizer, on_spike="skip")
    assert recorder.of("grad/skipped_count")[-1] == 2
    assert_same(weights, train_slow([*batches[:2], *batches[4:]])[0])


class WithScaler(torch.optim.Optimizer):
    """Takes the GradScaler in its step; GradScaler looks for the argument."""

    _step_supports_amp_scaling = True

    def __init__(self, params):
        super().__init__(params, {})
        self.given = []

    def step(self, closure=None, *, grad_scaler=None):
        self.given.append(grad_scaler)


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop passing itself")
def test_the_arguments_of_a_step_are_seen():
    model = make_mlp()
    optimizer, scaler = WithScaler(model.parameters()), torch.amp.GradScaler("cpu", init_scale=4.0)

    def step(engine, batch):
        scaler.scale(mse_loss(model, batch)).backward()
        scaler.step(optimizer)

    train(step, mlp_batches(1), GradMonitor(model, optimizer, scaler=scaler, on_spike="skip"))
    assert optimizer.given == [scaler]


def test_a_method_that_was_kept_from_before_is_refused():
    model, optimizer = build("MuonLike")
    kept = optimizer.step
    engine = Engine(make_step(model, optimizer, before_step=lambda _: kept()))
    GradMonitor(model, optimizer, on_spike="skip").attach(engine)
    with pytest.raises(ValueError, match=r"MuonLike.*optimizer.step\(\)"):
        engine.run(mlp_batches(2))


def test_optimizers_that_pass_steps_on():
    """A wrapper without step hooks is refused, unless it is accelerate's; the optimizer in it is skipped."""
    model, inner = build("MuonLike")

    class Passing(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

        def step(self, closure=None):
            return self.optimizer.step(closure) if closure else self.optimizer.step()

        def zero_grad(self, set_to_none=True):
            self.optimizer.zero_grad(set_to_none)

    optimizer = Passing(inner)
    with pytest.raises(ValueError, match=r"Passing.*give that one"):
        GradMonitor(model, optimizer, on_spike="skip")
    Passing.__module__ = "accelerate.optimizer"
    for given in (inner, optimizer):
        assert GradMonitor(model, given, on_spike="skip").acts_on is inner
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip")
    recorder = train(make_step(model, optimizer), mlp_batches(6, (3,)), monitor)
    assert recorder.of("grad/skipped_count")[-1] == 1
    kept = [batch for i, batch in enumerate(mlp_batches(6, (3,)), 1) if i != 3]
    other, other_optimizer = build("MuonLike")
    train(make_step(other, other_optimizer), kept)
    assert_same([*model.parameters()], [*other.parameters()])
