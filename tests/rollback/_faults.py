"""Small training runs on the digits, faults in them, and their results."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_monitor import GradMonitor, RollbackHandler
from tests._helpers import make_step

START, AFTER = 220, 30
# name -> how many iterations it lasts
FAULTS = {"labels": 30, "lr x100": 3, "lr grows": 100, "lr by hand": 100, "nan": 1}
MODES = ("sgd", "adamw", "amp", "accumulation")


@functools.cache
def digits() -> tuple[Tensor, ...]:
    """Images and labels to learn from, and to test with."""
    from sklearn.datasets import load_digits

    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data.data, dtype=torch.float32)[order] / 16.0, torch.tensor(data.target)[order]
    return x[:1397], y[:1397], x[1397:], y[1397:]


def batches(seed: int, count: int, size: int = 64) -> list[tuple[Tensor, Tensor]]:
    x, y, *_ = digits()
    generator = torch.Generator().manual_seed(100 + seed)
    places = [torch.randint(len(x), (size,), generator=generator) for _ in range(count)]
    return [(x[place], y[place]) for place in places]


def make_model(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))


def make_optimizer(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=2e-3)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@torch.no_grad()
def accuracy(model: nn.Module, shift: int = 0) -> float:
    *_, x, y = digits()
    model.eval()
    correct = (model(x).argmax(1) == (y + shift) % 10).float().mean()
    model.train()
    return float(correct)


def train(
    mode: str,
    seed: int,
    fault: str = "",
    *,
    length: int | None = None,
    after: int = AFTER,
    skip_step: bool = False,
    handler: bool = True,
    peak_lr: float | None = None,
    size: int = 64,
) -> dict[str, Any]:
    """Train with a fault; return accuracy, rollbacks and discarded iterations.

    Args:
        length: how long the fault lasts, in place of what it usually does.
        after: for how long training goes on without it; 0 where the shifted labels are the right ones from then on.
        handler: whether monitor and handler are attached.
        peak_lr: largest learning rate of a OneCycleLR.
    """
    lasts = FAULTS[fault] if length is None and fault else length or 0
    model = make_model(seed)
    optimizer = make_optimizer(model, "adamw" if mode == "adamw" else "sgd")
    base = optimizer.param_groups[0]["lr"]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if mode == "amp" else None
    every = 2 if mode == "accumulation" else 1
    disturbed = range(START, START + lasts) if fault else range(0)
    total = START + lasts - 1 + after

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "amp"):
            return F.cross_entropy(model(batch[0]), batch[1]) / every

    trainer = Engine(make_step(model, optimizer, every=every, scaler=scaler, zero_at="end", loss_of=loss_of))

    @trainer.on(Events.ITERATION_STARTED)
    def disturb(engine: Engine) -> None:
        iteration = engine.state.iteration
        if fault == "lr grows" and iteration in disturbed:
            optimizer.param_groups[0]["lr"] *= 1.06
        elif fault == "lr by hand":
            optimizer.param_groups[0]["lr"] = base * (1.06 ** (iteration - START) if iteration in disturbed else 1.0)
        elif fault == "lr x100":
            optimizer.param_groups[0]["lr"] = base * (100.0 if iteration in disturbed else 1.0)
        elif fault == "labels" and iteration in disturbed:
            x, y = engine.state.batch
            engine.state.batch = x, (y + 1) % 10
        elif fault == "nan" and iteration == START:
            model[0].weight.data.view(-1)[:1] = math.nan

    to_save = {"model": model, "optimizer": optimizer} | ({"scaler": scaler} if scaler else {})
    if peak_lr is not None:
        to_save["scheduler"] = scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak_lr, total)
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: scheduler.step())
    rollback = RollbackHandler(to_save)
    if handler:
        GradMonitor(model, optimizer, scaler=scaler, on_spike="skip" if skip_step else None).attach(trainer)
        rollback.attach(trainer)
    trainer.run(batches(seed, total, size // every), max_epochs=1)
    return {
        "accuracy": accuracy(model, shift=int(not after)),
        "rollbacks": rollback._count,
        "discarded": rollback._discarded_count,
    }
