"""Demo: a small GPT learns Python, some batches are damaged, and monitors are attached."""

from __future__ import annotations

import functools
import importlib.util
import logging
import shlex
import sys
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from ignite.engine import Engine, Events
from ignite.handlers.base_logger import BaseLogger
from torch import Tensor, nn

from ignite_monitor.attaching import attach_monitors
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.hdf5.logger import HDF5Logger
from ignite_monitor.report.series import number
from ignite_monitor.rollback.handler import RollbackHandler
from ignite_monitor.tensorboard import tensorboard_layout

LEAST = 200  # with fewer iterations the damaged batches would be in the threshold's warm-up
CHARACTERS, CONTEXT, BATCH, WIDTH, HEADS, BLOCKS = 128, 64, 16, 64, 4, 2
MOST_BYTES = 2**20
ROW = 30  # consecutive damaged batches, more than skipping them survives

Batch = tuple[Tensor, Tensor]

_print = functools.partial(print, flush=True)


class Damaged(NamedTuple):
    """Damaged batches: one of zeros, and a range with permuted characters."""

    zeros: int = -1
    permuted: range = range(0)


class Block(nn.Module):
    """Transformer block: causal attention and an MLP, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for an input of (batch, characters, width)."""
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return torch.add(x, self.mlp(self.norm_2(x)))


