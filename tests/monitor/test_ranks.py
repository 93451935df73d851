"""The ranks whose optimizers step together, on one rank of a process group that transfers nothing."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ignite.distributed.comp_models import _SerialModel
from ignite.engine import Engine, Events
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import ignite_monitor as im
from ignite_monitor.monitor.ranks import RankReduction, Ranks
from ignite_monitor.monitor.transfer import NamedValues
from ignite_monitor.scaling import AlignmentHandler, MaxPScheduler, parametrize

CPU = torch.device("cpu")


@pytest.fixture
def process_group():
    """Start a fake process group of any number of ranks, of which this is the given one."""

    def start(world: int, rank: int = 0) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def resolved(group, *models) -> Ranks:
    ranks = Ranks(group, *models)
    ranks.resolve()
    return ranks


def sharded(mesh) -> nn.Module:
    model = nn.Linear(4, 4)
    whole = DTensor.from_local(model.weight.detach(), mesh, [Shard(0)] * mesh.ndim, run_check=False)
    model.weight = nn.Parameter(whole)
    return model


def test_without_a_group_nothing_is_communicated(monkeypatch):
    for name in ("all_gather_object", "all_reduce", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, lambda *_: pytest.fail("there is one rank"))
    ranks, values = resolved(None, nn.Linear(2, 2)), torch.ones(2)
    assert (ranks.size, ranks.replicas, ranks.exceed_wrappers, ranks.all_present) == (1, 1, False, True)
    assert ranks.sum(values) is ranks.max(values) is ranks.any(values) is values
    assert ranks.gather({"a": 1}) == [{"a": 1}]
    assert ranks.value_of_first_rank(1) == 1


def test_a_model_without_a_wrapper_is_alone(process_group):
    process_group(8)
    assert resolved(None, nn.Linear(2, 2)).size == 1


@pytest.mark.parametrize(
    ("wrapped", "given", "size", "replicas", "groups"),
    [
        ("ddp", None, 8, 8, 1),
        ("mesh", None, 8, 8, 2),
        ("inner", None, 2, 2, 1),
        ("both", None, 8, 8, 1),
        ("plain", "world", 8, 1, 1),
        ("plain", "mesh", 8, 1, 2),
        ("ddp", "world", 8, 8, 1),
        ("inner", "outer", 8, 2, 2),
        ("inner", "mesh", 8, 2, 2),
        ("inner", "world", 8, 2, 1),
    ],
)
def test_the_ranks_are_those_of_the_wrappers_and_of_the_group(process_group, wrapped, given, size, replicas, groups):
    process_group(8, rank=3)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("outer", "inner"))
    known = {"world": dist.group.WORLD, "mesh": mesh, "outer": mesh["outer"], None: None}
    make = {
        "plain": partial(nn.Linear, 2, 2),
        "ddp": lambda: DistributedDataParallel(nn.Linear(2, 2)),
        "mesh": partial(sharded, mesh),
        "inner": partial(sharded, mesh["inner"]),
        "both": lambda: nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), sharded(mesh["inner"])),
    }
    ranks = resolved(known[given], make[wrapped]())
    assert (ranks.size, ranks.replicas, len(ranks.groups)) == (size, replicas, groups)
    ranks.release()
    assert (ranks.size, ranks.groups) == (1, [])


def test_groups_that_overlap_in_part_are_refused(process_group):
    process_group(8)
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("outer", "inner"))
    group = dist.new_group([0, 1, 2])
    with pytest.raises(ValueError, match="Argument group should be a DeviceMesh of all ranks"):
        resolved(group, sharded(mesh["outer"]))


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-100, 1.0, 1e100, 1e160, 1e300])
@pytest.mark.parametrize(
    ("norm_type", "has_group", "expected"),
    [(2.0, False, 5.0), (2.0, True, 5.0 * 3**0.5), (torch.inf, True, 4.0)],
)
def test_norms_over_ranks_stay_in_range(process_group, monkeypatch, scale, norm_type, has_group, expected):
    """Three ranks, of which this one has 3 and 4 and the two others the same."""
    process_group(3)
    model = nn.Linear(2, 1, bias=False).double()
    model.weight.grad = torch.tensor([[3.0, 4.0]], dtype=torch.float64) * scale
    ranks = resolved(dist.group.WORLD, model)
    monkeypatch.setattr(ranks, "_reduce", lambda values, largest=False: values if largest else 3 * values)
    monkeypatch.setattr(ranks, "_group", ranks._group if has_group else None)
    norm, _ = ranks.norm([*model.parameters()], norm_type)
    assert float(norm) / scale == pytest.approx(expected, rel=1e-14)


def test_rows_by_name_over_two_ranks_that_have_the_same(process_group, monkeypatch):
    process_group(2)
    ranks = resolved(dist.group.WORLD)
    monkeypatch.setattr(ranks, "_reduce", lambda values, largest=False: values if largest else 2 * values)
    sums = {"kind": NamedValues(["a", "b"], torch.tensor([[1.0, 2.0], [3.0, 4.0]]))}
    maxima = {"largest": NamedValues(["a", "b"], torch.tensor([[5.0], [torch.nan]]))}
    sums, maxima = RankReduction(ranks)(sums, maxima, CPU)
    assert sums["kind"][0] == ["a", "b"]
    assert sums["kind"][1].tolist() == [[2.0, 4.0], [6.0, 8.0]]
    assert maxima["largest"][1].tolist() == [[5.0], [torch.inf]]  # the maximum of NaN depends on the order of ranks


def recording(model, optimizer):
    """A GradMonitor that a SpikeRecorder follows."""
    monitor = im.GradMonitor(model, optimizer)

    def attach(engine: Engine, event: Any) -> None:
        monitor.attach(engine, event)
        im.SpikeRecorder(monitor, tempfile.mkdtemp()).attach(engine, event)

    return SimpleNamespace(attach=attach)


METRICS = {"std": True, "max_abs": True}
_SQUARES = {"loss": lambda model, x: model(x).square().mean()}
# Number and bytes of the collectives of the last iteration, as in docs/guides/distributed.md.
MONITORS: dict[str, tuple[Callable[..., Any], tuple[int, int]]] = {
    "GradMonitor": (im.GradMonitor, (0, 0)),
    "GradMonitor of a group": (lambda m, o: im.GradMonitor(m.module, o, group=dist.group.WORLD), (1, 24)),
    "GradMonitor per parameter of a group": (
        lambda m, o: im.GradMonitor(m.module, o, group=dist.group.WORLD, per_parameter=True),
        (1, 72),
    ),
    "GradMonitor per parameter": (partial(im.GradMonitor, per_parameter=True), (0, 0)),
    "WeightUpdateHandler": (im.WeightUpdateHandler, (0, 0)),
    "OptimizerStateHandler": (im.OptimizerStateHandler, (0, 0)),
    "ActivationHandler": (
        lambda m, _: im.ActivationHandler(m, activations=METRICS, gradients={"l2_norm": True}),
        (2, 4 * 112),
    ),
    "HistogramHandler": (lambda m, _: im.HistogramHandler(m), (0, 0)),
    "SpectralNormHandler": (lambda m, _: im.SpectralNormHandler(m), (0, 0)),
    "RCCHandler": (lambda m, _: im.RCCHandler(m), (1, 2 * 80)),
    "AlignmentHandler": (lambda m, _: AlignmentHandler(m), (1, 2 * 48)),
    "StepStatsHandler": (im.StepStatsHandler, (0, 0)),
    "GradientNoiseScaleHandler": (partial(im.GradientNoiseScaleHandler, items=len), (1, 48)),
    "CurvatureHandler": (partial(im.CurvatureHandler, lanczos_steps=5, **_SQUARES), (7, 7 * 4 * 76)),
    "ReplicaCheckHandler": (im.ReplicaCheckHandler, (2, 24)),
    "ReplayCheckHandler": (lambda m, _: im.ReplayCheckHandler(m, **_SQUARES), (1, 4)),
    "RoutingHandler": (lambda m, _: im.RoutingHandler(m, routers=r"2$", top_k=1), (2, 56)),
    "RollbackHandler": (lambda m, o: im.RollbackHandler({"model": m, "optimizer": o}), (1, 24)),
    "SetupCheck": (im.SetupCheck, (0, 0)),
    "SpikeMonitor": (lambda m, o: im.SpikeMonitor(lambda engine: 1.0), (0, 0)),
    "DriftMonitor": (lambda m, o: im.DriftMonitor(lambda engine: 1.0), (0, 0)),
    "SpikeRecorder": (recording, (0, 0)),
    "HealthyCheckpoint": (lambda m, o: im.HealthyCheckpoint({"model": m, "optimizer": o}, lambda *_: None), (1, 4)),
}


def at_once(state, bucket):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def layers(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))


def check_empty(parts: list[Any], value: dict[Any, Any]) -> None:
    assert not any(value)
    parts[:] = [value] * len(parts)


def collectives(
    world: int, make: Callable[..., Any], monkeypatch, module: nn.Module | None = None, groups: Any = None
) -> list[tuple[int, int]]:
    """The number of collectives of a monitor, and of their bytes, in each iteration on the first of some ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    calls: list[int] = []
    counts: list[tuple[int, int]] = []

    def counted(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel() * tensor.element_size())
        return original(tensor, *args, **kwargs)

    try:
        torch.manual_seed(0)
        model = DistributedDataParallel(module or layers())
        model.register_comm_hook(None, at_once)  # DistributedDataParallel cannot wait for a fake reduction
        model._comm_hooks.clear()
        optimizer = torch.optim.AdamW(groups or model.parameters())

        def step(engine: Engine, batch: torch.Tensor) -> float:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            return 1.0

        def finish(_: Engine) -> None:
            counts.append((len(calls), sum(calls)))
            calls.clear()

        engine = Engine(step)
        make(model, optimizer).attach(engine, Events.ITERATION_STARTED)
        engine.add_event_handler(Events.ITERATION_COMPLETED, finish)
        with monkeypatch.context() as patch:
            patch.setenv("LOCAL_RANK", "0")
            # Ignite would make a gloo group beside the fake one.
            patch.setattr("ignite.distributed.utils._model", _SerialModel())
            patch.setattr("ignite.distributed.utils._need_to_sync", False)
            for name in ("all_reduce", "broadcast"):
                patch.setattr(dist, name, partial(counted, getattr(dist, name)))
                patch.setattr(dist.distributed_c10d, name, getattr(dist, name))
            # Of objects the first rank's names come first, and what is gathered is empty.
            patch.setattr(dist, "all_gather_object", lambda parts, value, _: check_empty(parts, value))
            for name in ("all_gather", "all_to_all", "gather"):
                patch.setattr(dist, name, lambda *_, **__: pytest.fail("a collective of as many parts as ranks"))
            engine.run([torch.randn(8, 4) for _ in range(5)])  # names are exchanged in the fourth iteration
        return counts
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("name", MONITORS)
def test_collectives_do_not_grow_with_the_ranks(name, monkeypatch):
    make, expected = MONITORS[name]
    few, many = (collectives(world, make, monkeypatch) for world in (4, 16_384))
    assert few == many
    assert many[-1] == expected


