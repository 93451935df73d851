"""The norm of the whole matrix on every rank, however it is shared out."""

from __future__ import annotations

import io

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine
from torch import nn

from ignite_monitor import SpectralNormHandler, StepStatsHandler
from tests.distributed import _models
from tests.distributed._launch import WORLD, run_scenarios
from tests.distributed._models import ddp, fsdp, mesh, run, step_of, whole

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
    return _models.net(Net)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 270, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(COUNT)]


def exact(weight):
    return float(torch.linalg.matrix_norm(weight.detach().double().flatten(1), ord=2))


def train(model, rank, part=slice(None), monitor=None):
    """What was published in each iteration, and what the norms were."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    handler = SpectralNormHandler(model, updates=True, per_parameter=True)
    if monitor is not None:
        handler.load_state_dict(monitor)
    step, norms = step_of(model, optimizer, rank), []

    def train_step(engine, batch):
        step(engine, batch)
        weights = {name.removeprefix("module."): whole(item) for name, item in model.named_parameters()}
        norms.append({f"spectral/norm/{name}": exact(item) for name, item in weights.items() if item.ndim > 1})

    rows = run(train_step, batches()[part], handler, StepStatsHandler(model, optimizer))
    kept = ("spectral/", "step/parameter_norm")
    published = [{name: value for name, value in row.items() if name.startswith(kept)} for row in rows]
    return {"published": published, "exact": norms, "monitor": handler.state_dict()}


def resumed(rank):
    """A run that is saved halfway and goes on with another model and monitor."""
    model, other = fsdp(net()), fsdp(net())
    first = train(model, rank, part=slice(2))
    buffer = io.BytesIO()
    torch.save({"model": model.state_dict(), "monitor": first["monitor"]}, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    other.load_state_dict(state["model"])
    second = train(other, rank, part=slice(2, None), monitor=state["monitor"])
    return {name: first[name] + second[name] for name in ("published", "exact")}


def columns(rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = net().first.weight.detach()
    holder = nn.Module()
    holder.weight = nn.Parameter(distribute_tensor(weight, mesh(), [Shard(1)]))
    engine = Engine(lambda *_: None)
    handler = SpectralNormHandler(holder, per_parameter=True)
    handler.attach(engine)
    engine.run([0])
    published = {name: float(value) for name, value in handler.metrics.items()}
    return {"published": [published], "exact": [{"spectral/norm/weight": exact(weight)}]}


SCENARIOS = {
    "ddp": lambda rank: train(ddp(net()), rank),
    "fsdp": lambda rank: train(fsdp(net()), rank),
    "fsdp hybrid": lambda rank: train(fsdp(net(), (1, WORLD)), rank),
    "fsdp resumed": resumed,
    "columns": columns,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_rank_has_the_norm_of_the_whole_matrix(results, name):
    first, second = results(name)
    assert first["published"] == second["published"]
    for published, exact in zip(first["published"], first["exact"], strict=True):
        for key, value in exact.items():
            assert abs(published[key] / value - 1) <= published["spectral/error_max"] < 1e-2, key
        assert max(exact.values()) == pytest.approx(published["spectral/norm_max"], rel=1e-3)


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp hybrid"])
def test_both_ranks_publish_what_one_process_does(results, name):
    alone = train(net(), None)["published"]
    for i in range(COUNT):
        for key, value in results(name)[0]["published"][i].items():
            if "error" not in key and "iterations" not in key:
                assert value == pytest.approx(alone[i][key], rel=2e-3), (i, key)


def test_resumed_run_publishes_what_the_uninterrupted_one_does(results):
    for actual, expected in zip(results("fsdp resumed"), results("fsdp"), strict=True):
        assert actual["published"] == expected["published"]


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
