"""Monitors on two ranks publish what one process with the whole batches does, and agree to the last bit."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    HealthyCheckpoint,
    HistogramHandler,
    Key,
    Metric,
    Monitor,
    MonitorEvents,
    OptimizerStateHandler,
    RCCHandler,
    RoutingHandler,
    Schema,
    SetupCheck,
    SpectralNormHandler,
    StaticThreshold,
    StepStatsHandler,
    WeightUpdateHandler,
    record,
)
from ignite_monitor.scaling import AlignmentHandler, MaxPScheduler, parametrize
from tests._handlers import ClippingMonitor
from tests._helpers import assert_same, make_batches, make_step
from tests._models import Lambda, Net, make_mlp
from tests._ranks import WORLD, ddp, fsdp, run_scenarios, train, whole
from tests._truth import norm

COUNT = 6

# Models


class Experts(nn.Module):
    """The second expert and the second router are for rows with a large number, as only the last rank's have."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.relu = nn.Linear(6, 6), nn.ReLU()
        self.experts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x):
        record("rows", len(x))
        y = self.relu(self.layer(x))
        out = self.experts[0](y)
        large = x.amax(1) > 50
        return out.index_add(0, large.nonzero().flatten(), self.experts[1](y[large])) if large.any() else out


def branching() -> nn.Module:
    """The inner layer is for samples that start with what isn't negative."""
    layers = {"outer": nn.Linear(4, 3), "inner": nn.Linear(4, 4), "never": nn.Linear(4, 4)}
    return Lambda(lambda self, x: self.outer(x) if x[0, 0] < 0 else self.outer(self.inner(x)), **layers)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def dense() -> nn.Module:
    return make_mlp(sizes=(6, 6, 3), activation=nn.ReLU)


def words_net() -> nn.Module:
    return Net((6, 25, 3), words=11)


def attending() -> nn.Module:
    return Net((6, 25, 3), norm=nn.LayerNorm, words=11, attention=True)


def matrices() -> nn.Module:
    """Rows that two ranks can't share evenly, a convolution, and one row alone."""
    parts = [nn.Linear(6, 301), nn.Tanh(), nn.Linear(301, 25), nn.Unflatten(1, (5, 5)), nn.Conv1d(5, 7, 3)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(21, 1), nn.Linear(1, 3))


def moved() -> nn.Module:
    model = attending()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model


# Trainings


class Case(NamedTuple):
    """A training that ranks share, or one process makes by itself.

    Attributes:
        make: makes the model.
        monitors: makes them of model and optimizer.
        wrap: shares the model among the ranks.
        batches: those of both ranks.
        optimizer: makes it of the model.
        rows: of 8 rows the first rank has so many.
        parts: micro-batches to an iteration.
        step: options of the train step, of the model.
        rel: tolerance.
        ignored: names that are not the same in one process.
    """

    make: Callable[[], nn.Module]
    monitors: Callable[[Any, Any], list[Any]]
    wrap: Callable[[nn.Module], Any] = ddp
    batches: Callable[[int], list[Any]] = make_batches
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: sgd(model, 0.1)
    rows: int = 4
    parts: int = 1
    step: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    rel: float = 1e-3
    ignored: str = "^$"


