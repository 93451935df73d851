"""A second pass finds every flipped bit, is never different on a healthy machine, and leaves training as it is."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import signal
import threading

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from ignite_monitor import MonitorEvents, ReplayCheckHandler
from ignite_monitor.model.isolation import in_second_pass
from tests._handlers import HANDLERS
from tests._helpers import make_batches, make_step, mse_loss, run_monitored, same
from tests._models import make_model

KEY = "replay/reproducible"
SAME = {KEY: 1.0}


GENERATOR = np.random.default_rng(0)


def augmented(x):
    return x + GENERATOR.random()


class Tied(nn.Module):
    """Twice the same weight in one region of autocast; noise of all global generators, its own, and a helper's."""

    def __init__(self):
        super().__init__()
        self.encoder, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.generators = [np.random.default_rng(0), torch.Generator().manual_seed(0), random.Random(0)]

    def forward(self, x):
        own = self.generators[0].random() + torch.rand((), generator=self.generators[1]) + self.generators[2].random()
        noise = random.random() + np.random.rand() + torch.rand(8)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.middle(torch.relu(self.middle(self.encoder(augmented(x)) + noise * own)))
        return self.head(F.dropout(hidden.float(), 0.1))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def scaled(model, optimizer):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=2)
    return make_step(model, optimizer, 2, scaler=scaler, clip=0.5)


def with_average(model, optimizer):
    """A train step that ends with other changes."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    model.__dict__["average"] = average
    step = make_step(model, optimizer, clip=0.1)
    return lambda engine, batch: (step(engine, batch), scheduler.step(), average.update_parameters(model))


def with_thread(model, optimizer):
    """A train step that can reach a thread, as that of a progress bar, which changes itself."""
    step, watcher = make_step(model, optimizer), Watcher()

    def watched(engine, batch):
        watcher.woken += 1  # here in the same thread
        return step(engine, batch)

    return watched


class Watcher(threading.Thread):
    woken = 0


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
    "sparse": (lambda: nn.Embedding(5, 3, sparse=True), lambda m: torch.optim.SGD(m.parameters(), lr=0.05), halved),
    "another optimizer": (make_model, sgd, stepping_elsewhere),
    "thread": (make_model, sgd, with_thread),
    "autocast": (Tied, sgd, functools.partial(make_step, parts=2)),
    "spectral norm": (lambda: nn.Sequential(spectral_norm(nn.Linear(6, 5)), nn.Linear(5, 3)), sgd, make_step),
}


def train(steps, batches, *monitors):
    """Return the metrics and the state after a run; ``monitors`` makes them from model and optimizer."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
    make, optimizer_of, step_of = steps
    model = make()
    optimizer = optimizer_of(model)
    step = step_of(model, optimizer)
    rows = run_monitored(step, batches, *(monitor(model, optimizer) for monitor in monitors))
    numbers = [torch.rand(3), random.random(), np.random.rand(), GENERATOR.random()]
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
        expected.append({KEY: float(len(expected) < 3 or chance.random() < 0.3)})
        fault.update(parameter=chance.choice(parameters), in_second=chance.random() < 0.5, bit=chance.choice(bits))

    def hook(parameter):
        if parameter is fault["parameter"] and in_second_pass() == fault["in_second"] and expected[-1] != SAME:
            calls.append(parameter)
            if len(calls) == parts:  # an earlier one may be lost to rounding
                element = chance.randrange(parameter.numel())
                parameter.grad.view(-1).view(torch.int32)[element] ^= (1 << fault["bit"]) - (fault["bit"] == 31) * 2**32

    rows, _ = train(STEPS[name], make_batches(60), faulty)
    assert rows == expected


def changing_batch(model, optimizer):
    step = make_step(model, optimizer)
    return lambda engine, batch: (batch[0].mul_(0.5), step(engine, batch))


def inside_backward(model, optimizer):
    parameter, is_last = next(model.parameters()), itertools.cycle([False, True])
    own = torch.optim.SGD([parameter], lr=0.1)
    parameter.register_post_accumulate_grad_hook(lambda _: own.step() if next(is_last) else None)
    return make_step(model, torch.optim.SGD([*model.parameters()][1:], lr=0.1), parts=2)


def failing_twice(model, optimizer):
    step = make_step(model, optimizer)
    return lambda engine, batch: {}["once"] if in_second_pass() else step(engine, batch)


def inside_autocast(model, optimizer):
    return torch.autocast("cpu", torch.bfloat16)(make_step(model, optimizer))


def pruned(model, optimizer):
    """Removes a buffer in the first iteration."""
    step = make_step(model, optimizer)

    def removing(engine, batch):
        model._buffers.pop("mask", None)
        step(engine, batch)

    model.register_buffer("mask", torch.ones(1))
    return removing


def drawing(model, optimizer):
    noise = iter(torch.linspace(0, 1, 50))
    return make_step(model, optimizer, loss_of=lambda *args: mse_loss(*args) * (1 + next(noise)))


