"""A second pass finds every flipped bit, is never different on a healthy machine, and leaves training as it is."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from ignite_monitor import GradMonitor, MonitorEvents, ReplayCheckHandler, StaticThreshold
from ignite_monitor.model.isolation import is_reference_run
from tests._helpers import make_batches, make_model, make_step, mse_loss, run_monitored, same
from tests.monitor._handlers import HANDLERS

KEY = "replay/reproducible"
SAME = {KEY: 1.0}


class Tied(nn.Module):
    """Twice the same weight in one region of autocast; noise of all global generators, and of one of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.generators = [np.random.default_rng(0), torch.Generator().manual_seed(0), random.Random(0)]

    def forward(self, x):
        own = self.generators[0].random() + torch.rand((), generator=self.generators[1]) + self.generators[2].random()
        noise = random.random() + np.random.rand() + torch.rand(8)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.middle(torch.relu(self.middle(self.encoder(x) + noise * own)))
        return self.head(F.dropout(hidden.float(), 0.1))


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, **options)


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2)
    return make_step(model, optimizer, 2, scaler=scaler, clip=0.5)


def scheduled(model, optimizer):
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    model.__dict__["average"] = average
    step = make_step(model, optimizer, clip=0.1)
    return lambda engine, batch: (step(engine, batch), scheduler.step(), average.update_parameters(model))


def with_state(model, optimizer):
    """A train step that keeps an attribute of the engine's state, inside of autocast."""

    def step(engine, batch):
        engine.state.scale = getattr(engine.state, "scale", 1.0) * 0.9
        with torch.autocast("cpu", torch.bfloat16):
            return make_step(model, optimizer, loss_of=lambda *args: engine.state.scale * mse_loss(*args))(
                engine, batch
            )

    return step


# name -> model, optimizer, train step
STEPS = {
    "plain": (make_model, sgd, make_step),
    "accumulation": (make_model, sgd, functools.partial(make_step, parts=4, clip=0.1)),
    "over iterations": (make_model, sgd, functools.partial(make_step, every=3)),
    "cleared last": (make_model, sgd, functools.partial(make_step, zero_at="end")),
    "set to zero": (make_model, sgd, functools.partial(make_step, zero_at="end", set_to_none=False)),
    "fused": (make_model, lambda m: torch.optim.AdamW(m.parameters(), fused=True), make_step),
    "early return": (make_model, sgd, functools.partial(make_step, parts=2, leave_out=lambda e: e.state.iteration % 2)),
    "scaler": (make_model, sgd, scaled),
    "schedule and average": (make_model, sgd, scheduled),
    "state": (make_model, sgd, with_state),
    "autocast": (Tied, sgd, functools.partial(make_step, parts=2)),
    "spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 3)), sgd, make_step),
}


def train(steps, batches, *monitors, event=Events.ITERATION_STARTED):
    """State after a run, with what was published; monitors are made from model and optimizer."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    make, optimizer_of, step_of = steps
    model = make()
    optimizer = optimizer_of(model)
    step = step_of(model, optimizer)
    made = [monitor(model, optimizer) for monitor in monitors]
    rows = run_monitored(step, batches, *made, event=event)
    numbers = [torch.rand(3), random.random(), np.random.rand()]
    own = [torch.rand(3, generator=item) for item in getattr(model, "generators", [])[1:2]]
    gradients = [(item.grad, item._version) for item in model.parameters()]
    average = model.__dict__.get("average", model).state_dict()
    return rows, [dict(model.state_dict()), optimizer.state_dict(), gradients, numbers, own, dict(average)]


def attached(model, optimizer):
    return ReplayCheckHandler(model, optimizer)


@pytest.mark.parametrize("name", STEPS)
def test_training_is_untouched_and_reproducible(name, caplog):
    batches = make_batches(7, spikes=[5])
    rows, state = train(STEPS[name], batches, attached)
    assert same(state, train(STEPS[name], batches)[1])
    assert rows == [SAME] * 7
    assert caplog.messages == []


def test_a_healthy_machine_is_never_different():
    rows, _ = train(STEPS["autocast"], make_batches(300), attached)
    assert rows == [SAME] * 300


def flipping(chance, parts, bits):
    """A handler with a fault: one flipped bit in some passes, and what it should publish in each iteration."""
    expected = []

    def make(model, optimizer):
        handler, parameters, fault, calls = attached(model, optimizer), dict(model.named_parameters()), {}, {}

        def hook(parameter, name):
            where = name, is_reference_run()
            calls[where] = calls.get(where, 0) + 1
            if where == fault["where"] and calls[where] == parts:  # an earlier one may be lost to rounding
                parameter.grad.view(-1).view(torch.int32)[fault["element"]] ^= fault["bit"]

        for own, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda parameter, own=own: hook(parameter, own))
        start = handler.start_iteration

        def start_iteration(engine):
            calls.clear()
            name, bit = chance.choice([*parameters]), chance.choice(bits)
            is_faulty = bool(expected) and chance.random() < 0.7  # the first pass is healthy
            fault["where"] = (name, chance.random() < 0.5) if is_faulty else None
            fault["element"] = chance.randrange(parameters[name].numel())
            fault["bit"] = -(2**31) if bit == 31 else 1 << bit
            expected.append({KEY: float(not is_faulty)})
            start(engine)

        handler.start_iteration = start_iteration
        return handler

    return make, expected


@pytest.mark.parametrize(("name", "parts"), [("accumulation", 4), ("over iterations", 1), ("scaler", 2)])
def test_a_flipped_bit_in_one_pass_is_found(name, parts):
    """In the first or the second pass, in a random element of a random parameter's gradient."""
    bits = range(32) if name == "accumulation" else range(23)  # else it may overflow, without a step
    make, expected = flipping(random.Random(3), parts, bits)
    rows, _ = train(STEPS[name], make_batches(60), make)
    assert rows == expected


