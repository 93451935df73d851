"""Arguments that monitors refuse: an error of the right type names each of them, and nothing is changed."""

from __future__ import annotations

import functools
import inspect
import math

import pytest
import torch
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
from tests._helpers import footprint, make_trainer, mse_loss

Noise = functools.partial(GradientNoiseScaleHandler, micro_batches=2)
NOT_A_NUMBER = ["1", None, True, [1.0], 1j]
OTHER = torch.optim.SGD(nn.Linear(1, 1).parameters())

# what is called, the error, and the values of each argument that raise it
REFUSED = [
    (ActivationHandler, TypeError, {"activations": [torch.mean, {"m": 3}, {3: torch.mean}], "aggregate": [3, torch.max],
                                    "attention": ["yes"], "scaler": [1]}),
    (ActivationHandler, ValueError, {"activations": [{"a b": torch.mean}, {"underflow": True}],
                                     "parameters": [{"dead_fraction": True}], "aggregate": ["median"],
                                     "include": ["("], "activation_differences": [True], "reference": ["init"],
                                     "prefix": ["a b"]}),
    (CurvatureHandler, TypeError, {"loss": [1.0, None]}),
    (CurvatureHandler, ValueError, {"lanczos_steps": [0]}),
    (DriftMonitor, TypeError, {"value": [3], "direction": [None]}),
    (DriftMonitor, ValueError, {"direction": ["left"]}),
    (Noise, TypeError, {"micro_batches": [2.5], "items": [5]}),
    (Noise, ValueError, {"micro_batches": [0, 1], "decay": [1.0, 0.9]}),
    (GradMonitor, TypeError, {"model": ["model", 3, [nn.Linear(2, 2)], nn.Linear, lambda x: x],
                              "optimizer": ["sgd", 3, nn.Linear(2, 2), [1], torch.optim.SGD, True],
                              "scaler": ["scaler", 1.0, True, torch.amp.GradScaler],
                              "threshold": ["mean", [1], True, MeanStdThreshold, ThresholdRule, StaticThreshold],
                              "on_spike": [3, [print], False, True, lambda engine: None],
                              "max_consecutive_spikes": [None, 1.5, "3", True, [3]], "per_parameter": [1, None],
                              "norm_type": ["2", "inf", None, True, [2], 2j, torch.tensor(2.0), {}],
                              "reduction": [1, True, ["mean"], {"mean"}, b"mean"],
                              "group": [0, "world", [0, 1], torch.distributed], "prefix": [None, 1, ["grad"], b"grad"],
                              "flag": [None, 1, ["flag"], b"flag"]}),
    (GradMonitor, ValueError, {"model": [nn.Tanh(), nn.LazyLinear(2)], "optimizer": [OTHER],
                               "max_consecutive_spikes": [0, -1], "norm_type": [0, -1, -math.inf, math.nan, 0.0],
                               "reduction": ["", "max", "Mean", "avg"],
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
    (StepStatsHandler, TypeError, {"items": [3], "optimizer": [None]}),
    (WeightUpdateHandler, TypeError, {"optimizer": [1], "scaler": [1], "sample_size": [1.5, True], "eps": [None],
                                      "exploding_grad_threshold": ["1"], "frozen_patience_steps": [2.0],
                                      "prefix": [3], "model": [3]}),
    (WeightUpdateHandler, ValueError, {"optimizer": [OTHER], "sample_size": [0], "frozen_patience_steps": [0],
                                       "vanishing_grad_threshold": [-1.0], "exploding_grad_threshold": [math.nan],
                                       "frozen_update_ratio_threshold": [-1e-9], "top_k": [-1], "eps": [0],
                                       "prefix": [""]}),
    (attach_monitors, TypeError, {"trainer": [None], "model": [3], "optimizer": [None], "scaler": [1], "every": [2.0],
                                  "threshold": ["3"], "on_spike": [1], "prefix": [None], "extra": [[1]]}),
    (attach_monitors, ValueError, {"every": [0], "flag": ["no flag"], "extra": ["all", ["all"]]}),
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
