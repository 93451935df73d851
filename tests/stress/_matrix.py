"""The ways to train of the matrix: which there are, and one run of each, with every monitor or with none."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.amp import GradScaler

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    MeanStdThreshold,
    RCCHandler,
    SpectralNormHandler,
    StepStatsHandler,
    WeightUpdateHandler,
)
from tests._helpers import UNSTEADY, assert_same, reduced_over_ranks
from tests._models import Net
from tests._oracle import Oracle, WindowTruth, mean_std
from tests._ranks import ddp, fsdp, whole
from tests._truth import Event, UpdateTruth, Values, norm, spectral, statistics_of_step

FULL = os.environ.get("FULL_MATRIX", "0") != "0"
AXES = {
    "precision": ("float32", "bfloat16", "scaler"),
    "accumulation": ("none", "micro", "iterations"),
    "optimizer": ("SGD", "AdamW", "fused AdamW", *(["Muon"] if hasattr(torch.optim, "Muon") else [])),
    "mode": ("eager", "compiled"),
    "world": ("alone", "ddp", "fsdp"),
    "clip": (False, True),
    "skip": (False, True),
    "order": ("first", "last"),
}

STEPS, ACCUMULATED = 7, 4
OVERFLOW, SPIKE = 4, 6  # steps, counted from 1
RULE = {"k": 8.0, "warmup": 4}
EVERY = 2  # of compiled models so many iterations are watched by those monitors that run them eagerly


class Case(NamedTuple):
    """One way to train.

    Attributes:
        precision: what passes are in; with "scaler" float16 under autocast, and a GradScaler.
        accumulation: four micro-batches to an optimizer step, in one iteration or in four.
        optimizer: Muon has AdamW beside it, for what is no hidden matrix.
        mode: whether the model is compiled.
        world: one process, or what two ranks share.
        clip: whether the train step clips gradients, unscaled by hand where there is a scaler.
        skip: whether spikes are skipped.
        order: whether GradMonitor is attached before the other monitors or after them.
    """

    precision: str
    accumulation: str
    optimizer: str
    mode: str
    world: str
    clip: bool
    skip: bool
    order: str

    @property
    def name(self) -> str:
        """Name of the test case."""
        flags = ["clip"] * self.clip + ["skip"] * self.skip + [f"monitor {self.order}"]
        return ", ".join([*(str(item) for item in self[:5]), *flags])

    @property
    def iterations_per_step(self) -> int:
        return ACCUMULATED if self.accumulation == "iterations" else 1


def cases(worlds: Iterable[str], *, full: bool) -> list[Case]:
    """The whole product, or cases in which every two values of two axes meet.

    Args:
        worlds: of which worlds.
        full: whether all.
    """
    product = [Case(*values) for values in itertools.product(*AXES.values())]
    # What a case is about are the first five axes: of the others one combination each, each as often.
    rest = len([*itertools.product(*[*AXES.values()][5:])])
    if full:
        spread = [product[i * rest + i * 5 % rest] for i in range(len(product) // rest)]
        return [case for case in spread if case.world in worlds]
    open_pairs = {pair for case in product for pair in _pairs(case)}
    chosen = []
    while open_pairs:
        best = max(product, key=lambda case: len(open_pairs.intersection(_pairs(case))))
        chosen.append(best)
        open_pairs.difference_update(_pairs(best))
    return [case for case in chosen if case.world in worlds]


def _pairs(case: Case) -> list[Any]:
    return [*itertools.combinations(enumerate(case), 2)]


MATRICES = ("first.weight",)


def net() -> Net:
    torch.manual_seed(0)
    return Net((6, 9, 1), norm=nn.LayerNorm, dropout=0.25)


def batches(case: Case) -> list[tuple[Tensor, Tensor]]:
    """Those of all ranks, 16 rows for each: rank 1 has the second half of the rows."""
    generator = torch.Generator().manual_seed(1)
    count = STEPS * case.iterations_per_step
    made = [(torch.randn(16, 6, generator=generator), torch.randn(16, 1, generator=generator)) for _ in range(count)]
    for step, factor in ((SPIKE, 1e3), (OVERFLOW, 1e6 if case.precision == "scaler" else 1.0)):
        # In one micro-batch alone, and on the last rank.
        made[step * case.iterations_per_step - case.iterations_per_step // 2 - 1][1][-1] *= factor
    return made


def optimizers_of(
    case: Case, parameters: dict[str, nn.Parameter]
) -> dict[str, tuple[torch.optim.Optimizer, list[str]]]:
    """Prefix of the monitor -> optimizer, and the names of its parameters."""
    names = [*parameters]
    if case.optimizer == "SGD":
        optimizer: Any = torch.optim.SGD(parameters.values(), lr=1e-3, momentum=0.9, weight_decay=0.1)
    elif case.optimizer != "Muon":
        fused = case.optimizer == "fused AdamW"
        optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.1, fused=fused)
    else:
        rest = [name for name in names if name not in MATRICES]
        muon = torch.optim.Muon([parameters[name] for name in MATRICES], lr=1e-2, weight_decay=0.1)
        adamw = torch.optim.AdamW([parameters[name] for name in rest], lr=1e-2)
        return {"grad": (muon, [*MATRICES]), "rest": (adamw, rest)}
    return {"grad": (optimizer, names)}


class Run:
    """One training, of several optimizers, compiled or not; a common train step records nothing between its parts.

    Args:
        case: how.
        rank: of two, or None for a process of its own.
        monitored: whether the monitors are attached.

    Attributes:
        facts: of each iteration its events, the parameters that a step was made for, and the flags after its backward.
        published: what the monitors publish in each iteration.
    """

    def __init__(self, case: Case, rank: int | None, *, monitored: bool, backend: str = "aot_eager") -> None:
        self.case, self.rank, self.monitored = case, rank, monitored
        torch.manual_seed(0)
        self.model = model = net()
        if case.world != "alone":
            self.model = ddp(model) if case.world == "ddp" else fsdp(model, ["first"])
        self.parameters = dict(model.named_parameters())
        self.wrapped = self.model
        if case.mode == "compiled":
            torch._dynamo.reset()
            self.model = torch.compile(self.model, backend=backend)
        self.optimizers = optimizers_of(case, self.parameters)
        self.scaler = None
        if case.precision == "scaler":
            self.scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        self.oracles = {prefix: Oracle(mean_std(**RULE, decay=0.99)) for prefix in self.optimizers}
        self.facts: list[dict[str, Any]] = []
        self.published: list[dict[str, float]] = []
        self.engine = Engine(self._train_step)
        self.monitors = self._monitors() if monitored else {}
        torch.manual_seed(rank or 0)
        with contextlib.ExitStack() as stack:
            for monitor, event in self.monitors.values():
                stack.enter_context(monitor.attach(self.engine, event))
            self.engine.add_event_handler(Events.ITERATION_COMPLETED, self._note)
            self.engine.run(batches(case), max_epochs=1)
        self.state = self._state()

    def _monitors(self) -> dict[str, Any]:
        case, model, scaler = self.case, self.model, self.scaler
        every = Events.ITERATION_STARTED
        some = Events.ITERATION_STARTED(every=EVERY) if case.mode == "compiled" else every
        detecting = {
            prefix: (
                GradMonitor(
                    model, optimizer, scaler=scaler, threshold=MeanStdThreshold(**RULE),
                    on_spike="skip" if case.skip else None, prefix=prefix, flag=f"{prefix}_spike",
                ),
                every,
            )
            for prefix, (optimizer, _) in self.optimizers.items()
        }  # fmt: skip
        metrics = {"mean": True, "std": True, "max_abs": True, "nonfinite_count": True, "abs": torch.abs}
        reference: Any = net() if case.world == "fsdp" else "init"
        others = {
            "update": (WeightUpdateHandler(model, scaler=scaler, sample_size=None), every),
            "activation": (
                ActivationHandler(
                    model, activations=True, gradients=metrics, parameters={"l2": torch.linalg.vector_norm},
                    scaler=scaler,
                ),
                some,
            ),
            "rcc": (RCCHandler(model, reference=reference), some),
            "spectral": (SpectralNormHandler(model, updates=True, per_parameter=True), every),
            "step": (StepStatsHandler(model, self.optimizers["grad"][0]), every),
        }  # fmt: skip
        return detecting | others if case.order == "first" else others | detecting

    def _train_step(self, engine: Engine, batch: Any) -> None:
        case, scaler = self.case, self.scaler
        iteration = engine.state.iteration
        is_eager = case.mode == "eager" or iteration % EVERY == 0
        steps = iteration % case.iterations_per_step == 0
        fact = self._start(iteration)
        parts = self._parts(batch)
        stance = "force_eager" if is_eager and not self.monitored and case.mode == "compiled" else None
        with contextlib.nullcontext() if stance is None else torch.compiler.set_stance(stance):
            for place, (x, y) in enumerate(parts):
                synchronised = steps and place == len(parts) - 1
                with reduced_over_ranks(self.wrapped, synchronised):
                    with self._autocast():
                        loss = F.mse_loss(self.model(x), y) / (len(parts) * case.iterations_per_step)
                    (loss if scaler is None else scaler.scale(loss)).backward()
        scale = 1.0 if scaler is None else scaler.get_scale()
        if synchronised or case.world == "alone":
            gradients = self._whole({name: item.grad for name, item in self.parameters.items()})
            self._gradients = {name: item.double() / scale for name, item in gradients.items()}
            self._happens("backward", reached=[*gradients], before=self._before)
        self._happens("moment")
        flags = {prefix: bool(getattr(engine.state, f"{prefix}_spike", False)) for prefix in self.optimizers}
        if steps:
            self._step(fact["made"])
        self._happens("returned", weights=self._whole(self.parameters))
        self.facts.append(fact | {"flags": flags, "scale": scale, "eager": is_eager})

    def _start(self, iteration: int) -> dict[str, Any]:
        if (iteration - 1) % self.case.iterations_per_step == 0:
            for optimizer, _ in self.optimizers.values():
                optimizer.zero_grad()
        self.events, self._gradients = [], {}
        self._happens("iteration", weights=self._whole(self.parameters))
        self._before = [name for name, item in self.parameters.items() if item.grad is not None]
        return {"events": self.events, "made": []}

    def _happens(self, kind: str, **what: Any) -> None:
        self.events.append({"kind": kind, "gradients": self._gradients, **what})

    def _parts(self, batch: tuple[Tensor, Tensor]) -> list[tuple[Tensor, ...]]:
        """This rank's rows, one micro-batch after the other."""
        mine = [item if self.rank is None else item.chunk(2)[self.rank] for item in batch]
        count = ACCUMULATED if self.case.accumulation == "micro" else 1
        return [*zip(*(item.chunk(count) for item in mine), strict=True)]

    def _step(self, made: list[str]) -> None:
        """Run after the backward that ends an accumulation; without monitors the step itself is skipped."""
        scaler, unscaled = self.scaler, False
        for place, (prefix, (optimizer, names)) in enumerate(self.optimizers.items()):
            own_norm = norm(self._gradients[name] for name in names)
            overflow = scaler is not None and not math.isfinite(own_norm)
            skipped = self.case.skip and self.oracles[prefix].expect(own_norm)["spike"] == 1 and not overflow
            if self.case.clip:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                    unscaled = True
                torch.nn.utils.clip_grad_norm_([self.parameters[name] for name in names], 0.5)
            if not overflow:
                self._happens("step", optimizer=place)
            if self.monitored or not skipped:
                unscaled = True
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if not overflow:
                self._happens("skipped" if skipped else "stepped", optimizer=place)
                made += [] if skipped else names
        if scaler is not None and unscaled:
            scaler.update()

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.case.precision == "float32":
            return contextlib.nullcontext()
        return torch.autocast("cpu", torch.float16 if self.case.precision == "scaler" else torch.bfloat16)

    def _note(self, engine: Engine) -> None:
        published: dict[str, float] = {}
        for monitor, _ in self.monitors.values():
            published |= monitor.on_host()
        self.published.append(published)
        assert published.keys() <= engine.state.metrics.keys()
        rest = {name: float(value) for name, value in engine.state.metrics.items() if name not in published}
        assert all(value != value or "/std" in name or "/threshold" in name for name, value in rest.items()), rest

    def _state(self) -> dict[str, Any]:
        """Return the state that must be the same without monitors."""
        return {
            "parameters": self._whole(self.parameters),
            "gradients": self._whole({name: item.grad for name, item in self.parameters.items()}),
            "optimizers": [_local(optimizer.state_dict()) for optimizer, _ in self.optimizers.values()],
            "scale": 1.0 if self.scaler is None else self.scaler.get_scale(),
            "rng": torch.get_rng_state(),
        }

    def _whole(self, tensors: dict[str, Any]) -> dict[str, Tensor]:
        """Copies, of all ranks' parts, of those that there are."""
        return {name: whole(item) for name, item in tensors.items() if item is not None}


