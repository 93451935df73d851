"""Number of operations that monitors launch in an iteration: the cost on a GPU, the same in every run."""

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
from tests.accelerator._trainings import Training, batches, transformer

Make = Callable[..., Any]
CLIP = "clip_grad_norm_"
# Limits with a model of six blocks, which has 77 parameters, as in Operations; the monitor, given model and optimizer.
LIMITS: dict[str, tuple[int, int, Make]] = {
    "GradMonitor": (40, 50, GradMonitor),
    "GradMonitor, RobustThreshold": (50, 60, lambda m, o: GradMonitor(m, o, threshold=RobustThreshold())),
    "GradMonitor, per_parameter": (99, 115, lambda m, o: GradMonitor(m, o, per_parameter=True)),
    "WeightUpdateHandler": (127, 129, WeightUpdateHandler),
    "OptimizerStateHandler": (200, 205, OptimizerStateHandler),
    "ActivationHandler": (70, 270, lambda m, o: ActivationHandler(m, activations=True)),
    "ActivationHandler, attention": (110, 530, lambda m, o: ActivationHandler(m, activations=True, attention=True)),
    "ActivationHandler, gradients and parameters": (
        830,
        1285,
        lambda m, o: ActivationHandler(m, activations=True, attention=True, gradients=True, parameters=True),
    ),
    "RCCHandler": (1050, 1130, lambda m, o: RCCHandler(m)),
    "SpectralNormHandler": (515, 515, lambda m, o: SpectralNormHandler(m)),
    "SpectralNormHandler, updates": (1065, 1065, lambda m, o: SpectralNormHandler(m, updates=True)),
    "StepStatsHandler": (6, 6, StepStatsHandler),
}


class Operations(NamedTuple):
    """Numbers of operations in an iteration.

    Attributes:
        seen: those that a dispatch mode sees; none is on in hooks on modules.
        launched: all that the simulated device has run; 0 on another one.
    """

    seen: int
    launched: int


def operations(device: Device, make: Make | None, blocks: int = 6, width: int = 32, clip: bool = False) -> Operations:
    """Those of the fourth iteration of a training run, when all tensors exist."""
    iterations = 4
    training = Training(device, model=transformer(blocks, width, records=False), clip=clip)
    trainer, counting = training.trainer, contextlib.ExitStack()
    counts: list[Any] = []

    def launched() -> int:
        return simulated.launched() if device.name == simulated.NAME else 0

    @trainer.on(Events.ITERATION_STARTED(once=iterations))
    def start() -> None:
        counts.extend((launched(), counting.enter_context(simulated.operations(device.name))))

    if make is not None:
        make(training.model, training.optimizer).attach(trainer)

    @trainer.on(Events.ITERATION_COMPLETED(once=iterations))
    def end() -> None:
        counting.close()
        counts.append(launched())

    trainer.run(batches(iterations, device.name), max_epochs=1)
    before, seen, after = counts
    return Operations(sum(seen.values()), after - before)


def added(device: Device, make: Make | None = None, **kwargs: int) -> Operations:
    """Operations that a monitor adds to an iteration; without one, those that clipping adds."""
    with torch.random.fork_rng(devices=[]):
        plain = _without(device.name, *kwargs.items())
        watched = operations(device, make, **kwargs, clip=make is None)
    return Operations(watched.seen - plain.seen, watched.launched - plain.launched)


@functools.cache
def _without(device: str, *kwargs: tuple[str, int]) -> Operations:
    return operations(Device(device), None, **dict(kwargs))
