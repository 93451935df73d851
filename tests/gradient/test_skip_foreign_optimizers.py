"""Reactions with optimizers that torch does not have: exact, or refused with the remedy.

Patterns of step() that hidden gradients do not stop; ``make compatibility`` adds the optimizers of packages.
"""

from __future__ import annotations

import copy
import importlib
import warnings

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import StepLR

from ignite_monitor import GradMonitor, StaticThreshold, WeightUpdateHandler
from tests._trainers import assert_same, grad_norm, loss_of, make_batches, make_model, train, training_state

LIMIT = 60.0


class MuonLike(torch.optim.Optimizer):
    """As Keller Jordan's Muon, it makes a gradient of zeros where there is none, and steps along its momentum."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.02, "momentum": 0.95})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])
                p.add_(update / (update.norm() + 1e-7), alpha=-group["lr"])


class DecaysAlways(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                p.mul_(1 - 1e-3)
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)


class NeedsAll(torch.optim.Optimizer):
    """Raises where a gradient is missing."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = torch.cat([p.grad.flatten() for p in group["params"]]).norm()
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad / norm)


class AdamThatDoesMore(torch.optim.Adam):
    @torch.no_grad()
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.99)
        return loss


def of(package, name, **arguments):
    def make(params):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(importlib.import_module(package), name)(params, **arguments)

    return make


OPTIMIZERS = {
    "MuonLike": MuonLike,
    "DecaysAlways": DecaysAlways,
    "NeedsAll": NeedsAll,
    "AdamThatDoesMore": AdamThatDoesMore,
}
INSTALLED_FOR_COMPATIBILITY = {
    "schedulefree.AdamWScheduleFree": of("schedulefree", "AdamWScheduleFree", lr=1e-2, warmup_steps=5),
    "schedulefree.SGDScheduleFree": of("schedulefree", "SGDScheduleFree", lr=1e-2),
    **{
        f"timm.{name}": of("timm.optim", name, lr=1e-3)
        for name in ("AdaBelief", "Adan", "Lamb", "Lion", "MADGRAD", "NvNovoGrad", "RMSpropTF", "SGDW")
    },
}
EVERY_OPTIMIZER = [
    *OPTIMIZERS,
    *(pytest.param(name, marks=pytest.mark.compatibility) for name in INSTALLED_FOR_COMPATIBILITY),
]


