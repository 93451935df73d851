"""One rank of the runs that test_rcc_ranks.py looks at."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import RCCHandler
from tests.distributed._launch import WORLD, run_scenarios

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


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 11, (8, 2), generator=generator), torch.randn(8, 3, generator=generator))
        for _ in range(COUNT)
    ]


def train(model: nn.Module, rank: int | None, at: int = 4, **arguments: Any) -> dict[str, Any]:
    """Train on one rank's part of the batches, which ends or begins at a sample (None: the whole)."""
    handler = RCCHandler(model, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5 if at == 4 else 0.0)

    def train_step(engine, batch):
        inputs, targets = batch if rank is None else (part[:at] if rank == 0 else part[at:] for part in batch)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    engine = Engine(train_step)
    handler.attach(engine)
    published: list[dict[str, float]] = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda _: published.append({k: float(v) for k, v in handler.metrics.items()})
    )
    engine.run(batches(), max_epochs=1)
    return {"published": published}


def moved() -> Net:
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


def fsdp() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    model = net()
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def refused(rank: int) -> dict[str, Any]:
    try:
        RCCHandler(fsdp())
    except ValueError as error:
        return {"refused": str(error)}
    return {}


def failing(rank: int) -> dict[str, Any]:
    """The reference of one rank can't be run."""
    reference = net().to("meta") if rank else net()
    return train(DistributedDataParallel(net()), rank, reference=reference)


class Branch(nn.Module):
    """The inner layer is for samples that start with what isn't negative."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner, self.never = nn.Linear(4, 3), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.outer(x) if x[0, 0] < 0 else self.outer(self.inner(x))


def branch(rank: int | None) -> dict[str, Any]:
    """Iterations in which the first sample, which is the first rank's, and the second go different ways, or neither."""
    torch.manual_seed(2)
    reference, model = Branch(), Branch()
    handler = RCCHandler(model, reference=reference)
    x = torch.randn(2, 1, 4)
    x[:, 0, 0] = torch.tensor([-1.0, 1.0])
    batches = [x, x.flip(0), -x.abs()]
    used = DistributedDataParallel(model, find_unused_parameters=True) if rank is not None else model

    def train_step(engine, batch):
        for each in batch if rank is None else batch[rank : rank + 1]:
            used(each)

    engine = Engine(train_step)
    handler.attach(engine)
    published: list[dict[str, float]] = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda _: published.append({k: float(v) for k, v in handler.metrics.items()})
    )
    engine.run(batches)
    return {"published": published}


SCENARIOS = {
    "branch": branch,
    "ddp": lambda rank: train(DistributedDataParallel(net()), rank),
    "ddp static": lambda rank: train(DistributedDataParallel(net(), static_graph=True), rank),
    "ddp uneven": lambda rank: train(DistributedDataParallel(moved()), rank, 3, reference=net()),
    "fsdp": lambda rank: train(fsdp(), rank, reference=copy.deepcopy(net())),
    "fsdp of both": lambda rank: train(fsdp(), rank, reference=fsdp()),
    "fsdp refused": refused,
    "failing": failing,
}


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
