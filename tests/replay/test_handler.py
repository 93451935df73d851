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
from tests._helpers import make_batches, make_model, make_step, mse_loss, run_monitored, same
from tests.monitor._handlers import HANDLERS

KEY = "replay/reproducible"


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


# name -> model, optimizer, train step
STEPS = {
    "plain": (make_model, sgd, make_step),
    "accumulation": (make_model, sgd, functools.partial(make_step, parts=4, clip=0.1)),
    "over iterations": (make_model, sgd, functools.partial(make_step, every=3)),
    "cleared last": (make_model, sgd, functools.partial(make_step, zero_at="end")),
    "set to zero": (make_model, sgd, functools.partial(make_step, zero_at="end", set_to_none=False)),
    "closure": (
        make_model,
        lambda m: torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3),
        functools.partial(make_step, closure=True),
    ),
    "fused": (make_model, lambda m: torch.optim.AdamW(m.parameters(), fused=True), make_step),
    "early return": (make_model, sgd, functools.partial(make_step, parts=2, leave_out=lambda e: e.state.iteration % 2)),
    "scaler": (make_model, sgd, scaled),
    "schedule and average": (make_model, sgd, scheduled),
    "autocast": (Tied, sgd, functools.partial(make_step, parts=2)),
    "spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 3)), sgd, make_step),
}


def train(name, batches, *monitors, event=Events.ITERATION_STARTED):
    """State after a run, with what was published; monitors are made from model and optimizer."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    make, optimizer_of, step_of = STEPS[name]
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
    rows, state = train(name, batches, attached)
    assert same(state, train(name, batches)[1])
    expected = {} if name == "spectral norm" else {KEY: 1.0}  # its buffers are others in the second pass
    assert [row for row in rows if row != expected] == []
    assert len(caplog.messages) == (name == "spectral norm")
    if name == "spectral norm":
        assert "a forward pass changes buffers" in caplog.text


@pytest.mark.parametrize("name", ["plain", "autocast"])
def test_a_healthy_machine_is_never_different(name):
    rows, _ = train(name, make_batches(1000), attached)
    assert rows == [{KEY: 1.0}] * 1000


def flipping(chance, parts, bits):
    """A handler with a fault: one flipped bit in some passes, and what it should publish in each iteration."""
    expected = []

    def make(model, optimizer):
        handler, parameters, fault, calls = attached(model, optimizer), dict(model.named_parameters()), {}, {}

        def hook(parameter, name):
            where = name, handler._left is not None  # in the second pass
            calls[where] = calls.get(where, 0) + 1
            if where == fault["where"] and calls[where] == parts:  # an earlier one may be lost to rounding
                parameter.grad.view(-1).view(torch.int32)[fault["element"]] ^= fault["bit"]

        for own, parameter in parameters.items():
            parameter.register_post_accumulate_grad_hook(lambda parameter, own=own: hook(parameter, own))
        start = handler.start_iteration

        def start_iteration(engine):
            calls.clear()
            name, bit = chance.choice([*parameters]), chance.choice(bits)
            is_faulty = chance.random() < 0.7
            fault["where"] = (name, chance.random() < 0.5) if is_faulty else None
            fault["element"] = chance.randrange(parameters[name].numel())
            fault["bit"] = -(2**31) if bit == 31 else 1 << bit
            expected.append({KEY: float(not is_faulty)})
            start(engine)

        handler.start_iteration = start_iteration
        return handler

    return make, expected


PARTS = {"plain": 1, "accumulation": 4, "over iterations": 1, "closure": 1, "scaler": 2, "early return": 2}


@pytest.mark.parametrize("name", PARTS)
def test_a_flipped_bit_in_one_pass_is_found(name):
    """In the first or the second pass, in a random element of a random parameter's gradient."""
    bits = range(23) if name == "scaler" else range(32)  # else it may overflow, which is not reported
    make, expected = flipping(random.Random(3), PARTS[name], bits)
    rows, _ = train(name, make_batches(100), make)
    assert rows == expected


