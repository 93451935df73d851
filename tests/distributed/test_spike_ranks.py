"""Each rank keeps its own part of a spike, and looks by itself for where the first NaN came from."""

from __future__ import annotations

import copy
import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine
from torch import Tensor, nn

from ignite_monitor import GradMonitor, SpikeRecorder, StaticThreshold, load_spike, record
from tests._helpers import same
from tests.distributed._launch import run_scenarios
from tests.distributed._models import ddp, fsdp


class Norm(nn.LayerNorm):
    nan_rank: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        return output * math.nan if torch.distributed.get_rank() == self.nan_rank else output


class Net(nn.Module):
    def __init__(self, sync: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.norm = Norm(8)
        self.sync = sync

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x))
        if self.sync:
            mean = x.detach().mean()
            torch.distributed.all_reduce(mean)
            x = x + mean * 0
        return self.last(F.dropout(x, 0.5, self.training))


def train(used: nn.Module, rank: int, nan_rank: int | None = None, factor: float = 1.0) -> dict[str, Any]:
    """A spike in the third of five iterations, whose step is skipped: log lines, and contents of the files."""
    model: Any = getattr(used, "module", used)
    optimizer = torch.optim.SGD(used.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    batches = [(torch.randn(6, 4, generator=generator), torch.arange(6) % 3) for _ in range(5)]
    directory = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    before: dict[str, Tensor] = {}
    losses: list[Tensor] = []
    reported: list[str] = []

    def step(engine: Engine, batch: tuple[Tensor, Tensor]) -> None:
        is_planted = engine.state.iteration == 3
        model.norm.nan_rank = nan_rank if is_planted else None
        if is_planted and not isinstance(next(used.parameters()), torch.distributed.tensor.DTensor):
            before.update(copy.deepcopy(model.state_dict()))
        optimizer.zero_grad()
        item = F.cross_entropy(used(batch[0]), batch[1], reduction="none")
        record("losses", item)
        losses.append(item.detach())
        (item.mean() * (factor if is_planted else 1.0)).backward()
        if not is_planted:
            optimizer.step()

    torch.manual_seed(10 + rank)
    engine = Engine(step)
    monitor = GradMonitor(used, optimizer, threshold=StaticThreshold(1e3))
    listener = logging.Handler()
    listener.emit = lambda item: reported.append(item.getMessage())  # type: ignore[method-assign]
    monitor.logger.addHandler(listener)
    monitor.attach(engine)
    SpikeRecorder(monitor, directory).attach(engine)
    engine.run(batches)
    monitor.logger.removeHandler(listener)
    torch.distributed.barrier()
    spike = load_spike(directory / f"grad-00000003-rank{rank}.spike.pt")
    result = {
        "files": sorted(item.name for item in directory.iterdir()),
        "source": spike.source,
        "own": (spike.iteration, spike.rank) == (3, rank) and same(spike.batch, batches[2]),
        "warnings": reported,
        "finite": bool(losses[-1].isfinite().all()),
    }
    if before and nan_rank is None:
        again = Net()
        again.load_state_dict(before)
        spike.restore_random_state()
        result["same"] = same(F.cross_entropy(again(spike.batch[0]), spike.batch[1], reduction="none"), losses[2])
        result["losses"] = same(spike.losses, losses[2])
    return result


SCENARIOS = {
    "spike": lambda rank: train(ddp(Net()), rank, factor=1e6),
    "nan on both": lambda rank: train(ddp(Net()), rank, rank),
    "nan on one": lambda rank: train(ddp(Net()), rank, 1),
    "communicating": lambda rank: train(ddp(Net(sync=True)), rank, 1),
    "fsdp": lambda rank: train(fsdp(Net(), inner=()), rank, 1),
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_rank_has_a_file_of_its_own(results, name):
    for rank, result in enumerate(results(name)):
        assert result["files"] == [f"grad-00000003-rank{rank}.spike.pt"]
        assert result["own"]
        assert result["finite"]


def test_each_rank_can_make_its_step_again(results):
    assert [(item["same"], item["losses"], item["source"]) for item in results("spike")] == [(True, True, None)] * 2


def test_what_starts_on_both_ranks_is_named_on_both(results):
    assert [(item["source"]["name"], item["source"]["kind"]) for item in results("nan on both")] == [
        ("norm", "forward")
    ] * 2


def test_what_starts_on_another_rank_is_not_named(results):
    first, second = results("nan on one")
    assert first["source"] is None
    assert ["all values of this rank are finite" in text for text in first["warnings"]] == [True]
    assert (second["source"]["name"], second["source"]["kind"]) == ("norm", "forward")


@pytest.mark.parametrize(("name", "reason"), [("communicating", "communicates"), ("fsdp", "sharded")])
def test_no_rank_communicates_for_it(results, name, reason):
    for result in results(name):
        assert result["source"] is None
        assert [reason in text for text in result["warnings"]] == [True]


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
