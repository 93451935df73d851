"""A second pass finds every flipped bit, is never different on a healthy machine, and leaves training as it is."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from ignite_monitor import GradMonitor, MonitorEvents, ReplayCheckHandler, StaticThreshold
from ignite_monitor.model.isolation import in_second_pass
from tests._handlers import HANDLERS
from tests._helpers import make_batches, make_step, mse_loss, run_monitored, same
from tests._models import make_model

KEY = "replay/reproducible"
SAME = {KEY: 1.0}


class Tied(nn.Module):
    """Twice the same weight in one region of autocast; noise of all global generators, and of one of its own."""

    def __init__(self):
        super().__init__()
        self.encoder, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.generators = [np.random.default_rng(0), torch.Generator().manual_seed(0), random.Random(0)]

    def forward(self, x):
        own = self.generators[0].random() + torch.rand((), generator=self.generators[1]) + self.generators[2].random()
        noise = random.random() + np.random.rand() + torch.rand(8)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.middle(torch.relu(self.middle(self.encoder(x) + noise * own)))
        return self.head(F.dropout(hidden.float(), 0.1))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2)
    return make_step(model, optimizer, 2, scaler=scaler, clip=0.5)


def with_state(model, optimizer):
    """A train step that keeps an attribute of the engine's state."""

    def step(engine, batch):
        factor = engine.state.factor = getattr(engine.state, "factor", 1.0) * 0.9
        return make_step(model, optimizer, loss_of=lambda *args: factor * mse_loss(*args))(engine, batch)

    return step


def with_average(model, optimizer):
    """A train step that ends with other changes."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    model.__dict__["average"] = average
    step = make_step(model, optimizer, clip=0.1)
    return lambda engine, batch: (step(engine, batch), scheduler.step(), average.update_parameters(model))


def stepping_elsewhere(model, optimizer):
    """Another optimizer steps first; every error of the backward is ignored."""
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)

    def step(engine, batch):
        optimizer.zero_grad()
        for action in (mse_loss(model, batch).backward, other.step, optimizer.step):
            with contextlib.suppress(BaseException):
                action()

    return step


def halved(model, optimizer):
    """Halves a sparse gradient before the step, which is made without gradients."""

    def loss_of(model, batch):
        return F.mse_loss(model(batch[0].abs().long() % 5).mean(1), batch[1])

    optimizer.step = torch.no_grad()(optimizer.step)
    return make_step(model, optimizer, loss_of=loss_of, before_step=lambda _: model.weight.grad.mul_(0.5))


# name -> model, optimizer, train step
STEPS = {
    "accumulation": (make_model, sgd, functools.partial(make_step, parts=4, clip=0.1)),
    "over iterations": (make_model, sgd, functools.partial(make_step, every=3)),
    "cleared last": (make_model, sgd, functools.partial(make_step, zero_at="end")),
    "set to zero": (make_model, sgd, functools.partial(make_step, zero_at="end", set_to_none=False)),
    "fused": (make_model, lambda m: torch.optim.AdamW(m.parameters(), fused=True), make_step),
    "early return": (make_model, sgd, functools.partial(make_step, parts=2, leave_out=lambda e: e.state.iteration % 2)),
    "scaler": (make_model, sgd, scaled),
    "average": (make_model, sgd, with_average),
    "state": (make_model, sgd, with_state),
    "sparse": (lambda: nn.Embedding(5, 3, sparse=True), lambda m: torch.optim.SGD(m.parameters(), lr=0.05), halved),
    "another optimizer": (make_model, sgd, stepping_elsewhere),
    "autocast": (Tied, sgd, functools.partial(make_step, parts=2)),
    "spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 3)), sgd, make_step),
}


def train(steps, batches, *monitors):
    """Return the metrics and the state after a run; ``monitors`` makes them from model and optimizer."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    make, optimizer_of, step_of = steps
    model = make()
    optimizer = optimizer_of(model)
    step = step_of(model, optimizer)
    rows = run_monitored(step, batches, *(monitor(model, optimizer) for monitor in monitors))
    numbers = [torch.rand(3), random.random(), np.random.rand()]
    own = [torch.rand(3, generator=item) for item in getattr(model, "generators", [])[1:2]]
    gradients = [(item.grad, item._version) for item in model.parameters()]
    average = dict(model.__dict__.get("average", model).state_dict())
    return rows, [dict(model.state_dict()), average, optimizer.state_dict(), gradients, numbers, own]


