"""One rank of the runs that test_ranks.py looks at: ``python -m tests.distributed._worker FOLDER RANK NAME …``."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any
from unittest import mock

import ignite.distributed as idist
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import (
    CurvatureHandler,
    GradientNoiseScaleHandler,
    GradMonitor,
    HistogramHandler,
    MeanStdThreshold,
    MonitorEvents,
    SpectralNormHandler,
    WeightUpdateHandler,
)
from ignite_monitor.curvature.hessian import Hessian
from tests._helpers import make_batches
from tests.distributed import _models
from tests.distributed._launch import WORLD, run_scenarios
from tests.distributed._models import Net, counted_collectives, net, run, share, step_of, whole

COUNT = 26
SPIKE = 24


def batches(spike: int | None = None):
    """Whole batches of 8; at ``spike`` the second half, which is rank 1's, has huge targets."""
    made = make_batches(COUNT)
    if spike is not None:
        made[spike - 1][1][4:] *= 1000
    return made


def train(
    model: nn.Module,
    rank: int | None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    spike: int | None = None,
    monitored: bool = True,
    leave_out: int | None = None,
    step: Mapping[str, Any] = MappingProxyType({}),
    watch: nn.Module | None = None,
    **kwargs: Any,
) -> dict[str, Any]:
    """Train on one rank's halves of the batches (None: the whole), and say what was published.

    ``step`` is how the train step of :func:`step_of` is made.
    """
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=0.1)
    norms: list[float | None] = []
    fired: list[int] = []

    def look(engine: Engine) -> None:
        if monitored:
            norms.append(None if engine.state.grad_norm is None else float(engine.state.grad_norm))

    inner = step_of(model, optimizer, rank, after_backward=look, **step)

    def train_step(engine: Engine, batch: Any) -> None:
        if monitored and engine.state.iteration == 1:
            engine.add_event_handler(MonitorEvents.GRADIENTS_READY, lambda e: fired.append(e.state.iteration))
        if engine.state.iteration != leave_out:
            inner(engine, batch)

    monitors = [GradMonitor(watch or model, optimizer, **kwargs)] if monitored else []
    seen = run(train_step, batches(spike), *monitors)
    return {"seen": seen, "fired": fired, "norms": norms, "parameters": [*map(whole, model.parameters())]}


# A spike's step is left out by the train step; and four iterations to a step, the first one of the fifth is a spike.
LEAVING_OUT: dict[str, Any] = {"spike": SPIKE, "step": {"leaves_spikes_out": True, "set_to_none": False}}
ACCUMULATING: dict[str, Any] = {
    "spike": 17,
    "step": {"every": 4},
    "threshold": MeanStdThreshold(k=10.0, warmup=3),
}


def differently(how: dict[str, Any], **step: Any) -> dict[str, Any]:
    return {**how, "step": {**how["step"], **step}}


def ddp(unused: bool = False, **kwargs: Any) -> DistributedDataParallel:
    return _models.ddp(net(unused=unused), **kwargs)


def fsdp() -> Any:
    return _models.fsdp(net())


def loss_at(iteration: int, rank: int) -> float:
    """Of the last rank it is huge once."""
    return 100.0 if iteration == SPIKE and rank == WORLD - 1 else 1.0 + 0.01 * (iteration % 3)


def skipping(make, **kwargs: Any):
    def run(rank: int) -> dict[str, Any]:
        def optimizer(model):
            return kwargs["optimizer"](model.parameters()) if "optimizer" in kwargs else None

        first, second = make(), make()
        skipped = train(first, rank, optimizer=optimizer(first), spike=SPIKE, on_spike="skip")
        left_out = train(second, rank, optimizer=optimizer(second), spike=SPIKE, monitored=False, leave_out=SPIKE)
        return {**skipped, "left out": left_out["parameters"]}

    return run


