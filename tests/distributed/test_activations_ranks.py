"""Two ranks publish what one process with the whole batches sees, uneven shares and conditional modules included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ignite_monitor import ActivationHandler, HistogramHandler, Metric, record
from tests._helpers import assert_same
from tests.distributed import _models
from tests.distributed._launch import run_scenarios
from tests.distributed._models import ddp, fsdp, run, share, synchronised, whole

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
    return _models.net(Net)


def dense() -> nn.Module:
    return _models.net(lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)))


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
        model(share(x, rank, SPLIT)).square().mean().backward()
        optimizer.step()

    of_parameters = {"max_abs": True, "norm": torch.norm}
    handler = ActivationHandler(model, activations=METRICS, gradients={"norm": torch.norm}, parameters=of_parameters)
    return {"published": run(train_step, batches(), handler)}


def clipped(model: Any, rank: int) -> dict[str, Any]:
    """Two micro-batches, the first one without reduction, and a step with what clipping leaves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    truth: dict[str, float] = {}

    def look(family: str) -> None:
        for name, item in model.named_parameters():
            truth[f"{family}/{name.removeprefix('module.')}/norm"] = float(whole(item.grad).double().norm())

    def train_step(engine, x):
        optimizer.zero_grad()
        for part in range(2):
            with synchronised(model, part == 1):
                model(x[rank + 2 * part :: 4]).square().mean().backward()
        look("gradient")
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        look("gradient_after_clip")
        optimizer.step()

    (published,) = run(train_step, batches()[:1], ActivationHandler(model, gradients={"norm": torch.norm}))
    return {"published": published, "truth": truth}


def histograms(model: nn.Module, rank: int) -> dict[str, Any]:
    """What is drawn in the last iteration, and of what: this rank's outputs, and whole weights and gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tensors: dict[str, torch.Tensor] = {}

    def train_step(engine, x):
        optimizer.zero_grad()
        output = model(share(x, rank, SPLIT))
        tensors["activations/_root_"] = output.detach().clone()
        output.square().mean().backward()
        optimizer.step()
        for name, item in model.named_parameters():
            name = name.removeprefix("module.")
            tensors.update({f"weights/{name}": whole(item), f"gradients/{name}": whole(item.grad)})

    handler = HistogramHandler(model)
    run(train_step, batches(), handler)
    return {"tensors": tensors, "drawn": handler.histograms}


SCENARIOS = {
    "ddp": lambda rank: train(ddp(net(), find_unused_parameters=True), rank),
    "ddp learning": lambda rank: train(ddp(net(), find_unused_parameters=True), rank, learn=True),
    "fsdp": lambda rank: train(fsdp(dense(), inner=()), rank),
    "ddp clipped": lambda rank: clipped(ddp(dense()), rank),
    "fsdp clipped": lambda rank: clipped(fsdp(dense(), inner=()), rank),
    "ddp histograms": lambda rank: histograms(ddp(dense()), rank),
    "fsdp histograms": lambda rank: histograms(fsdp(dense(), inner=()), rank),
}


def of_forward(published):
    # Of a module that only one rank calls the loss of the whole is another one.
    start = ("activation/", "recorded/", "parameter/")
    late = ("activation/experts.1/",)
    return {name: value for name, value in published.items() if name.startswith(start) and not name.startswith(late)}


@pytest.mark.parametrize(("name", "model"), [("ddp", net), ("fsdp", dense)])
def test_both_ranks_publish_what_one_process_does(results, name, model):
    alone = train(model(), None)["published"]
    for result in results(name):
        for i in range(COUNT):
            measured, wanted = of_forward(result["published"][i]), of_forward(alone[i])
            rows = measured.pop("recorded/_root_/rows", None)
            wanted.pop("recorded/_root_/rows", None)
            assert rows in (None, 4.0)
            if i >= 3:  # the first rank's output is without the second expert's
                measured, wanted = ({k: v for k, v in item.items() if "_root_" not in k} for item in (measured, wanted))
            assert measured == pytest.approx(wanted, rel=1e-4, abs=1e-6), i


def test_a_module_that_one_rank_calls_is_published_from_the_next_iteration_on(results):
    for result in results("ddp"):
        present = ["activation/experts.1/mean" in item for item in result["published"]]
        assert present == [False, False, False, False, True, True]
        # Its five rows are the second rank's.
        assert result["published"][4]["activation/experts.1/count"] == 5
        assert result["published"][4]["activation/experts.1/half/count"] == 2.5


@pytest.mark.parametrize("name", ["ddp histograms", "fsdp histograms"])
def test_histograms_are_of_own_batches_and_of_whole_parameters(results, name):
    for rank in results(name):
        for key, own in rank["tensors"].items():
            values, measured = own.double().numpy().ravel(), rank["drawn"][f"histograms/{key}"]
            assert measured["num"] == len(values)
            assert (measured["min"], measured["max"]) == (values.min(), values.max())
            counts, _ = np.histogram(values, measured["bucket_limits"])
            assert measured["bucket_counts"][1:] == counts.tolist()


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "histograms" not in name])
def test_both_ranks_agree_to_the_last_bit(results, name):
    assert_same(*results(name))


def test_sharded_gradients_are_whole(results):
    model, batch = dense().double(), batches()[0].double()
    for rank in (0, 1):
        (model(share(batch, rank, SPLIT)).square().mean() / 2).backward()
    published = results("fsdp")[0]["published"][0]
    measured = [value for name, value in published.items() if name.startswith("gradient/")]
    assert measured == pytest.approx([parameter.grad.norm().item() for parameter in model.parameters()], rel=1e-4)


@pytest.mark.parametrize("name", ["ddp clipped", "fsdp clipped"])
def test_gradients_of_micro_batches_before_and_after_clipping(results, name):
    for result in results(name):
        assert result["published"] == pytest.approx(result["truth"], rel=1e-5)


if __name__ == "__main__":
    run_scenarios(SCENARIOS)