@pytest.mark.parametrize("name", STEPS)
def test_training_is_untouched_and_reproducible(name, caplog):
    batches = make_batches(7, spikes=[5])
    rows, state = train(STEPS[name], batches, ReplayCheckHandler)
    assert same(state, train(STEPS[name], batches)[1])
    assert rows == [SAME] * 7
    assert caplog.messages == []


def test_a_healthy_machine_is_never_different():
    rows, _ = train(STEPS["autocast"], make_batches(300), ReplayCheckHandler)
    assert rows == [SAME] * 300


@pytest.mark.parametrize(("name", "parts"), [("accumulation", 4), ("over iterations", 1), ("scaler", 2)])
def test_a_flipped_bit_in_one_pass_is_found(name, parts):
    """Flips a random bit of a random gradient element in either pass, from the first iteration on."""
    chance, expected, fault, calls = random.Random(3), [], {}, []
    bits = range(32) if name == "accumulation" else range(23)  # else it may overflow, without a step

    def faulty(model, optimizer):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        handler = ReplayCheckHandler(model, optimizer)
        handler.start_iteration = lambda engine: draw([*model.parameters()])
        return handler

    def draw(parameters):
        calls.clear()
        expected.append({KEY: float(len(expected) > 0 and chance.random() < 0.3)})
        fault.update(parameter=chance.choice(parameters), in_second=chance.random() < 0.5, bit=chance.choice(bits))

    def hook(parameter):
        if parameter is fault["parameter"] and in_second_pass() == fault["in_second"] and expected[-1] != SAME:
            calls.append(parameter)
            if len(calls) == parts:  # an earlier one may be lost to rounding
                element = chance.randrange(parameter.numel())
                parameter.grad.view(-1).view(torch.int32)[element] ^= (1 << fault["bit"]) - (fault["bit"] == 31) * 2**32

    rows, _ = train(STEPS[name], make_batches(60), faulty)
    assert rows == expected


# fault -> results of iterations 4, 6, 8; part of the warning
AT_SPIKES = {
    "none": ({4: 1.0, 6: 1.0, 8: 1.0}, ""),
    "second pass": ({4: 1.0, 6: 0.0, 8: 1.0}, "gave other gradients: 0.weight (by up to 1)"),
    "before any pass": ({}, "another state"),
    "over iterations": ({4: 1.0, 8: 1.0}, "another state"),
    "changed between": ({4: 1.0, 8: 1.0}, "another state"),
}


@pytest.mark.parametrize("fault", AT_SPIKES)
def test_a_spike_between_monitored_iterations_is_replayed(fault, caplog):
    """Iterations 4 and 8 are monitored, 6 has a spike, at which a handler sets the gradients to zero."""
    model = make_model()
    optimizer = sgd(model)
    handler = ReplayCheckHandler(model, optimizer)
    if fault in ("second pass", "before any pass"):
        model[0].weight.register_post_accumulate_grad_hook(
            lambda item: [item.grad.add_(in_second_pass() and trainer.state.iteration == 6)].clear()
        )
    parts, every = 2 if fault == "changed between" else 1, 3 if fault == "over iterations" else 1
    trainer, published = Engine(make_step(model, optimizer, parts, every=every)), {}
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(100.0), on_spike="skip")
    if fault == "none":  # then it detects the spike, at which gradients change, before the handler sees the gradients
        monitor.attach(trainer)
    handler.attach(trainer, Events.ITERATION_STARTED(every=100 if fault == "before any pass" else 4))
    if fault != "none":
        monitor.attach(trainer)

    @trainer.on(MonitorEvents.SPIKE_DETECTED)
    def clear():
        for item in model.parameters():
            item.grad.zero_()

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine):
        if KEY in engine.state.metrics:
            published[engine.state.iteration] = engine.state.metrics[KEY]

    trainer.run(make_batches(9, spikes=[6]))
    expected, cause = AT_SPIKES[fault]
    assert published == expected
    assert [cause in text for text in caplog.messages if "ReplayCheck" in text] == [True] * (fault != "none")


def changing_batch(model, optimizer):
    step = make_step(model, optimizer)
    return lambda engine, batch: (batch[0].mul_(0.5), step(engine, batch))


def perturbing(model, optimizer):
    """The weights move past version counters."""

    def loss_of(model, batch):
        for item in model.parameters():
            item.data.mul_(1.001)
        return mse_loss(model, batch)

    return make_step(model, optimizer, loss_of=loss_of)