# fault -> results of iterations 4, 6, 8; part of the warning
AT_SPIKES = {
    "none": ({4: 1.0, 6: 1.0, 8: 1.0}, ""),
    "second pass": ({4: 1.0, 6: 0.0, 8: 1.0}, "gave other gradients: 0.weight (by up to 1)"),
    "before any pass": ({}, "no second pass was the same"),
    "over iterations": ({4: 1.0, 8: 1.0}, "earlier gradients in place"),
    "changed between": ({4: 1.0, 8: 1.0}, "handlers may change gradients"),
}


@pytest.mark.parametrize("fault", AT_SPIKES)
def test_a_spike_between_monitored_iterations_is_replayed(fault, caplog):
    """Iterations 4 and 8 are monitored, 6 has a spike, at which a handler sets the gradients to zero."""
    model = make_model()
    optimizer = sgd(model)
    handler = ReplayCheckHandler(model, optimizer)
    if fault in ("second pass", "before any pass"):
        model[0].weight.register_post_accumulate_grad_hook(
            lambda item: [item.grad.add_(is_reference_run() and trainer.state.iteration == 6)].clear()
        )
    parts = 2 if fault == "changed between" else 1
    trainer = Engine(make_step(model, optimizer, parts, every=3 if fault == "over iterations" else 1))
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(100.0), on_spike="skip")
    if fault == "none":  # then it detects the spike, at which gradients change, before the handler sees the gradients
        monitor.attach(trainer)
    handler.attach(trainer, Events.ITERATION_STARTED(every=100 if fault == "before any pass" else 4))
    if fault != "none":
        monitor.attach(trainer)
    published = {}
    trainer.add_event_handler(MonitorEvents.SPIKE_DETECTED, lambda: [*map(torch.zero_, gradients())].clear())

    def gradients():
        return [item.grad for item in model.parameters()]

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
    """Sharpness-aware minimization, which does not restore the weights to the last bit, past version counters."""

    def step(engine, batch):
        optimizer.zero_grad()
        mse_loss(model, batch).backward()
        shifts = [0.1 * item.grad for item in model.parameters()]
        for item, shift in zip(model.parameters(), shifts, strict=True):
            item.data.add_(shift)
        mse_loss(model, batch).backward()
        for item, shift in zip(model.parameters(), shifts, strict=True):
            item.data.sub_(shift)
        optimizer.step()

    return step


def stepping_elsewhere(model, optimizer):
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    return make_step(model, optimizer, before_step=lambda engine: other.step())


def inside_backward(model, optimizer):
    parameter = next(model.parameters())
    parameter.register_post_accumulate_grad_hook(lambda item: torch.optim.SGD([item], lr=0.1).step())
    return make_step(model, torch.optim.SGD([*model.parameters()][1:], lr=0.1))


