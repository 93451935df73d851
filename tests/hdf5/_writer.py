"""Runs in processes of their own."""

from __future__ import annotations

import atexit
import itertools
from pathlib import Path
from typing import Any

import h5py  # noqa: F401  so that a process that is forked off has it
import torch
import torch.distributed as distributed
from ignite.engine import Engine, Events
from ignite.metrics import Average

from ignite_monitor import HDF5Logger, SpikeMonitor


def step(engine: Engine, batch: int) -> dict[str, Any]:
    iteration = engine.state.iteration
    named: dict[str, Any] = {f"m{i}": iteration + i / 16 for i in range(20)}
    if iteration % 3 == 0:
        named["rare"] = torch.tensor(float(iteration))
    if iteration > 100:
        named[f"top/{iteration % 17}"] = float(iteration)
    return named


def write_forever(path: Path, mode: str, start: int, completed: Any) -> None:
    """Log every iteration after ``start``; ``completed.value`` is the number of the last one."""
    engine = Engine(step)
    logger = HDF5Logger(path, mode, trainer=engine)
    logger.attach_output_handler(engine, Events.ITERATION_COMPLETED, output_transform=lambda output: output)

    @engine.on(Events.STARTED | Events.ITERATION_COMPLETED)
    def count() -> None:
        completed.value = engine.state.iteration

    engine.load_state_dict({"iteration": start, "epoch_length": 10**9, "max_epochs": 1})
    engine.run(itertools.count(start))


def fail(path: Path) -> None:
    """Raise an error in iteration 30, and end as an interpreter does, with the traceback still there."""
    engine, logger = Engine(lambda engine, batch: 0.5), HDF5Logger(path)
    logger.attach_output_handler(engine, Events.ITERATION_COMPLETED, output_transform=lambda output: output)
    engine.logger.disabled = True
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=30), lambda: 1 / 0)
    try:
        engine.run(range(100))
    except ZeroDivisionError:
        atexit._run_exitfuncs()


def log_on_rank(path: Path, rank: int) -> None:
    """One of two ranks: both attach the logger and compute; the first writes."""
    distributed.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=2)
    engine = Engine(lambda engine, batch: float(batch + 10 * rank))
    Average().attach(engine, "average")
    monitor = SpikeMonitor(lambda engine: float(rank))
    monitor.attach(engine)
    monitor.report("own", f"rank {rank}")
    monitor.report("shared", "all ranks")
    with HDF5Logger(path) as logger:
        logger.attach_output_handler(engine, Events.ITERATION_COMPLETED, tag="train", output_transform=lambda x: x)
        logger.attach_output_handler(engine, Events.EPOCH_COMPLETED, tag="train", metric_names=["average"])
        monitor.log_to(logger, engine)
        engine.run(range(4))
    distributed.barrier()
    distributed.destroy_process_group()