class OneTensor(nn.Module):
    """Of the first layer's bias the gradient is 30 times as large at one forward pass; its output is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.passes = net(), 0

    def forward(self, x):
        self.passes += 1
        bias = self.net.first.bias
        factor = 29.0 if self.passes == SPIKE else 0.0
        return self.net(x) + factor * (self.net(x + 0 * x) - self._without(x, bias.detach()))

    def _without(self, x, bias):
        first = F.linear(x, self.net.first.weight, bias)
        return self.net.second(torch.tanh(first)) * self.net.scale


def single_tensors(wrap, rank: int | None, **kwargs: Any) -> dict[str, Any]:
    """With a threshold per tensor, and how many collectives that takes; and without."""
    counts = {}
    for per_parameter in (False, True):
        with counted_collectives() as calls:
            result = train(wrap(OneTensor()), rank, per_parameter=per_parameter, **kwargs)
        counts[per_parameter] = len(calls)
    return {**result, "collectives": counts[True], "without": counts[False]}


def sharded(model: nn.Module) -> nn.Module:
    return _models.fsdp(model, inner=())


def different_parameters(rank: int, **kwargs: Any) -> dict[str, Any]:
    """Each rank trains a model of its own on its own half."""
    torch.manual_seed(rank)
    own: list[torch.Tensor] = []
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    optimizer.register_step_pre_hook(
        lambda *_: own.append(torch.cat([p.grad.flatten().double() for p in model.parameters()]))
    )
    seen = run(step_of(model, optimizer, rank), batches(SPIKE), GradMonitor(model, optimizer, **kwargs))
    return {"seen": seen, "own": own}


def auto_model(rank: int) -> dict[str, Any]:
    model = idist.auto_model(net())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=0.1))
    assert isinstance(model, DistributedDataParallel)
    return train(model, rank, optimizer=optimizer, spike=SPIKE)


def inner_model(rank: int) -> dict[str, Any]:
    model = ddp()
    return train(model, rank, watch=model.module, spike=SPIKE)


def refused(rank: int) -> dict[str, Any]:
    """What can't work with a wrapper."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    with pytest.raises(ValueError, match=r"Argument reduction should.*DistributedDataParallel"):
        GradMonitor(ddp(), reduction="sum")
    for make in (GradMonitor, WeightUpdateHandler, SpectralNormHandler, HistogramHandler):
        with pytest.raises(ValueError, match=r"Argument model should.*FullyShardedDataParallel"):
            make(FullyShardedDataParallel(net(), device_id=torch.device("cpu")))
    for kind, kwargs in (
        (CurvatureHandler, {"loss": lambda model, batch: None}),
        (GradientNoiseScaleHandler, {"micro_batches": 2}),
    ):
        model = fsdp()
        with pytest.raises(ValueError, match="Argument model should not be sharded"):
            kind(model, torch.optim.SGD(model.parameters(), 0.1), **kwargs)
    return {}


def dropped(rank: int) -> dict[str, Any]:
    """Nothing is detached, nothing is torn down: as a script ends that just stops."""
    global kept
    kept = ddp_trainer(rank, watched=True)[0]
    return {}


def freed(rank: int) -> dict[str, Any]:
    """What is alive of a run that was dropped without detaching, with monitors and without."""
    alive = {}
    gc.disable()
    for watched in (False, False, True):  # the first use leaves reference cycles of torch's own
        parts = [weakref.ref(part) for part in ddp_trainer(rank, watched)]
        alive[watched] = [part() is not None for part in parts]
    gc.enable()
    return {"bare": alive[False], "watched": alive[True]}


def ddp_trainer(rank: int, watched: bool) -> tuple[Engine, nn.Module, nn.Module]:
    """A trainer that has run, its model, and that without its wrapper."""
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    trainer = Engine(step_of(model, optimizer, rank))
    if watched:
        GradMonitor(model, optimizer, on_spike="skip").attach(trainer)
    trainer.run(batches())
    return trainer, model, model.module


def after_the_process_group(rank: int) -> dict[str, Any]:
    """A training of its own on each rank, once the group is gone."""
    train(ddp(), rank)
    dist.destroy_process_group()
    return train(net(), rank)


