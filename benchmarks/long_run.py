"""Whether 10,000 iterations with every handler attached leave memory, time, hooks and handlers as they were.

A small transformer is trained with every handler in every iteration, with a TensorBoard logger and an HDF5Logger; a
damaged batch every 500 iterations is a step that GradMonitor skips. Every 100 iterations, when the loggers have written
what they hold, this counts the tensors that are alive and their bytes, what the C library's heap and (after a garbage
collection: until then Python keeps freed tuples) Python have given out, the size of the process, and all hooks, event
handlers and modes. Time is that of the processor, all threads together; steps of a second model without monitors take
turns with the others, so that a machine that gets slower is not taken for monitors that do.

The first third is warm-up. Memory and time grow if a straight line through the rest (its standard error is from ten
blocks, since neighbouring samples are alike) or the mean of the last third over that of the second rises by more than a
tolerance, and the line by more than three standard errors. Tensors, hooks, handlers and modes grow if there is ever one
more in the last third than in the second; hooks, handlers and modes, if there is one more than when iteration 2 starts.
Exits with 1 if anything grows.

    PYTHONPATH=. python benchmarks/long_run.py [--iterations 10000] [-o long_run.png] [--without RCCHandler TensorBoard]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from fits import line
from ignite.engine import Engine, Events
from ignite.handlers.tensorboard_logger import TensorboardLogger
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import optimizer as torch_optimizer

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    HDF5Logger,
    RCCHandler,
    SpectralNormHandler,
    StepStatsHandler,
    WeightUpdateHandler,
)
from ignite_monitor.step_stats.measures import resident_memory

EVERY = 100
PLAIN = 20  # steps without monitors in a sample
BLOCKS = 10
TOKENS, WIDTH = 32, 16

# What is counted, its unit, and the part of its mean by which it may grow: None where it is only shown.
SERIES = {
    "time per iteration": ("ms", None),
    "the same without monitors": ("ms", None),
    "time over that without monitors": ("", 0.03),
    "size of the process": ("MiB", 0.005),
    "C heap in use": ("MiB", 0.001),
    "Python's blocks": ("", 0.001),
    "tensors alive": ("", 0.0),
    "bytes of tensors": ("", 0.0),
    "hooks, handlers, modes": ("", 0.0),
}


class Heap(ctypes.Structure):
    """What glibc's mallinfo2() gives."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    )


def heap_in_use() -> float:
    """MiB that malloc has given out; NaN without glibc."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return float("nan")
    mallinfo.restype = Heap
    found = mallinfo()
    return (found.uordblks + found.hblkhd) / 2**20


def alive_tensors() -> tuple[int, int]:
    """How many tensors Python knows, and the bytes of their storages, each counted once."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and not is_lazy(each)]
    storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
    return len(tensors), sum(storages.values())


