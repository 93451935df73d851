"""GradMonitor and what needs several ranks: two see what one process with the whole batch sees, and agree."""

from __future__ import annotations

import functools
import itertools
import math
import signal
from collections.abc import Callable, Mapping
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
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import (
    CurvatureHandler,
    GradientNoiseScaleHandler,
    GradMonitor,
    HistogramHandler,
    MeanStdThreshold,
    MonitorEvents,
    ReplayCheckHandler,
    SpectralNormHandler,
    WeightUpdateHandler,
)
from ignite_monitor.curvature.hessian import Hessian
from tests._helpers import assert_same, grad_norm, make_batches, make_step, mse_loss
from tests._models import Net
from tests._oracle import Oracle, mean_of, mean_std
from tests._ranks import WORLD, ddp, fsdp, inner_of, launch, run_scenarios, train, unwrapped, whole

COUNT, WARMUP, SPIKE = 10, 6, 9


def batches(spike: int | None = None, count: int = COUNT):
    """Whole batches of 8; at ``spike`` the second half, which is rank 1's, has huge targets."""
    made = make_batches(count)
    if spike is not None:
        made[spike - 1][1][4:] *= 1000
    return made


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, weight_decay=0.1)


def watched(
    wrap: Callable[[Any], Any],
    rank: int | None,
    *,
    make: Callable[[], nn.Module] = Net,
    spike: int | None = None,
    count: int = COUNT,
    inner: bool = False,
    optimizer: Callable[[Any], Any] = sgd,
    step: Mapping[str, Any] = MappingProxyType({}),
    **kwargs: Any,
) -> dict[str, Any]:
    """Train with a GradMonitor, of the wrapped model or the ``inner`` one; return what it publishes, and parameters."""
    norms: list[float | None] = []
    fired: list[int] = []

    def note(engine: Engine) -> None:
        norms.append(None if engine.state.grad_norm is None else float(engine.state.grad_norm))

    def monitors(model: nn.Module, optimizer: Any) -> list[Any]:
        options = {"threshold": MeanStdThreshold(warmup=WARMUP)} | kwargs
        monitor = GradMonitor(inner_of(model) if inner else model, optimizer, **options)
        ready = lambda engine: fired.append(engine.state.iteration)  # noqa: E731
        return [monitor, lambda engine: engine.add_event_handler(MonitorEvents.GRADIENTS_READY, ready)]

    make_train_step = functools.partial(make_step, after_backward=note, **step)
    run = train(make, wrap, rank, batches(spike, count), monitors, optimizer=optimizer, step=make_train_step)
    return {
        "seen": run.rows,
        "fired": fired,
        "norms": norms,
        "parameters": [*map(whole, run.model.parameters())],
        "buffers": [*run.model.buffers()],
        "all_reduces": run.all_reduces,
    }


# A spike's step is skipped by the train step; and four iterations to a step, the first one of the fifth is a spike.
SKIPPED_BY_HAND: dict[str, Any] = {
    "spike": SPIKE,
    "step": {"leave_out": lambda engine: engine.state.unhealthy_spike, "set_to_none": False},
}
ACCUMULATING: dict[str, Any] = {
    "spike": 17,
    "count": 26,
    "step": {"every": 4},
    "threshold": MeanStdThreshold(k=10.0, warmup=3),
}


def scaled(wrap, rank: int | None) -> dict[str, Any]:
    """With a GradScaler, and an overflow on one rank."""
    scaler = GradScaler("cpu", init_scale=2.0**10)
    factor = lambda engine: math.inf if engine.state.iteration == 4 and rank != 0 else 1.0  # noqa: E731
    return watched(wrap, rank, step={"scaler": scaler, "factor": factor, "clip": 0.5}, scaler=scaler)


# Every rank has running statistics of its own; before a forward pass DDP overwrites them by those of rank 0.
NORMALIZED = functools.partial(Net, norm=nn.BatchNorm1d)