def replacing(model, optimizer):
    """Replaces a module by one with other weights, of the same name."""
    step = make_step(model, optimizer)

    def replace(engine, batch):
        model[0] = nn.Linear(6, model[0].out_features)
        step(engine, batch)

    return replace


def reaching(kind):
    """A train step that can reach an object which can't be read."""

    def step_of(model, optimizer):
        unreadable = kind()
        return make_step(model, optimizer, loss_of=lambda *args: (unreadable, mse_loss(*args))[1])

    return step_of


class Unprintable(float):
    def __repr__(self):
        raise RuntimeError("no text")


class WithoutAttributes:
    @property
    def __dict__(self):
        raise RuntimeError("no attributes")


class WithoutClass:
    @property
    def __class__(self):
        raise RuntimeError("no class")


UNREPORTED = {
    "repr": (reaching(Unprintable), "the state of the train step can't be read: RuntimeError: no text"),
    "attributes": (reaching(WithoutAttributes), "the state of the train step can't be read: RuntimeError: no att"),
    "class": (reaching(WithoutClass), "the state of the train step can't be read: RuntimeError: no class"),
    "drawing": (drawing, "the train step keeps state: <lambda>.noise"),
    "replacing": (replacing, "the train step keeps state: Sequential.0"),
    "inside autocast": (inside_autocast, "inside of backward or autocast"),
    "changing batch": (changing_batch, "the train step keeps state: engine.state.batch"),
    "inside backward": (inside_backward, "inside of backward or autocast"),
    "failing twice": (failing_twice, "the second pass raised KeyError: 'once'"),
    "closure": (functools.partial(make_step, closure=True), "before a backward reaches the model"),
    "pruned": (pruned, "the train step keeps state: Sequential.mask"),
}


@pytest.mark.parametrize("name", UNREPORTED)
def test_what_cannot_be_repeated_switches_off_with_the_reason(name, caplog):
    step_of, cause = UNREPORTED[name]
    rows, state = train((make_model, sgd, step_of), make_batches(5), ReplayCheckHandler)
    assert rows == [{}] * 5
    (message,) = [text for text in caplog.messages if "ReplayCheck" in text]
    assert message.startswith("ReplayCheckHandler (replay): iteration 1: off for the rest of the run: ")
    assert cause in message
    assert not torch.is_autocast_enabled("cpu")
    assert same(state, train((make_model, sgd, step_of), make_batches(5))[1])


