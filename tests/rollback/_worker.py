"""Scenarios of two ranks: rollbacks that one rank alone triggers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import MonitorEvents, RollbackHandler
from tests.distributed._launch import run_scenarios
from tests.rollback import _faults


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPS = {"ddp": ddp, "fsdp": fsdp}


def plain(state: Any) -> Any:
    """This rank's parts, copied."""
    if isinstance(state, torch.Tensor):
        return getattr(state, "_local_tensor", state).detach().clone()
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    return [plain(item) for item in state] if isinstance(state, (list, tuple)) else state


def one_rank_asks(kind: str, how: str) -> Any:
    """Rank 1 alone diverges; both ranks restore the same state, each its own part of it."""

    def scenario(rank: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = WRAPS[kind](_faults.make_model(0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        rollback = RollbackHandler({"model": model, "optimizer": optimizer}, every=10)
        before: dict[int, Any] = {}
        after: dict[str, Any] = {}

        def train_step(engine: Engine, batch: Any) -> float:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0][rank::2]), batch[1][rank::2])
            loss.backward()
            optimizer.step()
            if how == "loss" and rank == 1 and engine.state.iteration >= 25:
                return float("nan")
            return loss.item()

        def state() -> Any:
            return plain({"model": model.state_dict(), "optimizer": optimizer.state_dict()["state"]})

        trainer = Engine(train_step)
        rollback.attach(trainer)
        trainer.add_event_handler(Events.ITERATION_STARTED, lambda e: before.update({e.state.iteration - 1: state()}))
        trainer.add_event_handler(
            MonitorEvents.ROLLED_BACK,
            lambda e: after.update(
                at=e.state.iteration, state=state(), to=e.state.metrics["rollback/restored_iteration"]
            ),
        )

        @trainer.on(Events.ITERATION_STARTED(once=25))
        def disturb(_: Engine) -> None:
            if rank == 1 and how == "request":
                rollback.request("only here")
            if rank == 1 and how == "nan":
                weight = next(model.parameters())
                getattr(weight, "_local_tensor", weight).data.view(-1)[0] = float("nan")

        trainer.run(_faults.batches(0, 36, 16), max_epochs=1)
        return {
            "at": after["at"],
            "state": after["state"],
            "expected": before[int(after["to"])],
            "count": rollback._count,
        }

    return scenario


SCENARIOS = {f"{kind} {how}": one_rank_asks(kind, how) for kind in WRAPS for how in ("request", "nan", "loss")}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
