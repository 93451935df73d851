"""One rank of the runs that test_replicas_ranks.py looks at: ``… FOLDER RANK NAME …``."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import ReplicaCheckHandler, StepStatsHandler
from tests.distributed._launch import WORLD, run_scenarios

LOOKS = 10_000 if os.environ.get("FULL_MATRIX", "0") != "0" else 150
AT = 4  # the iteration before which something is changed
COUNT = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 3)
        self.norm, self.dropout = nn.BatchNorm1d(9), nn.Dropout(0.1)
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def forward(self, x):
        return self.second(self.dropout(torch.tanh(self.norm(self.first(x)))))


def ddp() -> nn.Module:
    torch.manual_seed(0)
    return DistributedDataParallel(Net())


def fsdp(mesh_shape: tuple[int, ...] = (WORLD,)) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("replicate", "shard")[-len(mesh_shape) :])
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(
    model: nn.Module,
    rank: int,
    change: Callable[..., None] | None = None,
    count: int = COUNT,
    seeds: bool = False,
    **arguments: Any,
) -> dict[str, Any]:
    """Train on other batches on every rank; one of them changes something."""
    torch.manual_seed(rank if seeds else 1)
    random.seed(1)
    np.random.seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def train_step(engine, batch):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(WORLD * engine.state.iteration + rank)
        F.mse_loss(model(torch.randn(4, 6, generator=generator)), torch.zeros(4, 3)).backward()
        optimizer.step()
        if change is not None and engine.state.iteration == AT and rank == 1:
            with torch.no_grad():
                change(model, optimizer, engine)

    check = ReplicaCheckHandler(model, optimizer, **arguments)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda entry: said.append(entry.getMessage())  # type: ignore[method-assign]
    check.logger.addHandler(handler)
    engine = Engine(train_step)
    check.attach(engine)
    in_sync: list[Any] = []
    differing: list[Any] = []

    @engine.on(Events.ITERATION_COMPLETED)
    def record(_: Engine) -> None:
        in_sync.append(check.metrics.get("replicas/in_sync"))
        differing.append(check.metrics.get("replicas/differing_count"))

    made = 0
    original = dist.all_reduce

    def counting(*args, **kwargs):
        nonlocal made
        made += 1
        return original(*args, **kwargs)

    dist.all_reduce = counting
    try:
        engine.run([None] * count, max_epochs=1)
    finally:
        dist.all_reduce = original
        check.logger.removeHandler(handler)
    return {"in_sync": in_sync, "differing": differing, "said": said, "all_reduces": made}


def wait(rank: int) -> dict[str, Any]:
    """Every rank waits for its data, the second one 50 ms, on a clock that moves for nothing else."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stats = StepStatsHandler(model, optimizer, slowest_rank=True)
    now = [0.0]
    stats._data.now = lambda: now[0]  # type: ignore[method-assign]

    def batches():
        for _ in range(2):
            now[0] += 0.05 if rank else 0.003
            yield None

    engine = Engine(lambda *_: None)
    stats.attach(engine)
    seen: list[dict[str, float]] = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED, lambda _: seen.append({name: float(v) for name, v in stats.on_host().items()})
    )
    engine.run(batches(), epoch_length=2, max_epochs=1)
    return {name: [each[f"step/data_wait_{name}"] for each in seen] for name in ("ms", "max_ms", "rank")}


def flip(tensor: Any) -> None:
    """The lowest bit of the last element."""
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    tensor.view(-1)[-1:].view(torch.int32).bitwise_xor_(1)


def parameter(model: nn.Module, end: str) -> Tensor:
    return next(each for name, each in model.named_parameters() if name.endswith(end))


def exchange(model, optimizer, engine):
    weight = parameter(model, "first.weight")
    weight[0, 0], weight[3, 2] = weight[3, 2].clone(), weight[0, 0].clone()


class Broken(dict[str, Any]):
    """Optimizer state that raises an error whenever it is read by a check."""

    def items(self):
        raise RuntimeError("out of memory (a stand-in)")


def break_state(model, optimizer, engine):
    weight = parameter(model, "first.weight")
    optimizer.state[weight] = Broken(optimizer.state[weight])


# what is changed on the second rank -> how, and what the log has to name
CHANGES: dict[str, tuple[Callable[..., None], str]] = {
    "weight": (lambda m, o, e: flip(parameter(m, "first.weight")), "first.weight (rank 1)"),
    "bias": (lambda m, o, e: flip(parameter(m, "second.bias")), "second.bias (rank 1)"),
    "exchange": (exchange, "first.weight (rank 1)"),
    "buffer": (lambda m, o, e: flip(next(b for n, b in m.named_buffers() if n.endswith("table"))), "table (rank 1)"),
    "moment": (
        lambda m, o, e: flip(o.state[parameter(m, "second.weight")]["exp_avg_sq"]),
        "exp_avg_sq of second.weight in the optimizer (rank 1)",
    ),
    "step": (
        lambda m, o, e: o.state[parameter(m, "second.weight")]["step"].add_(1),
        "step of second.weight in the optimizer (rank 1)",
    ),
    "rate": (lambda m, o, e: o.param_groups[0].update(lr=2e-3), "settings of group 0 of the optimizer (rank 1)"),
    "random": (lambda m, o, e: torch.rand(1), "torch's RNG state (rank 1)"),
    "lost": (
        lambda m, o, e: o.state[parameter(m, "second.weight")].pop("exp_avg"),
        "exp_avg of second.weight in the optimizer (rank 1)",
    ),
    "new": (
        lambda m, o, e: m.register_buffer("new", torch.ones(2)),
        "items that are new, or not on all ranks (rank 1)",
    ),
    "iteration": (lambda m, o, e: setattr(e.state, "epoch", 9), "the epoch (rank 1)"),
}
SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{
        # Without its moment AdamW makes no further step.
        f"ddp {name}": lambda rank, name=name, change=change: train(
            ddp(), rank, change, AT if name == "lost" else COUNT, random_state=name == "random"
        )
        for name, (change, _) in CHANGES.items()
    },
    **{
        f"hybrid {name}": lambda rank, change=CHANGES[name][0]: train(fsdp((WORLD, 1)), rank, change)
        for name in ("weight", "moment", "buffer")
    },
    "ddp healthy": lambda rank: train(ddp(), rank, count=LOOKS),
    "ddp seeds": lambda rank: train(ddp(), rank, seeds=True),
    "ddp excluded": lambda rank: train(ddp(), rank, CHANGES["weight"][0], exclude=r"^(module\.)?first\.weight"),
    "ddp error": lambda rank: train(ddp(), rank, break_state),
    "hybrid healthy": lambda rank: train(fsdp((WORLD, 1)), rank, count=LOOKS // 25),
    "waits": wait,
    "fsdp healthy": lambda rank: train(fsdp(), rank),
}


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