def overflowing(model, optimizer):
    """The gradient of the last bias, 8 times the scale, overflows in every iteration but the first."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=0.999)

    def loss_of(model, batch):
        output = model(batch[0])
        return (output - output.detach()).sum()

    return make_step(model, optimizer, scaler=scaler, loss_of=loss_of)


def failing_twice(model, optimizer):
    def step(engine, batch):
        if is_reference_run():
            raise KeyError("once")
        return make_step(model, optimizer)(engine, batch)

    return step


UNREPORTED = {
    "changing batch": (changing_batch, "changes its batch"),
    "perturbing": (perturbing, "no second pass was the same before"),
    "stepping elsewhere": (stepping_elsewhere, "an optimizer of other parameters steps first"),
    "inside backward": (inside_backward, "inside of backward"),
    "overflowing": (overflowing, "a GradScaler may have changed its scale"),
    "failing twice": (failing_twice, "can't run twice: KeyError: 'once'"),
    "closure": (functools.partial(make_step, closure=True), "the second pass computes other gradients"),
}


@pytest.mark.parametrize("name", UNREPORTED)
def test_what_cannot_be_repeated_is_not_reported_with_one_warning(name, caplog):
    step_of, cause = UNREPORTED[name]
    batches = make_batches(5)
    handlers = []

    def with_earlier_pass(model, optimizer):
        handlers.append(attached(model, optimizer))
        handlers[0].load_state_dict({"same_count": int(name != "perturbing")})
        return handlers[0]

    rows, state = train((make_model, sgd, step_of), batches, with_earlier_pass)
    assert rows == [{}] * 5
    assert [cause in text for text in caplog.messages if "ReplayCheck" in text] == [True]
    if name != "changing batch":
        assert same(state, train((make_model, sgd, step_of), batches)[1])


def test_side_effects_before_the_last_backward_happen_twice_and_no_others():
    calls, model = [], make_model()
    step = make_step(model, optimizer := sgd(model), 2, before_step=lambda engine: calls.append("after"))
    trainer = Engine(lambda engine, batch: (calls.append("before"), step(engine, batch)))
    attached(model, optimizer).attach(trainer)
    trainer.add_event_handler(MonitorEvents.GRADIENTS_READY, lambda: calls.append("event"))
    trainer.run(make_batches(1))
    assert calls == ["before", "event", "event", "after", "before"]


def test_generators_that_the_train_step_creates_are_restored():
    def train_with(*monitors):
        model, own = make_model(), []
        optimizer = sgd(model)

        def step(engine, batch):
            if not own:
                own.append(random.Random(0))
            optimizer.zero_grad()
            mse_loss(model, (batch[0] + own[0].random(), batch[1])).backward()
            optimizer.step()

        made = [monitor(model, optimizer) for monitor in monitors]
        rows = run_monitored(step, make_batches(4), *made, event=Events.ITERATION_STARTED(every=2))
        return rows, [dict(model.state_dict()), own[0].random()]

    rows, state = train_with(attached)
    assert rows == [{}, SAME] * 2
    assert same(state, train_with()[1])


@pytest.mark.parametrize("order", ["own optimizer first", "other optimizer first"])
def test_modules_and_optimizers_unknown_to_the_handler_are_restored(order):
    def state(is_watched):
        encoder, model = make_model(), nn.Linear(3, 3)
        both = nn.Sequential(encoder, model)
        own, other = sgd(model), sgd(encoder)

        def step(engine, batch):
            own.zero_grad(), other.zero_grad()
            mse_loss(both, batch).backward()
            nn.utils.clip_grad_norm_(both.parameters(), 0.1)
            for optimizer in (own, other) if order == "own optimizer first" else (other, own):
                optimizer.step()

        rows = run_monitored(step, make_batches(5), *([attached(model, own)] if is_watched else []))
        assert rows == [SAME if is_watched and order == "own optimizer first" else {}] * 5
        return dict(both.state_dict())

    assert same(state(True), state(False))


def test_no_other_monitor_sees_the_second_pass():
    """One of every class; those of spikes do not detect any."""
    others = [make for name, make in HANDLERS.items() if "," not in name and name != "ReplayCheckHandler"]
    without = train(STEPS["accumulation"], make_batches(4), *others)
    rows, state = train(STEPS["accumulation"], make_batches(4), attached, *others)
    values = [[{key: row[key] for key in row if not key.startswith(("step/", "replay"))} for row in rows]]
    values += [[{key: row[key] for key in row if not key.startswith("step/")} for row in without[0]]]
    assert same(*values)
    assert len(values[0][0]) > 50
    assert same(state, without[1])