def noise_scale(model: nn.Module, rank: int | None, micro: int) -> dict[str, Any]:
    """Micro-batches of two items, as many on each rank; in one process those of both ranks."""
    ranks = range(WORLD) if rank is None else [rank]
    micro *= len(ranks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def train_step(engine, batch):
        optimizer.zero_grad()
        own = [[part.split(2)[: micro // len(ranks)] for part in share(batch, item)] for item in ranks]
        parts = [part for item in own for part in zip(*item, strict=True)]
        for index, (x, y) in enumerate(parts):
            syncs = rank is None or index == len(parts) - 1
            with contextlib.nullcontext() if syncs else model.no_sync():
                (F.mse_loss(model(x), y) / micro).backward()
        optimizer.step()

    monitor = GradientNoiseScaleHandler(model, optimizer, micro_batches=micro, items=lambda batch: 2 * micro)
    run(train_step, batches(), monitor)
    return {"moments": monitor.state_dict()["moments"], "weights": [item.detach() for item in model.parameters()]}


def curvature(model: nn.Module, rank: int | None, failing: str = "") -> dict[str, Any]:
    """Rank 1 may fail in its loss, in a product, or not reach the model."""
    failing = failing if rank == 1 else ""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)

    def loss(model, batch):
        x, y = share(batch, rank)
        if failing == "unreached":
            return torch.zeros((), requires_grad=True)
        return F.mse_loss(model(None if failing == "loss" else x), y)

    times, products = Hessian.times, itertools.count()

    def fails_in_time(hessian: Hessian, vector: torch.Tensor) -> torch.Tensor:
        if next(products) == 4:
            raise torch.OutOfMemoryError("no memory")
        return times(hessian, vector)

    with mock.patch.object(Hessian, "times", fails_in_time if failing == "product" else times):
        monitor, event = CurvatureHandler(model, optimizer, loss=loss), Events.ITERATION_STARTED(every=2)
        seen = run(step_of(model, optimizer, rank), batches()[:2], monitor, at=event)
    return {"seen": seen, "weights": [item.detach() for item in model.parameters()]}


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


SCENARIOS: dict[str, Any] = {
    "ddp": lambda rank: train(ddp(), rank, spike=SPIKE),
    "ddp static_graph": lambda rank: train(ddp(static_graph=True), rank, spike=SPIKE),
    "ddp find_unused_parameters": lambda rank: train(ddp(unused=True, find_unused_parameters=True), rank, spike=SPIKE),
    "ddp gradient_as_bucket_view": lambda rank: train(ddp(gradient_as_bucket_view=True), rank, spike=SPIKE),
    "ddp many buckets": lambda rank: train(ddp(bucket_cap_mb=1e-5), rank, spike=SPIKE),
    "auto_model": auto_model,
    "ddp, monitor of the inner model": inner_model,
    "fsdp": lambda rank: train(fsdp(), rank, spike=SPIKE),
    "ddp no_sync": lambda rank: train(ddp(), rank, step={"micro": 2, "quiet": True}),
    "ddp no_sync over iterations": lambda rank: train(ddp(), rank, step={"every": 2, "quiet": True}),
    "ddp accumulation without no_sync": lambda rank: train(ddp(), rank, step={"micro": 2}),
    "ddp static_graph accumulation without no_sync": lambda rank: train(
        ddp(static_graph=True), rank, step={"micro": 2}
    ),
    "fsdp without gradient sync": lambda rank: train(fsdp(), rank, step={"micro": 2, "quiet": True}),
    "fsdp accumulation": lambda rank: train(fsdp(), rank, step={"micro": 2}),
    "skip ddp": skipping(ddp),
    "skip ddp fused": skipping(ddp, optimizer=fused),
    "skip fsdp": skipping(fsdp),
    "skip fsdp fused": skipping(fsdp, optimizer=fused),
    "leaving out ddp": lambda rank: train(ddp(), rank, **LEAVING_OUT),
    "leaving out fsdp": lambda rank: train(fsdp(), rank, **LEAVING_OUT),
    "leaving out fsdp set to none": lambda rank: train(fsdp(), rank, **differently(LEAVING_OUT, set_to_none=True)),
    "leaving out ddp bucket view": lambda rank: train(ddp(gradient_as_bucket_view=True), rank, **LEAVING_OUT),
    "leaving out ddp bucket view set to none": lambda rank: train(
        ddp(gradient_as_bucket_view=True), rank, **differently(LEAVING_OUT, set_to_none=True)
    ),
    "accumulating ddp": lambda rank: train(ddp(), rank, **ACCUMULATING),
    "accumulating ddp bucket view": lambda rank: train(ddp(gradient_as_bucket_view=True), rank, **ACCUMULATING),
    "accumulating fsdp": lambda rank: train(fsdp(), rank, **ACCUMULATING),
    "accumulating fsdp zeroed in place": lambda rank: train(
        fsdp(), rank, **differently(ACCUMULATING, set_to_none=False)
    ),
    "clip ddp": lambda rank: train(ddp(), rank, spike=SPIKE, on_spike="clip"),
    "clip fsdp": lambda rank: train(fsdp(), rank, spike=SPIKE, on_spike="clip"),
    "loss ddp": lambda rank: train(ddp(), rank, loss=lambda engine: loss_at(engine.state.iteration, rank)),
    "loss fsdp": lambda rank: train(fsdp(), rank, loss=lambda engine: loss_at(engine.state.iteration, rank)),
    "tensors ddp": lambda rank: single_tensors(DistributedDataParallel, rank),
    "tensors fsdp": lambda rank: single_tensors(sharded, rank),
    "tensors clip fsdp": lambda rank: single_tensors(sharded, rank, on_spike="clip"),
    "tensors skip ddp": lambda rank: single_tensors(DistributedDataParallel, rank, on_spike="skip"),
    "tensors sum": lambda rank: different_parameters(rank, reduction="sum", per_parameter=True),
    "tensors mean": lambda rank: different_parameters(rank, reduction="mean", per_parameter=True),
    "sum": lambda rank: different_parameters(rank, reduction="sum"),
    "sum inf": lambda rank: different_parameters(rank, reduction="sum", norm_type=float("inf")),
    "mean": lambda rank: different_parameters(rank, reduction="mean"),
    "noise scale of two": lambda rank: noise_scale(ddp(), rank, 1),
    "noise scale of four": lambda rank: noise_scale(ddp(), rank, 2),
    "curvature": lambda rank: curvature(ddp(), rank),
    "curvature, unused parameters": lambda rank: curvature(ddp(unused=True, find_unused_parameters=True), rank),
    "curvature, loss fails": lambda rank: curvature(ddp(), rank, "loss"),
    "curvature, product fails": lambda rank: curvature(ddp(), rank, "product"),
    "curvature, unreached loss": lambda rank: curvature(ddp(), rank, "unreached"),
    "refused": refused,
    "freed": freed,
    "after the process group": after_the_process_group,
    "dropped": dropped,
}


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    idist.get_world_size()  # asked before there is a group, as loggers do
    run_scenarios(SCENARIOS, left_standing=["dropped"])
