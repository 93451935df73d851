"""One rank of the runs that test_alignment_ranks.py looks at."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import RCCHandler
from ignite_monitor.scaling import AlignmentHandler, MaxPScheduler, parametrize
from tests.distributed._launch import WORLD, run_scenarios

COUNT = 4


def make_net(width):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(COUNT)]


def shard(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (WORLD,))
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(rank, seed=0, wrap=DistributedDataParallel):
    """What was published in each iteration; rank None has the whole batch."""
    torch.manual_seed(seed)
    parametrization = parametrize(make_net, (8, 16), sample_input=torch.zeros(1, 6), lr_prefactor=0.1)
    initial = copy.deepcopy(parametrization.model) if wrap is shard else "init"
    model = parametrization.model if rank is None else wrap(parametrization.model)
    optimizer = torch.optim.Adam(parametrization.param_groups)

    def train_step(_, batch):
        inputs, targets = batch if rank is None else (part[rank * 4 : rank * 4 + 4] for part in batch)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    handlers = (
        AlignmentHandler(model, reference=initial),
        MaxPScheduler(parametrization, optimizer, reference=initial),
    )
    engine = Engine(train_step)
    published = []
    for handler in handlers:
        handler.attach(engine)
    engine.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda e: published.append({name: float(value) for name, value in e.state.metrics.items()}),
    )
    engine.run(batches(), max_epochs=1)
    return {"published": published}


def train_with_own_seeds(rank):
    """Each rank has an RNG state of its own; initial weights are those of rank 0."""
    return train(rank, seed=rank)


def train_sharded(rank):
    return train(rank, wrap=shard)


def train_until_data_runs_out(rank):
    """Under join() rank 1 has two batches more, and the parametrization does not know of the wrapper."""
    torch.manual_seed(0)
    parametrization = parametrize(make_net, (8, 16), sample_input=torch.zeros(1, 6), lr_prefactor=0.1)
    model = DistributedDataParallel(parametrization.model)
    optimizer = torch.optim.Adam(parametrization.param_groups)
    published = []

    def train_step(_, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    engine = Engine(train_step)
    for handler in (
        AlignmentHandler(parametrization),
        MaxPScheduler(parametrization, optimizer),
        RCCHandler(parametrization.model),
    ):
        handler.attach(engine)
    engine.add_event_handler(Events.ITERATION_COMPLETED, lambda e: published.append(sorted(e.state.metrics)))
    with model.join():
        engine.run(batches()[: 2 + 2 * rank], max_epochs=1)
    return {"published": published}


SCENARIOS = {
    "ddp": train,
    "own_seeds": train_with_own_seeds,
    "fsdp": train_sharded,
    "join": train_until_data_runs_out,
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