def sgd(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def both_or_one(case: Case, rank: int | None) -> dict[str, Any]:
    run = train(
        case.make,
        case.wrap,
        rank,
        case.batches(COUNT),
        case.monitors,
        optimizer=case.optimizer,
        step=lambda model, optimizer: make_step(model, optimizer, case.parts, **case.step(model)),
        rows=case.rows,
    )
    tables = [dict(monitor.diagnostics) for monitor in run.monitors if hasattr(monitor, "diagnostics")]
    diagnostics = {name: list(map(float, item)) for table in tables for name, item in table.items()}
    rows = [{k: x for k, x in row.items() if not k.startswith("step/") or "norm" in k} for row in run.rows]
    return {"published": rows, "diagnostics": diagnostics, "all_reduces": run.all_reduces}


def disturbed(model: nn.Module) -> dict[str, Any]:
    """Set the last bias's gradient to 0 in three iterations, so that it freezes; validate before a step.

    FSDP leaves the root's whole parameters behind.
    """

    def zero(engine: Engine) -> None:
        if engine.state.iteration in (3, 4, 5):
            model.get_parameter(last_bias(model)).grad.zero_()

    def validate(engine: Engine) -> None:
        if engine.state.iteration == 2:
            model.eval()
            with torch.no_grad():
                model(engine.state.batch[0])
            model.train()

    return {"after_backward": zero, "before_step": validate}


def is_fifth(engine: Engine) -> bool:
    return engine.state.iteration == 5


def last_bias(model: nn.Module) -> str:
    return next(name for name, _ in model.named_parameters() if name.endswith("second.bias"))


def words(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches of two words each, and targets."""
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randint(0, 11, (8, 2), generator=generator) for _ in range(count)]
    return [(x, y) for x, (_, y) in zip(inputs, make_batches(count), strict=True)]


def with_large_rows(count: int) -> list[Any]:
    batches = make_batches(count)
    for x, _ in batches[3:]:
        x[7] = 100.0
    return batches


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    still = model.get_parameter(last_bias(model))
    others = [parameter for parameter in model.parameters() if parameter is not still]
    groups = [{"params": others}, {"params": [still], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.0, 0.9), weight_decay=0.1)


METRICS = {
    **dict.fromkeys(("mean", "std", "dead_fraction", "max_abs", "max_over_rms", "nonfinite_count"), True),
    "abs": torch.abs,
    "total": Metric(torch.sum, aggregate="sum"),
    "smallest": Metric(torch.min, aggregate="min"),
    "count": Metric(len, aggregate="sum"),
    "half/count": Metric(lambda x: len(x) / 2, aggregate="sum"),
}


def activation(model: nn.Module, optimizer: Any) -> list[Any]:
    norms = {"norm": torch.linalg.vector_norm, "max_abs": True}
    return [ActivationHandler(model, activations=METRICS, parameters=norms, gradients=norms)]


def updates(sample_size: int | None = 20, skip: bool = False) -> Callable[[Any, Any], list[Any]]:
    def monitors(model: nn.Module, optimizer: Any) -> list[Any]:
        # After one step all of the first moments are 1 but for rounding, which would choose the largest.
        made: list[Any] = [
            WeightUpdateHandler(model, optimizer, sample_size=sample_size),
            OptimizerStateHandler(model, optimizer, sample_size=sample_size, top_k=9),
        ]
        skipping = GradMonitor(model, optimizer, threshold=StaticThreshold(1e-9), on_spike="skip")
        return [*made, skipping] if skip else made

    return monitors


def rcc(reference: Callable[[], Any] = lambda: "init") -> Callable[[Any, Any], list[Any]]:
    return lambda model, optimizer: [RCCHandler(model, reference=reference())]


def routing(routers: str) -> Callable[[Any, Any], list[Any]]:
    return lambda model, optimizer: [RoutingHandler(model, routers=routers, top_k=2)]


def spectral(model: nn.Module, optimizer: Any) -> list[Any]:
    norms = SpectralNormHandler(model, updates=True, per_parameter=True)
    return [norms, StepStatsHandler(model, optimizer)]


def sharded(*inner: str, shape: tuple[int, ...] = (WORLD,)) -> Callable[[nn.Module], nn.Module]:
    return functools.partial(fsdp, inner=inner, shape=shape)


conditional = functools.partial(ddp, find_unused_parameters=True)


_UPDATES = {"batches": words, "optimizer": adamw, "step": disturbed}
_RCC = {"batches": words, "optimizer": lambda model: sgd(model, 0.5)}
_STILL = {"optimizer": lambda model: sgd(model, 0.0)}
_LARGE = {"batches": with_large_rows, "wrap": conditional, "rows": 3, **_STILL}
_SPECTRAL = {"rel": 2e-3, "ignored": "error"}
_SHARDED = {"rel": 2e-3, "ignored": "error|gradient_norm"}
CASES = {
    # Of rows that are not shared evenly gradients are others, and of the whole output there is less on the first rank.
    "activation ddp": Case(Experts, activation, ignored=r"^grad|experts\.1|_root_", **_LARGE),
    "activation fsdp": Case(dense, activation, sharded()),
    "routing ddp": Case(Experts, routing(r"experts\.\d"), parts=2, ignored=r"experts\.1", **_LARGE),
    "routing fsdp": Case(Experts, routing(r"experts\.0"), sharded(), parts=2),
    "rcc ddp": Case(attending, rcc(), **_RCC),
    "rcc static": Case(attending, rcc(), functools.partial(ddp, static_graph=True), **_RCC),
    "rcc uneven": Case(moved, rcc(lambda: seeded(attending)), rows=3, **_RCC | _STILL),
    "rcc fsdp": Case(attending, rcc(lambda: seeded(attending)), sharded("first"), **_RCC),
    "spectral ddp": Case(matrices, spectral, **_SPECTRAL),
    "spectral fsdp": Case(matrices, spectral, sharded("0", "2"), **_SHARDED),
    "spectral hybrid": Case(matrices, spectral, sharded("0", shape=(1, WORLD)), **_SHARDED),
    "update ddp": Case(words_net, updates(), **_UPDATES),
    "update ddp exact": Case(words_net, updates(None), **_UPDATES),
    "update fsdp": Case(words_net, updates(), sharded("first"), **_UPDATES),
    "update fsdp exact": Case(words_net, updates(None), sharded("first"), **_UPDATES),
    "update hybrid": Case(words_net, updates(), sharded("first", shape=(1, WORLD)), **_UPDATES),
    "update replicated": Case(words_net, updates(), sharded("first", shape=(WORLD, 1)), **_UPDATES),
    # The second expert, which one rank reaches, in an iteration without a step too.
    "update reached": Case(
        Experts, updates(None), conditional, with_large_rows, step=lambda model: {"leave_out": is_fifth}
    ),
    "update skipped": Case(words_net, updates(skip=True), sharded("first"), **_UPDATES),
}


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_publish_what_one_process_does(results, name):
    case = CASES[name]
    first, second = results(name)
    assert_same(first, second)
    alone = both_or_one(case, None)
    assert len(alone["published"][-1]) > 3
    for actual, expected in zip(first["published"], alone["published"], strict=True):
        rows = [{key: x for key, x in row.items() if not re.search(case.ignored, key)} for row in (actual, expected)]
        assert rows[0] == pytest.approx(rows[1], rel=case.rel, abs=1e-5)
    assert first["diagnostics"].keys() == alone["diagnostics"].keys()
    for parameter, values in alone["diagnostics"].items():
        assert first["diagnostics"][parameter] == pytest.approx(values, rel=case.rel, nan_ok=True), parameter


def test_a_module_that_one_rank_calls_is_published_when_names_have_been_exchanged(results):
    """In the fourth iteration, the first one of large rows."""
    rows = results("activation ddp")[0]["published"]
    assert ["activation/experts.1/mean" in row for row in rows] == [False] * 3 + [True] * 3
    assert rows[4]["activation/experts.1/count"] == 1
    assert rows[4]["activation/experts.1/half/count"] == 0.5
    assert rows[0]["recorded/_root_/rows"] == 4.0
    rows = results("routing ddp")[0]["published"]
    assert ["routing/load_entropy/experts.1" in row for row in rows] == [False] * 3 + [True] * 3


def test_one_of_the_parameters_freezes_and_a_skipped_step_is_none(results):
    rows = results("update fsdp")[0]["published"]
    assert [row["monitor/frozen_count"] for row in rows] == [0, 0, 0, 0, 1, 0]
    rows = results("update skipped")[0]["published"]
    assert any("monitor/grad_max" in row for row in rows)
    assert not any("monitor/frozen_count" in row for row in rows)


@pytest.mark.parametrize(("name", "collectives"), [("ddp", 0), ("fsdp", 2 * COUNT), ("fsdp exact", 2 * COUNT)])
def test_each_handler_makes_one_collective_for_all_sharded_parameters(results, name, collectives):
    assert results(f"update {name}")[0]["all_reduces"] == collectives


def local_steps(rank: int) -> dict[str, Any]:
    """Make each rank's steps with its own gradients, as under ``no_sync()``."""

    def make_train_step(model: nn.Module, optimizer: Any) -> Any:
        model.require_backward_grad_sync = False
        return make_step(model, optimizer)

    return {"published": train(words_net, ddp, rank, words(COUNT), updates(), step=make_train_step).rows}


def test_gradients_that_differ_between_ranks_are_not_published(results):
    for result in results("local steps"):
        assert [row for row in result["published"] if any("grad" in key for key in row)] == []
        assert "monitor/frozen_count" in result["published"][0]


# Gradients and histograms


def clipped(wrap: Callable[[nn.Module], Any], rank: int) -> dict[str, Any]:
    """Two micro-batches, the first one without reduction, and a step with what clipping leaves."""
    truth: dict[str, float] = {}

    def make_train_step(model: nn.Module, optimizer: Any) -> Any:
        def note(*_: Any) -> None:
            for name, item in model.named_parameters():
                truth[f"gradient/{name.removeprefix('module.')}/norm"] = norm(item.grad)

        optimizer.register_step_pre_hook(note)
        return make_step(model, optimizer, 2, reduce_last=True, clip=1e-3)

    def monitors(model: nn.Module, optimizer: Any) -> list[Any]:
        return [ActivationHandler(model, gradients={"norm": torch.norm})]

    return {
        "published": train(dense, wrap, rank, make_batches(1), monitors, step=make_train_step).rows[0],
        "truth": truth,
    }


def histograms(wrap: Callable[[nn.Module], Any], rank: int) -> dict[str, Any]:
    """Return the histograms of the last iteration: this rank's outputs, and whole weights and gradients."""
    tensors: dict[str, torch.Tensor] = {}

    def monitors(model: nn.Module, optimizer: Any) -> list[Any]:
        handler = HistogramHandler(model)
        model.register_forward_hook(lambda *args: tensors.update({"activations/_root_": args[2].detach().clone()}))
        return [handler]

    run = train(dense, wrap, rank, make_batches(2), monitors, rows=3)
    for name, item in run.model.named_parameters():
        name = name.removeprefix("module.")
        tensors |= {f"weights/{name}": whole(item), f"gradients/{name}": whole(item.grad)}
    return {"tensors": tensors, "drawn": run.monitors[0].histograms}


WRAPS = {"ddp": ddp, "fsdp": sharded()}


@pytest.mark.parametrize("wrap", WRAPS)
def test_gradients_of_micro_batches_after_clipping(results, wrap):
    for result in results(f"clipped {wrap}"):
        assert result["published"] == pytest.approx(result["truth"], rel=1e-5)


@pytest.mark.parametrize("wrap", WRAPS)
def test_histograms_are_of_own_batches_and_of_whole_parameters(results, wrap):
    for rank in results(f"histograms {wrap}"):
        for key, own in rank["tensors"].items():
            values, measured = own.double().numpy().ravel(), rank["drawn"][f"histograms/{key}"]
            assert measured["num"] == len(values)
            assert (measured["min"], measured["max"]) == (values.min(), values.max())
            counts, _ = np.histogram(values, measured["bucket_limits"])
            assert measured["bucket_counts"][1:] == counts.tolist()


# The coordinate check


def branch(rank: int | None) -> dict[str, Any]:
    """Iterations in which the first sample, which is the first rank's, and the second go different ways, or neither."""
    torch.manual_seed(2)
    reference, x = branching(), torch.randn(2, 1, 4)
    x[:, 0, 0] = torch.tensor([-1.0, 1.0])

    def make_train_step(model: nn.Module, optimizer: Any) -> Any:
        return lambda engine, batch: [model(item) for item in batch]

    def monitors(model: nn.Module, optimizer: Any) -> list[Any]:
        return [RCCHandler(model, reference=reference)]

    data = [x, x.flip(0), -x.abs()]
    return {"published": train(branching, conditional, rank, data, monitors, step=make_train_step, rows=1).rows}


class Repeating(nn.Module):
    """Calls its layer a second time, on one rank in the first copy alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.times = nn.Linear(6, 4), nn.Linear(4, 3), [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return torch.stack([self.second(x) for _ in range(self.times[0])]).sum(0)


def incomparable(rank: int) -> dict[str, Any]:
    """The second layer of rank 1 is called more often than in the reference."""

    def monitors(model: nn.Module, optimizer: Any) -> list[Any]:
        handlers = [RCCHandler(model), AlignmentHandler(model)]
        model.module.times[0] += rank
        return handlers

    return {"published": train(Repeating, ddp, rank, make_batches(2), monitors).rows}


def some_steps(rank: int) -> dict[str, Any]:
    """Rank 1 makes no step of its optimizer."""

    def make_train_step(model: nn.Module, optimizer: Any) -> Any:
        def step(engine: Engine, batch: Any) -> None:
            optimizer.zero_grad()
            model(batch[0]).square().mean().backward()
            if not rank:
                optimizer.step()

        return step

    def monitors(model: nn.Module, optimizer: Any) -> list[Any]:
        return [HistogramHandler(model)]

    return {
        "drawn": [
            *train(dense, sharded(), rank, make_batches(2), monitors, step=make_train_step).monitors[0].histograms
        ]
    }


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 100, bias=False), nn.Linear(100, 3, bias=False))


def known_by_one_rank(rank: int) -> dict[str, Any]:
    """Rank 0 has learned that one of the parameters is to be measured whole, as it alone writes to a logger."""

    def monitors(model: nn.Module, optimizer: Any) -> list[Any]:
        handler = WeightUpdateHandler(model, optimizer, sample_size=200)
        if not rank:
            handler.load_state_dict(handler.state_dict() | {"whole": ["0.weight"]})
        return [handler]

    run = train(wide, sharded(), rank, make_batches(1), monitors)
    (handler,) = run.monitors
    torch.manual_seed(0)
    before, after = wide()[0].weight.detach(), run.model[0].weight.full_tensor().detach()
    return {"ratio": handler.diagnostics["0.weight"].update_ratio, "true": norm(after - before) / norm(before)}


def moved_between(rank: int) -> dict[str, Any]:
    """No gradient moves a weight; the last rank's part of one moves in unmonitored iterations."""
    model = fsdp(wide())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    handler = WeightUpdateHandler(model, optimizer, frozen_patience_steps=2)

    def step(engine: Engine, batch: Any) -> None:
        if rank and engine.state.iteration % 2:
            with torch.no_grad():
                next(model.parameters()).to_local()[-1] += 1
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()

    engine, frozen = Engine(step), []
    handler.attach(engine, Events.ITERATION_STARTED(every=2))
    engine.add_event_handler(
        Events.ITERATION_COMPLETED(every=2),
        lambda _: frozen.append([name for name, item in handler.diagnostics.items() if item.is_frozen]),
    )
    engine.run(range(8))
    return {"frozen": frozen}


def refused(rank: int) -> dict[str, Any]:
    with pytest.raises(ValueError, match=r"^Argument reference should be a module, since the model"):
        RCCHandler(fsdp(seeded(attending)))
    return {}


def test_a_sharded_model_needs_a_module(results):
    assert results("refused") == [{}, {}]


def test_a_rank_that_cannot_measure_delays_no_rank(results):
    first, second = results("failing")
    # What one rank cannot compare is published by none.
    assert (first["published"], first["all_reduces"]) == ([{}] * COUNT, COUNT)
    assert second == first


def test_a_layer_that_one_rank_cannot_compare_is_published_by_none(results):
    first, second = results("incomparable")
    assert first == second
    for row in first["published"]:
        assert "rcc/weight_update/first" in row
        assert not any("/second" in key for key in row)
    assert "alignment/z0_dW/first" in first["published"][-1]


def test_histograms_wait_for_no_rank_that_makes_no_step(results):
    drawn = [{name.split("/")[1] for name in item["drawn"]} for item in results("some steps")]
    assert drawn == [{"weights", "activations", "gradients"}, {"weights", "activations"}]


def test_a_ratio_is_the_same_where_one_rank_measures_its_part_whole(results):
    """Within three standard errors of the other rank's sample of about 100 elements, half of the change."""
    first, second = results("known by one rank")
    assert first == second
    assert first["ratio"] == pytest.approx(first["true"], rel=0.2)


def test_a_part_on_one_rank_that_moves_between_monitored_iterations_is_not_frozen(results):
    assert results("moved between") == [{"frozen": [[], *[["1.weight"]] * 3]}] * 2


def test_a_layer_that_one_rank_alone_reaches_is_published_by_both(results):
    first, second = results("branch")
    assert first == second
    expected = branch(None)["published"]
    assert ["rcc/input/inner" in values for values in expected] == [True, True, False]
    assert first["published"] == [pytest.approx(values) for values in expected]


# Alignment, and the learning rates that follow it


@functools.cache
def parametrized() -> Any:
    def make_net(width):
        return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3))

    torch.manual_seed(0)
    return parametrize(make_net, (8, 16), sample_input=torch.zeros(1, 6), lr_prefactor=0.1)


