"""GradMonitor in one process: what it publishes and flags, whatever the train step looks like, and its cost."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.utils.checkpoint import checkpoint

from ignite_monitor import GradMonitor, MonitorEvents, StaticThreshold
from tests._helpers import grad_norm, make_step, mlp_batches, mse_loss, square_loss, train
from tests._models import make_mlp

CLOSE = {"rel": 1e-5}


def sgd(model, **kwargs):
    return torch.optim.SGD(model.parameters(), **({"lr": 0.01} | kwargs))


def plain_step(model, optimizer, *, seen=None, leaves_out=False, **options):
    """A train step; ``seen`` gets the norm in float64 and the flag, right after backward."""

    def note(engine):
        norm, flag = (getattr(engine.state, name, None) for name in ("grad_norm", "unhealthy_spike"))
        seen.append((grad_norm(model), None if norm is None else float(norm), flag))

    options |= {"after_backward": note} if seen is not None else {}
    return make_step(model, optimizer, leave_out=lambda e: leaves_out and e.state.unhealthy_spike, **options)


@pytest.mark.parametrize("zero_at", ["start", "end"])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_flag_and_norm_speak_of_this_iterations_gradients_when_backward_returns(zero_at, with_optimizer):
    model, seen = make_mlp(), []
    optimizer = sgd(model)
    monitor = GradMonitor(model, optimizer if with_optimizer else None)
    step = plain_step(model, optimizer, zero_at=zero_at, seen=seen, leaves_out=True)
    recorder = train(step, mlp_batches(40, spikes=[30]), monitor)

    truth, norms, flags = zip(*seen, strict=True)
    assert norms == pytest.approx(truth, **CLOSE)
    assert [bool(flag) for flag in flags] == [i == 30 for i in range(1, 41)]
    assert all(type(flag) is bool for flag in flags)
    assert recorder.flags == [bool(flag) for flag in flags]
    assert recorder.norms == pytest.approx(norms, rel=0)
    assert recorder.of("grad/norm") == pytest.approx(norms, rel=0)


def test_loading_a_state_while_a_gradient_may_still_grow_loses_nothing_of_it():
    model = make_mlp()
    optimizer = sgd(model, lr=1e-6)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e-3))
    engine = Engine(lambda engine, batch: mse_loss(model, batch).backward())
    monitor.attach(engine)
    saved = monitor.state_dict()
    saved["counts"] = torch.tensor([1000.0, 0.0, 0.0], dtype=torch.float64)
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=1), lambda: monitor.load_state_dict(saved))
    engine.run(mlp_batches(2))
    assert float(monitor.metrics["grad/spike_count"]) == 1001


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_no_gradients_at_all_publish_nothing_and_warn_once_saying_what_to_do(caplog, with_optimizer):
    model, other = make_mlp(), make_mlp(1)
    optimizer = sgd(other)
    monitor = GradMonitor(model, sgd(model) if with_optimizer else None)
    recorder = train(plain_step(other, optimizer), mlp_batches(25), monitor)
    assert recorder.metrics == [{}] * 25
    assert recorder.flags == [False] * 25
    (report,) = monitor.reports
    assert (report.iteration, report.kind, report.severity) == (20, "no_gradient", "note")
    assert "optimizer" in report.text
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("norm_type", [1, 2.0, math.inf])
def test_norm_types(norm_type):
    model, truth = make_mlp(), []
    optimizer = sgd(model)
    step = make_step(model, optimizer, after_backward=lambda _: truth.append(grad_norm(model, norm_type)))
    recorder = train(step, mlp_batches(3), GradMonitor(model, optimizer, norm_type=norm_type))
    assert recorder.norms == recorder.of("grad/norm") == pytest.approx(truth, **CLOSE)


@pytest.mark.parametrize("plain", [(), (0,), (2,)])
@pytest.mark.parametrize("nested", [False, True])
def test_segments_checkpointed_reentrantly_are_one_backward(plain, nested):
    """Plain segments are before or after those that call a backward within the backward, or in none at all."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))
    optimizer, ready, truth = sgd(model), [], []

    def forward(x):
        x = x.clone().requires_grad_()
        for i, layer in enumerate(model):
            if nested and i not in plain:
                inner = lambda x, layer=layer: checkpoint(layer, x, use_reentrant=True)  # noqa: E731
                x = checkpoint(lambda x, inner=inner: torch.tanh(inner(x)), x, use_reentrant=True)
            else:
                x = layer(x) if i in plain else checkpoint(layer, x, use_reentrant=True)
        return x

    engine = Engine(make_step(forward, optimizer, after_backward=lambda engine: truth.append(grad_norm(model))))
    GradMonitor(model, optimizer).attach(engine)
    engine.add_event_handler(MonitorEvents.GRADIENTS_READY, lambda engine: ready.append(float(engine.state.grad_norm)))
    engine.run(mlp_batches(3))
    assert ready == pytest.approx(truth, **CLOSE)


