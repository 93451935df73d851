"""How many operations a monitor launches in an iteration: the number is the cost on a GPU, the same in every run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from ignite.engine import Events

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    OptimizerStateHandler,
    RCCHandler,
    RobustThreshold,
    SpectralNormHandler,
    StepStatsHandler,
    WeightUpdateHandler,
)
from tests.accelerator import simulated
from tests.accelerator._device import Device
from tests.accelerator._trainings import Training, Transformer, batches

Make = Callable[..., Any]
CLIP = "clip_grad_norm_"
# How many there may be with a model of six blocks, which has 77 parameters; and the monitor, given model and optimizer.
MONITORS: dict[str, tuple[int, Make]] = {
    "GradMonitor": (40, GradMonitor),
    "GradMonitor, RobustThreshold": (50, lambda m, o: GradMonitor(m, o, threshold=RobustThreshold())),
    "GradMonitor, per_parameter": (98, lambda m, o: GradMonitor(m, o, per_parameter=True)),
    "WeightUpdateHandler": (130, WeightUpdateHandler),
    "OptimizerStateHandler": (200, lambda m, o: OptimizerStateHandler(m, o)),
    "ActivationHandler": (90, lambda m, o: ActivationHandler(m, activations=True)),
    "ActivationHandler, attention": (110, lambda m, o: ActivationHandler(m, activations=True, attention=True)),
    "ActivationHandler, gradients and parameters": (
        910,
        lambda m, o: ActivationHandler(m, activations=True, attention=True, gradients=True, parameters=True),
    ),
    "RCCHandler": (1050, lambda m, o: RCCHandler(m)),
    "SpectralNormHandler": (550, lambda m, o: SpectralNormHandler(m)),
    "SpectralNormHandler, updates": (1150, lambda m, o: SpectralNormHandler(m, updates=True)),
    "StepStatsHandler": (6, StepStatsHandler),
}


class Operations(NamedTuple):
    """What an iteration takes.

    Attributes:
        seen: operations as a dispatch mode sees them, which hooks on modules put aside.
        launched: on the simulated device all that it has run.
    """

    seen: int
    launched: int


def operations(device: Device, make: Make | None, blocks: int = 6, width: int = 32, clip: bool = False) -> Operations:
    """Those of the fourth iteration of a training, when all tensors are there."""
    iterations = 4
    training = Training(device, model=Transformer(blocks, width, records=False), clip=clip)
    trainer, counting = training.trainer, contextlib.ExitStack()
    launched: list[int] = []

    @trainer.on(Events.ITERATION_STARTED(once=iterations))
    def start() -> None:
        launched.append(simulated.launched() if device.name == simulated.NAME else 0)
        nonlocal seen
        seen = counting.enter_context(simulated.operations(device.name))

    if make is not None:
        make(training.model, training.optimizer).attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED(once=iterations))
    def end() -> None:
        counting.close()
        launched.append(simulated.launched() if device.name == simulated.NAME else 0)

    seen: Any = None
    trainer.run(batches(iterations, device.name), max_epochs=1)
    return Operations(sum(seen.values()), launched[1] - launched[0])


def added(device: Device, make: Make | None = None, **kwargs: int) -> Operations:
    """What a monitor adds to an iteration; without one, what clipping does."""
    with torch.random.fork_rng(devices=[]):
        plain = _without(device.name, *kwargs.items())
        watched = operations(device, make, **kwargs, clip=make is None)
    return Operations(watched.seen - plain.seen, watched.launched - plain.launched)


@functools.cache
def _without(device: str, *kwargs: tuple[str, int]) -> Operations:
    return operations(Device(device), None, **dict(kwargs))