def skipping(
    wrap, rank: int, optimizer: Callable[[Any], Any] = sgd, make: Callable[[], nn.Module] = Net
) -> dict[str, Any]:
    skipped = watched(wrap, rank, make=make, spike=SPIKE, on_spike="skip", optimizer=optimizer)
    others = [batch for place, batch in enumerate(batches(SPIKE), 1) if place != SPIKE]
    model = train(make, wrap, rank, others, optimizer=optimizer).model
    return {**skipped, "without the batch": ([*map(whole, model.parameters())], [*model.buffers()])}


class OneTensor(nn.Module):
    """Multiply the gradient of the first layer's bias by 100 in one forward pass, without a change of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.passes = Net(), 0

    def forward(self, x):
        self.passes += 1
        bias = self.net.first.bias
        factor = 99.0 if self.passes == SPIKE else 0.0
        return self.net(x) + factor * (self.net(x + 0 * x) - self._without(x, bias.detach()))

    def _without(self, x, bias):
        first = F.linear(x, self.net.first.weight, bias)
        return self.net.second(torch.tanh(first)) * self.net.scale


def single_tensors(wrap, rank: int | None, **kwargs: Any) -> dict[str, Any]:
    """Train with and without thresholds for single tensors, and count collectives."""
    without, result = (watched(wrap, rank, make=OneTensor, per_parameter=item, **kwargs) for item in (False, True))
    return {**result, "without": without["all_reduces"]}


def auto_model(rank: int) -> dict[str, Any]:
    assert isinstance(idist.auto_model(Net()), DistributedDataParallel)
    return watched(idist.auto_model, rank, optimizer=lambda model: idist.auto_optim(sgd(model)), spike=SPIKE)


def local_steps(rank: int) -> dict[str, Any]:
    """Make each rank's steps with its own gradients."""

    def wrap(model: nn.Module) -> DistributedDataParallel:
        model = ddp(model)
        model.require_backward_grad_sync = False  # as under no_sync()
        return model

    return watched(wrap, rank)