def test_optimizer_steps_inside_of_backward_leave_no_whole_gradient_and_nothing_is_published():
    model = make_mlp()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.01) for parameter in model.parameters()}

    def step_at_once(parameter):
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(step_at_once)
    monitor = GradMonitor(model)
    recorder = train(lambda _, batch: mse_loss(model, batch).backward(), mlp_batches(22), monitor)
    assert recorder.metrics == [{}] * 22
    assert recorder.flags == [False] * 22
    assert [report.kind for report in monitor.reports] == ["no_gradient"]


# Train steps that :mod:`tests.stress` does not have


def observations(monitor):
    return float(monitor.state_dict()["detector"]["count"])


def test_a_step_that_raises_an_error_leaves_the_next_its_own_gradient():
    """The train step makes the iteration anew with smaller gradients."""
    model, norms, errors = make_mlp(), [], [MemoryError()]
    optimizer = sgd(model, lr=1e-6)

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
    optimizer = sgd(model, lr=1e-6)
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
    optimizer = sgd(model, lr=1e-6)
    engine = Engine(lambda engine, batch: mse_loss(model, batch).backward())
    GradMonitor(model, optimizer, threshold=StaticThreshold(1e-3)).attach(engine)
    hooks = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: hooks.append([len(p._backward_hooks or ()) for p in model.parameters()])
    )
    engine.run(mlp_batches(4), max_epochs=1)
    assert hooks == [[0] * 4] * 4


# Python calls that it adds to an iteration: the same in every run, unlike times

ITERATION = 30
# 292 are the hooks, one for each gradient. Optimizers of older releases run through more functions.
LIMIT = 500 if torch.__version__ >= "2.13" else 518


def calls(attach: Callable[[nn.Module, torch.optim.Optimizer, Engine], Any]) -> int:
    """Python calls of one iteration, in a model with 292 parameters."""
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(block, 24, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(5, 8), encoder, nn.LayerNorm(8), nn.Linear(8, 5, bias=False))
    assert len(list(model.parameters())) == 292
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    count = 0

    def profile(frame, event, argument):
        nonlocal count
        count += event == "call"

    engine = Engine(make_step(model, optimizer, loss_of=square_loss))
    attach(model, optimizer, engine)
    engine.add_event_handler(Events.GET_BATCH_STARTED(once=ITERATION), lambda: sys.setprofile(profile))
    engine.add_event_handler(Events.GET_BATCH_STARTED(once=ITERATION + 1), lambda: sys.setprofile(None))
    engine.run([torch.arange(5).view(1, 5)] * (ITERATION + 2))
    assert sys.getprofile() is None
    return count


def test_python_calls_of_a_monitored_iteration():
    plain = calls(lambda model, optimizer, engine: None)
    assert calls(lambda model, optimizer, engine: GradMonitor(model, optimizer).attach(engine)) - plain <= LIMIT
