"""Monitors written by users, as the guide shows, on two ranks: the values of one process, the same on both ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from ignite.engine import Engine
from torch import nn

from ignite_monitor import GradMonitor, Key, Monitor, MonitorEvents, Schema
from tests._handlers import ClippingMonitor
from tests._helpers import make_batches, make_step
from tests._models import make_mlp
from tests._ranks import ddp, fsdp, run_scenarios, train, whole

CLIP = 0.5


class WeightMonitor(Monitor, schema=Schema("weight", "weight", (Key("norm", "norm of all weights after the step"),))):
    """{keys}"""

    def handlers(self) -> Any:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def _on_train_step_completed(self, engine: Engine) -> None:
        self.publish(norm=torch.stack([whole(p).norm() for p in self.model.parameters()]).norm())


def monitors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [ClippingMonitor(model, optimizer), WeightMonitor(model, "weight"), GradMonitor(model, optimizer)]


def trained(wrap: Any, rank: int | None, parts: int = 1) -> dict[str, Any]:
    make = functools.partial(make_mlp, sizes=(6, 5, 3))
    step = functools.partial(make_step, clip=CLIP, parts=parts)
    run = train(make, wrap, rank, make_batches(4, size=8), monitors, step=step)
    names = ("clipping/kept", "weight/norm", "grad/norm")
    return {"rows": [{name: float(row[name]) for name in names} for row in run.rows]}


SCENARIOS = {
    "ddp": lambda rank: trained(ddp, rank),
    "fsdp": lambda rank: trained(fsdp, rank),
    "accumulation": lambda rank: trained(ddp, rank, 2),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_monitors_of_ones_own(results, name):
    first, second = results(name)
    assert first == second
    alone = trained(None, None)["rows"] if name != "accumulation" else first["rows"]
    for row, other in zip(first["rows"], alone, strict=True):
        assert row == pytest.approx(other, rel=1e-5)
        assert row["clipping/kept"] == pytest.approx(min(1.0, CLIP / row["grad/norm"]), rel=1e-4)
    assert min(row["clipping/kept"] for row in first["rows"]) < 0.9


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
