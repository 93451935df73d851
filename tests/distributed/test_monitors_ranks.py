"""Monitors on two ranks publish what one process with the whole batches does, and agree to the last bit."""

from __future__ import annotations

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

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    HealthyCheckpoint,
    HistogramHandler,
    Metric,
    OptimizerStateHandler,
    RCCHandler,
    RoutingHandler,
    SetupCheck,
    SpectralNormHandler,
    StaticThreshold,
    StepStatsHandler,
    WeightUpdateHandler,
    record,
)
from ignite_monitor.scaling import AlignmentHandler, MaxPScheduler, parametrize
from tests._helpers import assert_same, make_batches
from tests.distributed._launch import WORLD, run_scenarios
from tests.distributed._models import (
    counted_collectives,
    ddp,
    fsdp,
    net,
    run,
    share,
    step_of,
    synchronised,
    whole,
    words,
)

COUNT = 6

# Models


class Experts(nn.Module):
    """The second expert and the second router are for rows with a large number, as only the last rank's have."""

    top_k = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.relu = nn.Linear(6, 6), nn.ReLU()
        self.experts = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x):
        record("rows", len(x))
        y = self.relu(self.layer(x))
        out = self.experts[0](y)
        large = x.amax(1) > 50
        return out + self.experts[1](y[large]).sum() if large.any() else out


class Words(nn.Module):
    """Sizes that two ranks can't share evenly, one of them so small that a rank holds nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.first, self.second = nn.Linear(6, 25), nn.Linear(25, 3)
        self.scale = nn.Parameter(torch.ones(1))
        self.still = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.second(torch.tanh(self.first(self.embedding(x).mean(1)))) * self.scale + self.still


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first, self.second = nn.Embedding(11, 6), nn.Linear(6, 25), nn.Linear(25, 3, bias=False)
        self.norm = nn.LayerNorm(6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x):
        x = self.norm(self.embedding(x))
        return self.second(torch.tanh(self.first(self.attention(x, x, x)[0].mean(1))))


class Branch(nn.Module):
    """The inner layer is for samples that start with what isn't negative."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner, self.never = nn.Linear(4, 3), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.outer(x) if x[0, 0] < 0 else self.outer(self.inner(x))


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


def matrices() -> nn.Module:
    """Rows that two ranks can't share evenly, a convolution, and one row alone."""
    parts = [nn.Linear(6, 301), nn.Tanh(), nn.Linear(301, 25), nn.Unflatten(1, (5, 5)), nn.Conv1d(5, 7, 3)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(21, 1), nn.Linear(1, 3))


def moved() -> nn.Module:
    model = Attention()
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
        make_optimizer: of the model.
        at: of 8 rows the first rank has so many.
        micro: micro-batches to an iteration.
        after: called with model and engine after the step.
        rel: tolerance.
        ignored: names that are not the same in one process.
    """

    make: Callable[[], nn.Module]
    monitors: Callable[[Any, Any], list[Any]]
    wrap: Callable[[nn.Module], Any] = ddp
    batches: Callable[[int], list[Any]] = make_batches
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: sgd(model, 0.1)
    at: int = 4
    micro: int = 1
    after: Callable[[nn.Module, Engine, Any], None] = lambda *_: None
    rel: float = 1e-3
    ignored: str = "^$"


def sgd(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def train(case: Case, rank: int | None) -> dict[str, Any]:
    model = net(case.make) if rank is None else case.wrap(net(case.make))
    optimizer = case.make_optimizer(model)
    monitors = case.monitors(model, optimizer)
    step = step_of(model, optimizer, rank, case.at, micro=case.micro, after_backward=lambda e: zero_still(model, e))

    def train_step(engine: Engine, batch: Any) -> None:
        step(engine, batch)
        case.after(model, engine, share(batch, rank, case.at))

    with counted_collectives() as calls:
        published = run(train_step, case.batches(COUNT), *monitors)
    tables = [dict(monitor.diagnostics) for monitor in monitors if hasattr(monitor, "diagnostics")]
    diagnostics = {name: list(map(float, item)) for table in tables for name, item in table.items()}
    rows = [{k: x for k, x in row.items() if not k.startswith("step/") or "norm" in k} for row in published]
    return {"published": rows, "diagnostics": diagnostics, "all_reduces": len(calls)}


def zero_still(model: nn.Module, engine: Engine) -> None:
    """Set a parameter's gradient to 0 in three iterations, so that it freezes."""
    for name, parameter in model.named_parameters():
        if name.endswith("still") and engine.state.iteration in (3, 4, 5):
            parameter.grad.zero_()