class TinyGPT(nn.Module):
    """Predicts the next character."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(CHARACTERS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each next character, given numbers of characters: (batch, characters)."""
        x = self.characters(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def run_demo(directory: Path, iterations: int) -> None:
    """Train, and print what happens and the commands that show the results.

    Args:
        directory: the output folder; existing files are kept.
        iterations: the number of iterations, :data:`LEAST` at least.

    Raises:
        ModuleNotFoundError: if h5py or rich is not installed.
        OSError: if the directory can't be written.
    """
    from ignite_monitor.hdf5.reader import read_hdf5
    from ignite_monitor.report.run import Run
    from ignite_monitor.report.summary import summarise
    from ignite_monitor.report.text import findings_text, show

    directory.mkdir(parents=True, exist_ok=True)
    names = (f"run_{i}.h5" if i > 1 else "run.h5" for i in count(1))
    file = next(directory / name for name in names if not (directory / name).exists())
    torch.manual_seed(0)
    torch.set_num_threads(1)  # synchronizing threads costs such a small model more than they add
    text, model = _text(), TinyGPT()
    size = sum(parameter.numel() for parameter in model.parameters())
    damaged = Damaged(iterations // 2 + 1, range(2 * iterations // 3, 2 * iterations // 3 + ROW))
    _print(
        f"A GPT of {BLOCKS} blocks and {size:,} parameters learns {len(text) / 1e6:.1f} MB of Python's own\n"
        f"sources, for {iterations} iterations. Batch {damaged.zeros} is nothing but zeros, and in the batches\n"
        f"{damaged.permuted.start} to {damaged.permuted[-1]} every letter stands for another one.\n"
    )
    loggers: list[BaseLogger] = [HDF5Logger(file, "x")]
    charts = importlib.util.find_spec("tensorboard") is not None
    if charts:
        from ignite.handlers.tensorboard_logger import TensorboardLogger

        loggers.append(TensorboardLogger(log_dir=str(directory / "tensorboard" / file.stem)))
    try:
        _train(model, text, iterations, damaged, loggers)
    finally:
        for logger in loggers:
            logger.close()
    _print("\nSummary of the file:")
    show(findings_text(summarise(str(file), Run(read_hdf5(file)))), width=80)
    program = "python -m ignite_monitor" if Path(sys.argv[0]).name == "__main__.py" else "ignite-monitor"
    run, picture, log = (shlex.quote(str(path)) for path in (file, file.with_suffix(".png"), directory / "tensorboard"))
    _print(f"\nEverything is in {directory}. To inspect it:\n    {program} summary {run}")
    _print(f"    {program} plot {run} -o {picture}")
    _print(
        f"    tensorboard --logdir {log}" if charts else "    (with charts: pip install 'ignite-monitor[tensorboard]')"
    )


def _train(model: nn.Module, text: Tensor, iterations: int, damaged: Damaged, loggers: list[BaseLogger]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    train_text, test_text = text[: -len(text) // 10], text[-len(text) // 10 :]
    test_batch = next(_batches(test_text, Damaged(), seed=1))

    def train_step(engine: Engine, batch: Batch) -> None:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()  # skipped by GradMonitor at a spike
        engine.state.metrics["loss"] = loss.item()

    def evaluate(engine: Engine, batch: Batch) -> None:
        model.eval()
        with torch.no_grad():
            engine.state.metrics["loss"] = _loss(model, batch).item()
        model.train()

    trainer, evaluator = Engine(train_step), Engine(evaluate)
    more = ("rcc", "spectral")
    attached = attach_monitors(trainer, model, optimizer, loggers=loggers, every=10, extra=more, on_spike="skip")
    rollback = RollbackHandler({"model": model, "optimizer": optimizer}, every=25)
    rollback.attach(trainer)
    options: Any = {"metric_names": ["loss"], "global_step_transform": lambda *_: trainer.state.iteration}
    for logger in loggers:
        rollback.log_to(logger, trainer)
        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, tag="train", **options)
        logger.attach_output_handler(evaluator, Events.COMPLETED, tag="test", **options)
        if hasattr(logger, "add_custom_scalars"):
            logger.add_custom_scalars(tensorboard_layout(*attached.monitors.values(), rollback))
    spikes = {0}

    @trainer.on(MonitorEvents.SPIKE_DETECTED)
    def report_spike(engine: Engine) -> None:
        iteration = engine.state.iteration
        if iteration - 1 not in spikes:  # the first of several consecutive spikes is enough
            norm, threshold = (number(float(engine.state.metrics[f"grad/{it}"]), 3) for it in ("norm", "threshold"))
            text = f"SPIKE, gradient norm {norm} exceeds {threshold}: the step is skipped"
            _print(f"iteration {iteration:4d}: {text}")
        spikes.add(iteration)

    @trainer.on(MonitorEvents.ROLLED_BACK)
    def report_rollback(engine: Engine) -> None:
        restored = int(engine.state.metrics["rollback/restored_iteration"])
        _print(f"iteration {engine.state.iteration:4d}: rolled back to iteration {restored}")

    @trainer.on(Events.ITERATION_COMPLETED(every=max(1, iterations // 5)))
    def report(engine: Engine) -> None:
        evaluator.run([test_batch])
        loss, unseen = engine.state.metrics["loss"], evaluator.state.metrics["loss"]
        _print(f"iteration {engine.state.iteration:4d}: loss {loss:.3f}, on unseen code {unseen:.3f}")

    package = logging.getLogger("ignite_monitor")
    level = package.level
    package.setLevel(logging.ERROR)  # warnings are printed above
    try:
        trainer.run(_batches(train_text, damaged), max_epochs=1, epoch_length=iterations)
    finally:
        package.setLevel(level)
    attached.remove()
    rollback.detach()


def _loss(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def _text() -> Tensor:
    """Characters of the standard library's sources as integers; FileNotFoundError if there are none."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    content = b""
    for path in sorted(folder.glob("*.py")):
        content += path.read_bytes()
        if len(content) > MOST_BYTES:
            break
    if len(content) < 100 * CONTEXT:
        raise FileNotFoundError(f"The standard library's sources are not in {folder}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long().clamp(max=CHARACTERS - 1)


def _batches(text: Tensor, damaged: Damaged, seed: int = 0) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(CHARACTERS, generator=torch.Generator().manual_seed(seed))
    for iteration in count(1):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
        piece = text[starts + torch.arange(CONTEXT + 1)]
        if iteration == damaged.zeros:
            piece = torch.zeros_like(piece)
        if iteration in damaged.permuted:
            piece = others[piece]
        yield piece[:, :-1], piece[:, 1:]
