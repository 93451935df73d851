"""Gradients that a detection describes, in train steps that :mod:`tests.stress` does not have."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine, Events

from ignite_monitor import GradMonitor, StaticThreshold
from tests._helpers import grad_norm, make_step, mlp_batches, mse_loss, train
from tests._models import make_mlp

CLOSE = {"rel": 1e-5}


def sgd(model, lr=1e-6):
    return torch.optim.SGD(model.parameters(), lr=lr)


def observations(monitor):
    return float(monitor.state_dict()["detector"]["rule"]["count"])


# What becomes of a gradient between backward and step


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
