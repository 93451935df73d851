"""Arguments that GradMonitor and its rules refuse: when, with the argument's name, and without side effects."""

from __future__ import annotations

import copy

import pytest
import torch
from ignite.engine import Engine, Events

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    MeanStdThreshold,
    RobustThreshold,
    SpikeMonitor,
    WeightUpdateHandler,
)
from tests._helpers import ListLogger, footprint, make_batches, make_trainer, same
from tests._models import make_model


@pytest.mark.parametrize(
    "rule", [lambda: 1.0, lambda mean: mean, lambda *_: "1", lambda *_: None, lambda *_: torch.ones(2)]
)
def test_a_threshold_function_that_does_not_take_three_numbers_and_give_one_is_refused(rule):
    with pytest.raises(TypeError, match="threshold"):
        GradMonitor(make_model(), threshold=rule)


def test_all_but_model_and_optimizer_are_keyword_only():
    model = make_model()
    with pytest.raises(TypeError):
        GradMonitor(model, None, None)
    with pytest.raises(TypeError):
        GradMonitor()
    with pytest.raises(TypeError, match="norm"):
        GradMonitor(model, norm=2.0)


@pytest.mark.parametrize(("on_spike", "optimizer"), [("skip", None), ("clip", None), ("skip", "LBFGS")])
def test_on_spike_needs_an_optimizer_and_skip_refuses_lbfgs(on_spike, optimizer):
    model = make_model()
    match = "Steps of LBFGS cannot be skipped" if optimizer else f"on_spike='{on_spike}' requires `optimizer`"
    with pytest.raises(ValueError, match=match):
        GradMonitor(model, optimizer and torch.optim.LBFGS(model.parameters()), on_spike=on_spike)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({}, {}, "unhealthy_spike"),
        ({}, {"prefix": "other"}, "unhealthy_spike"),
        ({}, {"flag": "other"}, "grad"),
        ({"prefix": "a.b"}, {"prefix": "a_b", "flag": "other"}, "a_b_norm"),
        ({"prefix": "a"}, {"prefix": "b", "flag": "a_norm"}, "a_norm"),
        (None, {"flag": "skip"}, "skip"),
    ],
)
def test_a_name_that_another_monitor_or_the_user_has_claimed_on_the_engine(first, second, named):
    model, optimizer, engine = make_trainer()
    engine.state.skip = "the user's"
    if first is not None:
        GradMonitor(model, optimizer, **first).attach(engine)
    monitor = GradMonitor(model, optimizer, **second)
    before = footprint(engine, model, optimizer)
    with pytest.raises(ValueError, match=named):
        monitor.attach(engine)
    assert footprint(engine, model, optimizer) == before
    other = Engine(engine._process_function)
    monitor.attach(other)  # it is free for another engine
    other.run(make_batches(2), max_epochs=1)


# log_to


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize(
    ("arguments", "error", "name"),
    [
        *[({"logger": value}, TypeError, "logger") for value in (None, "tensorboard", ListLogger, print)],
        *[({"engine": value}, TypeError, "engine") for value in (None, "engine", Engine)],
        *[({"tag": value}, TypeError, "tag") for value in (3, ["train"], True)],
        *[({"event": value}, (TypeError, ValueError), "event") for value in (None, 3, "nonsense", Events)],
    ],
)
def test_log_to_refuses_and_changes_nothing(attached, arguments, error, name):
    model, optimizer, engine = make_trainer()
    monitor = GradMonitor(model, optimizer)
    if attached:
        monitor.attach(engine)
    before = footprint(engine, model, optimizer)
    with pytest.raises(error, match=name):
        monitor.log_to(**({"logger": ListLogger(), "engine": engine} | arguments))
    assert footprint(engine, model, optimizer) == before


# state


def trained(threshold=None):
    model, optimizer, engine = make_trainer()
    monitor = GradMonitor(model, optimizer, threshold=threshold)
    with monitor.attach(engine):
        engine.run(make_batches(5), max_epochs=1)
    return monitor


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: [],
        lambda state: "state",
        lambda state: {},
        lambda state: {"detector": state["detector"]},
        lambda state: state | {"detector": {}},
        lambda state: state | {"detector": 3},
        lambda state: state | {"detector": None},
        lambda state: state | {"skipped_count": "many"},
        lambda state: state | {"skipped_count": torch.ones(2)},
        lambda state: state | {"counts": torch.ones(2)},
        lambda state: state | {"detector": state["detector"] | {"spike_score": "many"}},
        lambda state: state | {"detector": state["detector"] | {"rule": {}}},
        lambda state: state | {"detector": state["detector"] | {"rule": 3}},
        lambda state: state | {"detector": state["detector"] | {"more": torch.ones(())}},
    ],
)
def test_a_state_that_no_monitor_saved_is_refused_and_changes_nothing(spoil):
    monitor, other = trained(), trained(MeanStdThreshold(warmup=3))
    before = copy.deepcopy(other.state_dict())
    state = dict(monitor.state_dict())
    state["counts"] += 7
    with pytest.raises((TypeError, ValueError)):
        other.load_state_dict(spoil(state))
    assert same(dict(other.state_dict()), dict(before))


# Advice in messages


@pytest.mark.parametrize("threshold", [RobustThreshold, "robust"])
def test_what_was_meant_as_a_threshold(threshold):
    model, optimizer, _ = make_trainer()
    with pytest.raises(TypeError, match="Argument threshold should be a threshold rule, a number, or a function"):
        GradMonitor(model, optimizer, threshold=threshold)
    with pytest.raises(TypeError, match="Argument threshold should be a threshold rule, a number, or a function"):
        SpikeMonitor(lambda engine: 1.0, threshold=threshold)


def test_a_cell_of_a_notebook_that_is_run_again():
    model, optimizer, trainer = make_trainer()
    first = GradMonitor(model, optimizer)
    first.attach(trainer)
    with pytest.raises(ValueError, match=r"unhealthy_spike is already claimed.*detach\(\) the other GradMonitor.*flag"):
        GradMonitor(model, optimizer).attach(trainer)
    WeightUpdateHandler(model).attach(trainer)
    with pytest.raises(ValueError, match=r"has the prefix 'monitor': detach\(\) the other .* a prefix of its own"):
        WeightUpdateHandler(model).attach(trainer)
    first.detach()
    GradMonitor(model, optimizer).attach(trainer)


def test_an_include_that_matches_nothing_is_refused():
    model, _, _ = make_trainer()
    with pytest.raises(ValueError, match="include and exclude should leave a module or a parameter"):
        ActivationHandler(model, activations=True, include="attention")
    ActivationHandler(model, activations=True, include="_root_")