def validate(model: nn.Module, engine: Engine, batch: Any) -> None:
    """FSDP leaves the root's whole parameters behind."""
    if engine.state.iteration == 2:
        model.eval()
        with torch.no_grad():
            model(batch[0])
        model.train()


def with_large_rows(count: int) -> list[Any]:
    batches = make_batches(count)
    for x, _ in batches[3:]:
        x[7] = 100.0
    return batches


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    still = [parameter for name, parameter in model.named_parameters() if name.endswith("still")]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith("still")]
    groups = [{"params": others}, {"params": still, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.0, 0.9), weight_decay=0.1)


METRICS = {
    **dict.fromkeys(("mean", "std", "kurtosis", "dead_fraction", "max_abs", "max_over_rms", "nonfinite_count"), True),
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
    return lambda model, optimizer: [RoutingHandler(model, routers=routers)]


def spectral(model: nn.Module, optimizer: Any) -> list[Any]:
    norms = SpectralNormHandler(model, updates=True, per_parameter=True)
    return [norms, StepStatsHandler(model, optimizer)]


def conditional(model: nn.Module) -> nn.Module:
    return ddp(model, find_unused_parameters=True)


def sharded(*inner: str, shape: tuple[int, ...] = (WORLD,)) -> Callable[[nn.Module], nn.Module]:
    return lambda model: fsdp(model, shape, inner)


_UPDATES = {"batches": words, "make_optimizer": adamw, "after": validate}
_RCC = {"batches": words, "make_optimizer": lambda model: sgd(model, 0.5)}
_STILL = {"make_optimizer": lambda model: sgd(model, 0.0)}
_LARGE = {"batches": with_large_rows, "wrap": conditional, "at": 3, **_STILL}
_SPECTRAL = {"rel": 2e-3, "ignored": "error|iterations"}
CASES = {
    # Of rows that are not shared evenly gradients are others, and of the whole output there is less on the first rank.
    "activation ddp": Case(Experts, activation, ignored=r"^grad|experts\.1|_root_", **_LARGE),
    "activation fsdp": Case(dense, activation, sharded()),
    "routing ddp": Case(Experts, routing(r"experts\.\d"), micro=2, ignored=r"experts\.1", **_LARGE),
    "routing fsdp": Case(Experts, routing(r"experts\.0"), sharded(), micro=2),
    "rcc ddp": Case(Attention, rcc(), **_RCC),
    "rcc static": Case(Attention, rcc(), lambda model: ddp(model, static_graph=True), **_RCC),
    "rcc uneven": Case(moved, rcc(lambda: net(Attention)), at=3, **_RCC | _STILL),
    "rcc fsdp": Case(Attention, rcc(lambda: net(Attention)), sharded("first"), **_RCC),
    "spectral ddp": Case(matrices, spectral, **_SPECTRAL),
    "spectral fsdp": Case(matrices, spectral, sharded("0", "2"), **_SPECTRAL),
    "spectral hybrid": Case(matrices, spectral, sharded("0", shape=(1, WORLD)), **_SPECTRAL),
    "update ddp": Case(Words, updates(), **_UPDATES),
    "update ddp exact": Case(Words, updates(None), **_UPDATES),
    "update fsdp": Case(Words, updates(), sharded("first"), **_UPDATES),
    "update fsdp exact": Case(Words, updates(None), sharded("first"), **_UPDATES),
    "update hybrid": Case(Words, updates(), sharded("first", shape=(1, WORLD)), **_UPDATES),
    "update replicated": Case(Words, updates(), sharded("first", shape=(WORLD, 1)), **_UPDATES),
    "update skipped": Case(Words, updates(skip=True), sharded("first"), **_UPDATES),
}


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_publish_what_one_process_does(results, name):
    case = CASES[name]
    first, second = results(name)
    assert_same(first, second)
    alone = train(case, None)
    assert len(alone["published"][-1]) > 3
    for actual, expected in zip(first["published"], alone["published"], strict=True):
        rows = [{key: x for key, x in row.items() if not re.search(case.ignored, key)} for row in (actual, expected)]
        assert rows[0] == pytest.approx(rows[1], rel=case.rel, abs=1e-5)
    assert first["diagnostics"].keys() == alone["diagnostics"].keys()
    for parameter, values in alone["diagnostics"].items():
        assert first["diagnostics"][parameter] == pytest.approx(values, rel=case.rel, nan_ok=True), parameter


def test_a_module_that_one_rank_calls_is_published_from_the_next_iteration_on(results):
    rows = results("activation ddp")[0]["published"]
    assert ["activation/experts.1/mean" in row for row in rows] == [False] * 4 + [True] * 2
    assert rows[4]["activation/experts.1/count"] == 1
    assert rows[4]["activation/experts.1/half/count"] == 0.5
    assert rows[0]["recorded/_root_/rows"] == 4.0
    rows = results("routing ddp")[0]["published"]
    assert ["routing/load_entropy/experts.1" in row for row in rows] == [False] * 4 + [True] * 2


def test_one_of_the_parameters_freezes_and_a_skipped_step_is_none(results):
    rows = results("update fsdp")[0]["published"]
    assert [row["monitor/frozen_count"] for row in rows] == [0, 0, 0, 0, 1, 0]
    rows = results("update skipped")[0]["published"]
    assert any("monitor/grad_max" in row for row in rows)
    assert not any("monitor/frozen_count" in row for row in rows)


@pytest.mark.parametrize(("name", "collectives"), [("ddp", 0), ("fsdp", 2 * COUNT), ("fsdp exact", 2 * COUNT)])
def test_each_handler_makes_one_collective_for_all_sharded_parameters(results, name, collectives):
    assert results(f"update {name}")[0]["all_reduces"] == collectives


# Gradients and histograms


def clipped(model: Any, rank: int) -> dict[str, Any]:
    """Two micro-batches, the first one without reduction, and a step with what clipping leaves."""
    truth: dict[str, float] = {}

    def note(family: str) -> None:
        for name, item in model.named_parameters():
            truth[f"{family}/{name.removeprefix('module.')}/norm"] = float(whole(item.grad).double().norm())

    def train_step(engine, batch):
        for part in range(2):
            with synchronised(model, part == 1):
                model(batch[0][rank + 2 * part :: 4]).square().mean().backward()
        note("gradient")
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        note("gradient_after_clip")
        optimizer.step()

    optimizer = sgd(model)
    (published,) = run(train_step, make_batches(1), ActivationHandler(model, gradients={"norm": torch.norm}))
    return {"published": published, "truth": truth}


def histograms(model: nn.Module, rank: int) -> dict[str, Any]:
    """Return the histograms of the last iteration: this rank's outputs, and whole weights and gradients."""
    tensors: dict[str, torch.Tensor] = {}
    optimizer, handler = sgd(model), HistogramHandler(model)
    model.register_forward_hook(lambda *args: tensors.update({"activations/_root_": args[2].detach().clone()}))
    run(step_of(model, optimizer, rank, 3), make_batches(2), handler)
    for name, item in model.named_parameters():
        name = name.removeprefix("module.")
        tensors |= {f"weights/{name}": whole(item), f"gradients/{name}": whole(item.grad)}
    return {"tensors": tensors, "drawn": handler.histograms}


WRAPS = {"ddp": ddp, "fsdp": sharded()}


@pytest.mark.parametrize("wrap", WRAPS)
def test_gradients_of_micro_batches_before_and_after_clipping(results, wrap):
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
    reference, model = Branch(), Branch()
    x = torch.randn(2, 1, 4)
    x[:, 0, 0] = torch.tensor([-1.0, 1.0])
    used = model if rank is None else conditional(model)

    def train_step(engine, batch):
        for item in batch if rank is None else batch[rank : rank + 1]:
            used(item)

    return {"published": run(train_step, [x, x.flip(0), -x.abs()], RCCHandler(model, reference=reference))}


def refused(rank: int) -> dict[str, Any]:
    with pytest.raises(ValueError, match=r"^Argument reference should be a module, since the model"):
        RCCHandler(fsdp(net(Attention)))
    return {}


def test_a_sharded_model_needs_a_module_which_may_be_sharded_too(results):
    assert results("refused") == [{}, {}]
    actual, expected = results("both sharded")[0]["published"], results("rcc fsdp")[0]["published"]
    assert actual == [pytest.approx(row, rel=1e-6) for row in expected]


def test_a_rank_that_cannot_measure_delays_no_rank(results):
    first, second = results("failing")
    assert [bool(values) for values in first["published"]] == [True] * COUNT
    assert second == first


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
    model = parametrization.model if rank is None else wrap(parametrization.model)
    optimizer = torch.optim.Adam(parametrization.param_groups)
    handlers: list[Any] = [
        AlignmentHandler(parametrization if joined else model, reference=initial),
        MaxPScheduler(parametrization, optimizer, reference=initial),
    ]
    if not joined:
        return {"published": run(step_of(model, optimizer, rank), make_batches(4), *handlers)}
    handlers.append(RCCHandler(parametrization.model))
    with model.join():
        return {"published": run(step_of(model, optimizer), make_batches(4)[: 2 + 2 * rank], *handlers)}


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
    def kinds(model: nn.Module, optimizer: torch.optim.Optimizer, called: nn.Module | None = None) -> list[str]:
        check = SetupCheck(model, optimizer)
        step = step_of(called or model, optimizer, rank)
        run(lambda engine, batch: step(engine, batch), make_batches(5), check)
        assert check.findings is not None
        return [finding.kind for finding in check.findings]

    wrapped, part, sharded_model, later = ddp(net(dense)), ddp(net(dense)), fsdp(net(dense), inner=["0"]), net(dense)
    optimizer = sgd(later)
    return {
        "ddp": kinds(wrapped, sgd(wrapped)),
        "bypassed": kinds(wrapped, sgd(wrapped), wrapped.module),
        "fsdp": kinds(sharded_model, sgd(sharded_model)),
        "stale": kinds(fsdp(later, inner=["0"]), optimizer),
        "forgotten": kinds(part, torch.optim.SGD([*part.parameters()][:-1], lr=0.01)),
    }


@pytest.mark.parametrize("rank", [0, 1])
def test_findings_of_a_setup(results, rank):
    expected = {"ddp": [], "bypassed": ["wrapper_bypassed"], "fsdp": [], "stale": ["stale_optimizer"]}
    assert results("setup")[rank] == expected | {"forgotten": ["not_optimized"]}


def healthy_checkpoint(rank: int) -> dict[str, Any]:
    """The second rank has a spike in iteration 9, and a tensor of its own that is NaN in iterations 19 to 22."""
    model, own = ddp(net(lambda: nn.Linear(4, 1))), nn.Linear(2, 2)
    optimizer, saved = sgd(model), []

    def train_step(engine: Engine, batch: Any) -> None:
        iteration = engine.state.iteration
        optimizer.zero_grad()
        scale = 1e4 if rank and iteration == 9 else 1.0
        F.mse_loss(scale * model(torch.full((2, 4), float(rank + 1))), torch.zeros(2, 1)).backward()
        optimizer.step()
        own.bias.data.fill_(torch.nan if rank and 19 <= iteration <= 22 else 0.0)

    trainer = Engine(train_step)
    GradMonitor(model, optimizer, threshold=1e4, on_spike="skip").attach(trainer)

    def save(checkpoint: Any, filename: str, metadata: Any = None) -> None:
        saved.append(trainer.state.iteration)

    checkpoint = HealthyCheckpoint({"model": model, "own": own}, save, quiet=5, n_saved=None)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), checkpoint)
    trainer.run([None] * 40)
    return {"saved": saved}


