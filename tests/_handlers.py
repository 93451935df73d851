"""Every monitor, as the tests of what all of them promise make it."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from ignite.engine import Events

from ignite_monitor import (
    ActivationHandler,
    CurvatureHandler,
    DriftMonitor,
    GradientNoiseScaleHandler,
    GradMonitor,
    HistogramHandler,
    MeanStdThreshold,
    OptimizerStateHandler,
    RCCHandler,
    ReplayCheckHandler,
    ReplicaCheckHandler,
    RollbackHandler,
    RoutingHandler,
    SetupCheck,
    SpectralNormHandler,
    SpikeMonitor,
    StaticThreshold,
    StepStatsHandler,
    WeightUpdateHandler,
)
from ignite_monitor.monitor.loss import LossRecorder
from ignite_monitor.scaling import AlignmentHandler
from tests._models import make_model

OTHER = make_model(7)
GUIDE = (Path(__file__).parent.parent / "docs" / "writing_a_monitor.md").read_text(encoding="utf-8")


def monitor_of_the_guide():
    """The class that the guide for monitors of one's own prints, without the run below it."""
    namespace = {"__name__": "guide"}
    exec(GUIDE.partition("```python\n")[2].partition("torch.manual_seed(0)")[0], namespace)
    return namespace["ClippingMonitor"]


ClippingMonitor = monitor_of_the_guide()


class EveryCurvature(CurvatureHandler):
    def attach(self, engine, event=Events.ITERATION_STARTED):
        return super().attach(engine, event)


class EarlyDrift(DriftMonitor):
    _WARMUP = 3


def mse_of(model, batch):
    torch.manual_seed(0)  # for the dropout of runs that are resumed; restored afterwards
    return F.mse_loss(model(batch[0]), batch[1])


def value_of(model):
    return [*model.parameters()][-1].detach().norm()


def loss_at(iteration):
    return 1.0 + 0.1 * (iteration % 3) + 100.0 * (iteration == 26)


def routing(model, optimizer):
    model.top_k = 1
    return RoutingHandler(model, routers="^[04]$")


# name -> (model, optimizer) -> monitor
HANDLERS = {
    "GradMonitor": lambda model, optimizer: GradMonitor(model, optimizer),
    "GradMonitor, no optimizer": lambda model, optimizer: GradMonitor(model, threshold=MeanStdThreshold(warmup=3)),
    "GradMonitor, all spikes": lambda model, optimizer: GradMonitor(
        model, optimizer, threshold=StaticThreshold(1e-3), max_consecutive_spikes=1000
    ),
    "GradMonitor, skip": lambda model, optimizer: GradMonitor(
        model, optimizer, on_spike="skip", threshold=StaticThreshold(1e9)
    ),
    "GradMonitor, function": lambda model, optimizer: GradMonitor(
        model, optimizer, threshold=StaticThreshold(1e9), on_spike=lambda engine, norm: None
    ),
    "GradMonitor, clip and all signals": lambda model, optimizer: GradMonitor(
        model, optimizer, on_spike="clip", loss=lambda engine: loss_at(engine.state.iteration), per_parameter=True
    ),
    # Named values appear once others have been written, and are looked at in a test of their own.
    "WeightUpdateHandler": lambda model, optimizer: WeightUpdateHandler(model, optimizer, top_k=0),
    "OptimizerStateHandler": lambda model, optimizer: OptimizerStateHandler(model, optimizer, top_k=0),
    "ReplicaCheckHandler": lambda model, optimizer: ReplicaCheckHandler(model, optimizer),
    "ReplayCheckHandler": lambda model, optimizer: ReplayCheckHandler(model, optimizer),
    "HistogramHandler": lambda model, optimizer: HistogramHandler(model),
    "ActivationHandler": lambda model, optimizer: ActivationHandler(model, activations=True),
    "ActivationHandler, gradients": lambda model, optimizer: ActivationHandler(model, gradients=True),
    "WeightUpdateHandler, no optimizer": lambda model, optimizer: WeightUpdateHandler(model, sample_size=4, top_k=0),
    "RCCHandler": lambda model, optimizer: RCCHandler(model),
    "SpectralNormHandler": lambda model, optimizer: SpectralNormHandler(
        model, updates=True, per_parameter=True, top_k=0
    ),
    # With a reference of its own it has something to say before the first update.
    "AlignmentHandler": lambda model, optimizer: AlignmentHandler(model, reference=copy.deepcopy(OTHER)),
    "SpikeMonitor": lambda model, optimizer: SpikeMonitor(
        lambda engine: value_of(model), threshold=MeanStdThreshold(warmup=3)
    ),
    "SpikeMonitor, both": lambda model, optimizer: SpikeMonitor(
        lambda engine: value_of(model), threshold=MeanStdThreshold(warmup=3), direction="both"
    ),
    "DriftMonitor": lambda model, optimizer: EarlyDrift(lambda engine: value_of(model), direction="both"),
    "GradientNoiseScaleHandler": lambda model, optimizer: GradientNoiseScaleHandler(model, optimizer, micro_batches=2),
    "CurvatureHandler": lambda model, optimizer: EveryCurvature(model, optimizer, loss=mse_of, lanczos_steps=3),
    "RollbackHandler": lambda model, optimizer: RollbackHandler({"model": model, "optimizer": optimizer}, every=2),
    "ClippingMonitor of the guide": lambda model, optimizer: ClippingMonitor(model, optimizer),
    "LossRecorder": lambda model, optimizer: LossRecorder(),
    "SetupCheck": lambda model, optimizer: SetupCheck(model, optimizer),
    "RoutingHandler": routing,
    "StepStatsHandler": lambda model, optimizer: StepStatsHandler(
        model, optimizer, peak_flops=1e12, flops_per_item=1e3
    ),
}