def build(name):
    torch.manual_seed(0)
    model = make_model(bias=False)
    optimizer = (OPTIMIZERS | INSTALLED_FOR_COMPATIBILITY)[name](model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    return model, optimizer


def attributes(optimizer):
    """Everything else that an optimizer keeps, as far as it can be compared."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (int, float, str, bool, torch.Tensor))
    }


def run(name, batches, scaler=None, on_spike="skip", before_step=lambda model: None):
    model, optimizer = build(name)
    scaler = None if scaler is None else scaler()
    scheduler = StepLR(optimizer, 3)

    def step(engine, batch):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        (loss if scaler is None else scaler.scale(loss)).backward()
        before_step(model)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        assert all(parameter.grad is not None for parameter in model.parameters())

    monitors = []
    if on_spike is not None:
        monitors = [GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike=on_spike, scaler=scaler)]
    torch.manual_seed(1)
    recorder = train(step, batches, *monitors)
    return model, optimizer, scheduler, recorder


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
@pytest.mark.parametrize("spikes", [(7,), (1, 2, 6)])
def test_a_skipped_step_was_not_made(name, spikes, amp):
    """Weights, state and the optimizer's own attributes are bitwise those of a run without the spikes' batches."""
    scaler = (lambda: GradScaler("cpu", init_scale=2.0**10)) if amp else None
    batches = make_batches(10, spikes, 1e3)
    model, optimizer, _, recorder = run(name, batches, scaler)
    assert recorder.of("grad/skipped_count")[-1] == len(spikes)
    kept = [batch for i, batch in enumerate(batches, 1) if i not in spikes]
    other, other_optimizer, _, _ = run(name, kept, scaler, on_spike=None)
    assert_same(training_state(model, optimizer), training_state(other, other_optimizer))
    assert_same(attributes(optimizer), attributes(other_optimizer))


@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_a_clipped_step_is_that_of_the_scaled_gradient(name):
    def scale(model):
        norm = grad_norm(model)
        if norm > LIMIT:
            for parameter in model.parameters():
                parameter.grad.copy_(parameter.grad.double() * (LIMIT / norm))

    batches = make_batches(10, (2, 7), 1e3)
    model, _, _, recorder = run(name, batches, on_spike="clip")
    other, *_ = run(name, batches, on_spike=None, before_step=scale)
    assert recorder.of("grad/clipped_count")[-1] == 2
    for own, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["MuonLike", "NeedsAll"])
def test_it_leaves_the_optimizer_as_it_came(name):
    model, optimizer = build(name)
    StepLR(optimizer, 3)  # which puts a step of its own in place of the method
    before = dict(vars(optimizer)), dict(optimizer._optimizer_step_pre_hooks)

    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        if engine.state.iteration == 3:
            raise KeyError("mine")

    GradMonitor(model, optimizer, on_spike="skip", threshold=StaticThreshold(LIMIT)).attach(engine := Engine(step))
    with pytest.raises(KeyError, match="mine"):
        engine.run(make_batches(5, (3,)))
    assert vars(optimizer)["step"] is before[0]["step"]
    assert dict(optimizer._optimizer_step_pre_hooks) == before[1]


def test_a_schedule_does_not_warn_of_it():
    model, optimizer = build("MuonLike")
    scheduler = StepLR(optimizer, 3)

    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
        scheduler.step()  # a warning would be an error here

    GradMonitor(model, optimizer, on_spike="skip", threshold=StaticThreshold(LIMIT)).attach(engine := Engine(step))
    engine.run(make_batches(5, (1, 3)))


def test_update_ratios_know_that_no_step_was_made():
    model, optimizer = build("DecaysAlways")

    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    engine = Engine(step)
    updates = WeightUpdateHandler(model, optimizer)
    updates.attach(engine)
    GradMonitor(model, optimizer, on_spike="skip", threshold=StaticThreshold(LIMIT)).attach(engine)
    seen = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: seen.append("monitor/update_ratio_median" in updates.metrics)
    )
    engine.run(make_batches(4, (3,)))
    assert seen == [True, True, False, True]


class SAMLike(torch.optim.Optimizer):
    """As sharpness-aware minimization is written: the closure is evaluated where the weights have been moved to."""

    def __init__(self, params, needs=False):
        super().__init__(params, {"lr": 0.01})

    def first_step(self):
        pass

    def second_step(self):
        pass

    def step(self, closure=None):
        self.first_step()
        closure()
        self.second_step()


class NeedsClosure(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure):
        closure()


class NoConstructor(torch.optim.Optimizer):
    def __init__(self, params):
        self.param_groups = [{"params": list(params)}]
        self.state = {}

    def step(self, closure=None):
        pass


@pytest.mark.parametrize("kind", [SAMLike, NeedsClosure, torch.optim.LBFGS, NoConstructor])
def test_what_is_known_beforehand_is_refused_in_the_constructor(kind):
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=f"{kind.__name__}.*unhealthy_spike"):
        GradMonitor(model, kind(model.parameters()), on_spike="skip")


def test_a_closure_is_refused_at_the_first_step_before_anything_has_moved():
    model, optimizer = build("MuonLike")
    before = copy.deepcopy(training_state(model, optimizer))

    def step(engine, batch):
        optimizer.step(lambda: loss_of(model, batch))

    GradMonitor(model, optimizer, on_spike="skip").attach(engine := Engine(step))
    with pytest.raises(ValueError, match=r"MuonLike.*closure.*unhealthy_spike"):
        engine.run(make_batches(2))
    assert_same(training_state(model, optimizer), before)


def test_a_method_that_was_kept_from_before_is_refused():
    model, optimizer = build("MuonLike")
    kept = optimizer.step

    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        kept()

    GradMonitor(model, optimizer, on_spike="skip").attach(engine := Engine(step))
    with pytest.raises(ValueError, match=r"MuonLike.*optimizer.step\(\)"):
        engine.run(make_batches(2))


def test_optimizers_that_pass_steps_on():
    """As accelerate's do: the given one holds the groups of the one that steps."""
    model, inner = build("MuonLike")

    class Passing(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

        param_groups = property(lambda self: self.optimizer.param_groups)
        state = property(lambda self: self.optimizer.state)

        def step(self, closure=None):
            return self.optimizer.step(closure) if closure else self.optimizer.step()

    optimizer = Passing(inner)

    def step(engine, batch):
        inner.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip")
    recorder = train(step, make_batches(6, (3,)), monitor)
    assert recorder.of("grad/skipped_count")[-1] == 1
    kept = [batch for i, batch in enumerate(make_batches(6, (3,)), 1) if i != 3]
    other = run("MuonLike", kept, on_spike=None)[0]
    assert_same([*model.parameters()], [*other.parameters()])