def _local(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _local(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [_local(value) for value in state]
    if hasattr(state, "to_local"):
        state = state.to_local()
    return copy.deepcopy(state)


def both(case: Case, rank: int | None = None, backend: str = "aot_eager") -> dict[str, Any]:
    """A monitored training, and a run without monitors."""
    run, counterpart = (Run(case, rank, monitored=monitored, backend=backend) for monitored in (True, False))
    return {"facts": run.facts, "published": run.published, "state": run.state, "unmonitored": counterpart.state}


# The truth

# Numbers of passes are compared by unit tests; all ranks are to publish the same.
OF_PASSES = ("activation/", "gradient/", "parameter/", "rcc/")
# Tested against computations of their own in tests/step_stats and tests/weight_update.
_ELSEWHERE = ("step/gradient_norm", "step/batch_rms/", "monitor/largest_weight/", "monitor/smallest_grad/")
BOUNDS = {"spectral/error_max", "spectral/update_error_max", "spectral/iterations"}


def truths(case: Case, facts: list[dict[str, Any]]) -> tuple[list[Values], list[dict[str, bool]]]:
    """Return the expected metrics of each iteration, and the flags after its backward."""
    optimizers, scaled = optimizers_of(case, dict(net().named_parameters())), case.precision == "scaler"
    events = [Event(**event) for fact in facts for event in fact["events"]]
    held = [names for _, names in optimizers.values()]
    windows = {
        prefix: WindowTruth(mean_std(**RULE, decay=0.99), names, lambda i, place=place: i == place, scaled=scaled)
        for place, (prefix, (_, names)) in enumerate(optimizers.items())
    }
    for window in windows.values():
        window.follow(events)
    update = UpdateTruth([name for names in held for name in names], held.__getitem__, top_k=5, scaled=scaled).follow(
        events
    )
    rates = [group["lr"] for group in optimizers["grad"][0].param_groups]
    published = []
    for i, fact in enumerate(facts):
        before, after = fact["events"][0]["weights"], fact["events"][-1]["weights"]
        values = statistics_of_step(after.values(), rates[0]) | update.published[i]
        norms = spectral(net(), before, after, fact["made"], bool(fact["made"]))
        values |= norms | {name.replace("/norm/", "/topk/"): value for name, value in norms.items()}
        for prefix, window in windows.items():
            of_window = window.published[i]
            of_window |= {"scale": fact["scale"]} if scaled and "norm" in of_window else {}
            values |= {f"{prefix}/{name}": value for name, value in of_window.items()}
        published.append(values)
    flags = [{prefix: window.moments[i][0] for prefix, window in windows.items()} for i in range(len(facts))]
    return published, flags


def compare(case: Case, results: list[dict[str, Any]]) -> None:
    """Compare each rank's run with a run without monitors, and its numbers with the truth."""
    expected, flags = truths(case, results[0]["facts"])  # parameters are whole on every rank
    for rank, result in enumerate(results):
        assert_same(result["state"], result["unmonitored"])
        for i, (fact, published) in enumerate(zip(result["facts"], result["published"], strict=True)):
            where = f"iteration {i + 1}, rank {rank}"
            assert fact["flags"] == flags[i], where
            of_passes = {name for name in published if name.startswith(OF_PASSES)}
            assert bool(of_passes) is fact["eager"], where
            assert all(published[name] == results[0]["published"][i][name] for name in of_passes), where
            elsewhere = {name for name in published if name.startswith(_ELSEWHERE)}
            assert published.keys() - of_passes - elsewhere - BOUNDS == expected[i].keys() | UNSTEADY, where
            for name, value in expected[i].items():
                assert published[name] == close(name, value), (where, name)


def close(name: str, value: float) -> Any:
    if name.startswith("spectral/"):
        return pytest.approx(value, rel=2e-3)  # what a norm may be off by, which its own error bound says too
    # A mean of what nearly cancels is as good as the float32 numbers it is of.
    return pytest.approx(value, rel=1e-4 if "std" in name or "threshold" in name else 1e-5, abs=1e-7, nan_ok=True)