def attached(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """How many hooks and handlers there are on an engine, a model and optimizers, and modes that are on."""
    owners = [*model.modules(), optimizer, torch_optimizer, nn.modules.module]
    hooks = [value for owner in owners for name, value in vars(owner).items() if name.rstrip("_").endswith("_hooks")]
    hooks += [each._backward_hooks for each in model.parameters()]
    hooks += [each._post_accumulate_grad_hooks for each in model.parameters()]
    handlers = sum(map(len, engine._event_handlers.values()))
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return sum(len(each) for each in hooks if isinstance(each, dict)) + handlers + modes


def make_step() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
    model = nn.Sequential(
        nn.Embedding(TOKENS, WIDTH),
        nn.TransformerEncoder(block, 1, enable_nested_tensor=False),
        nn.Linear(WIDTH, TOKENS),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(engine: Engine | None, batch: tuple[Tensor, float]) -> float:
        tokens, factor = batch
        optimizer.zero_grad()
        loss = factor * nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return model, optimizer, train_step


def batches(iterations: int) -> Iterator[tuple[Tensor, float]]:
    generator = torch.Generator().manual_seed(0)
    for iteration in range(1, iterations + 1):
        damaged = iteration % 500 == 250
        yield torch.randint(0, TOKENS, (4, 8), generator=generator), 1000.0 if damaged else 1.0


def monitors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [
        GradMonitor(model, optimizer, on_spike="skip"),
        WeightUpdateHandler(model, optimizer),
        ActivationHandler(
            model,
            activations=True,
            parameters={"norm": torch.norm},
            gradients={"norm": torch.norm},
            activation_differences={"norm": lambda now, then: (now - then).norm()},
            parameter_differences={"norm": lambda now, then: (now - then).norm()},
            reference="init",
            attention=True,
        ),
        RCCHandler(model),
        SpectralNormHandler(model, updates=True, per_parameter=True),
        StepStatsHandler(model, optimizer, peak_flops=1e12, flops_per_item=1e3),
    ]


class Sampler:
    """Counts everything, as the first handler of every hundredth iteration, from the second on."""

    def __init__(self, engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, flush: Any) -> None:
        self.iterations: list[int] = []
        self.series: dict[str, list[float]] = {name: [] for name in SERIES}
        self._counted, self._flush = (engine, model, optimizer), flush
        self._plain = make_step()[2]
        self._tokens = next(batches(1))
        self._began, self._last, self.hooks_at_first = time.process_time(), 1, 0
        engine.add_event_handler(Events.ITERATION_STARTED, self)

    def __call__(self, engine: Engine) -> None:
        if engine.state.iteration % EVERY == 2:
            self.sample(engine)

    def sample(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        self._flush()
        passed = 1e3 * (time.process_time() - self._began) / max(iteration - self._last, 1)
        before = time.process_time()
        for _ in range(PLAIN):
            self._plain(engine, self._tokens)
        plain = 1e3 * (time.process_time() - before) / PLAIN
        tensors = alive_tensors()
        process, heap = resident_memory() or math.nan, heap_in_use()
        gc.collect()
        values = (passed, plain, passed / plain, process, heap, sys.getallocatedblocks(), *tensors)
        if iteration > 2:  # the time before was that of the first iteration, in which torch makes what it keeps
            self.iterations.append(iteration)
            for name, value in zip(SERIES, (*values, attached(*self._counted)), strict=True):
                self.series[name].append(value)
        else:
            self.hooks_at_first = attached(*self._counted)
        self._last = iteration
        self._began = time.process_time()


def run(iterations: int, without: list[str], folder: Path) -> tuple[Sampler, int]:
    """Train, and give what was counted, and the hooks and handlers that are left when everything is detached."""
    model, optimizer, train_step = make_step()
    engine = Engine(train_step)
    writers: list[Any] = []
    if "TensorBoard" not in without:
        writers.append(TensorboardLogger(log_dir=str(folder)))
    if "HDF5Logger" not in without:
        writers.append(HDF5Logger(folder / "run.h5"))

    def flush() -> None:
        for each in writers:
            (each if isinstance(each, HDF5Logger) else each.writer).flush()

    before = attached(engine, model, optimizer)
    sampler = Sampler(engine, model, optimizer, flush)
    members = [each for each in monitors(model, optimizer) if type(each).__name__ not in without]
    for monitor in members:
        monitor.attach(engine)
        for writer in writers:
            monitor.log_to(writer, engine)
    engine.run(batches(iterations), max_epochs=1, epoch_length=iterations)
    engine.remove_event_handler(sampler, Events.ITERATION_STARTED)
    for monitor in members:
        monitor.detach()
    for writer in writers:
        writer.close()
    return sampler, attached(engine, model, optimizer) - before


def judged(name: str, iterations: list[int], values: list[float], at_first: int) -> tuple[list[str], bool]:
    """A row of the table, and whether the series grows."""
    unit, tolerance = SERIES[name]
    third = len(values) // 3
    second, last = values[third : 2 * third], values[2 * third :]
    after, x = values[third:], iterations[third:]
    size = max(1, len(after) // BLOCKS)
    blocks = [(mean(x[i : i + size]), mean(after[i : i + size])) for i in range(0, size * (len(after) // size), size)]
    slope = line(*zip(*blocks, strict=True))
    length, middle = x[-1] - x[0], mean(second)
    rise, error, change = (
        100 * each / middle for each in (slope.value * length, slope.error * length, mean(last) - middle)
    )
    if tolerance is None:
        grows = False
    elif tolerance == 0:
        grows = max(last) > max(second) or (name.startswith("hooks") and max(values) > at_first)
    else:
        grows = rise > 3 * error and max(rise, change) > 100 * tolerance
    detection = "" if tolerance is None else "grows" if grows else "flat"
    digits = 2 if unit or middle < 100 else 0
    numbers = [f"{middle:.{digits}f} {unit}".strip(), f"{mean(last):.{digits}f} {unit}".strip()]
    return [name, *numbers, f"{change:+.3f} %", f"{rise:+.3f} ± {error:.3f} %", detection], grows


def plot(sampler: Sampler, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(3, 3, figsize=(14, 9), sharex=True, layout="constrained")
    for axis, (name, values) in zip(axes.flat, sampler.series.items(), strict=True):
        unit = SERIES[name][0]
        axis.plot(sampler.iterations, values, ".-", linewidth=0.8, markersize=3)
        axis.axvspan(0, sampler.iterations[len(values) // 3], color="0.93")
        axis.set_title(f"{name}, {unit}" if unit else name, fontsize=10)
        axis.set_ylim(0, 1.25 * max(values))
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("iteration")
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME", help="handlers and loggers to leave out")
    args = parser.parse_args()
    if args.iterations < 30 * EVERY:
        parser.error(f"argument --iterations: at least {30 * EVERY}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        sampler, left = run(args.iterations, args.without, Path(folder))
    print("| | second third | last third | change | line's rise after warm-up | |\n|---|---|---|---|---|---|")
    grown = []
    for name, values in sampler.series.items():
        row, grows = judged(name, sampler.iterations, values, sampler.hooks_at_first)
        print("| " + " | ".join(row) + " |")
        grown += [name] * grows
    print(f"\nhooks, handlers and modes at the start of iteration 2: {sampler.hooks_at_first}; left in the end: {left}")
    if args.output:
        plot(sampler, args.output)
    for name in grown:
        print(f"{name}: grows", file=sys.stderr)
    return bool(grown or left)


if __name__ == "__main__":
    sys.exit(main())
