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
    HistogramHandler,
    Metric,
    OptimizerStateHandler,
    SpectralNormHandler,
    SpikeMonitor,
    SpikeRecorder,
    StepStatsHandler,
    WeightUpdateHandler,
    attach_monitors,
)
from tests._helpers import footprint, make_trainer, mse_loss

Noise = functools.partial(GradientNoiseScaleHandler, micro_batches=2)
Mfu = functools.partial(StepStatsHandler, peak_flops=1e9, flops_per_item=1.0)
OTHER = torch.optim.SGD(nn.Linear(1, 1).parameters())

# what is called, the error, and the values of each argument that raise it
REFUSED = [
    (ActivationHandler, TypeError, {"activations": [torch.mean, {"m": 3}, {3: torch.mean}], "aggregate": [3, torch.max],
                                    "attention": ["yes"], "scaler": [1]}),
    (ActivationHandler, ValueError, {"activations": [{"a b": torch.mean}, {"overflow_fraction": torch.int8},
                                                     {"underflow": True}],
                                     "parameters": [{"dead_fraction": True}], "aggregate": ["median"],
                                     "include": ["("], "activation_differences": [True], "reference": ["init"],
                                     "prefix": ["a b"]}),
    (CurvatureHandler, TypeError, {"loss": [1.0, None]}),
    (CurvatureHandler, ValueError, {"lanczos_steps": [0]}),
    (DriftMonitor, TypeError, {"value": [3], "direction": [None]}),
    (DriftMonitor, ValueError, {"direction": ["left"]}),
    (Noise, TypeError, {"micro_batches": [2.5], "items": [5]}),
    (Noise, ValueError, {"micro_batches": [0, 1], "decay": [1.0, 0.9]}),
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
    (Mfu, TypeError, {"items": [3], "peak_flops": ["fast"], "optimizer": [None], "slowest_rank": [1]}),
    (Mfu, ValueError, {"peak_flops": [0, None], "flops_per_item": [-1, None]}),
    (WeightUpdateHandler, TypeError, {"optimizer": [1], "scaler": [1], "sample_size": [1.5, True], "eps": [None],
                                      "exploding_grad_threshold": ["1"], "frozen_patience_steps": [2.0],
                                      "prefix": [3], "model": [3]}),
    (WeightUpdateHandler, ValueError, {"optimizer": [OTHER], "sample_size": [0], "frozen_patience_steps": [0],
                                       "vanishing_grad_threshold": [-1.0, 1e3], "exploding_grad_threshold": [math.nan],
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
