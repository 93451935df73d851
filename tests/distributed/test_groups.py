"""Pipelines, experts, subgroups and independent trainings, on four ranks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import (
    ActivationHandler,
    CurvatureHandler,
    GradientNoiseScaleHandler,
    GradMonitor,
    MeanStdThreshold,
    MonitorEvents,
    ReplayCheckHandler,
    RollbackHandler,
    attach_monitors,
)
from ignite_monitor.monitor.ranks import NOT_REDUCED
from tests._helpers import Recorder
from tests._ranks import NEEDS_SHARDS, SHARDS, ddp, run_scenarios, whole

RANKS, COUNT, SPIKE, WIDTH = 4, 10, 9, 8
ODD = 2  # the rank whose gradient is wild


class Trainer:
    """A training with a GradMonitor of one rank, whose optimizer notes the gradients of its steps.

    Args:
        model: the model of this rank.
        backward: makes the gradients from a batch of sixteen rows.
        monitors: makes monitors of model and optimizer.
        is_odd: whether the gradient of this rank, and of it alone, is a thousand times as large in one iteration.
    """

    def __init__(
        self, model: Any, backward: Callable[[Any], Any], monitors: Callable[[Any, Any], list[Any]], is_odd: bool
    ) -> None:
        self.model, self.spikes = model, list[int]()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(engine: Engine, batch: Any) -> None:
            self.optimizer.zero_grad()
            backward(engine, batch)
            if is_odd and engine.state.iteration == SPIKE:
                for parameter in model.parameters():
                    parameter.grad *= 1000.0
            self.squares.append([float(whole(item.grad).double().square().sum()) for item in self.used()])
            self.optimizer.step()

        self.squares: list[list[float]] = []
        self.engine = Engine(step)
        self.monitors = monitors(model, self.optimizer)
        for monitor in self.monitors:
            monitor.attach(self.engine, Events.ITERATION_STARTED)
        self.recorder = Recorder(self.engine)

        if self.engine.has_registered_events(MonitorEvents.SPIKE_DETECTED):
            self.engine.add_event_handler(MonitorEvents.SPIKE_DETECTED, self.note)

    def note(self, engine: Engine) -> None:
        self.spikes.append(engine.state.iteration)

    def used(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.grad is not None]

    def run(self, count: int = COUNT) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        data = [torch.randn(2, 16, WIDTH, generator=generator).unbind() for _ in range(count)]
        self.engine.run(data, max_epochs=1)
        return {
            "seen": self.recorder.metrics,
            "squares": self.squares,
            "spikes": self.spikes,
            "reports": [(type(it).__name__, report.text) for it in self.monitors for report in it.reports],
            "parameters": [*map(whole, self.model.parameters())],
        }


def grad_monitor(model: nn.Module, optimizer: torch.optim.Optimizer, **kwargs: Any) -> list[Any]:
    options = {"on_spike": "skip", "threshold": MeanStdThreshold(warmup=6)} | kwargs
    return [GradMonitor(model, optimizer, **options)]


def mesh_of(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp")[: len(shape)])


# Pipelines


def layer(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


SCHEDULES = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B}


def pipeline(
    rank: int, schedule: str, micro: int, wrap: str = "", given: str = "mesh", **kwargs: Any
) -> dict[str, Any]:
    """Train a pipeline whose stages have the ranks of one column of a mesh.

    Args:
        rank: this rank.
        schedule: the name of its schedule; the interleaved one has two stages on every rank.
        micro: number of micro-batches.
        wrap: what the ranks of one stage are wrapped in; then there are two stages of two ranks each.
        given: "mesh", "stages" or "world" for the group of the monitor; "" for none.
        kwargs: further arguments of GradMonitor.
    """
    if schedule != "GPipe" and not SHARDS:
        raise RuntimeError(NEEDS_SHARDS)  # torch 2.6 does not end them on gloo, 1F1B without monitors too
    mesh = mesh_of(2, 2) if wrap else mesh_of(RANKS, 1)
    stages, place, replica = mesh["pp"].size(), mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    indices = [place, place + stages] if schedule == "interleaved" else [place]
    parts: list[Any] = [layer(index) for index in indices]
    if wrap == "ddp":
        # Without find_unused_parameters torch 2.13 fails by itself where there are several micro-batches.
        options: dict[str, Any] = {"process_group": mesh["dp"].get_group(), "find_unused_parameters": True}
        parts = [ddp(part, **options) for part in parts]
    elif wrap:
        parts = [fsdp_over(part, mesh["dp"]) for part in parts]
    total, device, group = stages * len(parts), torch.device("cpu"), mesh["pp"].get_group()
    own = [PipelineStage(part, i, total, device, group=group) for part, i in zip(parts, indices, strict=True)]
    kind: Any = SCHEDULES[schedule]
    made = kind(own if len(own) > 1 else own[0], micro, loss_fn=F.mse_loss)

    def backward(engine: Engine, batch: Any) -> None:
        x, y = (part.chunk(mesh["dp"].size())[replica] for part in batch)
        args = [x] if 0 in indices else []
        made.step(*args, **({"target": y} if total - 1 in indices else {}))

    groups = {"mesh": mesh, "stages": mesh["pp"], "world": dist.group.WORLD, "": None}
    monitors = functools.partial(grad_monitor, group=groups[given], **kwargs)
    trainer = Trainer(nn.ModuleList(parts), backward, monitors, is_odd=place == stages // 2)
    return {**trainer.run(), "stage": place}


def fsdp_over(part: nn.Module, mesh: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    if not SHARDS:
        raise RuntimeError(NEEDS_SHARDS)
    return fully_shard(part, mesh=mesh)


# Tensor parallel


def tensor_parallel(rank: int, replicas: int) -> dict[str, Any]:
    """Split two layers by columns and by rows; FSDP2 shards over the other dimension of a mesh, where it has one."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh_of(replicas, RANKS // replicas)
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)]
    model: Any = nn.Sequential(*layers)
    parallelize_module(model, mesh["dp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    model = fsdp_over(model, mesh["pp"]) if replicas > 1 else model

    def backward(engine: Engine, batch: Any) -> None:
        x, y = (part.chunk(replicas)[mesh["pp"].get_local_rank()] for part in batch)
        (1000.0 ** (engine.state.iteration == SPIKE) * F.mse_loss(model(x), y)).backward()

    return Trainer(model, backward, grad_monitor, is_odd=False).run()


# Local gradients


class Experts(nn.Module):
    """A layer that all ranks share, and one of each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = layer(0)
        self.expert = layer(100 + rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(self.shared(x))


def own_loss(rank: int, model: Callable[[Any], Any], odd: bool = False) -> Callable[[Engine, Any], None]:
    def backward(engine: Engine, batch: Any) -> None:
        x, y = (part.chunk(RANKS)[rank] for part in batch)
        wild = 1000.0 if odd and rank == ODD and engine.state.iteration == SPIKE else 1.0
        (wild * F.mse_loss(model(x), y)).backward()

    return backward


def experts(rank: int, **kwargs: Any) -> dict[str, Any]:
    """DistributedDataParallel ignores one layer, which is another on every rank."""
    net: Any = Experts(rank)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        net, [f"expert.{name}" for name, _ in net.expert.named_parameters()]
    )
    model = ddp(net)
    monitors = functools.partial(with_means, **kwargs)
    return Trainer(model, own_loss(rank, model, odd=True), monitors, is_odd=False).run()


def mean_square(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).square().mean()


def with_means(model: nn.Module, optimizer: torch.optim.Optimizer, **kwargs: Any) -> list[Any]:
    """Add monitors that need the ranks' mean of every gradient."""
    others = [GradientNoiseScaleHandler(model, optimizer), CurvatureHandler(model, optimizer, loss=mean_square)]
    return [*grad_monitor(model, optimizer, **kwargs), *others]


def table(rank: int, reduction: str, is_sharded: bool = False) -> dict[str, Any]:
    """A layer of the rank's own, beside one that ranks share by DistributedDataParallel or FSDP2."""
    net: Any = Experts(rank)
    net.shared = fsdp_over(net.shared, mesh_of(RANKS)) if is_sharded else ddp(net.shared)
    monitors = functools.partial(grad_monitor, group=dist.group.WORLD if reduction == "sum" else None)
    return Trainer(net, own_loss(rank, net, odd=True), monitors, is_odd=False).run()


def local_sgd(rank: int) -> dict[str, Any]:
    """A communication hook that leaves every rank its own gradient."""
    model: Any = ddp(layer(0))
    state = post_local.PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_local.post_localSGD_hook)
    return Trainer(model, own_loss(rank, model, odd=True), with_means, is_odd=False).run()


def idle_expert(rank: int) -> dict[str, Any]:
    """The expert of the first rank gets no token in the third iteration, and has no backward there."""
    model = layer(rank)
    step = own_loss(rank, model)

    def backward(engine: Engine, batch: Any) -> None:
        if rank or engine.state.iteration != 3:
            step(engine, batch)

    monitors = functools.partial(grad_monitor, group=dist.group.WORLD, per_parameter=True)
    return Trainer(model, backward, monitors, is_odd=rank == ODD).run()


# Ranks that do not train together


def independent(rank: int) -> dict[str, Any]:
    """A training of its own on every rank, of another length."""
    model = layer(rank)

    def monitors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        to_save = {"model": model, "optimizer": optimizer}
        others = [ActivationHandler(model, activations={"std": True}), RollbackHandler(to_save)]
        return [*grad_monitor(model, optimizer), *others, ReplayCheckHandler(model, loss=mean_square)]

    result = Trainer(model, own_loss(rank, model), monitors, is_odd=False).run(COUNT + rank)
    dist.barrier()
    return result


def subgroup(rank: int) -> dict[str, Any]:
    """The first two ranks train; the others wait for them."""
    group = dist.new_group([0, 1])
    result: dict[str, Any] = {}
    if rank < 2:
        model: Any = ddp(layer(0), process_group=group)
        trainer = Trainer(model, own_loss(rank, model), lambda *_: [], is_odd=False)
        to_save = {"model": model, "optimizer": trainer.optimizer}
        options: dict[str, Any] = {"every": 2, "rollback": to_save, "extra": ["replicas", "rcc", "histograms"]}
        with attach_monitors(trainer.engine, model, trainer.optimizer, on_spike="skip", **options):
            result = trainer.run()
    dist.barrier()
    return result


SHAPES = [("", "mesh"), ("ddp", "mesh"), ("ddp", "stages"), ("fsdp", "mesh"), ("fsdp", "world")]
PIPELINES = {
    f"{schedule}, {micro} micro-batches, {wrap or 'plain'} in a group of the {given}": functools.partial(
        pipeline, schedule=schedule, micro=micro, wrap=wrap, given=given
    )
    for (schedule, micro), (wrap, given) in [
        *((("GPipe", 4), shape) for shape in SHAPES),
        (("1F1B", 8), ("ddp", "mesh")),
        (("1F1B", 2), ("fsdp", "stages")),
        (("interleaved", 1), ("", "mesh")),
        (("interleaved", 8), ("fsdp", "mesh")),
    ]
}
SCENARIOS: dict[str, Any] = {
    **PIPELINES,
    "per parameter": functools.partial(pipeline, schedule="1F1B", micro=4, per_parameter=True, on_spike="clip"),
    "each stage by itself": functools.partial(pipeline, schedule="GPipe", micro=1, given=""),
    "tensor parallel": functools.partial(tensor_parallel, replicas=1),
    "tensor parallel and FSDP2": functools.partial(tensor_parallel, replicas=2),
    "experts": experts,
    "experts, clipped": functools.partial(experts, per_parameter=True, on_spike="clip"),
    "table sum": functools.partial(table, reduction="sum"),
    "table mean": functools.partial(table, reduction="mean"),
    "table sharded, sum": functools.partial(table, reduction="sum", is_sharded=True),
    "table sharded, mean": functools.partial(table, reduction="mean", is_sharded=True),
    "local SGD": local_sgd,
    "idle expert": idle_expert,
    "independent": independent,
    "subgroup": subgroup,
}


def check(results: list[Any], squares: Callable[[list[list[float]]], float], count: int = COUNT) -> None:
    """All ranks have the norm whose square is a function of the squares of all ranks' gradients, and skip one step."""
    for place in range(count):
        expected = math.sqrt(squares([result["squares"][place] for result in results]))
        assert [item["seen"][place]["grad/norm"] for item in results] == pytest.approx([expected] * RANKS, rel=1e-5)
    first = results[0]["seen"]
    assert [seen["grad/spike"] for seen in first] == [place == SPIKE for place in range(1, count + 1)]
    for result in results:
        assert result["seen"] == first  # to the last bit
        assert result["seen"][-1]["grad/skipped_count"] == 1.0


@pytest.mark.parametrize("name", PIPELINES)
def test_all_stages_of_a_pipeline_have_one_norm_and_one_decision(results, name):
    ranks = results(name)
    replicas = 2 if "plain" not in name else 1
    check(ranks, lambda squares: sum(map(sum, squares)) / replicas)
    assert [result["spikes"] for result in ranks] == [[SPIKE]] * RANKS


def test_thresholds_of_parameters_clip_all_stages_by_one_factor(results):
    ranks = results("per parameter")
    seen = [[{k: v for k, v in row.items() if "culprit" not in k} for row in result["seen"]] for result in ranks]
    assert all(rows == seen[0] for rows in seen)
    assert seen[0][-1]["grad/clipped_count"] == 1.0


def test_without_a_group_each_stage_is_by_itself(results):
    for result in results("each stage by itself"):
        norms = [math.sqrt(sum(squares)) for squares in result["squares"]]
        assert [seen["grad/norm"] for seen in result["seen"]][:-2] == pytest.approx(norms[:-2], rel=1e-5)


@pytest.mark.parametrize("name", ["tensor parallel", "tensor parallel and FSDP2"])
def test_parts_of_a_tensor_make_one_norm(results, name):
    check(results(name), lambda squares: sum(squares[0]))


def test_experts_count_as_parts_of_one_gradient(results):
    ranks = results("experts")
    check(ranks, lambda squares: sum(squares[0][:2]) + sum(sum(own[2:]) for own in squares))
    assert [result["spikes"] for result in ranks] == [[SPIKE]] * RANKS
    clipped = results("experts, clipped")
    assert all(result["seen"][-1]["grad/clipped_count"] == 1.0 for result in clipped)
    for result in clipped:  # the shared layer stays the same on all ranks
        for own, first in zip(result["parameters"][:2], clipped[0]["parameters"], strict=False):
            assert torch.equal(own, first)


@pytest.mark.parametrize("shared", ["table ", "table sharded, "])
@pytest.mark.parametrize(("reduction", "share"), [("sum", 1.0), ("mean", 1 / RANKS)])
def test_gradients_that_no_wrapper_reduces_are_parts_of_one_with_a_group_and_else_the_same(
    results, reduction, share, shared
):
    ranks = results(f"{shared}{reduction}")
    check(ranks, lambda squares: sum(squares[0][:2]) + share * sum(sum(own[2:]) for own in squares))


def test_local_gradients_have_the_root_mean_square_of_the_ranks_norms(results):
    check(results("local SGD"), lambda squares: sum(map(sum, squares)) / RANKS)


@pytest.mark.parametrize("name", ["experts", "local SGD"])
def test_what_needs_the_mean_gradient_says_that_there_is_none(results, name):
    for result in results(name):
        others = [(kind, text) for kind, text in result["reports"] if kind != "GradMonitor"]  # which skips a step
        assert [(kind, text.endswith(NOT_REDUCED)) for kind, text in others] == [
            ("GradientNoiseScaleHandler", True),
            ("CurvatureHandler", True),
        ]
        assert not any(key.startswith(("curvature", "noise_scale")) for row in result["seen"] for key in row)


def test_a_rank_without_a_backward_takes_part(results):
    ranks = results("idle expert")
    assert ranks[0]["squares"][2] == []
    for place in range(COUNT):
        expected = math.sqrt(sum(sum(result["squares"][place]) for result in ranks))
        norms = [result["seen"][place]["grad/norm"] for result in ranks]
        assert norms == pytest.approx([expected] * RANKS, rel=1e-5)
    flags = [[seen["grad/spike"] for seen in result["seen"]] for result in ranks]
    assert flags == [flags[0]] * RANKS
    assert flags[0][SPIKE - 1]


def test_independent_trainings_do_not_wait_for_each_other(results):
    for rank, result in enumerate(results("independent")):
        assert len(result["seen"]) == COUNT + rank
        norms = [math.sqrt(sum(squares)) for squares in result["squares"]]
        assert [seen["grad/norm"] for seen in result["seen"]] == pytest.approx(norms, rel=1e-5)


def test_some_of_the_ranks_train(results):
    first, second, *others = results("subgroup")
    assert others == [{}, {}]
    assert len(first["seen"]) == COUNT
    shared = [{k: v for k, v in row.items() if k.startswith(("grad/", "activation/"))} for row in first["seen"]]
    assert shared == [{k: row[k] for k in own} for row, own in zip(second["seen"], shared, strict=True)]
    assert first["seen"][-1]["replicas/in_sync"] == 1.0


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    run_scenarios(SCENARIOS, world=RANKS)
