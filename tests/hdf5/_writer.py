"""A run that goes on until its process is killed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import h5py  # noqa: F401  so that a process that is forked off has it
import torch
from ignite.engine import Engine, Events

from ignite_monitor import HDF5Logger


def step(engine: Engine, batch: int) -> dict[str, Any]:
    iteration = engine.state.iteration
    named: dict[str, Any] = {f"m{i}": iteration + i / 10 for i in range(20)}
    if iteration % 3 == 0:
        named["rare"] = torch.tensor(float(iteration))
    if iteration > 100:
        named[f"top/{iteration % 17}"] = float(iteration)
    return named


def write_forever(path: Path, mode: str, start: int, completed: Any) -> None:
    """Log every iteration after ``start``; ``completed.value`` is the number of the last one."""
    engine = Engine(step)
    logger = HDF5Logger(path, mode)
    logger.attach_output_handler(engine, Events.ITERATION_COMPLETED, output_transform=lambda output: output)

    @engine.on(Events.STARTED | Events.ITERATION_COMPLETED)
    def count() -> None:
        completed.value = engine.state.iteration

    engine.load_state_dict({"iteration": start, "epoch_length": 10**9, "max_epochs": 1})
    engine.run(itertools.count(start))
