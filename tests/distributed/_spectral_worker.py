"""One rank of the runs that test_spectral_ranks.py looks at."""

from __future__ import annotations

import io

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import SpectralNormHandler, StepStatsHandler
from tests.distributed._launch import WORLD, run_scenarios

COUNT = 4


class Net(nn.Module):
    """Rows that two ranks can't share evenly, of sizes with and without known vectors, and one row alone."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(270, 301), nn.Linear(301, 25)
        self.conv = nn.Conv1d(5, 7, 3)
        self.last = nn.Linear(95, 1)

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x)))
        return self.last(F.pad(self.conv(x.unflatten(1, (5, 5))).flatten(1), (0, 74)))


def net():
    torch.manual_seed(0)
    return Net()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 270, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(COUNT)]


def train(model, rank, method="power", part=slice(None), monitor=None):
    """What was published in each iteration, and by what it was wrong."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def train_step(_, batch):
        inputs, targets = batch if rank is None else (part[rank * 4 : rank * 4 + 4] for part in batch)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    handler = SpectralNormHandler(model, method=method, updates=True, per_parameter=True)
    if monitor is not None:
        handler.load_state_dict(monitor)
    stats = StepStatsHandler(model, optimizer)
    engine = Engine(train_step)
    handler.attach(engine)
    stats.attach(engine)
    published, exact = [], []

    @engine.on(Events.ITERATION_COMPLETED)
    def record(_):
        values = {name: float(value) for name, value in handler.metrics.items()}
        values["parameter_norm"] = float(stats.metrics["step/parameter_norm"])
        published.append(values)
        whole = {
            name.removeprefix("module."): each.full_tensor() if hasattr(each, "full_tensor") else each
            for name, each in model.named_parameters()
        }
        exact.append(
            {
                f"spectral/norm/{name}": float(torch.linalg.matrix_norm(each.detach().double().flatten(1), ord=2))
                for name, each in whole.items()
                if each.ndim > 1
            }
        )

    engine.run(batches()[part], max_epochs=1)
    return {"published": published, "exact": exact, "monitor": handler.state_dict()}


def resumed(rank):
    """A run that is saved halfway and goes on with another model and monitor."""
    model, other = fsdp(), fsdp()
    first = train(model, rank, part=slice(2))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "monitor": first["monitor"]}, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    other.load_state_dict(state["model"])
    second = train(other, rank, part=slice(2, None), monitor=state["monitor"])
    return {name: first[name] + second[name] for name in ("published", "exact")}


def fsdp(shape=(WORLD,)):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = net()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(model.first, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def columns():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    model = net()
    mesh = init_device_mesh("cpu", (WORLD,))
    weight = distribute_tensor(model.first.weight.detach(), mesh, [Shard(1)])
    holder = nn.Module()
    holder.weight = nn.Parameter(weight)
    handler = SpectralNormHandler(holder, per_parameter=True)
    engine = Engine(lambda *_: None)
    handler.attach(engine)
    engine.run([0])
    exact = float(torch.linalg.matrix_norm(model.first.weight.detach().double(), ord=2))
    return {
        "published": [{name: float(value) for name, value in handler.metrics.items()}],
        "exact": [{"spectral/norm/weight": exact}],
    }


SCENARIOS = {
    "ddp": lambda rank: train(DistributedDataParallel(net()), rank),
    "fsdp": lambda rank: train(fsdp(), rank),
    "fsdp hybrid": lambda rank: train(fsdp((1, WORLD)), rank),
    "fsdp resumed": resumed,
    "fsdp svd": lambda rank: train(fsdp(), rank, "svd"),
    "columns": lambda rank: columns(),
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
