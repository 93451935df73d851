"""Alignment, and the learning rates that follow it, on two ranks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from ignite_monitor import RCCHandler
from ignite_monitor.scaling import AlignmentHandler, MaxPScheduler, parametrize
from tests._helpers import make_batches
from tests.distributed._launch import run_scenarios
from tests.distributed._models import ddp, fsdp, run, step_of

COUNT = 4


def parametrized(seed=0):
    def make_net(width):
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))

    torch.manual_seed(seed)
    return parametrize(make_net, (8, 16), sample_input=torch.zeros(1, 6), lr_prefactor=0.1)


def train(rank, seed=0, wrap=ddp):
    """What was published in each iteration; rank None has the whole batch."""
    parametrization = parametrized(seed)
    initial = "init" if wrap is ddp else copy.deepcopy(parametrization.model)
    model = parametrization.model if rank is None else wrap(parametrization.model)
    optimizer = torch.optim.Adam(parametrization.param_groups)
    handlers = (
        AlignmentHandler(model, reference=initial),
        MaxPScheduler(parametrization, optimizer, reference=initial),
    )
    return {"published": run(step_of(model, optimizer, rank), make_batches(COUNT), *handlers)}


def train_until_data_runs_out(rank):
    """Under join() rank 1 has two batches more, and the parametrization does not know of the wrapper."""
    parametrization = parametrized()
    model = ddp(parametrization.model)
    optimizer = torch.optim.Adam(parametrization.param_groups)
    handlers = (
        AlignmentHandler(parametrization),
        MaxPScheduler(parametrization, optimizer),
        RCCHandler(parametrization.model),
    )
    with model.join():
        return {"published": run(step_of(model, optimizer), make_batches(COUNT)[: 2 + 2 * rank], *handlers)}


SCENARIOS = {
    "ddp": train,
    # Each rank has an RNG state of its own; initial weights are those of rank 0.
    "own_seeds": lambda rank: train(rank, seed=rank),
    "fsdp": lambda rank: train(rank, wrap=lambda model: fsdp(model, inner=["2"])),
    "join": train_until_data_runs_out,
}


@pytest.mark.parametrize("name", ["ddp", "own_seeds", "fsdp"])
def test_both_ranks_publish_what_one_process_does(results, name):
    """Ranks with seeds of their own start from the weights of rank 0, and compare with these."""
    first, second = results(name)
    assert first == second
    whole = train(None)["published"]
    assert any(name.startswith("alignment/dZ_w0/") for name in whole[-1])
    for i in range(COUNT):
        assert first["published"][i] == pytest.approx(whole[i], rel=1e-3), i


def test_ranks_that_have_run_out_of_data_are_not_waited_for(results):
    """Learning rates stay as they are, and what takes all ranks is absent."""
    both = results("join")
    assert [len(item["published"]) for item in both] == [2, 4]
    assert {name.split("/")[0] for item in both for names in item["published"] for name in names} == {"maxp"}


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
