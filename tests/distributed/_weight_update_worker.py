"""One rank of the runs that test_weight_update_ranks.py looks at: ``… FOLDER RANK NAME …``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import GradMonitor, OptimizerStateHandler, StaticThreshold, WeightUpdateHandler
from tests.distributed._launch import WORLD, run_scenarios

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
    torch.manual_seed(0)
    return Net()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randint(0, 11, (8, 2), generator=generator), torch.randn(8, 3, generator=generator))
        for _ in range(COUNT)
    ]


def train(model: nn.Module, rank: int | None, sample_size: int | None = 20, skip: bool = False) -> dict[str, Any]:
    """Train on one rank's halves of the batches (None: the whole), and say what was published."""
    parameters = dict(model.named_parameters())
    (still,) = (parameter for name, parameter in parameters.items() if name.endswith("still"))
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in parameters.values() if p is not still]}, {"params": [still], "weight_decay": 0.0}],
        lr=0.01, betas=(0.0, 0.9), weight_decay=0.1,
    )  # fmt: skip

    def train_step(engine, batch):
        inputs, targets = batch if rank is None else (part[rank * 4 : rank * 4 + 4] for part in batch)
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

    handler = WeightUpdateHandler(model, optimizer, sample_size=sample_size)
    engine = Engine(train_step)
    handler.attach(engine)
    # After one step all of the first are 1 but for rounding, which would choose the largest.
    state = OptimizerStateHandler(model, optimizer, sample_size=sample_size, top_k=9)
    state.attach(engine)
    if skip:
        GradMonitor(model, optimizer, threshold=StaticThreshold(1e-9), on_spike="skip").attach(engine)
    published: list[dict[str, float]] = []
    diagnostics: list[dict[str, list[float]]] = []

    @engine.on(Events.ITERATION_COMPLETED)
    def record(_: Engine) -> None:
        diagnostics.append({name: list(map(float, each)) for name, each in handler.diagnostics.items()})
        named = [each.on_host() for each in (handler, state)]
        published.append({name: float(value) for each in named for name, value in each.items()})

    engine.run(batches(), max_epochs=1)
    return {"published": published, "diagnostics": diagnostics}


def fsdp(mesh_shape: tuple[int, ...] = (WORLD,)) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-len(mesh_shape) :]
    model = net()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def counted(function) -> dict[str, Any]:
    """What a function returns, and how many collectives of the handler's it has made."""
    made = 0
    original = dist.all_reduce

    def counting(*args, **kwargs):
        nonlocal made
        made += 1
        return original(*args, **kwargs)

    dist.all_reduce = counting
    try:
        return function() | {"all_reduces": made}
    finally:
        dist.all_reduce = original


SCENARIOS = {
    "ddp": lambda rank: train(DistributedDataParallel(net()), rank),
    "ddp exact": lambda rank: train(DistributedDataParallel(net()), rank, None),
    "fsdp": lambda rank: train(fsdp(), rank),
    "fsdp exact": lambda rank: train(fsdp(), rank, None),
    "fsdp hybrid": lambda rank: train(fsdp((1, WORLD)), rank),
    "fsdp replicated": lambda rank: train(fsdp((WORLD, 1)), rank),
    "fsdp skipped": lambda rank: train(fsdp(), rank, skip=True),
}


if __name__ == "__main__":
    run_scenarios(
        {name: lambda rank, scenario=scenario: counted(lambda: scenario(rank)) for name, scenario in SCENARIOS.items()}
    )
