"""A small GPT learns Python's own sources, some batches are damaged, and monitors are attached.

    python examples/demo.py

takes half a minute. See what was recorded with ``ignite-monitor summary runs/demo/run.h5``.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import sysconfig
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from ignite.engine import Engine, Events
from ignite.handlers.tensorboard_logger import TensorboardLogger
from torch import Tensor, nn

from ignite_monitor import HDF5Logger, attach_monitors

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


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def read_text() -> Tensor:
    """Characters of the standard library's sources as integers."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    content = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[:MOST_BYTES]
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).long().clamp(max=CHARACTERS - 1)


def make_batches(
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


def train(directory: Path, iterations: int) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)  # synchronizing threads costs such a small model more than they add
    zeros, permuted = iterations // 2 + 1, range(2 * iterations // 3, 2 * iterations // 3 + CONSECUTIVE)
    print(f"A GPT of {BLOCKS} blocks learns Python's own sources, for {iterations} iterations.")
    print(f"Batch {zeros} is all zeros; in batches {permuted[0]} to {permuted[-1]} the letters are permuted.\n")
    model = TinyGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)

    def train_step(engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()  # skipped by GradMonitor at a spike
        engine.state.metrics["loss"] = loss.item()

    trainer, saved = Engine(train_step), {"model": model, "optimizer": optimizer}

    @trainer.on(Events.ITERATION_COMPLETED(every=iterations // 5))
    def report(engine: Engine) -> None:
        print(f"iteration {engine.state.iteration:4d}: loss {engine.state.metrics['loss']:.3f}")

    with HDF5Logger(directory / "run.h5") as file, TensorboardLogger(log_dir=f"{directory}/tensorboard") as charts:
        attached = attach_monitors(
            trainer, model, optimizer, every=10, loggers=[file, charts], extra=("rcc", "spectral"), on_spike="skip",
            rollback=saved,
        )  # fmt: skip
        for logger in (file, charts):
            logger.attach_output_handler(trainer, Events.ITERATION_COMPLETED, tag="train", metric_names=["loss"])
        with attached:
            trainer.run(make_batches(read_text(), zeros, permuted), max_epochs=1, epoch_length=iterations)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model on damaged data, monitored and with rollbacks.")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/demo"), help="where to write")
    parser.add_argument("--iterations", type=int, default=400, help=f"at least {LEAST} (default: 400)")
    arguments = parser.parse_args()
    if arguments.iterations < LEAST:
        parser.error(f"argument --iterations should be at least {LEAST}, but given {arguments.iterations}")
    arguments.output.mkdir(parents=True, exist_ok=True)
    logging.getLogger("ignite_monitor").setLevel(logging.INFO)
    logging.getLogger("ignite_monitor").addHandler(logging.StreamHandler(sys.stdout))
    train(arguments.output, arguments.iterations)
    scripts = os.path.relpath(Path(sys.executable).parent)  # .venv/bin after `make demo`
    print("\nTo see what happened:")
    print(f"    {scripts}/ignite-monitor summary {arguments.output}/run.h5")
    print(f"    {scripts}/tensorboard --logdir {arguments.output}/tensorboard")


if __name__ == "__main__":
    main()
