"""A skipped step leaves no trace in buffers: running statistics, and others that a forward pass updates."""

from __future__ import annotations

import math

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import GradMonitor, Monitor, MonitorEvents, StaticThreshold
from tests import _optimizers as optimizers
from tests._helpers import assert_same, make_step, mlp_batches, mse_loss, train, training_state

LIMIT = 1e3


class Counting(nn.Module):
    """Keeps an average of its own, a constant, and a buffer that is replaced by every forward pass."""

    def __init__(self):
        super().__init__()
        self.register_buffer("average", torch.zeros(6))
        self.register_buffer("constant", torch.ones(3))
        self.register_buffer("last", torch.zeros(()))

    def forward(self, x):
        self.average.lerp_(x.detach().mean(0), 0.5)
        self.last = x.detach().amax()
        return x


def build(kind):
    torch.manual_seed(0)
    norm = {
        "batch": lambda: nn.BatchNorm1d(6),
        "cumulative": lambda: nn.BatchNorm1d(6, momentum=None),
        "instance": lambda: nn.Sequential(
            nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
        ),
        "own": Counting,
    }[kind]()
    return nn.Sequential(nn.Linear(4, 6), norm, nn.Tanh(), nn.Linear(6, 2))


def batches_of(count, bad=(), value=1e5):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(count)]
    # The targets make the spike, the inputs would stay in the statistics.
    return [(x * value, y * value) if i in bad else (x, y) for i, (x, y) in enumerate(batches, 1)]


def run(kind, batches, monitored, fused=False, step_of=make_step, action="skip"):
    model = build(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike=action)
    recorder = train(step_of(model, optimizer), batches, *[monitor] * monitored)
    return training_state(model, optimizer), recorder


def without(batches, bad):
    return [batch for i, batch in enumerate(batches, 1) if i not in bad]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("value", [1e5, math.nan])
@pytest.mark.parametrize("kind", ["batch", "cumulative", "instance", "own"])
@pytest.mark.parametrize("bad", [(7,), (1, 2, 8)])
def test_buffers_are_those_of_a_run_without_the_batch(kind, bad, value, fused):
    batches = batches_of(12, bad, value)
    state, recorder = run(kind, batches, True, fused)
    assert recorder.of("grad/skipped_count")[-1] == len(bad)
    assert_same(state, run(kind, without(batches, bad), False, fused)[0])


@pytest.mark.parametrize("where", [7, 8, 9])
@pytest.mark.parametrize(("fused", "value"), [(False, 1e5), (True, math.nan)])
def test_all_micro_batches_of_a_skipped_step_leave_the_statistics(where, value, fused):
    batches = batches_of(15, [where], value)
    state, recorder = run("batch", batches, True, fused, step_of=lambda m, o: make_step(m, o, every=3))
    assert recorder.of("grad/skipped_count")[-1] == recorder.of("grad/spike_count")[-1] == 1
    kept = without(batches, (7, 8, 9))
    assert_same(state, run("batch", kept, False, fused, step_of=lambda m, o: make_step(m, o, every=3))[0])


