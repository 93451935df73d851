"""What monitors say of a mistake: what to do about it."""

from __future__ import annotations

import logging
from collections import namedtuple

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    RobustThreshold,
    SpikeMonitor,
    StepStatsHandler,
    WeightUpdateHandler,
    attach_monitors,
)
from tests._helpers import make_trainer


class Wrapper:
    """An optimizer by its methods alone."""

    def __init__(self, optimizer):
        self.base = optimizer
        self.param_groups = optimizer.param_groups


@pytest.mark.parametrize("kind", [GradMonitor, WeightUpdateHandler, StepStatsHandler, attach_monitors])
def test_the_optimizer_in_a_wrapper_is_named(kind):
    model, optimizer, trainer = make_trainer()
    arguments = (trainer, model) if kind is attach_monitors else (model,)
    with pytest.raises(TypeError, match=r"given .*Wrapper.*: give the optimizer inside of it, its attribute 'base'"):
        kind(*arguments, Wrapper(optimizer))
    with pytest.raises(TypeError, match=r"given <class 'str'>$"):
        kind(*arguments, "adam")


@pytest.mark.parametrize(
    ("threshold", "hint"),
    [
        (RobustThreshold, r"give an instance, RobustThreshold\(…\)"),
        ("robust", "but given robust$"),
    ],
)
def test_what_was_meant_as_a_threshold(threshold, hint):
    model, optimizer, _ = make_trainer()
    with pytest.raises(TypeError, match=hint):
        GradMonitor(model, optimizer, threshold=threshold)
    with pytest.raises(TypeError, match=hint):
        SpikeMonitor(lambda engine: 1.0, threshold=threshold)


def test_a_cell_of_a_notebook_that_is_run_again():
    model, optimizer, trainer = make_trainer()
    first = GradMonitor(model, optimizer)
    first.attach(trainer)
    with pytest.raises(ValueError, match=r"unhealthy_spike is already claimed.*detach\(\) the other GradMonitor.*flag"):
        GradMonitor(model, optimizer).attach(trainer)
    WeightUpdateHandler(model).attach(trainer)
    with pytest.raises(ValueError, match=r"has the prefix 'monitor': detach\(\) that one.* another prefix"):
        WeightUpdateHandler(model).attach(trainer)
    first.detach()
    GradMonitor(model, optimizer).attach(trainer)


@pytest.mark.parametrize("told", [True, False])
def test_nothing_chosen_is_said_once(told, caplog):
    model, _, trainer = make_trainer()
    ActivationHandler(model, activations=None if told else {"std": True}).attach(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.run([(torch.randn(8, 6), torch.randn(8, 3))] * 3)
    assert sum("Give activations=True" in each.getMessage() for each in caplog.records) == told


def test_an_include_that_matches_nothing_is_refused():
    model, _, _ = make_trainer()
    with pytest.raises(ValueError, match="include and exclude should leave a module or a parameter"):
        ActivationHandler(model, activations=True, include="attention")
    ActivationHandler(model, activations=True, include="_root_")


Output = namedtuple("Output", "hidden logits")


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x):
        y = self.linear(x)
        return Output((y, Output(y, 2 * y)), logits=3 * y)


def test_fields_of_namedtuples_have_names():
    model = Named()
    trainer = Engine(lambda engine, x: model(x).logits.sum().backward())
    ActivationHandler(model, activations={"max_abs": True}).attach(trainer)
    seen = {}
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: seen.update(engine.state.metrics))
    trainer.run([torch.randn(4, 6)])
    root = {name.split("/", 2)[2]: value for name, value in seen.items() if "_root_" in name}
    places = {"hidden/0": 1, "hidden/1/hidden": 1, "hidden/1/logits": 2, "logits": 3}
    unit = seen["activation/linear/max_abs"]
    assert root == pytest.approx({f"{place}/max_abs": factor * unit for place, factor in places.items()})
