"""Small real trainings: healthy ones come out healthy, with what was judged; wrecked ones are named."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

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
from ignite_monitor.report.text import show, summary_text

ITERATIONS = 150


def mlp():
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 5))


def cnn():
    """Convolutions with biases that the BatchNorms take away, of which no name tells."""
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


def trained(path, model, data, optimizer, **options):
    """The summary of a run.

    Args:
        options: ``every`` how many iterations the weights and activations are looked at, ``accumulate`` over how many
            iterations, ``damage(iteration, model, optimizer)`` before an iteration, ``judged(model)`` the optimizer
            that GradMonitor is given, ``iterations``, ``zero`` whether gradients are reset.
    """
    given = SimpleNamespace(
        **{"every": 5, "accumulate": 1, "damage": None, "judged": None, "iterations": ITERATIONS} | options
    )
    steps = optimizer(model)

    def train_step(engine, batch):
        iteration = engine.state.iteration
        if given.damage:
            given.damage(iteration, model, steps)
        if (iteration - 1) % given.accumulate == 0:
            steps.zero_grad()
        loss = F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1])
        (loss / given.accumulate).backward()
        if iteration % given.accumulate == 0:
            steps.step()
        engine.state.metrics["loss"] = loss.item()

    trainer = Engine(train_step)
    with HDF5Logger(path, mode="w") as logger:
        monitor = GradMonitor(model, given.judged(model) if given.judged else steps)
        monitor.attach(trainer)
        monitor.log_to(logger, trainer)
        others = [WeightUpdateHandler(model, steps), ActivationHandler(model, activations=True, attention=True)]
        for other in [*others, RCCHandler(model), StepStatsHandler(model, steps)]:
            other.attach(trainer, Events.ITERATION_STARTED(every=given.every))
            other.log_to(logger, trainer)
        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, tag="train", metric_names=["loss"])
        trainer.run(data, epoch_length=given.iterations)
    return summarise("run.h5", Run(read_hdf5(path)))


@pytest.fixture
def train(tmp_path):
    torch.manual_seed(0)
    return lambda *args, **options: trained(tmp_path / "run.h5", *args, **options)


def words(summary):
    stream = io.StringIO()
    show(summary_text(summary), stream)
    return stream.getvalue()


def of(summary, kind):
    (finding,) = [finding for finding in summary.findings if finding.kind == kind]
    return finding


HEALTHY = {
    "mlp, SGD": (mlp, vectors, sgd(0.1), {}),
    "mlp, Adam": (mlp, vectors, adam(1e-3), {}),
    "mlp, accumulation": (mlp, vectors, sgd(0.1), {"accumulate": 4, "iterations": 300}),
    "cnn, SGD with momentum": (cnn, images, sgd(0.02, 0.9), {}),
    "cnn, Adam": (cnn, images, adam(1e-3), {}),
    "gpt, Adam": (TinyGPT, text, adam(2e-3), {}),
    "gpt, SGD": (TinyGPT, text, sgd(0.3, 0.9), {}),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_trainings_are_healthy_and_say_what_was_judged(train, name):
    model, data, optimizer, options = HEALTHY[name]
    summary = train(model(), data(), optimizer, **options)
    assert summary.healthy is True, [finding.text for finding in summary.findings]
    said = words(summary)
    assert "Healthy: nothing in this run needs attention." in said
    assert " grad metrics (grad/*) in " in said


def test_a_language_model_that_was_wrecked_from_the_start(train):
    """Its first block's attention is saturated, and what it puts out is far too large."""
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


def detached():
    model = mlp()
    model[1].register_forward_pre_hook(lambda module, args: (args[0].detach(),))
    return model


def dead():
    model = mlp()
    with torch.no_grad():
        model[0].bias -= 100
    return model


# name: model, data, optimizer, options, the first finding
SICK = {
    "rate x 1000": (mlp, vectors, adam(1.0), {}, "early_norms"),
    "rate x 1000, SGD": (mlp, vectors, sgd(1e4), {}, "nonfinite_gradients"),
    "rate x 1000 in iteration 100": (mlp, vectors, adam(1e-3), {"damage": rates(1000)}, "rate_rose"),
    "rate of 0": (mlp, vectors, adam(0.0), {}, "group_rate"),
    "rate of 1e-9": (mlp, vectors, adam(1e-9), {}, "small_updates"),
    "weight decay": (
        *(mlp, vectors, lambda model: torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=30.0), {}),
        "weights_shrank",
    ),
    "dead units": (dead, vectors, adam(1e-3), {}, "dead_units"),
    "no gradient": (detached, vectors, adam(1e-3), {}, "frozen_parameters"),
    "gpt, rate x 500": (TinyGPT, text, adam(1.0), {"every": 20, "iterations": 60}, "loss_rose"),
}


@pytest.mark.parametrize("name", SICK)
def test_the_cause_comes_first(train, name):
    model, data, optimizer, options, kind = SICK[name]
    summary = train(model(), data(), optimizer, **options)
    assert summary.healthy is False
    assert summary.findings[0].kind == kind, [finding.text for finding in summary.findings]
    assert "rate" not in name or "learning rate" in summary.findings[0].action


def test_a_monitor_of_an_optimizer_that_makes_no_step(train):
    """Whether it publishes norms then, or nothing."""
    summary = train(mlp(), vectors(), sgd(0.1), judged=sgd(0.1))
    assert not summary.healthy
    assert "the optimizer" in words(summary)


def test_a_training_that_ends_in_the_warm_up(train):
    summary = train(mlp(), vectors(), sgd(0.1), iterations=15)
    assert summary.healthy is None
    assert "Nothing unusual, but the gradients were not monitored." in words(summary)


@pytest.mark.parametrize("name", ["qkv", "mlp.0", "norm_2"])
def test_the_module_that_makes_nan_is_named(train, name):
    """It is the first in the order of execution, in which ``norm_2`` comes after the attention."""

    def damage(iteration, model, optimizer):
        if iteration == 50:
            with torch.no_grad():
                model.blocks[1].get_submodule(name).weight.view(-1)[0] = math.nan

    summary = train(TinyGPT(), text(), adam(2e-3), damage=damage, iterations=60)
    assert f"first in blocks.1.{name}," in of(summary, "nonfinite_activations").text
    assert summary.findings[0].severity == "problem"


def test_a_gradient_in_the_warm_up_that_wrecked_the_model(train):
    def damage(iteration, model, optimizer):
        if iteration == 7:
            with torch.no_grad():
                model[0].weight.mul_(1000)
        if iteration == 8:
            with torch.no_grad():
                model[0].weight.div_(1000)

    assert of(train(mlp(), vectors(), sgd(0.1), damage=damage), "early_norms").iterations == (7,)
