"""One rank of the runs that test_activations_ranks.py looks at."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import ActivationHandler, HistogramHandler, Metric, record
from tests.distributed._launch import WORLD, run_scenarios

COUNT = 6
SPLIT = 3  # of 8 rows the first rank has so many


class Net(nn.Module):
    """The second expert is for batches that hold a large number, as only the last rows of the later ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.relu = nn.Linear(4, 6), nn.ReLU()
        self.experts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x):
        y = self.relu(self.layer(x))
        record("rows", len(x))
        out = self.experts[0](y)
        return out + self.experts[1](y) if x.max() > 50 else out


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(8, 4, generator=generator) for _ in range(COUNT)]
    for batch in made[3:]:
        batch[7] = 100.0
    return made


METRICS = {
    "mean": True,
    "std": True,
    "dead_fraction": True,
    "max_abs": True,
    "nonfinite_count": True,
    "abs": torch.abs,
    "total": Metric(torch.sum, aggregate="sum"),
    "smallest": Metric(torch.min, aggregate="min"),
    "count": Metric(len, aggregate="sum"),
    "half/count": Metric(lambda x: len(x) / 2, aggregate="sum"),
}


def train(model: nn.Module, rank: int | None, learn: bool = False) -> dict[str, Any]:
    """Train on one rank's share of the batches (None: the whole), and say what was published."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if learn else 0.0)

    def train_step(engine, x):
        optimizer.zero_grad()
        own = x if rank is None else x[:SPLIT] if rank == 0 else x[SPLIT:]
        model(own).square().mean().backward()
        optimizer.step()

    engine = Engine(train_step)
    ActivationHandler(
        model, activations=METRICS, gradients={"norm": torch.norm}, parameters={"max_abs": True, "norm": torch.norm}
    ).attach(engine)
    published: list[dict[str, float]] = []
    engine.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda e: published.append({name: float(value) for name, value in e.state.metrics.items()}),
    )
    engine.run(batches())
    return {"published": published}


def clipped(model: Any, rank: int) -> dict[str, Any]:
    """Two micro-batches, the first one without reduction, and a step with what clipping leaves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []

    def norms() -> list[float]:
        gradients = [parameter.grad for parameter in model.parameters()]
        whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in gradients]
        return [float(each.double().norm()) for each in whole]

    def train_step(engine, x):
        optimizer.zero_grad()
        for part in range(2):
            is_last = part == 1
            if hasattr(model, "no_sync"):
                context = contextlib.nullcontext() if is_last else model.no_sync()
            else:
                model.set_requires_gradient_sync(is_last)
                context = contextlib.nullcontext()
            with context:
                model(x[rank + 2 * part :: 4]).square().mean().backward()
        found.append(norms())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        found.append(norms())
        optimizer.step()

    engine = Engine(train_step)
    handler = ActivationHandler(model, gradients={"norm": torch.norm})
    handler.attach(engine)
    engine.run(batches()[:1])
    names = [name.removeprefix("module.") for name, _ in model.named_parameters()]
    return {
        "published": {name: float(value) for name, value in handler.metrics.items()},
        "truth": {
            f"{family}/{name}/norm": norm
            for family, each in zip(("gradient", "gradient_after_clip"), found, strict=True)
            for name, norm in zip(names, each, strict=True)
        },
    }


def histograms(model: nn.Module, rank: int) -> dict[str, Any]:
    """What is drawn in the last iteration, and of what: this rank's outputs, and whole weights and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tensors: dict[str, torch.Tensor] = {}

    def keep(kind: str) -> None:
        for name, each in model.named_parameters():
            whole: Any = (each if kind == "weights" else each.grad).detach()
            whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            tensors[f"{kind}/{name.removeprefix('module.')}"] = whole.clone()

    def train_step(engine, x):
        optimizer.zero_grad()
        output = model(x[:SPLIT] if rank == 0 else x[SPLIT:])
        tensors["activations/_root_"] = output.detach().clone()
        output.square().mean().backward()
        keep("gradients")
        optimizer.step()
        keep("weights")

    engine = Engine(train_step)
    handler = HistogramHandler(model)
    handler.attach(engine)
    drawn: dict[str, Any] = {}
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda _: drawn.update(handler.histograms))
    engine.run(batches())
    return {"tensors": tensors, "drawn": drawn}


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def fsdp() -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(dense(), mesh=init_device_mesh("cpu", (WORLD,)))


SCENARIOS = {
    "ddp": lambda rank: train(DistributedDataParallel(net(), find_unused_parameters=True), rank),
    "ddp learning": lambda rank: train(DistributedDataParallel(net(), find_unused_parameters=True), rank, learn=True),
    "fsdp": lambda rank: train(fsdp(), rank),
    "ddp clipped": lambda rank: clipped(DistributedDataParallel(dense()), rank),
    "fsdp clipped": lambda rank: clipped(fsdp(), rank),
    "ddp histograms": lambda rank: histograms(DistributedDataParallel(dense()), rank),
    "fsdp histograms": lambda rank: histograms(fsdp(), rank),
}


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
