"""Which gradient a detection speaks of: the state machine by itself, and GradMonitor in the train steps it is for."""

from __future__ import annotations

import copy

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import ActivationHandler, GradMonitor, StaticThreshold, WeightUpdateHandler
from tests._trainers import Recorder, grad_norm, loss_of, make_batches, make_model, norm_of, train
from tests.stress._steps import PUT

CLOSE = {"rel": 1e-5}


def sgd(model, lr=1e-6):
    return torch.optim.SGD(model.parameters(), lr=lr)


def observations(monitor):
    return float(monitor.state_dict()["detector"]["rule"]["count"])


# The window


# What becomes of a gradient between backward and step


@pytest.mark.parametrize("factor", [0.0, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("how", [*PUT])
@pytest.mark.parametrize("skip_step", [False, True])
def test_a_gradient_replaced_after_its_backward_is_one_detection_one_event_and_one_observation(factor, how, skip_step):
    model, truth, flags, told, moved = make_model(), [], [], [], []
    optimizer = sgd(model)

    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        truth.append(grad_norm(model))
        flags.append(engine.state.unhealthy_spike)
        for parameter in model.parameters():
            PUT[how](parameter, parameter.grad.detach() * factor)
        before = copy.deepcopy(model.state_dict())
        optimizer.step()
        moved.append(any(not torch.equal(each, before[name]) for name, each in model.state_dict().items()))

    monitor = GradMonitor(
        model,
        optimizer,
        threshold=StaticThreshold(50.0),
        on_spike="skip" if skip_step else lambda engine, norm: told.append((engine.state.iteration, norm)),
    )
    recorder = train(step, make_batches(9, spikes=[4, 5]), monitor)
    assert flags == recorder.flags == [i in (4, 5) for i in range(1, 10)]
    assert recorder.of("grad/norm") == recorder.norms == pytest.approx(truth, **CLOSE)
    assert told == [(i, pytest.approx(truth[i - 1], **CLOSE)) for i in (4, 5) if not skip_step]
    assert recorder.of("grad/spike_count") == [0, 0, 0, 1, 2, 2, 2, 2, 2]
    assert observations(monitor) == 8  # of spikes in a row the first enters alone
    entered = [min(norm, 50.0) for i, norm in enumerate(truth[:-1], 1) if i != 5]
    assert recorder.of("grad/mean")[-1] == pytest.approx(sum(entered) / 7, **CLOSE)
    assert recorder.of("grad/stepped") == [float(not (skip_step and i in (4, 5))) for i in range(1, 10)]
    assert recorder.of("grad/skipped_count")[-1] == 2 * skip_step
    assert moved == [factor > 0 and not (skip_step and i in (4, 5)) for i in range(1, 10)]


@pytest.mark.parametrize("how", [*PUT])
def test_gradients_that_no_backward_makes_are_judged_at_each_step(how):
    model, truth = make_model(), []
    optimizer = sgd(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def step(engine, batch):
        gradients = torch.autograd.grad(loss_of(model, batch), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            PUT[how](parameter, gradient)
        truth.append([norm_of([gradient]) for gradient in gradients])
        optimizer.step()

    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(50.0))
    engine = Engine(step)
    monitor.attach(engine)
    WeightUpdateHandler(model, optimizer, sample_size=None).attach(engine)
    ActivationHandler(model, gradients={"norm": torch.linalg.vector_norm}).attach(engine)
    recorder = Recorder(engine)
    engine.run(make_batches(6, spikes=[4]), max_epochs=1)
    whole = [sum(norm**2 for norm in norms) ** 0.5 for norms in truth]
    assert recorder.of("grad/norm") == pytest.approx(whole, **CLOSE)
    assert recorder.of("grad/spike") == [0, 0, 0, 1, 0, 0]
    assert recorder.of("monitor/grad_max") == pytest.approx([max(norms) for norms in truth], **CLOSE)
    for place, (name, _) in enumerate(model.named_parameters()):
        assert recorder.of(f"gradient/{name}/norm") == pytest.approx([norms[place] for norms in truth], **CLOSE)


def test_gradients_and_parameters_that_are_inference_tensors_stop_nothing():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            with torch.inference_mode():
                self.backbone = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            with torch.no_grad():
                x = self.backbone(x)
            return self.head(x)

    model, truth = Net(), []
    optimizer = sgd(model, lr=0.1)

    def step(engine, batch):
        optimizer.zero_grad()
        if engine.state.iteration % 2:
            loss_of(model, batch).backward()
        else:  # as evolution strategies do
            with torch.inference_mode():
                for parameter in model.head.parameters():
                    parameter.grad = 0.1 * torch.ones_like(parameter)
        truth.append(grad_norm(model))
        optimizer.step()
        optimizer.zero_grad()

    engine = Engine(step)
    GradMonitor(model, optimizer).attach(engine)
    WeightUpdateHandler(model, optimizer, sample_size=None).attach(engine)
    ActivationHandler(model, gradients=True).attach(engine)
    recorder = Recorder(engine)
    engine.run(make_batches(6), max_epochs=1)
    assert recorder.of("grad/norm") == pytest.approx(truth, **CLOSE)
    assert all(recorder.of("monitor/grad_max"))
    assert recorder.of("monitor/update_ratio_max")[1] > 0
    assert recorder.of("gradient/head.bias/mean")[1::2] == pytest.approx([0.1] * 3)


# Spikes that the train step leaves out


def set_to_none(parameter, _):
    parameter.grad = None


@pytest.mark.parametrize("how", [*PUT, "none"])
@pytest.mark.parametrize("zero_at", ["start", "end"])
def test_a_spike_that_is_left_out_counts_however_gradients_are_set_to_zero(how, zero_at):
    model, told = make_model(), []
    optimizer = sgd(model)

    def zero():
        for parameter in model.parameters():
            if parameter.grad is not None:
                (set_to_none if how == "none" else PUT[how])(parameter, torch.zeros_like(parameter))

    def step(engine, batch):
        if zero_at == "start":
            zero()
        loss_of(model, batch).backward()
        if not engine.state.unhealthy_spike:
            optimizer.step()
        if zero_at == "end":
            zero()

    monitor = GradMonitor(
        model,
        optimizer,
        threshold=StaticThreshold(50.0),
        on_spike=lambda engine, norm: told.append(engine.state.iteration),
    )
    recorder = train(step, make_batches(8, spikes=[3, 4, 6]), monitor)
    assert recorder.of("grad/spike_count") == [0, 0, 1, 2, 2, 3, 3, 3]
    assert recorder.of("grad/stepped") == [1, 1, 0, 0, 1, 0, 1, 1]
    assert told == [3, 4, 6]
    assert observations(monitor) == 7  # of spikes in a row the first enters alone


@pytest.mark.parametrize("every", [2, 3, 4])
def test_filters_that_meet_some_iterations_of_an_accumulation(every):
    """Steps in the others go unseen: what is published is whole gradients alone, and partial ones that are flagged."""
    model, truth = make_model(), []
    optimizer = sgd(model)

    def step(engine, batch):
        i = engine.state.iteration
        if i % 4 == 1:
            optimizer.zero_grad()
        loss_of(model, batch).backward()
        truth.append(grad_norm(model))
        if i % 4 == 0:
            optimizer.step()

    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(50.0))
    recorder = train(step, make_batches(24, spikes=[5]), monitor, event=Events.ITERATION_STARTED(every=every))
    expected, whole = [], 0
    for i, norm in enumerate(truth, 1):
        is_published = i % every == 0 and (i % 4 == 0 or norm > 50.0)
        expected.append(pytest.approx(norm, **CLOSE) if is_published else None)
        whole += i % every == 0 and i % 4 == 0
    assert recorder.of("grad/norm") == expected
    # Of iterations 5 to 8, whose sum is a spike, one entry: that of the step where it is seen, else the flagged part.
    assert recorder.metrics[23]["grad/spike_count"] == 1
    assert observations(monitor) == whole + (every == 3)


# Several optimizers and models


def test_no_hook_waits_for_a_backward_after_the_train_step():
    model = make_model()
    optimizer = sgd(model)
    engine = Engine(lambda engine, batch: loss_of(model, batch).backward())
    GradMonitor(model, optimizer, threshold=StaticThreshold(1e-3)).attach(engine)
    hooks = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: hooks.append([len(p._backward_hooks or ()) for p in model.parameters()])
    )
    engine.run(make_batches(4), max_epochs=1)
    assert hooks == [[0] * 4] * 4