def alignment(rank: int | None, own_weights: bool = False, wrap: Any = ddp, joined: bool = False) -> dict[str, Any]:
    """Under join() rank 1 has two batches more, and the parametrization does not know of the wrapper."""
    parametrization = copy.deepcopy(parametrized())
    if own_weights and rank:
        nn.init.zeros_(parametrization.model[0].weight)
    initial: Any = "init" if wrap is ddp else copy.deepcopy(parametrization.model)

    def monitors(model: nn.Module, optimizer: Any) -> list[Any]:
        handlers: list[Any] = [
            AlignmentHandler(parametrization if joined else model, reference=initial),
            MaxPScheduler(parametrization, optimizer, reference=initial),
        ]
        return [*handlers, RCCHandler(parametrization.model)] if joined else handlers

    run = train(
        lambda: parametrization.model,
        wrap,
        rank,
        make_batches(4)[: 2 + 2 * rank if joined else None],
        monitors,
        optimizer=lambda model: torch.optim.Adam(parametrization.param_groups),
        around=DistributedDataParallel.join if joined else contextlib.nullcontext,
    )
    return {"published": run.rows}


@pytest.mark.parametrize("name", ["ddp", "own weights", "fsdp"])
def test_alignment_and_rates_are_those_of_one_process(results, name):
    """Ranks with weights of their own start from those of rank 0, and compare with these."""
    first, second = results(f"alignment {name}")
    assert first == second
    alone = alignment(None)["published"]
    assert any(name.startswith("alignment/dZ_w0/") for name in alone[-1])
    for actual, expected in zip(first["published"], alone, strict=True):
        assert actual == pytest.approx(expected, rel=1e-3)


