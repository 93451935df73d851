"""Two passes find every flipped bit, are never different on a healthy machine, and leave training as it is."""

from __future__ import annotations

import functools
import random
import signal

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
Replay = functools.partial(ReplayCheckHandler, loss=mse_loss)


class Noisy(nn.Module):
    """Twice the same weight in one region of autocast; noise of all global generators, its own, and its file's."""

    def __init__(self):
        super().__init__()
        self.encoder, self.middle, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.generators = [np.random.default_rng(0), torch.Generator().manual_seed(0), random.Random(0)]

    def forward(self, x):
        own = self.generators[0].random() + torch.rand((), generator=self.generators[1]) + self.generators[2].random()
        noise = random.random() + np.random.rand() + GENERATOR.random() + torch.rand(8)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.middle(torch.relu(self.middle(self.encoder(x) + noise * own)))
        return self.head(F.dropout(hidden.float(), 0.1))


class Carrying(nn.Module):
    """Its hidden state goes on from batch to batch, as an attribute, in a container, and in place."""

    def __init__(self):
        super().__init__()
        self.cell, self.head, self.hidden = nn.GRUCell(6, 4), nn.Linear(4, 3), torch.zeros(8, 4)
        self.states, self.memory = {"count": 0}, torch.zeros(8, 4)

    def forward(self, x):
        hidden = self.cell(x, self.hidden + self.states["count"] + self.memory)
        self.hidden = hidden.detach()
        self.states["count"] += 1
        self.memory.copy_(hidden.detach())
        return self.head(hidden)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def scaled(model, optimizer):
    return make_step(model, optimizer, 2, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**9), clip=0.5)


def changing_batch(model, optimizer):
    step = make_step(model, optimizer)
    return lambda engine, batch: (batch[0].mul_(0.5), step(engine, batch))


def pruned(model, optimizer):
    """Removes a buffer in the first iteration."""
    model.register_buffer("mask", torch.ones(1))
    step = make_step(model, optimizer)
    return lambda engine, batch: (model._buffers.pop("mask", None), step(engine, batch))


def embedding_loss(model, batch):
    return F.mse_loss(model(batch.pop(0).abs().long() % 5).mean(1), batch.pop())


def normalized():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), spectral_norm(nn.Linear(8, 3)))


# name -> model, optimizer, train step
STEPS = {
    "accumulation": (make_model, sgd, functools.partial(make_step, parts=4, clip=0.1)),
    "over iterations": (make_model, sgd, functools.partial(make_step, every=3)),
    "set to zero": (make_model, sgd, functools.partial(make_step, zero_at="end", set_to_none=False)),
    "closure": (make_model, sgd, functools.partial(make_step, closure=True)),
    "fused": (make_model, lambda m: torch.optim.AdamW(m.parameters(), fused=True), make_step),
    "scaler": (make_model, sgd, scaled),
    "autocast": (Noisy, sgd, functools.partial(make_step, parts=2)),
    "changing batch": (make_model, sgd, changing_batch),
    "pruned": (make_model, sgd, pruned),
    "normalized": (normalized, sgd, make_step),
    "carrying": (Carrying, sgd, make_step),
}


def train(steps, batches, *monitors):
    """Return the metrics and the state after a run; ``monitors`` makes them from model and optimizer."""
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
    make, optimizer_of, step_of = steps
    model = make()
    optimizer = optimizer_of(model)
    rows = run_monitored(step_of(model, optimizer), batches, *(monitor(model, optimizer) for monitor in monitors))
    numbers = [torch.rand(3), random.random(), np.random.rand(), GENERATOR.random()]
    own = [torch.rand(3, generator=item) for item in getattr(model, "generators", [])[1:2]]
    carried = [getattr(model, name, None) for name in ("hidden", "states", "memory")]
    gradients = [(item.grad, item._version) for item in model.parameters()]
    return rows, [dict(model.state_dict()), optimizer.state_dict(), gradients, numbers, own, carried]


def replay(model, optimizer):
    return Replay(model)


@pytest.mark.parametrize("name", STEPS)
def test_training_is_untouched_and_reproducible(name, caplog):
    rows, state = train(STEPS[name], make_batches(7, spikes=[5]), replay)
    assert same(state, train(STEPS[name], make_batches(7, spikes=[5]))[1])
    assert rows == [SAME] * 7
    assert caplog.messages == []


def noisy_loss(model, batch, generator):
    return embedding_loss(model, [*batch]) * torch.rand((), generator=generator)


