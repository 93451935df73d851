"""Demo: a small GPT learns Python, some batches are damaged, and monitors are attached."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import shlex
import sys
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers.base_logger import BaseLogger
from torch import Tensor, nn

from ignite_monitor.attaching import attach_monitors
from ignite_monitor.hdf5.logger import HDF5Logger
from ignite_monitor.hdf5.reader import read_hdf5
from ignite_monitor.report.run import Run
from ignite_monitor.report.summary import summarise
from ignite_monitor.tensorboard import tensorboard_layout

LEAST = 200  # with fewer iterations the damaged batches would be in the threshold's warm-up
CHARACTERS, CONTEXT, BATCH, WIDTH, HEADS, BLOCKS = 128, 64, 16, 64, 4, 2
MOST_BYTES = 2**20
CONSECUTIVE = 30  # permuted batches, more than skipping them survives


class Block(nn.Module):
    """Transformer block of (batch, characters, width): causal attention and an MLP, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return torch.add(x, self.mlp(self.norm_2(x)))


class TinyGPT(nn.Module):
    """Predicts logits of each next character from numbers of characters, (batch, characters)."""

    def __init__(self) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(CHARACTERS, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CHARACTERS)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.characters(x) + self.places.weight[: x.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(embedded)))
        return logits


def run_demo(directory: Path, iterations: int) -> None:
    """Train, print what happens, and the commands that show the results; keep existing files in the directory."""
    from ignite_monitor.report.text import findings_text, show

    if iterations < LEAST:
        raise ValueError(f"argument --iterations should be at least {LEAST}, but given {iterations}")
    directory.mkdir(parents=True, exist_ok=True)
    names = (f"run_{i}.h5" if i > 1 else "run.h5" for i in count(1))
    file = next(directory / name for name in names if not (directory / name).exists())
    torch.manual_seed(0)
    torch.set_num_threads(1)  # synchronizing threads costs such a small model more than they add
    zeros, permuted = iterations // 2 + 1, range(2 * iterations // 3, 2 * iterations // 3 + CONSECUTIVE)
    print(f"A GPT of {BLOCKS} blocks learns Python's own sources, for {iterations} iterations.")
    print(f"Batch {zeros} is all zeros; in batches {permuted[0]} to {permuted[-1]} the letters are permuted.\n")
    loggers: list[BaseLogger] = [HDF5Logger(file, "x")]
    charts = importlib.util.find_spec("tensorboard") is not None
    if charts:
        from ignite.handlers.tensorboard_logger import TensorboardLogger

        loggers.append(TensorboardLogger(log_dir=str(directory / "tensorboard" / file.stem)))
    package, shown = logging.getLogger("ignite_monitor"), logging.StreamHandler(sys.stdout)
    with contextlib.ExitStack() as stack:
        for logger in loggers:
            stack.enter_context(logger)
        stack.callback(package.setLevel, package.level)
        stack.callback(package.removeHandler, shown)
        package.addHandler(shown)
        package.setLevel(logging.INFO)
        _train(iterations, zeros, permuted, loggers)
    print("\nSummary of the file:")
    show(findings_text(summarise(str(file), Run(read_hdf5(file)))), width=80)
    run, picture, log = (shlex.quote(str(path)) for path in (file, file.with_suffix(".png"), directory / "tensorboard"))
    python, current = Path(sys.executable), Path.cwd()
    run_module = f"{shlex.quote(str(python.relative_to(current) if python.is_relative_to(current) else python))} -m"
    print(f"\nEverything is in {directory}. To inspect it:\n    {run_module} ignite_monitor summary {run}")
    print(f"    {run_module} ignite_monitor plot {run} -o {picture}")
    if charts:
        print(f"    {run_module} tensorboard.main --logdir {log}")


def _train(iterations: int, zeros: int, permuted: range, loggers: list[BaseLogger]) -> None:
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train_step(engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss = _loss(model, batch)
        loss.backward()
        optimizer.step()  # skipped by GradMonitor at a spike
        engine.state.metrics["loss"] = loss.item()

    trainer, saved = Engine(train_step), {"model": model, "optimizer": optimizer}
    options: Any = {"loggers": loggers, "extra": ("rcc", "spectral"), "on_spike": "skip", "rollback": saved}
    attached = attach_monitors(trainer, model, optimizer, every=10, **options)
    for logger in loggers:
        logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, tag="train", metric_names=["loss"])
        if hasattr(logger, "add_custom_scalars"):
            logger.add_custom_scalars(tensorboard_layout(attached))

    @trainer.on(Events.ITERATION_COMPLETED(every=iterations // 5))
    def report(engine: Engine) -> None:
        print(f"iteration {engine.state.iteration:4d}: loss {engine.state.metrics['loss']:.3f}")

    with attached:
        trainer.run(_batches(_text(), zeros, permuted), max_epochs=1, epoch_length=iterations)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _text() -> Tensor:
    """Characters of the standard library's sources as integers; FileNotFoundError if there are none."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:MOST_BYTES]
    if len(content) < 100 * CONTEXT:
        raise FileNotFoundError(f"The standard library's sources are not in {folder}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long().clamp(max=CHARACTERS - 1)


def _batches(
    text: Tensor, zeros: int = -1, permuted: range = range(0), seed: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    others = torch.randperm(CHARACTERS, generator=torch.Generator().manual_seed(seed))
    for iteration in count(1):
        starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
        piece = text[starts + torch.arange(CONTEXT + 1)]
        if iteration == zeros:
            piece = torch.zeros_like(piece)
        if iteration in permuted:
            piece = others[piece]
        yield piece[:, :-1], piece[:, 1:]