def overflowing(model, optimizer):
    """The gradient of the last bias, 8 times the scale, overflows in every iteration."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, backoff_factor=0.999)

    def loss_of(model, batch):
        output = model(batch[0])
        return (output - output.detach()).sum()

    return make_step(model, optimizer, scaler=scaler, loss_of=loss_of)


def test_of_a_step_that_overflows_nothing_is_reported(caplog):
    rows, _ = train((make_model, sgd, overflowing), make_batches(3), ReplayCheckHandler)
    assert rows == [{}] * 3
    assert caplog.messages == []


COUNTER = [0.0]


class Carrying(nn.Module):
    """Its hidden state goes on from batch to batch, kept in any of several places."""

    def __init__(self, place):
        super().__init__()
        self.cell, self.head, self.place = nn.GRUCell(6, 4), nn.Linear(4, 3), place
        self.hidden, self.states, self.memory = torch.zeros(8, 4), {"hidden": torch.zeros(8, 4)}, torch.zeros(8, 4)

    def forward(self, x):
        before = {"attribute": self.hidden, "dictionary": self.states["hidden"], "in place": self.memory}
        hidden = self.cell(x, before[self.place].clone())
        if self.place == "attribute":
            self.hidden = hidden.detach()
        elif self.place == "dictionary":
            self.states["hidden"] = hidden.detach()
        else:
            self.memory.copy_(hidden.detach())
        return self.head(hidden)


class Counting:
    count = 0


def counting(place):
    """A train step that keeps a number, which its loss uses."""

    def step_of(model, optimizer):
        count, history, scheduler = 0.0, [], torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        teacher = nn.Linear(1, 1, bias=False).requires_grad_(False) if place == "teacher" else None

        def loss_of(model, batch):
            taught = 0.0 if teacher is None else teacher.weight.sum()
            return mse_loss(model, batch) * (1 + count + len(history) + COUNTER[0] + taught)

        inner = make_step(model, optimizer, loss_of=loss_of)

        average = [weight.detach().clone() for weight in model.parameters()]

        def step(engine, batch, own=[0.0]):  # noqa: B006
            nonlocal count
            if place == "variable":
                count += 1.0
            elif place == "default":
                own[0] += 1.0
                batch = (batch[0] * own[0], batch[1])
            elif place == "average":
                average[0].data.mul_(0.5)
                batch = (batch[0] + average[0].sum(), batch[1])
            elif place == "class":
                Counting.count += 1
                batch = (batch[0] * Counting.count, batch[1])
            elif place == "teacher":
                teacher.weight.data.add_(0.1)
            elif place == "list":
                history.append(0.1)
            elif place == "scheduler":
                scheduler.step()
            elif place == "state":
                vars(engine.state).setdefault("sums", []).append(0.1)
            else:
                COUNTER[0] += 1.0
            return inner(engine, batch)

        return step

    return step_of


KEEPS = {
    "attribute": "Carrying.hidden",
    "dictionary": "Carrying.states",
    "in place": "Carrying.memory",
    "variable": "step.count",
    "list": "loss_of.history",
    "scheduler": "SGD.param_groups.lr",
    "state": "engine.state.sums",
    "global": "loss_of.COUNTER",
    "teacher": "Linear.weight",
    "default": "step.defaults",
    "average": "step.average",
    "class": "Counting.count",
}


@pytest.mark.parametrize("place", KEEPS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_step_that_keeps_state_trains_as_without_and_switches_off_with_the_state(place, caplog):
    steps = (functools.partial(Carrying, place), sgd, make_step)
    if place not in ("attribute", "dictionary", "in place"):
        steps = (make_model, sgd, counting(place))
    COUNTER[0] = Counting.count = 0
    rows, state = train(steps, make_batches(5), ReplayCheckHandler)
    COUNTER[0] = Counting.count = 0
    assert same(state, train(steps, make_batches(5))[1])
    assert rows == [{}] * 5
    (message,) = caplog.messages
    assert "off for the rest of the run: the train step keeps state" in message
    assert KEEPS[place] in message


def test_attributes_that_every_forward_makes_anew_are_no_kept_state():
    """A loss that the model stashes, and the weight that the older spectral norm computes."""

    class Stashing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.utils.spectral_norm(nn.Linear(6, 3))
            self.norm = torch.zeros(())

        def forward(self, x):
            output = self.layer(x)
            self.norm = output.square().mean()
            return output

    def step_of(model, optimizer):
        return make_step(model, optimizer, loss_of=lambda model, batch: mse_loss(model, batch) + model.norm)

    steps = (Stashing, sgd, step_of)
    rows, state = train(steps, make_batches(4), ReplayCheckHandler)
    assert rows == [SAME] * 4
    assert same(state[:1], train(steps, make_batches(4))[1][:1])


@pytest.mark.parametrize("same_before", [0, 2, 3, 5])
def test_a_fault_is_suspected_after_three_passes_of_this_run_that_were_the_same(same_before, caplog):
    def disturbed(model, optimizer):
        calls = []

        def disturb(module, args, output):
            calls.append(in_second_pass())
            return output * (1.001 if in_second_pass() and sum(calls) == same_before + 1 else 1.0)

        model.register_forward_hook(disturb)
        return make_step(model, optimizer)

    rows, _ = train((make_model, sgd, disturbed), make_batches(7), ReplayCheckHandler)
    is_suspect = same_before >= 3
    assert rows == [SAME] * same_before + [{KEY: 0.0}] + [SAME if is_suspect else {}] * (6 - same_before)
    (message,) = caplog.messages
    assert ("hardware" in message) is is_suspect
    assert ("off for the rest of the run" in message) is not is_suspect
    assert f"{same_before} earlier ones of this run gave the same" in message


def test_an_error_of_a_signal_handler_ends_training():
    def step_of(model, optimizer):
        step = make_step(model, optimizer)
        return lambda engine, batch: (in_second_pass() and signal.raise_signal(signal.SIGUSR1), step(engine, batch))

    def stop(number, frame):
        raise TimeoutError("out of time")

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(TimeoutError, match="out of time"):
            train((make_model, sgd, step_of), make_batches(2), ReplayCheckHandler)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("parts", [1, 3])
def test_backward_passes_inside_of_a_backward(parts):
    """Reentrant checkpoints, the last of which holds all parameters that the outer backward reaches."""

    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            hidden = checkpoint(self.middle, torch.tanh(self.first(x)), use_reentrant=True)
            return checkpoint(self.last, F.dropout(hidden, 0.2), use_reentrant=True)

    steps = (Recomputing, sgd, functools.partial(make_step, parts=parts))
    rows, state = train(steps, make_batches(4), ReplayCheckHandler)
    assert rows == [SAME] * 4
    assert same(state, train(steps, make_batches(4))[1])


def test_handlers_of_events_do_not_see_the_second_pass():
    calls, model = [], make_model()
    trainer = Engine(make_step(model, optimizer := sgd(model)))
    ReplayCheckHandler(model, optimizer).attach(trainer)
    trainer.add_event_handler(MonitorEvents.GRADIENTS_READY, lambda: calls.append("event"))
    trainer.run(make_batches(1))
    assert calls == ["event"]
    assert trainer.state.metrics == SAME


def test_what_only_the_train_step_knows_is_restored():
    """Modules and an optimizer that the handler was not given, and a generator that an iteration creates."""

    class Comparable(nn.Module):
        __hash__ = None

    def state(is_watched):
        _unhashable = Comparable()
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