def test_a_loss_may_change_its_batch_and_have_sparse_gradients_and_a_generator_of_its_own():
    def run(*monitors):
        random_of_loss, model = torch.Generator().manual_seed(0), nn.Embedding(5, 3, sparse=True)

        def loss_of(model, batch):
            return noisy_loss(model, batch, random_of_loss)

        step = make_step(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_of=loss_of)
        handlers = [monitor(model, loss=loss_of) for monitor in monitors]
        return run_monitored(step, make_batches(4), *handlers), random_of_loss.get_state()

    (rows, state), (_, expected) = run(ReplayCheckHandler), run()
    assert rows == [SAME] * 4
    assert torch.equal(state, expected)


def test_a_healthy_machine_is_never_different_whatever_the_gradients():
    batches = make_batches(100)
    batches[3][0][0] = torch.nan
    rows, _ = train(STEPS["autocast"], batches, replay)
    assert rows == [SAME] * 100


def test_a_flipped_bit_in_one_pass_is_found():
    """Flips a random bit of a random gradient element in either pass, in the fourth pair of a run."""
    chance, expected, fault = random.Random(3), [], {}

    class Flip(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            fault["pass"] = fault["pass"] - 1 if in_second_pass() else fault["pass"]
            if in_second_pass() and fault["pass"] == 0:
                bit = chance.randrange(32)
                element = chance.randrange(gradient.numel())
                gradient.view(-1).view(torch.int32)[element] ^= (1 << bit) - (bit == 31) * 2**32
            return gradient

    class Faulty(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(8, 3))  # whose gradient is that of the output

        def forward(self, x):
            return x + Flip.apply(self.bias)

    def draw():
        expected.append({KEY: float(len(expected) % 4 < 3 or chance.random() < 0.3)})
        fault["pass"] = 0 if expected[-1] == SAME else chance.choice([1, 2])

    model = nn.Sequential(make_model(), Faulty())
    trainer, rows, handler = Engine(make_step(model, sgd(model))), [], Replay(model)
    trainer.add_event_handler(Events.ITERATION_STARTED, draw)
    handler.attach(trainer)
    trainer.add_event_handler(MonitorEvents.TRAIN_STEP_COMPLETED, lambda: rows.append(dict(trainer.state.metrics)))
    for _ in range(25):  # a difference switches it off for the rest of the run
        trainer.run(make_batches(4))
    assert rows == expected


def keeping():
    seen = []

    def loss(model, batch):
        seen.append(1.0)
        return mse_loss(model, batch) * len(seen)

    return loss


def of_the_training_model(model):
    return lambda _, batch: mse_loss(model, batch)


def raising(model, batch):
    raise KeyError("no second\npass")


class Checkpointed(nn.Linear):
    """All of its gradients are hidden from the outer graph."""

    def forward(self, x):
        return checkpoint(super().forward, x.clone().requires_grad_(), use_reentrant=True)


class Uncopyable(nn.Linear):
    def __deepcopy__(self, memo):
        raise RuntimeError("one only")


# name -> model, function of the model that returns a loss, reason
OFF = {
    "raising": (make_model, lambda _: raising, "the loss can't be evaluated twice: KeyError: 'no second"),
    "number": (make_model, lambda _: lambda model, batch: 1.0, "can't be evaluated twice: AttributeError"),
    "detached": (make_model, lambda _: lambda *args: mse_loss(*args).detach(), "does not require grad"),
    "without parameters": (
        make_model,
        lambda _: lambda model, batch: batch[0].sum().requires_grad_(),
        "RuntimeError: the loss reaches no parameter of the model that it is given",
    ),
    "training model": (make_model, of_the_training_model, "a copy calls the root module of the model that trains"),
    "checkpointed": (
        lambda: nn.Sequential(Checkpointed(6, 4), nn.Linear(4, 3)),
        lambda _: mse_loss,
        "use_reentrant=False",
    ),
    "uncopyable": (lambda: Uncopyable(6, 3), lambda _: mse_loss, "it can't be copied (RuntimeError: one only)"),
    "keeping": (make_model, lambda _: keeping(), "too few to tell a fault from a nondeterministic operation or a loss"),
}


@pytest.mark.parametrize("name", OFF)
def test_what_cannot_be_repeated_switches_off_with_the_reason_until_the_run_ends(name, caplog):
    make, loss_of, reason = OFF[name]
    steps = (make, sgd, make_step)
    rows, state = train(steps, make_batches(5), lambda model, _: ReplayCheckHandler(model, loss=loss_of(model)))
    assert same(state, train(steps, make_batches(5))[1])
    assert rows == [{KEY: 0.0} if name == "keeping" else {}] + [{}] * 4
    (message,) = caplog.messages
    assert message.startswith("ReplayCheckHandler (replay): iteration 1: off for the rest of the run: ")
    assert reason in message


class Tracking(nn.Module):
    """Its normalization, its noise and its weight are as the loss asks, which counts its calls outside of it."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.register_buffer("scale", torch.ones(2))
        self.noise = [torch.Generator().manual_seed(1)]

    def forward(self, x):
        return self.head(self.norm(x))


def shift_inputs(copied, trained, count, batch):
    return mse_loss(copied, (batch[0] + count, batch[1])) * count


def draw_more(copied, trained, count, batch):
    torch.rand(count, generator=copied.noise[0]), torch.rand(count), np.random.rand(count)
    return mse_loss(copied, batch) * count


def scale_loss(copied, trained, count, batch):
    return mse_loss(copied, batch) * count


def change_weight(copied, trained, count, batch):
    trained["head.weight"].data.add_(0.0 * count + 1.0)  # which no version counter tells
    return mse_loss(copied, batch) * count


def change_buffer(copied, trained, count, batch):
    trained["scale"].add_(1.0)
    return mse_loss(copied, batch)


GRADIENTS = "two passes gave different gradients: norm.weight, norm.bias, head.weight, head.bias. They "
# what a loss does -> what is said of it
SEEN = {
    shift_inputs: f"{GRADIENTS}changed no parameter, and left different states of buffer norm.running_mean. 0 earlier",
    draw_more: f"{GRADIENTS}changed no parameter, and left different states of generator torch, generator numpy, "
    "generator 1 of the model or loss. 0 earlier",
    scale_loss: f"{GRADIENTS}left parameters, buffers and known generators the same: state that they keep is outside",
    change_weight: f"{GRADIENTS}changed parameter head.weight, and left different states of no buffer or generator. 0",
    change_buffer: "the loss can't be evaluated twice: RuntimeError: it changes the model that trains, in scale",
}


@pytest.mark.parametrize("does", SEEN, ids=lambda does: does.__name__)
def test_the_report_names_the_state_that_a_pass_changed_or_left_different(does, caplog):
    model, calls = Tracking(), []
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def loss(copied, batch):
        calls.append(1)
        return does(copied, tensors, len(calls), batch)

    rows = run_monitored(make_step(model, sgd(model)), make_batches(3), ReplayCheckHandler(model, loss=loss))
    (message,) = caplog.messages
    assert f"off for the rest of the run: {SEEN[does]}" in message
    assert len(calls) == 2
    assert rows == [{} if does is change_buffer else {KEY: 0.0}, {}, {}]


@pytest.mark.parametrize("same_before", [0, 2, 3, 5])
def test_a_fault_is_suspected_after_three_equal_pairs_of_this_run(same_before, caplog):
    calls = []

    def disturbed(model, batch):
        calls.append(model)
        return mse_loss(model, batch) * (1.001 if len(calls) == 2 * (7 + same_before + 1) else 1.0)

    model = make_model()
    optimizer = sgd(model)
    trainer, rows = Engine(make_step(model, optimizer)), []
    ReplayCheckHandler(model, loss=disturbed).attach(trainer)
    trainer.run(make_batches(7))  # an earlier run does not count
    trainer.add_event_handler(MonitorEvents.TRAIN_STEP_COMPLETED, lambda: rows.append(dict(trainer.state.metrics)))
    trainer.run(make_batches(7))
    assert rows == [SAME] * same_before + [{KEY: 0.0}] + [{}] * (6 - same_before)
    (message,) = caplog.messages
    assert ("hardware" in message) is (same_before >= 3)
    assert "off for the rest of the run" in message
    assert f"{same_before} earlier pairs of this run were equal" in message


@pytest.mark.parametrize("error", [TimeoutError, KeyboardInterrupt])
def test_an_error_of_a_signal_handler_ends_training(error):
    def interrupted(model, batch):
        signal.raise_signal(signal.SIGUSR1)
        return mse_loss(model, batch)

    def stop(number, frame):
        raise error("out of time")

    before = signal.signal(signal.SIGUSR1, stop)
    models = []

    def watched(model, _):
        models.append(model)
        return ReplayCheckHandler(model, loss=interrupted)

    try:
        with pytest.raises(error, match="out of time"):
            train((make_model, sgd, make_step), make_batches(2), watched)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(list(models[0].parameters())) == 6  # all put back


def test_no_other_monitor_or_handler_sees_the_passes():
    """One of every class."""
    others = [make for name, make in HANDLERS.items() if "," not in name and name != "ReplayCheckHandler"]
    results = [train(STEPS["accumulation"], make_batches(4), *made) for made in (others, [replay, *others])]
    for rows, _ in results:
        for row in rows:
            for key in [key for key in row if key.startswith(("step/", "replay"))]:
                del row[key]
    assert same(*results)
    assert len(results[0][0][0]) > 50