class Latest(nn.Module):
    """Keeps its latest input as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("latest", torch.zeros(8, 4))

    def forward(self, x):
        self.latest = x
        return x


@pytest.mark.parametrize("fused", [False, True])
def test_a_batch_that_has_become_a_buffer_is_left_as_it_is(fused):
    torch.manual_seed(0)
    model = nn.Sequential(Latest(), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip")
    batches = batches_of(5, [3, 5])
    recorder = train(make_step(model, optimizer), batches, monitor)
    assert recorder.of("grad/skipped_count") == [0, 0, 1, 1, 2]
    assert_same(batches, batches_of(5, [3, 5]))
    assert_same(model[0].latest, batches[3][0])


def test_two_steps_in_one_iteration():
    """The step of the second half is skipped; the forward pass of the first half stays."""

    def step_of(model, optimizer):
        def step(engine, batch):
            for half in (slice(0, 4), slice(4, 8)):
                optimizer.zero_grad()
                mse_loss(model, (batch[0][half], batch[1][half])).backward()
                optimizer.step()

        return step

    batches = batches_of(6)
    bad = [(x.clone(), y.clone()) for x, y in batches]
    for tensor in bad[3]:
        tensor[4:] *= 1e5
    state, recorder = run("batch", bad, True, step_of=step_of)
    assert recorder.of("grad/skipped_count")[-1] == 1
    model = build("batch")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=False)
    whole, half = step_of(model, optimizer), make_step(model, optimizer)
    train(lambda e, b: half(e, tuple(t[:4] for t in b)) if e.state.iteration == 4 else whole(e, b), batches)
    assert_same(state, training_state(model, optimizer))


@pytest.mark.parametrize("fused", [False, True])
def test_a_non_finite_batch_under_clip_leaves_no_trace(fused):
    batches = batches_of(9, [5], math.nan)
    state, recorder = run("batch", batches, True, fused, action="clip")
    assert_same(state, run("batch", without(batches, [5]), False, fused)[0])
    assert (recorder.of("grad/skipped_count")[-1], recorder.of("grad/clipped_count")[-1]) == (1, 0)
    assert recorder.of("grad/stepped") == [1, 1, 1, 1, 0, 1, 1, 1, 1]


def test_iterations_that_are_not_monitored_are_part_of_the_statistics():
    model = build("batch")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    engine = Engine(make_step(model, optimizer))
    GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip").attach(
        engine, Events.ITERATION_STARTED(every=4)
    )
    batches = batches_of(10, [8])
    engine.run(batches, max_epochs=1)
    other = build("batch")
    other_optimizer = torch.optim.SGD(other.parameters(), lr=1e-2)
    train(make_step(other, other_optimizer), without(batches, [8]))
    assert_same(training_state(model, optimizer), training_state(other, other_optimizer))


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("zero_first", [False, True])
def test_a_batch_that_the_train_step_leaves_out_stays_in_the_statistics(set_to_none, zero_first):
    """Iteration 4 returns before its step; the step of iteration 5 is skipped, and leaves what iteration 4 has left."""

    def step_of(model, optimizer):
        def step(engine, batch):
            if zero_first:
                optimizer.zero_grad(set_to_none)
            loss = mse_loss(model, batch)
            if not zero_first:
                optimizer.zero_grad(set_to_none)
            loss.backward()
            if engine.state.iteration != 4:
                optimizer.step()

        return step

    batches = batches_of(8, [5], math.nan)
    state, _ = run("batch", batches, True, step_of=step_of)
    assert_same(state, run("batch", without(batches, [5]), False, step_of=step_of)[0])


@pytest.mark.parametrize("set_to_none", [False, True])
def test_a_state_that_is_loaded_within_an_accumulation_starts_a_window(set_to_none):
    def train_with(bad, monitored):
        model = build("batch")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip")
        engine = Engine(make_step(model, optimizer, every=3))
        for item in [monitor] * monitored:
            item.attach(engine)
        saved = {}

        @engine.on(Events.ITERATION_COMPLETED)
        def roll_back(engine):
            if engine.state.iteration == 3:
                saved.update({name: tensor.clone() for name, tensor in model.state_dict().items()})
            if engine.state.iteration == 7:
                model.load_state_dict(saved)
                optimizer.zero_grad(set_to_none)

        engine.run(batches_of(9, bad))
        return model.state_dict(), saved

    state, saved = train_with([8], True)
    assert_same(state, saved)  # the step of iterations 8 and 9 is skipped
    assert not torch.equal(train_with([], False)[0]["1.running_mean"], saved["1.running_mean"])


@pytest.mark.parametrize(
    ("frozen", "generator_first", "steps"),
    [(False, False, 1), (True, False, 1), (False, True, 1), (True, True, 1), (False, False, 2), (True, True, 2)],
)
def test_a_generators_skipped_step_leaves_no_trace_in_the_discriminator(frozen, generator_first, steps):
    def train_both(bad, monitored):
        torch.manual_seed(0)
        models = generator, discriminator = build("batch"), nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5))
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]

        def step_of_discriminator(iteration, batch):
            optimizers[1].zero_grad()
            (discriminator(batch[1]) - discriminator(generator(batch[0]).detach())).square().mean().backward()
            optimizers[1].step()

        def step_of_generator(iteration, batch):
            discriminator.requires_grad_(not frozen)
            for place in range(steps):
                if iteration != 4 or place != steps - 1 or monitored:
                    optimizers[0].zero_grad()
                    factor = math.nan if iteration == bad and place == steps - 1 else 1.0
                    discriminator(factor * generator(batch[0])).square().mean().backward()
                    optimizers[0].step()
            discriminator.requires_grad_(True)

        def step(engine, batch):
            parts = step_of_discriminator, step_of_generator
            for part in reversed(parts) if generator_first else parts:
                part(engine.state.iteration, batch)

        monitors = [
            GradMonitor(model, optimizer, on_spike="skip", prefix=name, flag=name)
            for model, optimizer, name in zip(models, optimizers, ("one", "two"), strict=True)
        ]
        train(step, batches_of(4), *monitors * monitored)
        return discriminator.state_dict(), dict(generator.named_parameters())

    assert_same(train_both(4, True), train_both(0, False))


class SkipsUnasked(Monitor):
    """Skips steps, but does not act on their optimizer."""

    def handlers(self):
        return [(MonitorEvents.OPTIMIZER_STEP_STARTED, self.skip_step)]

    def skip_step(self, engine, step):
        step.skip(True)


@pytest.mark.parametrize("name", ["SGD", "fused SGD momentum", "MuonLike"])
def test_only_a_monitor_that_acts_on_the_optimizer_may_skip(name):
    """Else the statistics before the step would not be known."""
    model, optimizer = optimizers.build(name)
    with pytest.raises(ValueError, match=f"step of {type(optimizer).__name__}.*acts_on"):
        train(make_step(model, optimizer), mlp_batches(1), SkipsUnasked(model, "own"))
