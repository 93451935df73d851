"""Gradients that a detection describes, in train steps that :mod:`tests.stress` does not have."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import GradMonitor, StaticThreshold
from tests._helpers import PUT, grad_norm, in_turn, make_step, mlp_batches, mse_loss, train
from tests._models import make_mlp

CLOSE = {"rel": 1e-5}


def sgd(model, lr=1e-6):
    return torch.optim.SGD(model.parameters(), lr=lr)


def observations(monitor):
    return float(monitor.state_dict()["detector"]["rule"]["count"])


# What becomes of a gradient between backward and step


def test_a_shared_backward_after_the_own_step_is_no_spike_of_the_model():
    """A generator passes its gradient through the discriminator, which has made its step; detected at its own step."""
    models = generator, discriminator = nn.Linear(2, 4), make_mlp()
    optimizers = [sgd(model) for model in models]
    step = in_turn(
        make_step(discriminator, optimizers[1]),
        make_step(
            generator, optimizers[0], loss_of=lambda *_: discriminator(generator(torch.ones(3, 2))).sum(),
            factor=lambda engine: 1e6 if engine.state.iteration == 3 else 1e-3,
        ),
    )  # fmt: skip
    monitors = [
        GradMonitor(model, optimizer, threshold=StaticThreshold(1e3), prefix=name, flag=name)
        for model, optimizer, name in zip(models, optimizers, ("generator", "discriminator"), strict=True)
    ]
    recorder = train(step, mlp_batches(4), *monitors)
    assert recorder.of("generator/spike_count")[-1] == 1
    assert recorder.of("discriminator/spike_count") == [0] * 4


def test_a_step_that_raises_an_error_leaves_the_next_its_own_gradient():
    """The train step makes the iteration anew with smaller gradients."""
    model, norms, errors = make_mlp(), [], [MemoryError()]
    optimizer = sgd(model)

    def fail(*_):
        if len(norms) == 3 and errors:
            raise errors.pop()

    def step(engine, batch):
        for factor in (1e4 if engine.state.iteration == 3 else 1.0, 1.0):
            optimizer.zero_grad()
            (factor * mse_loss(model, batch)).backward()
            norms.append(grad_norm(model))
            try:
                optimizer.step()
                break
            except MemoryError:
                norms.pop()

    optimizer.register_step_post_hook(fail)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e3), on_spike="skip")
    recorder = train(step, mlp_batches(5), monitor)
    assert not errors
    assert recorder.of("grad/norm") == pytest.approx(norms, **CLOSE)
    assert recorder.of("grad/spike") == [0] * 5


def set_to_none(parameter, _):
    parameter.grad = None


@pytest.mark.parametrize("how", [*PUT, "none"])
@pytest.mark.parametrize("zero_at", ["start", "end"])
def test_a_skipped_spike_counts_however_gradients_are_set_to_zero(how, zero_at):
    model, reported = make_mlp(), []
    optimizer = sgd(model)

    def zero():
        for parameter in model.parameters():
            if parameter.grad is not None:
                (set_to_none if how == "none" else PUT[how])(parameter, torch.zeros_like(parameter))

    steps = [
        lambda *_: zero(),
        make_step(model, optimizer, zero_at="never", leave_out=lambda engine: engine.state.unhealthy_spike),
    ]
    monitor = GradMonitor(
        model,
        optimizer,
        threshold=StaticThreshold(50.0),
        on_spike=lambda engine, norm: reported.append(engine.state.iteration),
    )
    step = in_turn(*steps if zero_at == "start" else reversed(steps))
    recorder = train(step, mlp_batches(8, spikes=[3, 4, 6]), monitor)
    assert recorder.of("grad/spike_count") == [0, 0, 1, 2, 2, 3, 3, 3]
    assert recorder.of("grad/stepped") == [1, 1, 0, 0, 1, 0, 1, 1]
    assert reported == [3, 4, 6]
    assert observations(monitor) == 7  # of spikes in a row the first enters alone


def test_a_loaded_state_does_not_include_the_spike_that_was_skipped_before():
    model = make_mlp()
    optimizer = sgd(model)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(50.0))
    engine = Engine(make_step(model, optimizer, leave_out=lambda engine: engine.state.unhealthy_spike))
    monitor.attach(engine)
    state = monitor.state_dict()
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=3), lambda: monitor.load_state_dict(state))
    engine.run(mlp_batches(4, spikes=[3]))
    assert observations(monitor) == 1
    assert engine.state.metrics["grad/spike_count"] == 0


def test_no_hook_waits_for_a_backward_after_the_train_step():
    model = make_mlp()
    optimizer = sgd(model)
    engine = Engine(lambda engine, batch: mse_loss(model, batch).backward())
    GradMonitor(model, optimizer, threshold=StaticThreshold(1e-3)).attach(engine)
    hooks = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: hooks.append([len(p._backward_hooks or ()) for p in model.parameters()])
    )
    engine.run(mlp_batches(4), max_epochs=1)
    assert hooks == [[0] * 4] * 4
