"""How many files of the package one value passes through on its way from the model to where it is read.

One iteration of a small transformer is followed with ``sys.setprofile``, after two that set everything up. A file is
entered when one of its functions is called; a move is a call or a return from one file of the package into another.
Counts are the same in every run.

    PYTHONPATH=. python benchmarks/routes.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine
from ignite.handlers.tensorboard_logger import TensorboardLogger
from torch import nn
from torch.nn import functional as F

import ignite_monitor
from ignite_monitor import ActivationHandler, GradMonitor, HDF5Logger, RCCHandler, WeightUpdateHandler

ROOT = str(Path(ignite_monitor.__file__).parent)


class Follower:
    """Counts the files of the package that are entered, and the moves between them."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.moves = 0
        self._stack: list[str] = []

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event not in ("call", "return") or not file.startswith(ROOT):
            return
        if event == "call":
            self.files.add(file)
            self.moves += bool(self._stack) and self._stack[-1] != file
            self._stack.append(file)
        elif self._stack:
            self._stack.pop()
            self.moves += bool(self._stack) and self._stack[-1] != file


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.attention(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.mlp(x)


def follow(make_monitor: Callable[[nn.Module, torch.optim.Optimizer], Any], make_logger: Callable[[str], Any]) -> Any:
    """The follower of the third iteration of a run."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), Block(16), Block(16), nn.Linear(16, 32))
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(engine: Engine, batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(train_step)
    monitor = make_monitor(model, optimizer)
    follower = Follower()
    with tempfile.TemporaryDirectory() as folder, make_logger(folder) as logger:
        monitor.attach(trainer)
        monitor.log_to(logger, trainer)

        def batches() -> Any:
            for _ in range(2):
                yield torch.randint(0, 32, (4, 9))
            sys.setprofile(follower)
            yield torch.randint(0, 32, (4, 9))

        try:
            trainer.run(batches(), max_epochs=1, epoch_length=3)
        finally:
            sys.setprofile(None)
    return follower


ROUTES = {
    "gradient norm -> TensorBoard": (GradMonitor, lambda folder: TensorboardLogger(log_dir=folder)),
    "activations -> HDF5": (lambda model, _: ActivationHandler(model, activations=True, attention=True), None),
    "gradient statistics -> HDF5": (lambda model, _: ActivationHandler(model, gradients=True), None),
    "RCC -> HDF5": (lambda model, _: RCCHandler(model), None),
    "update ratios -> HDF5": (WeightUpdateHandler, None),
}


def main() -> None:
    files = list(Path(ROOT).rglob("*.py"))
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    print(f"{lines:,} lines in {len(files)} files\n")
    print("| route | files entered | moves between files |\n|---|---|---|")
    for name, (make_monitor, make_logger) in ROUTES.items():
        follower = follow(make_monitor, make_logger or (lambda folder: HDF5Logger(f"{folder}/run.h5")))
        print(f"| {name} | {len(follower.files)} | {follower.moves} |")


if __name__ == "__main__":
    main()
