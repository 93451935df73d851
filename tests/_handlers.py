"""Every monitor, as the tests of what all of them promise make it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
from ignite_monitor.attaching import LossRecorder
from ignite_monitor.scaling import AlignmentHandler
from tests._models import make_model

OTHER = make_model(7).state_dict()
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


def routing(model, optimizer):
    return RoutingHandler(model, routers="^[04]$", top_k=1)


@dataclass(frozen=True)
class Case:
    """How to make a monitor, and what tests of all monitors have to know of it.

    Attributes:
        make: function of model and optimizer.
        parts: number of micro-batches in which the train step takes a batch.
        needs_backward: whether iterations without a backward have no values.
        on_device: whether it publishes tensors of the model's device.
        decides: whether it acts on a decision, for which the host may read one flag.
        reads: what it reads on the host in 30 iterations without loggers.
        ignored: what it reads of tensors that are on the host anyway.
        second_pass: whether it reads the result of a second pass in every iteration.
        has_model: whether it watches a model.
        reads_parameter: whether its value, a function here, reads a parameter.
    """

    make: Callable[..., Any]
    parts: int = 1
    needs_backward: bool = True
    on_device: bool = True
    decides: bool = False
    reads: Mapping[str, int] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    second_pass: bool = False
    has_model: bool = True
    reads_parameter: bool = False

    def __call__(self, model, optimizer):
        return self.make(model, optimizer)


def with_other_weights(model):
    other = copy.deepcopy(model)
    other.load_state_dict(copy.deepcopy(OTHER), strict=False, assign=True)
    return other


def grad_monitor(*, given=True, **options):
    return lambda model, optimizer: GradMonitor(model, optimizer if given else None, **options)


def of_model(kind, **options):
    return lambda model, optimizer: kind(model, **options)


def of_both(kind, **options):
    return lambda model, optimizer: kind(model, optimizer, **options)


def of_value(kind, **options):
    return lambda model, optimizer: kind(lambda engine: value_of(model), **options)


ALWAYS = {"needs_backward": False}
OF_VALUE = {"needs_backward": False, "has_model": False, "reads_parameter": True}
WARM = MeanStdThreshold(warmup=3)
FAR = StaticThreshold(1e9)

HANDLERS = {
    "GradMonitor": Case(grad_monitor()),
    "GradMonitor, no optimizer": Case(grad_monitor(given=False, threshold=WARM)),
    "GradMonitor, all spikes": Case(grad_monitor(threshold=StaticThreshold(1e-3), max_consecutive_spikes=1000)),
    "GradMonitor, skip": Case(grad_monitor(on_spike="skip", threshold=FAR), decides=True),
    "GradMonitor, function": Case(grad_monitor(on_spike=lambda engine, norm: None, threshold=FAR), decides=True),
    "GradMonitor, clip and all signals": Case(
        grad_monitor(on_spike="clip", per_parameter=True),
    ),
    # Named values appear once others have been written, and are looked at in a test of their own.
    "WeightUpdateHandler": Case(of_both(WeightUpdateHandler, top_k=0)),
    "OptimizerStateHandler": Case(of_both(OptimizerStateHandler, top_k=0)),
    "ReplicaCheckHandler": Case(of_both(ReplicaCheckHandler), on_device=False, **ALWAYS),  # a constant, with one rank
    "ReplayCheckHandler": Case(
        of_model(ReplayCheckHandler, loss=mse_of), on_device=False, second_pass=True, reads={"tolist": 30}, **ALWAYS
    ),
    "HistogramHandler": Case(of_model(HistogramHandler), **ALWAYS),
    "ActivationHandler": Case(of_model(ActivationHandler, activations=True)),
    "ActivationHandler, gradients": Case(of_model(ActivationHandler, gradients=True)),
    "WeightUpdateHandler, no optimizer": Case(of_model(WeightUpdateHandler, sample_size=4, top_k=0)),
    "RCCHandler": Case(of_model(RCCHandler)),
    "SpectralNormHandler": Case(of_model(SpectralNormHandler, updates=True, per_parameter=True, top_k=0), **ALWAYS),
    # With a reference of its own it has something to say before the first update.
    "AlignmentHandler": Case(lambda model, _: AlignmentHandler(model, reference=with_other_weights(model))),
    "SpikeMonitor": Case(of_value(SpikeMonitor, threshold=WARM), **OF_VALUE),
    "SpikeMonitor, both": Case(of_value(SpikeMonitor, threshold=WARM, direction="both"), **OF_VALUE),
    "DriftMonitor": Case(of_value(EarlyDrift, direction="both"), **OF_VALUE),
    "GradientNoiseScaleHandler": Case(of_both(GradientNoiseScaleHandler, micro_batches=2), parts=2),
    "CurvatureHandler": Case(of_both(EveryCurvature, loss=mse_of, lanczos_steps=3), ignored=("__float__",), **ALWAYS),
    "RollbackHandler": Case(
        lambda model, optimizer: RollbackHandler({"model": model, "optimizer": optimizer}, every=2),
        needs_backward=False,
        has_model=False,
        on_device=False,
        decides=True,
    ),
    "ClippingMonitor of the guide": Case(of_both(ClippingMonitor)),
    "LossRecorder": Case(lambda *_: LossRecorder(), has_model=False),
    "SetupCheck": Case(of_both(SetupCheck), on_device=False, reads={"tolist": 1}),
    "RoutingHandler": Case(routing),
    "StepStatsHandler": Case(of_both(StepStatsHandler), **ALWAYS),
}
