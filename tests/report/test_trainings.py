"""Small training runs: healthy ones are healthy, and the causes of damaged ones come first."""

from __future__ import annotations

import math

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.nn import functional as F

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    HDF5Logger,
    RCCHandler,
    StepStatsHandler,
    WeightUpdateHandler,
    read_hdf5,
)
from ignite_monitor.demo import WIDTH, TinyGPT
from ignite_monitor.report.run import Run
from ignite_monitor.report.summary import summarise
from tests._helpers import in_turn, make_step


def mlp():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


def cnn():
    """Convolutions whose biases have no effect, since BatchNorms remove them."""
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(784, 10))


def text():
    generator = torch.Generator().manual_seed(0)
    following = torch.softmax(3 * torch.randn(32, 32, generator=generator), -1)
    while True:
        x = torch.randint(32, (8, 1), generator=generator)
        for _ in range(24):
            x = torch.cat([x, torch.multinomial(following[x[:, -1]], 1, generator=generator)], 1)
        yield x[:, :-1], x[:, 1:].flatten()


def images():
    generator = torch.Generator().manual_seed(0)
    classes = torch.randn(10, 3, 16, 16, generator=generator)
    while True:
        y = torch.randint(10, (32,), generator=generator)
        yield classes[y] + 1.5 * torch.randn(32, 3, 16, 16, generator=generator), y


def vectors():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(20, 5, generator=generator)
    while True:
        x = torch.randn(32, 20, generator=generator)
        yield x, (x @ weight + 0.5 * torch.randn(32, 5, generator=generator)).argmax(1)


def sgd(rate, momentum=0.0):
    return lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], rate, momentum=momentum)


def adam(rate):
    return lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)


def trained(path, model, data, optimizer, every=10, accumulate=1, damage=lambda *_: None, iterations=150):
    """The summary of a run.

    Args:
        every: interval of the iterations in which weights and activations are measured, beside the first ones, as
            attach_monitors does.
        accumulate: the number of iterations per optimizer step.
        damage: called with iteration, model and optimizer before each iteration.
    """
    steps = optimizer(model)
    attention = isinstance(model, TinyGPT)
    measured = Events.ITERATION_STARTED(event_filter=lambda _, at: at % every == 0 or at in (1, 2, 3, 5))

    def loss_of(model, batch):
        loss = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1])
        trainer.state.metrics["loss"] = loss.item()
        return loss / accumulate

    step = make_step(model, steps, every=accumulate, loss_of=loss_of)
    trainer = Engine(in_turn(lambda engine, _: damage(engine.state.iteration, model, steps), step))
    with HDF5Logger(path, mode="w") as logger:
        monitor = GradMonitor(model, steps)
        monitor.attach(trainer)
        monitor.log_to(logger, trainer)
        others = [WeightUpdateHandler(model, steps), ActivationHandler(model, activations=True, attention=attention)]
        for other in [*others, RCCHandler(model), StepStatsHandler(model, steps)]:
            other.attach(trainer, measured)
            other.log_to(logger, trainer)
        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, tag="train", metric_names=["loss"])
        trainer.run(data, epoch_length=iterations)
    return summarise("run.h5", Run(read_hdf5(path)))


@pytest.fixture
def train(tmp_path):
    torch.manual_seed(0)
    return lambda *args, **options: trained(tmp_path / "run.h5", *args, **options)


def of(summary, kind):
    (finding,) = [finding for finding in summary.findings if finding.kind == kind]
    return finding


HEALTHY = {
    "mlp, SGD": (mlp, vectors, sgd(0.1), {}),
    "mlp, Adam": (mlp, vectors, adam(1e-3), {}),
    "mlp, accumulation": (mlp, vectors, sgd(0.1), {"accumulate": 4, "iterations": 200}),
    "cnn, SGD with momentum": (cnn, images, sgd(0.02, 0.9), {}),
    "cnn, Adam": (cnn, images, adam(1e-3), {}),
    "gpt, Adam": (TinyGPT, text, adam(2e-3), {}),
    "gpt, SGD": (TinyGPT, text, sgd(0.3, 0.9), {}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_healthy(train, name):
    model, data, optimizer, options = HEALTHY[name]
    summary = train(model(), data(), optimizer, **{"iterations": 100} | options)
    assert summary.healthy is True, [finding.text for finding in summary.findings]
    assert summary.assessment == "Healthy: nothing in this run needs attention."


def test_a_language_model_with_a_damaged_initialization(train):
    """The attention of the first block is saturated, and its outputs are far too large."""
    model = TinyGPT()
    with torch.no_grad():
        model.blocks[0].qkv.weight[: 2 * WIDTH].mul_(100)
        model.blocks[0].projection.weight.mul_(900)
    summary = train(model, text(), adam(2e-3), iterations=60)
    assert summary.healthy is False
    assert "blocks.0/head_0 (" in of(summary, "attention_collapse").text
    assert "blocks.0" in of(summary, "activation_outlier").text


def rates(factor):
    """Multiply the learning rate in iteration 100."""

    def change(iteration, model, optimizer):
        optimizer.param_groups[0]["lr"] *= factor if iteration == 100 else 1

    return change


def dead():
    model = mlp()
    with torch.no_grad():
        model[0].bias -= 100
    return model


# name: model, data, optimizer, options, the first finding
SICK = {
    "rate x 1000": (mlp, vectors, adam(1.0), {}, "large_updates"),
    "rate x 1000, SGD": (mlp, vectors, sgd(1e4), {}, "large_updates"),
    "rate x 1000 in iteration 100": (mlp, vectors, adam(1e-3), {"damage": rates(1000)}, "rate_rose"),
    "rate of 1e-9": (mlp, vectors, adam(1e-9), {}, "small_updates"),
    "weight decay": (
        *(mlp, vectors, lambda model: torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=30.0), {}),
        "weights_shrank",
    ),
    "dead units": (dead, vectors, adam(1e-3), {}, "dead_units"),
    "gpt, rate x 1000": (TinyGPT, text, adam(2.0), {"every": 20, "iterations": 60}, "large_updates"),
}


@pytest.mark.parametrize("name", SICK)
def test_the_cause_comes_first(train, name):
    model, data, optimizer, options, kind = SICK[name]
    summary = train(model(), data(), optimizer, **options)
    assert summary.healthy is False
    assert summary.findings[0].kind == kind, [finding.text for finding in summary.findings]
    assert "rate" not in name or "learning rate" in summary.findings[0].action


def test_the_module_that_produces_nan_is_named(train):
    """It is the first in the order of execution, in which ``norm_2`` comes after the attention."""

    def damage(iteration, model, optimizer):
        if iteration == 50:
            with torch.no_grad():
                model.blocks[1].norm_2.weight[0] = math.nan

    summary = train(TinyGPT(), text(), adam(2e-3), damage=damage, iterations=60)
    first = summary.findings[0]
    assert (first.kind, first.onset) == ("nonfinite_forward", 50)
    assert "blocks.1.norm_2" in first.text
    assert of(summary, "nonfinite_gradients").severity == "problem"
