"""Two ranks see what one process with the whole batch sees, and agree."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from ignite_monitor import RCCHandler
from tests.distributed import _models
from tests.distributed._launch import run_scenarios
from tests.distributed._models import ddp, fsdp, run, step_of, words

COUNT = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(11, 6), nn.Linear(6, 25), nn.Linear(25, 3, bias=False)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.norm(self.embedding(x))
        return self.second(torch.tanh(self.first(self.attention(x, x, x)[0].mean(1))))


class Branch(nn.Module):
    """The inner layer is for samples that start with what isn't negative."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner, self.never = nn.Linear(4, 3), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.outer(x) if x[0, 0] < 0 else self.outer(self.inner(x))


def net() -> Net:
    return _models.net(Net)


def moved() -> Net:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


def train(model: nn.Module, rank: int | None, at: int = 4, **arguments: Any) -> dict[str, Any]:
    """Train on one rank's part of the batches, which ends or begins at a sample (None: the whole)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if at == 4 else 0.0)
    return {"published": run(step_of(model, optimizer, rank, at), words(COUNT), RCCHandler(model, **arguments))}


def refused(rank: int) -> dict[str, Any]:
    with pytest.raises(ValueError, match=r"^Argument reference should be a module, since the model"):
        RCCHandler(fsdp(net()))
    return {}


def branch(rank: int | None) -> dict[str, Any]:
    """Iterations in which the first sample, which is the first rank's, and the second go different ways, or neither."""
    torch.manual_seed(2)
    reference, model = Branch(), Branch()
    x = torch.randn(2, 1, 4)
    x[:, 0, 0] = torch.tensor([-1.0, 1.0])
    used = ddp(model, find_unused_parameters=True) if rank is not None else model

    def train_step(engine, batch):
        for item in batch if rank is None else batch[rank : rank + 1]:
            used(item)

    return {"published": run(train_step, [x, x.flip(0), -x.abs()], RCCHandler(model, reference=reference))}


SCENARIOS = {
    "ddp": lambda rank: train(ddp(net()), rank),
    "ddp static": lambda rank: train(ddp(net(), static_graph=True), rank),
    "ddp uneven": lambda rank: train(ddp(moved()), rank, 3, reference=net()),
    "fsdp": lambda rank: train(fsdp(net()), rank, reference=copy.deepcopy(net())),
    "fsdp of both": lambda rank: train(fsdp(net()), rank, reference=fsdp(net())),
    "fsdp refused": refused,
    "branch": branch,
    # The reference of one rank can't be run.
    "failing": lambda rank: train(ddp(net()), rank, reference=net().to("meta") if rank else net()),
}


@pytest.mark.parametrize("name", [*SCENARIOS][:5])
def test_both_ranks_publish_what_one_process_does(results, name):
    whole = train(moved(), None, 3, reference=net()) if name == "ddp uneven" else train(net(), None)
    assert whole["published"][-1]["rcc/weight_update_max"] > 0.1
    first, second = results(name)
    assert first == second
    for i in range(COUNT):
        assert first["published"][i] == pytest.approx(whole["published"][i], rel=1e-3, abs=1e-5), i


def test_a_sharded_model_needs_a_module(results):
    assert results("fsdp refused") == [{}, {}]


def test_a_rank_that_cannot_measure_delays_no_rank(results):
    first, second = results("failing")
    assert [bool(values) for values in first["published"]] == [True] * COUNT
    assert second == first


def test_a_layer_that_one_rank_alone_reaches_is_published_by_both(results):
    first, second = results("branch")
    assert first == second
    whole = branch(None)["published"]
    assert ["rcc/input/inner" in values for values in whole] == [True, True, False]
    assert first["published"] == [pytest.approx(values) for values in whole]


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