def inside_backward(model, optimizer):
    parameter, is_last = next(model.parameters()), itertools.cycle([False, True])
    own = torch.optim.SGD([parameter], lr=0.1)
    parameter.register_post_accumulate_grad_hook(lambda _: own.step() if next(is_last) else None)
    return make_step(model, torch.optim.SGD([*model.parameters()][1:], lr=0.1), parts=2)


def overflowing(model, optimizer):
    """The gradient of the last bias, 8 times the scale, overflows in every iteration."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=0.999)

    def loss_of(model, batch):
        output = model(batch[0])
        return (output - output.detach()).sum()

    return make_step(model, optimizer, scaler=scaler, loss_of=loss_of)


def failing_twice(model, optimizer):
    step = make_step(model, optimizer)
    return lambda engine, batch: {}["once"] if in_second_pass() else step(engine, batch)


def inside_autocast(model, optimizer):
    return torch.autocast("cpu", torch.bfloat16)(make_step(model, optimizer))


UNREPORTED = {
    "inside autocast": (inside_autocast, "inside of backward, autocast"),
    "changing batch": (changing_batch, "another state"),
    "perturbing": (perturbing, "another state"),
    "inside backward": (inside_backward, "inside of backward"),
    "overflowing": (overflowing, "another state"),
    "failing twice": (failing_twice, "KeyError: 'once'"),
    "closure": (functools.partial(make_step, closure=True), "before any backward"),
}


@pytest.mark.parametrize("name", UNREPORTED)
def test_what_cannot_be_repeated_is_not_reported_with_one_warning(name, caplog):
    """Even after a second pass that was the same."""
    step_of, cause = UNREPORTED[name]

    def loaded(model, optimizer):
        handler = ReplayCheckHandler(model, optimizer)
        handler.load_state_dict({"same_count": 1})
        return handler

    rows, state = train((make_model, sgd, step_of), make_batches(5), loaded)
    assert rows == [{}] * 5
    assert [cause in text for text in caplog.messages if "ReplayCheck" in text] == [True]
    assert not torch.is_autocast_enabled("cpu")
    if name != "changing batch":
        assert same(state, train((make_model, sgd, step_of), make_batches(5))[1])


def test_side_effects_before_the_last_backward_happen_twice_and_no_others():
    calls, model = [], make_model()
    step = make_step(model, optimizer := sgd(model), 2, before_step=lambda engine: calls.append("after"))
    trainer = Engine(lambda engine, batch: (calls.append("before"), step(engine, batch)))
    ReplayCheckHandler(model, optimizer).attach(trainer)
    trainer.add_event_handler(MonitorEvents.GRADIENTS_READY, lambda: calls.append("event"))
    trainer.run(make_batches(1))
    assert calls == ["before", "event", "event", "after", "before"]


def test_what_only_the_train_step_knows_is_restored():
    """A module and an optimizer that the handler was not given, and a generator that an iteration creates."""

    def state(is_watched):
        encoder, model, generators = make_model(), nn.Linear(3, 3), []
        both = nn.Sequential(encoder, model)
        own, other = sgd(model), sgd(encoder)

        def step(engine, batch):
            generators.extend([random.Random(0)] if engine.state.iteration == 3 else [])
            draws = [generator.random() for generator in generators]
            own.zero_grad(), other.zero_grad()
            (mse_loss(both, batch) + sum(draws) * both(batch[0]).mean()).backward()
            nn.utils.clip_grad_norm_(both.parameters(), 0.1 + sum(generator.random() for generator in generators))
            own.step(), other.step()

        handlers = [ReplayCheckHandler(model, own)] if is_watched else []
        rows = run_monitored(step, make_batches(4), *handlers, event=Events.ITERATION_STARTED(every=2))
        assert rows == [{}, SAME if is_watched else {}] * 2
        return [dict(both.state_dict()), generators[0].random()]

    assert same(state(True), state(False))


def test_no_other_monitor_sees_the_second_pass():
    """One of every class."""
    others = [make for name, make in HANDLERS.items() if "," not in name and name != "ReplayCheckHandler"]
    results = [train(STEPS["accumulation"], make_batches(4), *made) for made in (others, [ReplayCheckHandler, *others])]
    for rows, _ in results:
        for row in rows:
            for key in [key for key in row if key.startswith(("step/", "replay"))]:
                del row[key]
    assert same(*results)
    assert len(results[0][0][0]) > 50
