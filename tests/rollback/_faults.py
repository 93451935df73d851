"""Small training runs on the digits, faults in them, and their results."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_monitor import GradMonitor, RollbackHandler

START, AFTER = 220, 30
# name -> how many iterations it lasts
FAULTS = {"labels": 30, "lr x100": 3, "lr grows": 100, "nan": 1}
MODES = ("sgd", "adamw", "amp", "accumulation")
RANKS = ("ddp", "fsdp")


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


def damaged(batch: tuple[Tensor, Tensor], fault: str) -> tuple[Tensor, Tensor]:
    x, y = batch
    return (x, (y + 1) % 10) if fault == "labels" else batch


@torch.no_grad()
def wreck(model: nn.Module, fault: str) -> None:
    """What happens to the model before an iteration."""
    for module in model.modules():
        if fault == "nan" and isinstance(module, nn.Linear):
            weight = getattr(module.weight, "_local_tensor", module.weight)
            weight.view(-1)[:1] = float("nan")


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
    monitor: bool = True,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    rank: int | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train with a fault; return accuracy, rollbacks and discarded iterations.

    Args:
        length: how long the fault lasts, in place of what it usually does.
        after: for how long training goes on without it; 0 where the shifted labels are the right ones from then on.
    """
    lasts = FAULTS[fault] if length is None and fault else length or 0
    model = wrap(make_model(seed))
    optimizer = make_optimizer(model, "adamw" if mode in ("adamw", "fsdp") else "sgd")
    base = optimizer.param_groups[0]["lr"]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if mode == "amp" else None
    every = 2 if mode == "accumulation" else 1
    disturbed = range(START, START + lasts) if fault else range(0)

    def train_step(engine: Engine, batch: Any) -> float:
        iteration = engine.state.iteration
        if iteration in disturbed:
            batch = damaged(batch, fault)
        x, y = batch if rank is None else (part[rank::2] for part in batch)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "amp"):
            loss = F.cross_entropy(model(x), y)
        if scaler is None:
            (loss / every).backward()
            if iteration % every == 0:
                optimizer.step()
                optimizer.zero_grad()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss.item()

    trainer = Engine(train_step)

    @trainer.on(Events.ITERATION_STARTED)
    def disturb(engine: Engine) -> None:
        iteration = engine.state.iteration
        if fault == "lr grows" and iteration in disturbed:
            optimizer.param_groups[0]["lr"] *= 1.06
        elif fault == "lr x100":
            optimizer.param_groups[0]["lr"] = base * (100.0 if iteration in disturbed else 1.0)
        if iteration == START:
            wreck(model, fault)

    if monitor:
        GradMonitor(model, optimizer, scaler=scaler, on_spike="skip" if skip_step else None).attach(trainer)
    rollback = None
    if handler:
        to_save = {"model": model, "optimizer": optimizer} | ({"scaler": scaler} if scaler else {})
        rollback = RollbackHandler(to_save, **kwargs)
        rollback.attach(trainer)
    total = START + lasts - 1 + after
    size = 32 if mode == "accumulation" else 64
    trainer.run(batches(seed, total, size), max_epochs=1)
    return {
        "accuracy": accuracy(model, shift=int(not after)),
        "rollbacks": rollback._count if rollback else 0,
        "discarded": rollback._discarded_count if rollback else 0,
        "iteration": trainer.state.iteration,
    }
