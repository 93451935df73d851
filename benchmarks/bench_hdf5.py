"""Cost of HDF5Logger with many metrics per iteration, compared with Ignite's flattening of the same dictionary.

Both take turns on the same engine in one run. Every output handler of Ignite flattens first, before it writes anything.
The time of HDF5Logger covers all its handlers, compression, writes and closing. Times are means per iteration. Bytes
are those of the closed file, names and steps included.

    python benchmarks/bench_hdf5.py [--metrics 10000] [--iterations 200]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ignite.engine import Engine, Events
from ignite.handlers.base_logger import BaseOutputHandler

from ignite_monitor import HDF5Logger, read_hdf5

KINDS: dict[str, Callable[[np.ndarray], Any]] = {
    "Python floats": lambda values: values.tolist(),
    "float32 tensors": lambda values: torch.from_numpy(values).float().unbind(),
    "float64 tensors": lambda values: torch.from_numpy(values).unbind(),
}


class Flattening(BaseOutputHandler):
    """The work that Ignite's output handlers share."""

    def __call__(self, engine: Engine, logger: Any, event_name: Any) -> None:
        self._setup_output_metrics_state_attrs(engine, key_tuple=False)


def seconds(function: Callable[..., Any], *args: Any) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def measure(kind: str, metrics: int, iterations: int, path: Path) -> tuple[float, float, float, float]:
    """Seconds per iteration of Ignite and of HDF5Logger, seconds to read, bytes per value."""
    generator = np.random.default_rng(0)
    names = [f"activation/blocks.{i // 20}.mlp/metric_{i % 20}" for i in range(metrics)]
    engine = Engine(lambda engine, batch: None)
    logger = HDF5Logger(path)
    logger.attach_output_handler(engine, Events.ITERATION_COMPLETED, "train", "all")
    engine.fire_event(Events.STARTED)
    flattening = Flattening("train", "all")
    ignite_time = logger_time = 0.0
    for iteration in range(1, iterations + 1):
        engine.state.iteration = iteration
        engine.state.metrics = dict(zip(names, KINDS[kind](generator.lognormal(size=metrics)), strict=True))
        ignite_time += seconds(flattening, engine, None, Events.ITERATION_COMPLETED)
        logger_time += seconds(engine.fire_event, Events.ITERATION_STARTED)  # pending rows are written
        logger_time += seconds(engine.fire_event, Events.ITERATION_COMPLETED)
    logger_time += seconds(logger.close)
    size = path.stat().st_size / (metrics * iterations)
    return ignite_time / iterations, logger_time / iterations, seconds(read_hdf5, path), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--metrics", type=int, default=10_000)
    parser.add_argument("--iterations", type=int, default=200)
    args = parser.parse_args()
    print(f"{args.metrics} metrics, {args.iterations} iterations")
    print(f"{'metrics are':16} {'Ignite ms':>10} {'HDF5 ms':>10} {'ratio':>7} {'bytes/value':>12} {'read s':>8}")
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            ignite, logger, read, size = measure(kind, args.metrics, args.iterations, Path(folder) / "run.h5")
        print(f"{kind:16} {1e3 * ignite:10.2f} {1e3 * logger:10.2f} {logger / ignite:7.2f} {size:12.2f} {read:8.2f}")


if __name__ == "__main__":
    main()
