"""Arguments that are refused: an error of the right type names each of them, and nothing is changed."""

from __future__ import annotations

import copy
import functools
import inspect
import math

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import (
    ActivationHandler,
    CurvatureHandler,
    DriftMonitor,
    GradientNoiseScaleHandler,
    GradMonitor,
    HistogramHandler,
    MeanStdThreshold,
    Metric,
    OptimizerStateHandler,
    RobustThreshold,
    SpectralNormHandler,
    SpikeMonitor,
    SpikeRecorder,
    StaticThreshold,
    StepStatsHandler,
    ThresholdRule,
    WeightUpdateHandler,
    attach_monitors,
)
from ignite_monitor.detection.thresholds import CallableThreshold
from tests._helpers import ListLogger, footprint, make_batches, make_trainer, mse_loss, same
from tests._models import make_model

Noise = functools.partial(GradientNoiseScaleHandler, micro_batches=2)
NOT_A_NUMBER = ["1", None, True, [1.0], 1j]
OTHER = torch.optim.SGD(nn.Linear(1, 1).parameters())

# what is called, the error, and the values of each argument that raise it
REFUSED = [
    (ActivationHandler, TypeError, {"activations": [torch.mean, {"m": 3}, {3: torch.mean}],
                                    "attention": ["yes"]}),
    (ActivationHandler, ValueError, {"activations": [{"a b": torch.mean}, {"underflow": True}],
                                     "parameters": [{"dead_fraction": True}],
                                     "include": ["("], "prefix": ["a b"]}),
    (CurvatureHandler, TypeError, {"loss": [1.0, None]}),
    (CurvatureHandler, ValueError, {"lanczos_steps": [0]}),
    (DriftMonitor, TypeError, {"value": [3, lambda: None], "direction": [None]}),
    (DriftMonitor, ValueError, {"direction": ["left"]}),
    (Noise, TypeError, {"micro_batches": [2.5], "items": [5]}),
    (Noise, ValueError, {"micro_batches": [0, 1], "decay": [1.0, 0.9]}),
    (GradMonitor, TypeError, {"model": ["model", 3, [nn.Linear(2, 2)], nn.Linear, lambda x: x],
                              "optimizer": ["sgd", 3, nn.Linear(2, 2), [1], torch.optim.SGD, True],
                              "scaler": ["scaler", 1.0, True, torch.amp.GradScaler],
                              "threshold": ["mean", [1], True, MeanStdThreshold, ThresholdRule, StaticThreshold],
                              "loss": [1.0, nn.functional.mse_loss, lambda: 1.0, nn.MSELoss, nn.MSELoss()],
                              "on_spike": [3, [print], False, True, lambda: None, lambda engine: None],
                              "max_consecutive_spikes": [None, 1.5, "3", True, [3]], "per_parameter": [1, None],
                              "norm_type": ["2", "inf", None, True, [2], 2j, torch.tensor(2.0), {}],
                              "group": [0, "world", [0, 1], torch.distributed], "prefix": [None, 1, ["grad"], b"grad"],
                              "flag": [None, 1, ["flag"], b"flag"]}),
    (GradMonitor, ValueError, {"model": [nn.Tanh(), nn.LazyLinear(2)], "optimizer": [OTHER],
                               "max_consecutive_spikes": [0, -1], "norm_type": [0, -1, -math.inf, math.nan, 0.0],
                               "prefix": ["", "a b", "a:b", "größe", "grad\n"],
                               "flag": ["", "a b", "1a", "metrics", "iteration", "output", "batch", "grad_norm",
                                        "max_epochs", "times"],
                               "threshold": [0, -1.0, math.nan, math.inf], "on_spike": ["", "Skip", "halve"]}),
    (HistogramHandler, TypeError, {"max_histograms": [1.5]}),
    (HistogramHandler, ValueError, {"max_histograms": [0], "include": ["no such"]}),
    (Metric, TypeError, {"fn": ["mean"]}),
    (OptimizerStateHandler, TypeError, {"optimizer": [nn.Linear(1, 1)], "model": ["m"], "top_k": [1.5]}),
    (OptimizerStateHandler, ValueError, {"optimizer": [OTHER], "sample_size": [0], "prefix": ["a b"]}),
    (SpectralNormHandler, TypeError, {"method": [1], "exclude": [1], "updates": [1], "per_parameter": ["yes"],
                                      "top_k": [1.5]}),
    (SpectralNormHandler, ValueError, {"method": ["svd"], "include": ["("], "top_k": [-1],
                                       "model": [nn.LayerNorm(3)]}),
    (SpikeRecorder, TypeError, {"monitor": [None, 1], "directory": [3], "keep": [2.5], "batch": [1]}),
    (SpikeRecorder, ValueError, {"directory": [__file__], "keep": [0]}),
    (MeanStdThreshold, TypeError, {"k": NOT_A_NUMBER, "warmup": [*NOT_A_NUMBER, 3.0], "decay": ["1", True, [1.0], 1j]}),
    (MeanStdThreshold, ValueError, {"k": [0, -1, math.nan, math.inf, -math.inf], "warmup": [0, 1, -1],
                                    "decay": [0, 1, -0.5, 1.5, math.nan, math.inf]}),
    (RobustThreshold, TypeError, {"k": NOT_A_NUMBER, "warmup": [*NOT_A_NUMBER, 3.0], "decay": ["1", True],
                                  "least": NOT_A_NUMBER}),
    (RobustThreshold, ValueError, {"k": [0, math.nan], "warmup": [1], "decay": [0, 1], "least": [-1.0]}),
    (StaticThreshold, TypeError, {"value": NOT_A_NUMBER}),
    (StaticThreshold, ValueError, {"value": [0, -1, math.nan, math.inf]}),
    (ThresholdRule, TypeError, {"warmup": [*NOT_A_NUMBER, 3.0], "decay": ["1", True, [1.0], 1j]}),
    (ThresholdRule, ValueError, {"warmup": [-1], "decay": [0, 1, -0.5, 1.5, math.nan]}),
    (CallableThreshold, TypeError, {"threshold": [3.0, lambda mean, std, count: "high"]}),
    (StepStatsHandler, TypeError, {"items": [3, lambda: None], "optimizer": [None]}),
    (WeightUpdateHandler, TypeError, {"optimizer": [1], "scaler": [1], "sample_size": [1.5, True], "eps": [None],
                                      "exploding_grad_threshold": ["1"], "frozen_patience_steps": [2.0],
                                      "prefix": [3], "model": [3]}),
    (WeightUpdateHandler, ValueError, {"optimizer": [OTHER], "sample_size": [0], "frozen_patience_steps": [0],
                                       "vanishing_grad_threshold": [-1.0], "exploding_grad_threshold": [math.nan],
                                       "frozen_update_ratio_threshold": [-1e-9], "top_k": [-1], "eps": [0],
                                       "prefix": [""]}),
    (attach_monitors, TypeError, {"trainer": [None], "model": [3], "optimizer": [None], "scaler": [1], "every": [2.0],
                                  "threshold": ["3"], "on_spike": [1], "prefix": [None], "extra": [[1]]}),
    (attach_monitors, ValueError, {"every": [0], "extra": ["all", ["all"]]}),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "refused"), REFUSED)