def refused(rank: int) -> dict[str, Any]:
    """Handlers that do not support a wrapper."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for make in (GradMonitor, WeightUpdateHandler, SpectralNormHandler, HistogramHandler):
        with pytest.raises(ValueError, match=r"Argument model should.*FullyShardedDataParallel"):
            make(FullyShardedDataParallel(Net(), device_id=torch.device("cpu")))
    for kind, kwargs in (
        (CurvatureHandler, {"loss": lambda model, batch: None}),
        (GradientNoiseScaleHandler, {"micro_batches": 2}),
    ):
        model = fsdp(Net())
        with pytest.raises(ValueError, match="Argument model should not be sharded"):
            kind(model, torch.optim.SGD(model.parameters(), 0.1), **kwargs)
    with pytest.raises(ValueError, match="Argument model should not be sharded"):
        ReplayCheckHandler(fsdp(Net()), loss=lambda model, batch: None)
    return {}


def dropped(rank: int) -> dict[str, Any]:
    """Nothing is detached, nothing is torn down: as a script ends that just stops."""
    global kept
    kept = train(Net, ddp, rank, batches(), lambda model, optimizer: [GradMonitor(model, optimizer, on_spike="skip")])
    return {}


def after_the_process_group(rank: int) -> dict[str, Any]:
    """A training of its own on each rank, once the group is gone."""
    watched(ddp, rank)
    dist.destroy_process_group()
    return watched(unwrapped, rank)


def noise_scale(rank: int | None, micro: int) -> dict[str, Any]:
    """Micro-batches of a rank; in one process those of both ranks."""
    micro *= 1 if rank is not None else WORLD
    data = batches()
    if rank is None:  # split() gives each micro-batch of a rank's
        data = [tuple(item.unflatten(0, (WORLD, -1)).transpose(0, 1).flatten(0, 1) for item in both) for both in data]

    def make_train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        loss_of = lambda model, batch: mse_loss(model, batch) / micro  # noqa: E731
        return make_step(model, optimizer, micro, reduce_last=True, loss_of=loss_of)

    def monitors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
        return [GradientNoiseScaleHandler(model, optimizer, micro_batches=micro)]

    run = train(Net, ddp, rank, data, monitors, step=make_train_step)
    return {"moments": run.monitors[0].state_dict()["moments"]}


def curvature(rank: int | None, failing: str = "", unused: bool = False, in_group: bool = False) -> dict[str, Any]:
    """Rank 1 may fail in its loss, in a product, or not reach the model. In a group the train step reduces by hand."""
    failing, group = failing if rank == 1 else "", dist.group.WORLD if in_group else None

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        if failing == "unreached":
            return torch.zeros((), requires_grad=True)
        return mse_loss(model, (None if failing == "loss" else batch[0], batch[1]))

    def reduce(model: nn.Module) -> None:
        for parameter in model.parameters() if in_group else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= WORLD

    times, products = Hessian.times, itertools.count()

    def fails_in_time(hessian: Hessian, vector: torch.Tensor) -> torch.Tensor:
        if next(products) == 4:
            raise torch.OutOfMemoryError("no memory")
        return times(hessian, vector)

    with mock.patch.object(Hessian, "times", fails_in_time if failing == "product" else times):
        run = train(
            functools.partial(Net, unused=unused),
            unwrapped if in_group else functools.partial(ddp, find_unused_parameters=unused),
            rank,
            batches()[:2],
            lambda model, optimizer: [CurvatureHandler(model, optimizer, loss=loss, group=group)],
            step=lambda model, optimizer: make_step(model, optimizer, before_step=lambda _: reduce(model)),
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3),
            event=Events.ITERATION_STARTED(every=2),
        )
    return {"seen": run.rows, "weights": [item.detach() for item in run.model.parameters()]}


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


fsdp_net = functools.partial(fsdp, inner=["first"])
BUCKETS = {"gradient_as_bucket_view": True}
SPIKING, MICRO = {"spike": SPIKE}, {"step": {"parts": 2}}
QUIET = {"step": {"parts": 2, "reduce_last": True}}
# name -> arguments of DistributedDataParallel, or None for fully_shard; and those of the training
TRAININGS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "ddp": ({}, SPIKING),
    "ddp static_graph": ({"static_graph": True}, SPIKING),
    "ddp find_unused_parameters": (
        {"find_unused_parameters": True},
        {"make": functools.partial(Net, unused=True), **SPIKING},
    ),
    "ddp gradient_as_bucket_view": (BUCKETS, SPIKING),
    "ddp many buckets": ({"bucket_cap_mb": 1e-5}, SPIKING),
    "fsdp": (None, SPIKING),
    "ddp no_sync": ({}, QUIET),
    "ddp no_sync over iterations": ({}, {"step": {"every": 2, "reduce_last": True}}),
    "ddp accumulation without no_sync": ({}, MICRO),
    "fsdp without gradient sync": (None, QUIET),
    "fsdp accumulation": (None, MICRO),
    "own skip ddp": ({}, SKIPPED_BY_HAND),
    "own skip fsdp": (None, SKIPPED_BY_HAND),
    "own skip ddp bucket view": (BUCKETS, SKIPPED_BY_HAND),
    "accumulating ddp": ({}, ACCUMULATING),
    "accumulating ddp bucket view": (BUCKETS, ACCUMULATING),
    "accumulating fsdp": (None, ACCUMULATING),
    "clip ddp": ({}, {**SPIKING, "on_spike": "clip"}),
    "clip fsdp": (None, {**SPIKING, "on_spike": "clip"}),
}
SCENARIOS: dict[str, Any] = {
    **{
        name: functools.partial(watched, fsdp_net if wrap is None else functools.partial(ddp, **wrap), **how)
        for name, (wrap, how) in TRAININGS.items()
    },
    "auto_model": auto_model,
    "ddp, monitor of the inner model": functools.partial(watched, ddp, inner=True, spike=SPIKE),
    "skip ddp": functools.partial(skipping, ddp),
    "skip ddp fused": functools.partial(skipping, ddp, optimizer=fused),
    "skip fsdp": functools.partial(skipping, fsdp_net),
    "skip fsdp fused": functools.partial(skipping, fsdp_net, optimizer=fused),
    "skip ddp statistics": functools.partial(skipping, ddp, make=NORMALIZED),
    "skip ddp statistics fused": functools.partial(skipping, ddp, optimizer=fused, make=NORMALIZED),
    "skip fsdp statistics": functools.partial(skipping, fsdp, make=NORMALIZED),
    "skip fsdp statistics fused": functools.partial(skipping, fsdp, optimizer=fused, make=NORMALIZED),
    "scaler ddp": functools.partial(scaled, ddp),
    "scaler fsdp": functools.partial(scaled, fsdp_net),
    "tensors ddp": functools.partial(single_tensors, ddp),
    "tensors fsdp": functools.partial(single_tensors, fsdp),
    "tensors clip fsdp": functools.partial(single_tensors, fsdp, on_spike="clip"),
    "tensors skip ddp": functools.partial(single_tensors, ddp, on_spike="skip"),
    "noise scale of two": functools.partial(noise_scale, micro=1),
    "noise scale of four": functools.partial(noise_scale, micro=2),
    "curvature": curvature,
    "curvature, unused parameters": functools.partial(curvature, unused=True),
    "curvature, in a group": functools.partial(curvature, in_group=True),
    "curvature, loss fails": functools.partial(curvature, failing="loss"),
    "curvature, product fails": functools.partial(curvature, failing="product"),
    "curvature, unreached loss": functools.partial(curvature, failing="unreached"),
    "ddp local steps": local_steps,
    "refused": refused,
    "dropped": dropped,
    "after the process group": after_the_process_group,  # the last one
}


DECAY = 0.99  # of the default rule

RUN = NAMES = [name for name in SCENARIOS if name != "dropped"]  # which has processes of its own
WHOLE = [name for name, (_, how) in TRAININGS.items() if how is SPIKING or "make" in how]
WHOLE += ["auto_model", "ddp, monitor of the inner model"]


@pytest.fixture(scope="module")
def one_process():
    """One process with the whole batch."""
    return watched(ddp, None, spike=SPIKE)


def independent_norms(spike: int | None = None, parts: int = 1, every: int = 1) -> list[float]:
    """The gradient norms of a run without monitors after each backward: of micro-batches, iterations to a step."""
    norms: list[float] = []

    def make_train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        note = lambda engine: norms.append(grad_norm(model))  # noqa: E731
        return make_step(model, optimizer, parts, every=every, after_backward=note)

    train(Net, ddp, None, batches(spike), optimizer=sgd, step=make_train_step)
    return norms


def approx(value):
    return pytest.approx(value, rel=2e-5, abs=1e-7)


@pytest.mark.parametrize("name", WHOLE)
def test_every_rank_publishes_what_one_process_would(results, one_process, name):
    norms = independent_norms(SPIKE)
    for result in results(name):
        oracle = Oracle(mean_std(6.0, WARMUP, DECAY))
        assert result["fired"] == list(range(1, COUNT + 1))
        assert result["norms"] == approx(norms)
        assert [seen["grad/norm"] for seen in result["seen"]] == approx(norms)
        for place, (seen, expected) in enumerate(zip(result["seen"], one_process["seen"], strict=True)):
            assert seen.keys() == expected.keys()
            assert seen == {
                key: pytest.approx(value, rel=1e-3 if "std" in key else 2e-5) for key, value in expected.items()
            }
            statistics = oracle.expect(norms[place])
            if 2 <= place < SPIKE:
                assert seen["grad/mean"] == approx(statistics["mean"])
                assert seen["grad/std"] == pytest.approx(statistics["std"], rel=1e-3)
            if WARMUP <= place < SPIKE:
                assert seen["grad/threshold"] == approx(statistics["threshold"])


@pytest.mark.parametrize("name", WHOLE)
def test_spike_in_one_ranks_batch_is_the_same_flag_on_both(results, name):
    first, second = results(name)
    assert [seen["flag"] for seen in first["seen"]] == [place == SPIKE for place in range(1, COUNT + 1)]
    assert first["seen"] == second["seen"]  # to the last bit: a threshold must not fall between two ranks


def test_no_sync_fires_once_with_the_accumulated_gradient(results):
    norms = independent_norms()
    for result in results("ddp no_sync"):
        assert result["fired"] == list(range(1, COUNT + 1))
        assert result["norms"][::2] == [None] * COUNT
        # Two micro-batches, each a mean over half: their sum is twice the gradient of the whole.
        assert result["seen"][0]["grad/norm"] == approx(2 * norms[0])
        assert result["seen"][-1]["grad/spike_count"] <= 1


@pytest.mark.parametrize(
    ("name", "synchronised"),
    [
        ("ddp no_sync", False),
        ("fsdp without gradient sync", False),
        ("ddp accumulation without no_sync", True),
        ("fsdp accumulation", True),
    ],
)
def test_accumulation_within_an_iteration(results, name, synchronised):
    norms = independent_norms(parts=2)
    halves = norms[::2], norms[1::2]
    for result in results(name):
        assert [seen["grad/norm"] for seen in result["seen"]] == approx(halves[1])
        assert result["norms"][1::2] == approx(halves[1])
        assert result["norms"][::2] == (approx(halves[0]) if synchronised else [None] * COUNT)
        assert len(result["fired"]) == COUNT * (2 if synchronised else 1)
        # One observation per optimizer step.
        assert result["seen"][-1]["grad/mean"] == approx(mean_of(halves[1][:-1], DECAY))


def test_iterations_under_no_sync_publish_nothing(results):
    norms = independent_norms(every=2)[1::2]
    for result in results("ddp no_sync over iterations"):
        assert result["seen"][::2] == [{"flag": 0.0}] * (COUNT // 2)
        assert [seen["grad/norm"] for seen in result["seen"][1::2]] == approx(norms)
        assert result["seen"][-1]["grad/mean"] == approx(mean_of(norms[:-1], DECAY))
    assert [result["seen"] for result in results("ddp local steps")] == [[{"flag": 0.0}] * COUNT] * WORLD


@pytest.mark.parametrize("name", ["clip ddp", "clip fsdp"])
def test_a_clipped_step_is_that_of_one_process_with_its_gradient_scaled_to_the_threshold(results, name):
    first, second = results(name)
    assert first["seen"] == second["seen"]
    assert first["seen"][-1]["grad/clipped_count"] == 1.0
    threshold = first["seen"][SPIKE - 1]["grad/threshold"]

    def make_train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        def scale(engine: Engine) -> None:
            if engine.state.iteration == SPIKE:
                norm = grad_norm(model)
                assert norm > 2 * threshold
                for parameter in model.parameters():
                    parameter.grad *= threshold / norm

        return make_step(model, optimizer, before_step=scale)

    model = train(Net, ddp, None, batches(SPIKE), optimizer=sgd, step=make_train_step).model
    for result in (first, second):
        for actual, references in zip(result["parameters"], model.parameters(), strict=True):
            torch.testing.assert_close(actual, references.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["scaler ddp", "scaler fsdp"])
def test_an_overflow_on_one_rank_is_left_to_the_scaler_on_all(results, name):
    alone = scaled(ddp, None)
    assert (alone["seen"][-1]["grad/nonfinite_count"], alone["seen"][-1]["grad/spike_count"]) == (1, 0)
    for result in results(name):
        for seen, expected in zip(result["seen"], alone["seen"], strict=True):
            assert seen == pytest.approx(expected, rel=1e-3, nan_ok=True)
        for actual, references in zip(result["parameters"], alone["parameters"], strict=True):
            torch.testing.assert_close(actual, references, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("skip")])
def test_a_skipped_step_leaves_parameters_and_running_statistics_as_without_the_batch(results, name):
    first, second = results(name)
    assert first["seen"][SPIKE - 1]["flag"]
    assert first["seen"][-1]["grad/skipped_count"] == 1.0
    for result in (first, second):
        assert_same((result["parameters"], result["buffers"]), result["without the batch"])
        assert_same(result["parameters"], first["parameters"])


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("own skip")])
def test_a_spike_that_the_train_step_skips_counts_once_though_gradients_are_zeroed_in_place(results, name):
    alone = watched(ddp, None, **SKIPPED_BY_HAND)["seen"]
    assert alone[-1]["grad/spike_count"] == 1
    for result in results(name):
        for seen, expected in zip(result["seen"], alone, strict=True):
            assert seen == {key: pytest.approx(value, rel=1e-3) for key, value in expected.items()}


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("accumulating")])
def test_a_spike_counts_once_while_iterations_accumulate(results, name):
    alone = watched(ddp, None, **ACCUMULATING)["seen"]
    # One value per step, and of the parts that are flagged.
    published = [0 if i % 4 == 0 else None for i in range(1, 17)] + [1, 1, 1, 1, None, None, None, 1, None, None]
    assert [seen.get("grad/spike_count") for seen in alone] == published
    for result in results(name):
        for seen, expected in zip(result["seen"], alone, strict=True):
            assert seen == {key: pytest.approx(value, rel=1e-3) for key, value in expected.items()}


@pytest.mark.parametrize(("name", "micro"), [("noise scale of two", 1), ("noise scale of four", 2)])
def test_noise_scale_of_ranks_is_that_of_micro_batches(results, name, micro):
    expected = noise_scale(None, micro)
    assert (expected["moments"] != 0).all()
    for result in results(name):
        # Parts of two ranks have the scale of their own loss, those of one process half of it.
        factor = torch.tensor([1, 4, 4, 16, 16, 16, 1])
        assert result["moments"].tolist() == approx((expected["moments"] * factor).tolist())


@pytest.mark.parametrize("name", ["curvature", "curvature, unused parameters", "curvature, in a group"])
def test_curvature_is_that_of_the_ranks_batches_together(results, name):
    alone = curvature(None, unused="unused" in name)["seen"]
    assert [len(seen) for seen in alone] == [0, 3]
    for result in results(name):
        for seen, expected in zip(result["seen"], alone, strict=True):
            residuals = {key for key in expected if key.endswith("_residual")}
            assert seen.keys() == expected.keys()
            keys = seen.keys() - residuals
            assert [seen[key] for key in keys] == approx([expected[key] for key in keys])


@pytest.mark.parametrize("name", ["loss fails", "product fails", "unreached loss"])
def test_a_rank_whose_curvature_fails_stops_no_rank(results, name):
    alone = curvature(None)
    for result in results(f"curvature, {name}"):
        for seen, expected in zip(result["seen"], alone["seen"], strict=True):
            # What was known before is right all the same.
            assert seen.keys() <= {"curvature/along_gradient"}
            assert seen == approx({key: expected[key] for key in seen})
        for actual, references in zip(result["weights"], alone["weights"], strict=True):
            torch.testing.assert_close(actual, references)


def test_what_cannot_work_with_a_wrapper_is_refused_by_name(results):
    assert results("refused") == [{}, {}]


def test_a_training_after_the_process_group_has_ended(results):
    assert [len(result["seen"]) for result in results("after the process group")] == [COUNT] * WORLD


def test_processes_end_cleanly(tmp_path):
    """A reducer that outlives its process group aborts the process at its exit, one time in four."""
    ends = launch("test_ranks", tmp_path, ["dropped"])
    if any(code == -signal.SIGABRT for code, _ in ends):  # without monitors too, one time in a hundred
        ends = launch("test_ranks", tmp_path / "again", ["dropped"])
    assert [code for code, _ in ends] == [0, 0], ends
    assert not any("Traceback" in error for _, error in ends), ends


@pytest.mark.parametrize("name", ["tensors ddp", "tensors fsdp", "tensors clip fsdp", "tensors skip ddp"])
def test_tensors_are_compared_the_same_on_all_ranks(results, name):
    reaction = {"on_spike": "clip"} if "clip" in name else {"on_spike": "skip"} if "skip" in name else {}
    alone = watched(ddp, None, make=OneTensor, per_parameter=True, **reaction)
    ranks = results(name)
    assert ranks[0]["seen"] == ranks[1]["seen"]
    for result in ranks:
        assert result["all_reduces"] == result["without"]
        assert [seen["flag"] for seen in result["seen"]] == [place == SPIKE for place in range(1, COUNT + 1)]
        culprits = {k: v for k, v in result["seen"][SPIKE - 1].items() if "culprit" in k}
        assert culprits == {"grad/culprit/net.first.bias": pytest.approx(1.0, abs=0.05)}
        for seen, expected in zip(result["seen"], alone["seen"], strict=True):
            assert seen == pytest.approx(expected, rel=1e-3)
        for one, other in zip(result["parameters"], alone["parameters"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    idist.get_world_size()  # asked before there is a group, as loggers do
    run_scenarios(SCENARIOS, left_standing=["dropped"])
