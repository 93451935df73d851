"""What GradMonitor and its rules refuse: when it is said, with the argument's name, and without a trace."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import ProgressBar
from ignite.handlers.base_logger import BaseLogger, BaseOptimizerParamsHandler, BaseOutputHandler
from torch import nn
from torch.amp import GradScaler

from ignite_monitor import GradMonitor, MeanStdThreshold, MonitorEvents, StaticThreshold, ThresholdRule
from tests._trainers import assert_same, loss_of, make_batches, make_model

NOT_A_NUMBER = ["1", None, True, [1.0], 1j]


def make_monitor(**kwargs):
    model = kwargs.pop("model") if "model" in kwargs else make_model()
    if "optimizer" in kwargs:
        return GradMonitor(model, **kwargs)
    return GradMonitor(model, torch.optim.SGD(make_parameters(model), lr=0.1), **kwargs)


def make_parameters(model):
    return model.parameters() if isinstance(model, nn.Module) and list(model.parameters()) else [torch.zeros(1)]


def footprint(engine, model):
    """Everything that attaching may change."""
    return {
        "handlers": {event: list(handlers) for event, handlers in engine._event_handlers.items() if handlers},
        "events": list(engine._allowed_events),
        "step": engine._process_function,
        "state": dict(vars(engine.state)),
        "model": [
            (dict(p._backward_hooks or {}), dict(p._post_accumulate_grad_hooks or {})) for p in model.parameters()
        ],
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", [None, "model", 3, [nn.Linear(2, 2)], nn.Linear, lambda x: x]),
        ("optimizer", ["sgd", 3, nn.Linear(2, 2), [1], torch.optim.SGD, True]),
        ("scaler", ["scaler", 1.0, True, GradScaler]),
        ("threshold", ["mean", [1], True, MeanStdThreshold, ThresholdRule, StaticThreshold]),
        ("on_spike", [3, [print], False, True, lambda engine: None]),
        ("max_consecutive_spikes", [None, 1.5, "3", True, [3]]),
        ("norm_type", ["2", "inf", None, True, [2], 2j, torch.tensor(2.0), {}]),
        ("reduction", [None, 1, True, ["mean"], {"mean"}, b"mean"]),
        ("prefix", [None, 1, ["grad"], b"grad"]),
        ("flag", [None, 1, ["flag"], b"flag"]),
    ],
)
def test_an_argument_of_a_wrong_type_is_a_type_error_that_names_it(name, values):
    for value in values:
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            make_monitor(**{name: value})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("model", [nn.Tanh(), nn.LazyLinear(2)]),
        ("optimizer", [torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)]),
        ("max_consecutive_spikes", [0, -1]),
        ("norm_type", [0, -1, -math.inf, math.nan, 0.0]),
        ("reduction", ["", "max", "Mean", "avg"]),
        ("prefix", ["", "a b", "a:b", "größe", "grad\n"]),
        ("flag", ["", "a b", "1a", "metrics", "iteration", "output", "batch", "grad_norm", "max_epochs", "times"]),
        ("threshold", [lambda mean, std, count: 1 / 0, 0, -1.0, math.nan, math.inf]),
        ("on_spike", ["", "Skip", "halve"]),
    ],
)
def test_an_argument_of_a_wrong_value_is_a_value_error_that_names_it(name, values):
    for value in values:
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            make_monitor(**{name: value})


@pytest.mark.parametrize(
    "rule", [lambda: 1.0, lambda mean: mean, lambda *_: "1", lambda *_: None, lambda *_: torch.ones(2)]
)
def test_a_threshold_function_that_does_not_take_three_numbers_and_give_one_is_refused(rule):
    with pytest.raises(TypeError, match="threshold"):
        make_monitor(threshold=rule)


def test_all_but_model_and_optimizer_are_keyword_only():
    model = make_model()
    with pytest.raises(TypeError):
        GradMonitor(model, None, None)
    with pytest.raises(TypeError):
        GradMonitor()
    with pytest.raises(TypeError, match="norm"):
        GradMonitor(model, norm=2.0)


@pytest.mark.parametrize("optimizer", [None, "LBFGS"])
def test_skipping_needs_an_optimizer_whose_step_can_be_left_out(optimizer):
    model = make_model()
    with pytest.raises(ValueError, match="on_spike='skip'"):
        GradMonitor(model, optimizer and torch.optim.LBFGS(model.parameters()), on_spike="skip")


@pytest.mark.parametrize(
    ("make", "name", "wrong_types", "wrong_values"),
    [
        (MeanStdThreshold, "k", NOT_A_NUMBER, [0, -1, math.nan, math.inf, -math.inf]),
        (MeanStdThreshold, "warmup", [*NOT_A_NUMBER, 3.0], [0, 1, -1]),
        (MeanStdThreshold, "decay", ["1", True, [1.0], 1j], [0, 1, -0.5, 1.5, math.nan, math.inf]),
        (StaticThreshold, "value", NOT_A_NUMBER, [0, -1, math.nan, math.inf]),
        (ThresholdRule, "warmup", [*NOT_A_NUMBER, 3.0], [-1]),
        (ThresholdRule, "decay", ["1", True, [1.0], 1j], [0, 1, -0.5, 1.5, math.nan]),
    ],
)
def test_threshold_rules_refuse_what_they_cannot_use(make, name, wrong_types, wrong_values):
    for value in wrong_types:
        with pytest.raises(TypeError, match=rf"\b{name}\b"):
            make(**{name: value})
    for value in wrong_values:
        with pytest.raises(ValueError, match=rf"\b{name}\b"):
            make(**{name: value})


# attach


def make_engine():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(engine, batch):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()

    return Engine(step), model, optimizer


@pytest.mark.parametrize("value", [None, "engine", 3, Engine, lambda engine, batch: None])
def test_attach_to_something_else_than_an_engine(value):
    monitor = make_monitor()
    with pytest.raises(TypeError, match=r"\bengine\b"):
        monitor.attach(value)
    monitor.attach(make_engine()[0])


@pytest.mark.parametrize(
    "value", [None, 3, "ITERATION_STARTED", "iteration_started", Events, [Events.ITERATION_STARTED]]
)
def test_attach_with_an_event_of_a_wrong_type(value):
    engine, model, optimizer = make_engine()
    before = footprint(engine, model)
    with pytest.raises(TypeError, match=r"\bevent\b"):
        GradMonitor(model, optimizer).attach(engine, value)
    assert footprint(engine, model) == before


@pytest.mark.parametrize(
    "value",
    [
        Events.ITERATION_COMPLETED,
        Events.EPOCH_STARTED,
        Events.STARTED(once=1),
        MonitorEvents.GRADIENTS_READY,
        Events.ITERATION_STARTED | Events.ITERATION_COMPLETED,
    ],
)
def test_attach_with_another_event(value):
    engine, model, optimizer = make_engine()
    before = footprint(engine, model)
    with pytest.raises(ValueError, match=r"\bevent\b"):
        GradMonitor(model, optimizer).attach(engine, value)
    assert footprint(engine, model) == before


@pytest.mark.parametrize("same_engine", [True, False])
def test_attaching_twice_is_refused_and_changes_nothing(same_engine):
    engine, model, optimizer = make_engine()
    other = engine if same_engine else Engine(lambda engine, batch: None)
    monitor = GradMonitor(model, optimizer)
    monitor.attach(engine)
    before = footprint(engine, model), footprint(other, model)
    with pytest.raises(ValueError, match="attached"):
        monitor.attach(other)
    assert (footprint(engine, model), footprint(other, model)) == before
    monitor.detach()
    monitor.attach(other)


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({}, {}, "unhealthy_spike"),
        ({}, {"prefix": "other"}, "unhealthy_spike"),
        ({}, {"flag": "other"}, "grad"),
        ({"prefix": "a.b"}, {"prefix": "a_b", "flag": "other"}, "a_b_norm"),
        ({"prefix": "a"}, {"prefix": "b", "flag": "a_norm"}, "a_norm"),
    ],
)
def test_a_name_that_another_monitor_has_claimed_on_the_engine(first, second, named):
    engine, model, optimizer = make_engine()
    GradMonitor(model, optimizer, **first).attach(engine)
    monitor = GradMonitor(model, optimizer, **second)
    before = footprint(engine, model)
    with pytest.raises(ValueError, match=named):
        monitor.attach(engine)
    assert footprint(engine, model) == before
    other = Engine(engine._process_function)
    monitor.attach(other)  # it is free for another engine
    other.run(make_batches(2), max_epochs=1)


def test_a_flag_that_the_users_own_state_attribute_has_claimed():
    engine, model, optimizer = make_engine()
    engine.state.skip = "the user's"
    before = footprint(engine, model)
    with pytest.raises(ValueError, match="skip"):
        GradMonitor(model, optimizer, flag="skip").attach(engine)
    assert footprint(engine, model) == before


# log_to


class ListLogger(BaseLogger):
    def __init__(self):
        self.written = []

    def _create_output_handler(self, *args, **kwargs):
        return ListHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args, **kwargs):
        return BaseOptimizerParamsHandler(*args, **kwargs)


class ListHandler(BaseOutputHandler):
    def __call__(self, engine, logger, event_name):
        logger.written.append(set(self._setup_output_metrics_state_attrs(engine, key_tuple=False)))


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
    engine, model, optimizer = make_engine()
    monitor = GradMonitor(model, optimizer)
    if attached:
        monitor.attach(engine)
    before = footprint(engine, model)
    with pytest.raises(error, match=name):
        monitor.log_to(**({"logger": ListLogger(), "engine": engine} | arguments))
    assert footprint(engine, model) == before


@pytest.mark.parametrize("tag", [None, "", "train"])
def test_a_tag_stands_before_the_names_and_none_adds_nothing(tag):
    engine, model, optimizer = make_engine()
    logger = ListLogger()
    monitor = GradMonitor(model, optimizer)
    monitor.attach(engine)
    monitor.log_to(logger, engine, tag=tag)
    engine.run(make_batches(1), max_epochs=1)
    start = f"{tag}/grad/" if tag else "grad/"
    assert {name.removeprefix(start) for name in logger.written[0]} >= {"norm", "spike"}


def test_a_progress_bar_is_let_go_by_detach():
    engine, model, optimizer = make_engine()
    monitor = GradMonitor(model, optimizer)
    before = {event: list(handlers) for event, handlers in engine._event_handlers.items() if handlers}
    monitor.attach(engine)
    monitor.log_to(ProgressBar(), engine)
    monitor.detach()
    assert {event: list(handlers) for event, handlers in engine._event_handlers.items() if handlers} == before


# state


def trained(threshold=None):
    engine, model, optimizer = make_engine()
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
        lambda state: state | {"detector": state["detector"] | {"spike_count": torch.ones(2)}},
        lambda state: state | {"detector": state["detector"] | {"spike_count": "many"}},
        lambda state: state | {"detector": state["detector"] | {"rule": {}}},
        lambda state: state | {"detector": state["detector"] | {"rule": 3}},
        lambda state: state | {"detector": state["detector"] | {"more": torch.ones(())}},
    ],
)
def test_a_state_that_no_monitor_saved_is_refused_and_changes_nothing(spoil):
    monitor, other = trained(), trained(MeanStdThreshold(warmup=3))
    before = copy.deepcopy(other.state_dict())
    state = dict(monitor.state_dict())
    state["detector"]["spike_count"] += 7
    with pytest.raises((TypeError, ValueError)):
        other.load_state_dict(spoil(state))
    assert_same(other.state_dict(), before)


def test_the_state_of_another_kind_of_rule_is_refused():
    class Longer(ThresholdRule):
        def empty(self):
            return super().empty() | {"more": torch.zeros(3)}

        def include(self, state, norm):
            return super().include(state, norm) | {"more": state["more"]}

        def __call__(self, mean, std, count):
            return math.inf

    with pytest.raises(ValueError, match="threshold rule"):
        trained().load_state_dict(trained(Longer()).state_dict())
