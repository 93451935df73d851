"""Two ranks see what one process with the whole batch and the whole parameters sees, and agree."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ignite_monitor import GradMonitor, OptimizerStateHandler, StaticThreshold, WeightUpdateHandler
from tests._helpers import assert_same
from tests.distributed import _models
from tests.distributed._launch import WORLD, run_scenarios
from tests.distributed._models import counted_collectives, ddp, fsdp, run, share, words

COUNT = 6
STILL = (3, 4, 5)


class Net(nn.Module):
    """Sizes that two ranks can't share evenly, one of them so small that a rank holds nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first, self.second = nn.Linear(6, 25), nn.Linear(25, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.still = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.second(torch.tanh(self.first(self.embedding(x).mean(1)))) * self.scale + self.still


def net() -> Net:
    return _models.net(Net)


def train(model: nn.Module, rank: int | None, sample_size: int | None = 20, skip: bool = False) -> dict[str, Any]:
    """Train on one rank's halves of the batches (None: the whole), and say what was published."""
    parameters = dict(model.named_parameters())
    (still,) = (parameter for name, parameter in parameters.items() if name.endswith("still"))
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters.values() if p is not still]}, {"params": [still], "weight_decay": 0.0}],
        lr=0.01, betas=(0.0, 0.9), weight_decay=0.1,
    )  # fmt: skip

    def train_step(engine, batch):
        inputs, targets = share(batch, rank)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        if engine.state.iteration in STILL:
            still.grad.zero_()
        optimizer.step()
        if engine.state.iteration == 2:  # validation: FSDP leaves the root's whole parameters behind
            model.eval()
            with torch.no_grad():
                model(inputs)
            model.train()

    # After one step all of the first are 1 but for rounding, which would choose the largest.
    monitors: list[Any] = [
        WeightUpdateHandler(model, optimizer, sample_size=sample_size),
        OptimizerStateHandler(model, optimizer, sample_size=sample_size, top_k=9),
    ]
    if skip:
        monitors.append(GradMonitor(model, optimizer, threshold=StaticThreshold(1e-9), on_spike="skip"))
    with counted_collectives() as calls:
        published = run(train_step, words(COUNT), *monitors)
    diagnostics = {name: list(map(float, item)) for name, item in monitors[0].diagnostics.items()}
    return {"published": published, "diagnostics": diagnostics, "all_reduces": len(calls)}


SCENARIOS = {
    "ddp": lambda rank: train(ddp(net()), rank),
    "ddp exact": lambda rank: train(ddp(net()), rank, None),
    "fsdp": lambda rank: train(fsdp(net()), rank),
    "fsdp exact": lambda rank: train(fsdp(net()), rank, None),
    "fsdp hybrid": lambda rank: train(fsdp(net(), (1, WORLD)), rank),
    "fsdp replicated": lambda rank: train(fsdp(net(), (WORLD, 1)), rank),
    "fsdp skipped": lambda rank: train(fsdp(net()), rank, skip=True),
}


@pytest.mark.parametrize("name", [*SCENARIOS][:-1])
def test_both_ranks_publish_what_one_process_does(results, name):
    whole = train(net(), None, None if "exact" in name else 20)
    for result in results(name):
        # AdamW divides by gradients that are sums of another order
        for i in range(COUNT):
            assert result["published"][i] == pytest.approx(whole["published"][i], rel=1e-3), i
        for parameter, values in whole["diagnostics"].items():
            assert result["diagnostics"][parameter] == pytest.approx(values, rel=1e-3), parameter


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_ranks_agree_to_the_last_bit(results, name):
    assert_same(*results(name))


def test_one_of_the_parameters_freezes(results):
    for result in results("fsdp"):
        frozen = [values["monitor/frozen_count"] for values in result["published"]]
        assert frozen == [float(i == STILL[-1]) for i in range(1, COUNT + 1)]


def test_a_skipped_step_is_none_on_either_rank(results):
    for result in results("fsdp skipped"):
        assert any("monitor/grad_max" in values for values in result["published"])
        assert not any("monitor/frozen_count" in values for values in result["published"])


@pytest.mark.parametrize(("name", "collectives"), [("ddp", 0), ("fsdp", 2 * COUNT), ("fsdp exact", 2 * COUNT)])
def test_each_handler_makes_one_collective_for_all_sharded_parameters(results, name, collectives):
    for result in results(name):
        assert result["all_reduces"] == collectives


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