@pytest.mark.parametrize("fault", ["none", "second pass", "before any pass", "over iterations", "buffer"])
def test_a_spike_between_monitored_iterations_is_replayed(fault, caplog):
    """Iterations 4 and 8 are monitored, 6 has a spike."""
    model = make_model()
    optimizer = sgd(model)
    handler = ReplayCheckHandler(model, optimizer)
    if fault == "buffer":
        model[4].register_buffer("calls", torch.zeros(()))
        model[4].register_forward_hook(lambda module, args, out: out * module.calls.add_(1.0).cos())
    if fault in ("second pass", "before any pass"):
        model[0].weight.register_post_accumulate_grad_hook(
            lambda item: [item.grad.add_(handler._left is not None and trainer.state.iteration == 6)].clear()
        )
    step = make_step(model, optimizer, every=3 if fault == "over iterations" else 1)
    trainer = Engine(step)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(100.0), on_spike="skip")
    if fault == "none":  # then it detects the spike, at which gradients change, before the handler sees the gradients
        monitor.attach(trainer)
    handler.attach(trainer, Events.ITERATION_STARTED(every=100 if fault == "before any pass" else 4))
    if fault != "none":
        monitor.attach(trainer)
    published, detected = {}, []
    trainer.add_event_handler(MonitorEvents.SPIKE_DETECTED, lambda: detected.append([*map(torch.zero_, gradients())]))

    def gradients():
        return [item.grad for item in model.parameters()]

    @trainer.on(Events.ITERATION_COMPLETED)
    def note(engine):
        if KEY in engine.state.metrics:
            published[engine.state.iteration] = engine.state.metrics[KEY]

    trainer.run(make_batches(9, spikes=[6]))
    assert len(detected) == 1
    expected = {"none": {4: 1.0, 6: 1.0, 8: 1.0}, "second pass": {4: 1.0, 6: 0.0, 8: 1.0}, "before any pass": {}}
    assert published == expected.get(fault, {4: 1.0, 8: 1.0} if fault == "over iterations" else {})
    causes = {
        "second pass": "gave other gradients: 0.weight (by up to 1)",
        "before any pass": "no second pass was the same",
    }
    causes |= {"over iterations": "earlier iterations are not known", "buffer": "a forward pass changes buffers"}
    assert causes.get(fault, "") in caplog.text
    assert sum("ReplayCheckHandler" in text for text in caplog.messages) == (fault != "none")


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


def inside_autocast(model, optimizer):
    def step(engine, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return make_step(model, optimizer)(engine, batch)

    return step


def inside_backward(model, optimizer):
    parameter = next(model.parameters())
    parameter.register_post_accumulate_grad_hook(lambda item: torch.optim.SGD([item], lr=0.1).step())
    return make_step(model, torch.optim.SGD([*model.parameters()][1:], lr=0.1))


def overflowing(model, optimizer):
    """The gradient of the last bias, 8 times the scale, overflows in every iteration."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=0.999)

    def loss_of(model, batch):
        output = model(batch[0])
        return (output - output.detach()).sum()

    return make_step(model, optimizer, scaler=scaler, loss_of=loss_of)


def failing_twice(model, optimizer):
    def step(engine, batch):
        if getattr(engine, "calls", 0) == engine.state.iteration:
            raise KeyError("once")
        engine.calls = engine.state.iteration
        return make_step(model, optimizer)(engine, batch)

    return step


UNREPORTED = {
    "changing batch": (changing_batch, "the train step changes its batch"),
    "perturbing": (perturbing, "the weights change before the optimizer's step"),
    "stepping elsewhere": (stepping_elsewhere, "an optimizer of other parameters steps first"),
    "inside autocast": (inside_autocast, "inside of autocast"),
    "inside backward": (inside_backward, "inside of backward"),
    "overflowing": (overflowing, "a GradScaler may have changed its scale"),
    "failing twice": (failing_twice, "can't run twice: KeyError: 'once'"),
    "fewer": (lambda m, o: lambda engine, batch: fewer(engine, m, batch), "fewer backward passes"),
}


def fewer(engine, model, batch):
    for _ in range(2 - engine.__dict__.setdefault("seen", set()).__contains__(engine.state.iteration)):
        mse_loss(model, batch).backward()
    engine.seen.add(engine.state.iteration)


@pytest.mark.parametrize("name", UNREPORTED)
def test_what_cannot_be_repeated_is_not_reported_with_one_warning(name, caplog):
    step_of, cause = UNREPORTED[name]
    STEPS["tested"] = make_model, sgd, step_of
    batches = make_batches(5)
    rows, state = train("tested", batches, attached)
    assert rows == [{}] * 5
    assert [cause in text for text in caplog.messages if "ReplayCheck" in text] == [True]
    if name != "changing batch":
        assert same(state, train("tested", batches)[1])


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
    assert rows == [{}, {KEY: 1.0}] * 2
    assert same(state, train_with()[1])


def test_modules_and_optimizers_unknown_to_the_handler_are_restored():
    def state(is_watched):
        encoder, model = make_model(), nn.Linear(3, 3)
        both = nn.Sequential(encoder, model)
        own, other = sgd(model), sgd(encoder)

        def step(engine, batch):
            own.zero_grad(), other.zero_grad()
            mse_loss(both, batch).backward()
            nn.utils.clip_grad_norm_(both.parameters(), 0.1)
            own.step(), other.step()

        rows = run_monitored(step, make_batches(5), *([attached(model, own)] if is_watched else []))
        assert rows == [{KEY: 1.0} if is_watched else {}] * 5
        return dict(both.state_dict())

    assert same(state(True), state(False))


@pytest.mark.parametrize("name", HANDLERS)
def test_no_other_monitor_and_no_handler_sees_the_second_pass(name):
    def published(*monitors):
        rows, _ = train("accumulation", make_batches(4), *monitors)
        return [{key: row[key] for key in row if not key.startswith(("step/", "replay"))} for row in rows]

    if name != "ReplayCheckHandler":
        assert same(published(HANDLERS[name], attached), published(HANDLERS[name]))
        assert same(published(attached, HANDLERS[name]), published(HANDLERS[name]))
