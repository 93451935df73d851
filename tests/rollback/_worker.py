"""Scenarios of two ranks: rollbacks that one rank alone triggers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import GradMonitor, MonitorEvents, RollbackHandler
from tests._helpers import make_step
from tests._ranks import ddp, fsdp, run_scenarios, train
from tests.rollback import _faults

WRAPS = {"ddp": ddp, "fsdp": functools.partial(fsdp, inner=["0"])}


def plain(state: Any) -> Any:
    """This rank's parts, copied."""
    if isinstance(state, torch.Tensor):
        return getattr(state, "_local_tensor", state).detach().clone()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(item) for item in state] if isinstance(state, (list, tuple)) else state


def one_rank_asks(kind: str, how: str, rank: int) -> dict[str, Any]:
    """Rank 1 alone diverges; both ranks restore the same state, each its own part of it."""
    before: dict[int, Any] = {}
    after: dict[str, Any] = {}

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Engine, Any], float]:
        train_step = make_step(model, optimizer, loss_of=loss_of)

        def diverging(engine: Engine, batch: Any) -> float:
            loss = float(train_step(engine, batch))
            return float("nan") if how == "loss" and rank == 1 and engine.state.iteration >= 25 else loss

        return diverging

    def monitors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        rollback = RollbackHandler({"model": model, "optimizer": optimizer}, every=10)

        def state() -> Any:
            return plain({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})

        def restored(engine: Engine) -> None:
            to = before[int(engine.state.metrics["rollback/restored_iteration"])]
            after.update(at=engine.state.iteration, state=state(), expected=to)

        def start(engine: Engine) -> None:
            iteration = engine.state.iteration
            before[iteration - 1] = state()
            if rank == 1 and how == "request" and iteration == 25:
                rollback.request("only here")
            if rank == 1 and how == "nan" and iteration == 25:
                weight = next(model.parameters())
                getattr(weight, "_local_tensor", weight).data.view(-1)[0] = float("nan")

        skipping = [GradMonitor(model, optimizer, on_spike="skip")] if how == "nan" else []  # so rank 0 stays finite
        return [
            rollback,
            *skipping,
            lambda engine: engine.add_event_handler(Events.ITERATION_STARTED, start),
            lambda engine: engine.add_event_handler(MonitorEvents.ROLLED_BACK, restored),
        ]

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    make = functools.partial(_faults.make_model, 0)
    run = train(make, WRAPS[kind], rank, batches(36), monitors, optimizer=adamw, step=step, rows=8)
    return after | {"count": run.monitors[0]._count}


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(count, 16, 64, generator=generator), torch.randint(10, (count, 16), generator=generator)
    return [*zip(x, y, strict=True)]


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


SCENARIOS = {
    f"{kind} {how}": functools.partial(one_rank_asks, kind, how) for kind in WRAPS for how in ("request", "nan", "loss")
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
