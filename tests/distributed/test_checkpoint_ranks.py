"""HealthyCheckpoint: all ranks save together, or none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import GradMonitor, HealthyCheckpoint
from tests.distributed._launch import run_scenarios
from tests.distributed._models import ddp


def train(rank: int) -> dict[str, Any]:
    """The second rank has a spike in iteration 9, and a tensor of its own that is NaN in iterations 19 to 22."""
    torch.manual_seed(0)
    model = ddp(nn.Linear(4, 1))
    own = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    saved: list[int] = []

    def train_step(engine: Engine, batch: Any) -> None:
        iteration = engine.state.iteration
        optimizer.zero_grad()
        scale = 1e4 if rank and iteration == 9 else 1.0
        (scale * model(torch.full((2, 4), float(rank + 1)))).square().mean().backward()
        optimizer.step()
        own.bias.data.fill_(torch.nan if rank and 19 <= iteration <= 22 else 0.0)

    trainer = Engine(train_step)
    GradMonitor(model, optimizer, threshold=1e4, on_spike="skip").attach(trainer)

    def save(checkpoint: Any, filename: str, metadata: Any = None) -> None:
        saved.append(trainer.state.iteration)

    checkpoint = HealthyCheckpoint({"model": model, "own": own}, save, quiet=5, n_saved=None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), checkpoint)
    trainer.run([None] * 40)
    return {"saved": saved}


SCENARIOS = {"checkpoint": train}


@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_save_together(results, rank):
    assert results("checkpoint")[rank]["saved"] == [15, 23, 30, 40]


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