def test_ranks_that_have_run_out_of_data_delay_no_rank(results):
    """Learning rates stay as they are, and what takes all ranks is absent."""
    both = results("alignment join")
    assert [len(item["published"]) for item in both] == [2, 4]
    assert {name.split("/")[0] for item in both for names in item["published"] for name in names} == {"maxp"}


# SetupCheck and HealthyCheckpoint


def setup_check(rank: int) -> dict[str, Any]:
    def kinds(wrap: Any, make: Any = dense, optimizer: Any = sgd) -> list[str]:
        monitors = lambda model, optimizer: [SetupCheck(model, optimizer)]  # noqa: E731
        (check,) = train(make, wrap, rank, make_batches(5), monitors, optimizer=optimizer).monitors
        assert check.findings is not None
        return [finding.kind for finding in check.findings]

    later = dense()
    of_whole = sgd(later)
    return {
        "ddp": kinds(ddp),
        "fsdp": kinds(sharded("0")),
        "stale": kinds(sharded("0"), lambda: later, lambda model: of_whole),
        "forgotten": kinds(ddp, optimizer=lambda model: torch.optim.SGD([*model.parameters()][:-1], lr=0.01)),
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_findings_of_a_setup(results, rank):
    expected = {"ddp": [], "fsdp": [], "stale": ["stale_optimizer"]}
    assert results("setup")[rank] == expected | {"forgotten": ["not_in_optimizer"]}


def healthy_checkpoint(rank: int, joined: bool = False) -> dict[str, Any]:
    """Rank 1 has a spike in iteration 9, a NaN of its own in 19 to 22, and under join() 20 iterations more."""
    own, saved = nn.Linear(2, 2), []

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(batch[1] * model(batch[0]), torch.zeros(1, 1))

    def monitors(model: nn.Module, optimizer: Any) -> list[Any]:
        def finish(engine: Engine) -> None:
            own.bias.data.fill_(torch.nan if rank and 19 <= engine.state.iteration <= 22 else 0.0)

        def save(checkpoint: Any, filename: str, metadata: Any = None) -> None:
            saved.append(trainers[0].state.iteration)

        trainers: list[Engine] = []
        checkpoint = HealthyCheckpoint({"model": model, "own": own}, save, quiet=5, n_saved=None)
        return [
            trainers.append,
            lambda engine: engine.add_event_handler(Events.ITERATION_COMPLETED, finish),
            GradMonitor(model, optimizer, threshold=1e4, on_spike="skip"),
            lambda engine: checkpoint.attach(engine, Events.ITERATION_COMPLETED(every=10)),
        ]

    data = [
        (torch.tensor([[1.0], [2.0]]).expand(2, 4), torch.tensor([[1.0], [1e4 if i == 9 else 1.0]]))
        for i in range(1, 21 + 20 * rank if joined else 41)
    ]
    step, around = (
        functools.partial(make_step, loss_of=loss_of),
        functools.partial(DistributedDataParallel.join, enable=joined),
    )
    train(lambda: nn.Linear(4, 1), ddp, rank, data, monitors, step=step, rows=1, around=around)
    return {"saved": saved}


def test_all_ranks_save_together_or_none(results):
    assert results("checkpoint") == [{"saved": [5, 15, 30, 40]}] * WORLD
    assert results("checkpoint join") == [{"saved": [5, 20]}, {"saved": [5, 15, 30, 40]}]


# Monitors written by users, as the guide shows

CLIP = 0.5


class WeightMonitor(Monitor, schema=Schema("weight", "weight", (Key("norm", "norm of all weights after the step"),))):
    """{keys}"""

    def handlers(self) -> Any:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def _on_train_step_completed(self, engine: Engine) -> None:
        self.publish(norm=torch.stack([whole(p).norm() for p in self.model.parameters()]).norm())


def own_monitors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    return [ClippingMonitor(model, optimizer), WeightMonitor(model, "weight"), GradMonitor(model, optimizer)]


def own_trained(wrap: Any, rank: int | None, parts: int = 1) -> dict[str, Any]:
    make = functools.partial(make_mlp, sizes=(6, 5, 3))
    step = functools.partial(make_step, clip=CLIP, parts=parts)
    run = train(make, wrap, rank, make_batches(4, size=8), own_monitors, step=step)
    names = ("clipping/kept", "weight/norm", "grad/norm")
    return {"rows": [{name: float(row[name]) for name in names} for row in run.rows]}


@pytest.mark.parametrize("name", ["own ddp", "own fsdp", "own accumulation"])
def test_monitors_of_ones_own(results, name):
    first, second = results(name)
    assert first == second
    alone = own_trained(None, None)["rows"] if "accumulation" not in name else first["rows"]
    for row, other in zip(first["rows"], alone, strict=True):
        assert row == pytest.approx(other, rel=1e-5)
        assert row["clipping/kept"] == pytest.approx(min(1.0, CLIP / row["grad/norm"]), rel=1e-4)
    assert min(row["clipping/kept"] for row in first["rows"]) < 0.9


SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{name: functools.partial(both_or_one, case) for name, case in CASES.items()},
    **{f"clipped {name}": functools.partial(clipped, wrap) for name, wrap in WRAPS.items()},
    **{f"histograms {name}": functools.partial(histograms, wrap) for name, wrap in WRAPS.items()},
    "branch": branch,
    "incomparable": incomparable,
    "some steps": some_steps,
    "local steps": local_steps,
    "known by one rank": known_by_one_rank,
    "moved between": moved_between,
    "refused": refused,
    # The reference of one rank can't be run.
    "failing": lambda rank: both_or_one(
        CASES["rcc ddp"]._replace(monitors=rcc(lambda: seeded(attending).to("meta" if rank else "cpu"))), rank
    ),
    "alignment ddp": alignment,
    "alignment own weights": functools.partial(alignment, own_weights=True),
    "alignment fsdp": functools.partial(alignment, wrap=sharded("2")),
    "alignment join": functools.partial(alignment, joined=True),
    "setup": setup_check,
    "own ddp": functools.partial(own_trained, ddp),
    "own fsdp": functools.partial(own_trained, fsdp),
    "own accumulation": functools.partial(own_trained, ddp, parts=2),
    "checkpoint": healthy_checkpoint,
    "checkpoint join": functools.partial(healthy_checkpoint, joined=True),
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