def test_wrong_arguments_are_named_and_change_nothing(make, error, refused):
    model, optimizer, trainer = make_trainer()
    given = {"model": model, "optimizer": optimizer, "trainer": trainer, "loss": mse_loss}
    given |= {"value": float, "monitor": SpikeMonitor(float), "directory": "x"}
    needed = {name for name, item in inspect.signature(make).parameters.items() if item.default is item.empty}
    before = footprint(trainer, model, optimizer)
    for name, values in refused.items():
        for value in values:
            with pytest.raises(error, match=rf"\b{name}\b"):
                make(**({key: given.get(key) for key in needed} | {name: value}))
    assert footprint(trainer, model, optimizer) == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(2, 3))])
def test_scripted_and_traced_modules_are_refused(make):
    inner = make(torch.nn.Sequential(torch.nn.Linear(3, 3)))
    for model in (inner, torch.nn.Sequential(inner)):
        with pytest.raises(ValueError, match="Argument model has scripted modules"):
            GradMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1))


# Names, loggers and states


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


def test_an_include_that_matches_nothing_is_refused():
    model, _, _ = make_trainer()
    with pytest.raises(ValueError, match="include and exclude should leave a module or a parameter"):
        ActivationHandler(model, activations=True, include="attention")
    ActivationHandler(model, activations=True, include="_root_")
