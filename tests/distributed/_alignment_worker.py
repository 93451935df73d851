"""One rank of the runs that test_alignment_ranks.py looks at."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.scaling import AlignmentHandler, MaxPScheduler, parametrize
from tests.distributed._launch import run_scenarios

COUNT = 4


def make_net(width):
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(COUNT)]


def train(rank, seed=0, reference="init"):
    """What was published in each iteration; rank None has the whole batch."""
    torch.manual_seed(seed)
    parametrization = parametrize(make_net, (8, 16), sample_input=torch.zeros(1, 6), lr_prefactor=0.1)
    optimizer = torch.optim.Adam(parametrization.param_groups)
    model = parametrization.model if rank is None else DistributedDataParallel(parametrization.model)

    def train_step(_, batch):
        inputs, targets = batch if rank is None else (part[rank * 4 : rank * 4 + 4] for part in batch)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    measured = model if reference == "init" else parametrization
    handlers = AlignmentHandler(measured, reference=reference), MaxPScheduler(parametrization, optimizer)
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
    """Each rank has random numbers of its own."""
    return train(rank, seed=rank, reference="seed")


SCENARIOS = {"ddp": train, "own_seeds": train_with_own_seeds}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
