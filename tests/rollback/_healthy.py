"""Healthy training runs of four kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_monitor import GradMonitor, RollbackHandler
from tests.rollback._faults import digits

Parts = tuple[Callable[[Engine, Any], Any], dict[str, Any], list[GradMonitor]]


def _supervised(model: nn.Module, optimizer: Any, loss_of: Callable[[Any], Tensor], scheduler: Any = None) -> Parts:
    def train_step(engine: Engine, batch: Any) -> float:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        return loss.item()

    to_save = {"model": model, "optimizer": optimizer} | ({"scheduler": scheduler} if scheduler else {})
    return train_step, to_save, [GradMonitor(model, optimizer)]


def _classifier(model: nn.Module, optimizer: Any, scheduler: Any = None) -> Parts:
    return _supervised(model, optimizer, lambda batch: F.cross_entropy(model(batch[0]), batch[1]), scheduler)


def mlp(count: int) -> Parts:
    model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48, 10))
    return _classifier(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))


def cnn_one_cycle(count: int) -> Parts:
    parts = [nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)]
    model = nn.Sequential(*parts, nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
    return _classifier(model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=count))


def batches_of_two(count: int) -> Parts:
    model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
    return _classifier(model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))


KINDS = {kind.__name__: kind for kind in (mlp, cnn_one_cycle, batches_of_two)}


def data(kind: str, seed: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    x, y, *_ = digits()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        place = torch.randint(len(x), (2 if kind == "batches_of_two" else 32,), generator=generator)
        yield x[place], y[place]


def run(kind: str, seed: int, count: int, handler: bool = True) -> tuple[dict[str, Any], RollbackHandler | None]:
    """A healthy training: what it ends with, and its handler."""
    torch.manual_seed(seed)
    train_step, to_save, monitors = KINDS[kind](count)
    trainer = Engine(train_step)
    for monitor in monitors:
        monitor.attach(trainer)
    rollback = RollbackHandler(to_save) if handler else None
    if rollback is not None:
        rollback.attach(trainer)
    trainer.run(data(kind, seed, count), max_epochs=1, epoch_length=count)
    state = {name: thing.state_dict() for name, thing in to_save.items()}
    return state | {"random": torch.get_rng_state()}, rollback