def test_all_ranks_save_together_or_none(results):
    assert results("checkpoint") == [{"saved": [15, 23, 30, 40]}] * WORLD


SCENARIOS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{name: lambda rank, case=case: train(case, rank) for name, case in CASES.items()},
    **{f"clipped {name}": lambda rank, wrap=wrap: clipped(wrap(net(dense)), rank) for name, wrap in WRAPS.items()},
    **{f"histograms {name}": lambda rank, w=wrap: histograms(w(net(dense)), rank) for name, wrap in WRAPS.items()},
    "branch": branch,
    "refused": refused,
    # The reference of one rank can't be run.
    "failing": lambda rank: train(
        CASES["rcc ddp"]._replace(monitors=rcc(lambda: net(Attention).to("meta" if rank else "cpu"))), rank
    ),
    "both sharded": lambda rank: train(CASES["rcc fsdp"]._replace(monitors=rcc(lambda: fsdp(net(Attention)))), rank),
    "alignment ddp": alignment,
    "alignment own weights": lambda rank: alignment(rank, own_weights=True),
    "alignment fsdp": lambda rank: alignment(rank, wrap=sharded("2")),
    "alignment join": lambda rank: alignment(rank, joined=True),
    "setup": setup_check,
    "checkpoint": healthy_checkpoint,
}

if __name__ == "__main__":
    run_scenarios(SCENARIOS)
