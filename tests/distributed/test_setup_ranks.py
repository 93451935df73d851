"""SetupCheck on two ranks: a wrapper that is not called, an optimizer from before sharding, and healthy training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import SetupCheck
from tests._helpers import make_batches
from tests.distributed._launch import run_scenarios
from tests.distributed._models import fsdp, net


def kinds(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, call: nn.Module | None = None) -> list[str]:
    def train_step(engine: Engine, batch: Any) -> float:
        optimizer.zero_grad()
        x, y = (each.chunk(2)[rank] for each in batch)
        loss = F.mse_loss((call or model)(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer, check = Engine(train_step), SetupCheck(model, optimizer)
    check.attach(trainer)
    trainer.run(make_batches(5))
    assert check.findings is not None
    return [finding.kind for finding in check.findings]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def train(rank: int) -> dict[str, Any]:
    wrapped, sharded = DistributedDataParallel(net()), fsdp(net())
    later = net()
    optimizer = sgd(later)
    part = DistributedDataParallel(net())
    return {
        "ddp": kinds(rank, wrapped, sgd(wrapped)),
        "bypassed": kinds(rank, wrapped, sgd(wrapped), wrapped.module),
        "fsdp": kinds(rank, sharded, sgd(sharded)),
        "stale": kinds(rank, fsdp(later), optimizer),
        "forgotten": kinds(rank, part, torch.optim.SGD([*part.parameters()][:-1], lr=0.01)),
    }


SCENARIOS = {"setup": train}


@pytest.mark.parametrize("rank", [0, 1])
def test_findings(results, rank):
    assert results("setup")[rank] == {
        "ddp": [],
        "bypassed": ["wrapper_bypassed"],
        "fsdp": [],
        "stale": ["stale_optimizer"],
        "forgotten": ["not_optimized"],
    }


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
