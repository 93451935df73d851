"""Each rank keeps its own part of a spike, and looks by itself for where the first NaN came from."""

from __future__ import annotations

import copy
import functools
import logging
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor import GradMonitor, SpikeRecorder, StaticThreshold, load_spike, record
from tests._helpers import make_batches, make_step, same
from tests._models import Net
from tests._ranks import ddp, fsdp, inner_of, run_scenarios, share, train


class Norm(nn.LayerNorm):
    nan_rank: int | None = None
    communicates = False

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = super().forward(x)
        if self.communicates:
            mean = output.detach().mean()
            torch.distributed.all_reduce(mean)
            output = output + mean * 0
        return output * math.nan if torch.distributed.get_rank() == self.nan_rank else output


def make_net(communicates: bool = False) -> Net:
    model = Net(norm=Norm, dropout=0.5)
    model.norm.communicates = communicates
    return model


def recorded(
    wrap: Any, rank: int, nan_rank: int | None = None, factor: float = 1.0, communicates: bool = False
) -> dict[str, Any]:
    """A spike in the third of five iterations, whose step is skipped: log lines, and contents of the files."""
    directory = Path(tempfile.mkdtemp(dir=sys.argv[1]))
    before: dict[str, Tensor] = {}
    losses: list[Tensor] = []
    reported: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda item: reported.append(item.getMessage())  # type: ignore[method-assign]

    def loss_of(model: nn.Module, batch: Any) -> Tensor:
        is_planted, inner = len(losses) == 2, inner_of(model)
        inner.norm.nan_rank = nan_rank if is_planted else None
        if is_planted and wrap is ddp:
            before.update(copy.deepcopy(inner.state_dict()))
        item = F.mse_loss(model(batch[0]), batch[1], reduction="none").mean(1)
        record("losses", item)
        losses.append(item.detach())
        return item.mean() * (factor if is_planted else 1.0)

    def monitors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        torch.manual_seed(10 + rank)
        monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e3))
        monitor.logger.addHandler(listener)
        return [monitor, SpikeRecorder(monitor, directory)]

    step = functools.partial(make_step, loss_of=loss_of, leave_out=lambda engine: engine.state.iteration == 3)
    data = make_batches(5, size=12)
    run = train(functools.partial(make_net, communicates), wrap, rank, data, monitors, step=step, rows=6)
    run.monitors[0].logger.removeHandler(listener)
    torch.distributed.barrier()
    spike = load_spike(directory / f"grad-00000003-rank{rank}.spike.pt")
    result = {
        "files": sorted(item.name for item in directory.iterdir()),
        "source": spike.source,
        "own": (spike.iteration, spike.rank) == (3, rank) and same(spike.batch, share(data[2], rank, 6)),
        "warnings": reported,
        "finite": bool(losses[-1].isfinite().all()),
    }
    if before and nan_rank is None:
        again = make_net()
        again.load_state_dict(before)
        spike.restore_random_state()
        result["same"] = same(F.mse_loss(again(spike.batch[0]), spike.batch[1], reduction="none").mean(1), losses[2])
        result["losses"] = same(spike.losses, losses[2])
    return result


SCENARIOS = {
    "spike": lambda rank: recorded(ddp, rank, factor=1e6),
    "nan on both": lambda rank: recorded(ddp, rank, rank),
    "nan on one": lambda rank: recorded(ddp, rank, 1),
    "communicating": lambda rank: recorded(ddp, rank, 1, communicates=True),
    "fsdp": lambda rank: recorded(fsdp, rank, 1),
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
    assert ["are finite on this rank" in text for text in first["warnings"]] == [True]
    assert (second["source"]["name"], second["source"]["kind"]) == ("norm", "forward")


@pytest.mark.parametrize(("name", "reason"), [("communicating", "communicates"), ("fsdp", "sharded")])
def test_no_rank_communicates_for_it(results, name, reason):
    for result in results(name):
        assert result["source"] is None
        assert [reason in text for text in result["warnings"]] == [True]


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
