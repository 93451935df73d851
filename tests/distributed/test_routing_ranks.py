"""Two ranks publish the routing that one process sees, also of a router that only one of them calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ignite_monitor import RoutingHandler
from tests._helpers import assert_same
from tests.distributed import _models
from tests.distributed._launch import run_scenarios
from tests.distributed._models import ddp, fsdp, run, share

COUNT = 5
SPLIT = 3  # of 8 rows the first rank has so many


class Net(nn.Module):
    """The second router is for batches that hold a large number, as only the last row of the later ones does."""

    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList([nn.Linear(4, 5), nn.Linear(4, 3)])

    def forward(self, x):
        out = self.gates[0](x).sum()
        return out + self.gates[1](x[x.amax(1) > 50]).sum() if x.max() > 50 else out


def net() -> Net:
    return _models.net(Net)


def train(model: nn.Module, rank: int | None, large: float = 100.0) -> dict[str, Any]:
    """Train on one rank's share of the batches (None: the whole), and return what was published."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(8, 4, generator=generator) for _ in range(COUNT)]
    for batch in batches[2:]:
        batch[7] = large
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def train_step(engine, x):
        optimizer.zero_grad()
        for part in share(x, rank, SPLIT).chunk(2):
            model(part).square().backward()
        optimizer.step()

    return {"published": run(train_step, batches, RoutingHandler(model, routers="gates"))}


SCENARIOS = {
    "ddp": lambda rank: train(ddp(net(), find_unused_parameters=True), rank),
    "fsdp": lambda rank: train(fsdp(net(), inner=()), rank, large=10.0),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_ranks_publish_what_one_process_does(results, name):
    is_conditional = name == "ddp"
    alone = train(net(), None, large=100.0 if is_conditional else 10.0)["published"]
    assert [len(row) for row in alone] == ([5, 5, 10, 10, 10] if is_conditional else [5] * 5)
    alone[2] = {key: value for key, value in alone[2].items() if "gates.0" in key}  # the ranks agree on names first
    for result in results(name):
        for found, wanted in zip(result["published"], alone, strict=True):
            assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_ranks_agree_to_the_last_bit(results, name):
    assert_same(*results(name))


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