def test_collectives_of_max_p_do_not_grow_with_the_ranks(monkeypatch):
    def counts(world: int) -> list[tuple[int, int]]:
        made = parametrize(layers, (4, 8), sample_input=torch.zeros(2, 4))
        make = lambda _, optimizer: MaxPScheduler(made, optimizer, group=dist.group.WORLD)  # noqa: E731
        return collectives(world, make, monkeypatch, made.model, made.param_groups)

    few, many = counts(4), counts(16_384)
    assert few == many
    assert many[-1] == (1, 48)


def test_monitors_with_collectives_take_a_group_and_all_are_counted():
    public = {name: getattr(im, name) for name in im.__all__}
    kinds = {name: item for name, item in public.items() if inspect.isclass(item) and issubclass(item, im.Monitor)}
    del kinds["Monitor"]
    assert kinds.keys() <= MONITORS.keys()
    reducing = {name for name in kinds if MONITORS[name][1] != (0, 0)} | {"GradMonitor"}
    reducing.remove("GradientNoiseScaleHandler")  # over the ranks of the wrapper, which reduces the gradients
    assert {name for name, item in kinds.items() if "group" in inspect.signature(item).parameters} == reducing
    checked = [im.HealthyCheckpoint, AlignmentHandler, MaxPScheduler, im.attach_monitors]
    assert all("group" in inspect.signature(item).parameters for item in checked)
