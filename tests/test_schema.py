"""Published keys are those of the schemas, and the schemas' texts reach help and reports."""

from __future__ import annotations

import ast
import inspect
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn

import ignite_monitor
from ignite_monitor import (
    ActivationHandler,
    CurvatureHandler,
    DriftMonitor,
    GradientNoiseScaleHandler,
    GradMonitor,
    HistogramHandler,
    MeanStdThreshold,
    Monitor,
    OptimizerStateHandler,
    RCCHandler,
    ReplicaCheckHandler,
    RollbackHandler,
    SetupCheck,
    SpectralNormHandler,
    SpikeMonitor,
    SpikeRecorder,
    StepStatsHandler,
    WeightUpdateHandler,
    record,
    scaling,
)
from ignite_monitor.attaching import LossRecorder
from ignite_monitor.keys import SCHEMAS
from ignite_monitor.report.limits import PERSISTENT
from ignite_monitor.scaling import AlignmentHandler, MaxPScheduler, parametrize
from ignite_monitor.schema import Key, Schema
from tests._handlers import HANDLERS
from tests._helpers import make_batches, make_step, make_trainer

KINDS = [
    LossRecorder,
    *(
        value
        for package in (ignite_monitor, scaling)
        for name in package.__all__
        if inspect.isclass(value := getattr(package, name)) and issubclass(value, Monitor)
        if value not in (Monitor, SetupCheck)
    ),  # these publish nothing
]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 6)
        self.first = nn.Linear(6, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.hidden = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)
        self.shift = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
        self.position_table = nn.Parameter(torch.ones(3, 8))
        self.unused, self.excluded = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x + self.table(torch.arange(len(x)) % 4))
        record("first_norm", x.norm())
        y = x.unsqueeze(1)
        return self.last(self.hidden(x + self.shift + self.attention(y, y, y, need_weights=False)[0].squeeze(1)).relu())


def make_parametrized():
    torch.manual_seed(0)

    def model(n):
        return nn.Sequential(nn.Linear(6, n), nn.Linear(n, n), nn.Linear(n, 3))

    parametrization = parametrize(model, (4, 8), sample_input=torch.zeros(1, 6), lr_prefactor=0.02)
    return parametrization.model, torch.optim.SGD(parametrization.param_groups, lr=0.1), parametrization


def make_all():
    """A monitor of each kind, all options on, with the optimizer and model that they watch."""
    torch.manual_seed(0)
    model = Model()
    held = [element for name, element in model.named_parameters() if not name.startswith("excluded")]
    optimizer = torch.optim.Adam(held, lr=0.1)
    everything = dict.fromkeys(("activations", "parameters", "gradients"), True)
    everything["activations"] = {"max_over_rms": True, "max_abs": True, "dead_fraction": True}
    never = SpikeMonitor(lambda engine: engine.state.iteration, direction="both", threshold=MeanStdThreshold(warmup=2))

    return model, optimizer, [
        GradMonitor(model, optimizer, threshold=MeanStdThreshold(k=0.1, warmup=2), on_spike="clip", per_parameter=True),
        WeightUpdateHandler(model, optimizer, frozen_update_ratio_threshold=1.0, frozen_patience_steps=1),
        OptimizerStateHandler(model, optimizer),
        ReplicaCheckHandler(model, optimizer),
        HistogramHandler(model),
        RCCHandler(model),
        ActivationHandler(model, **everything, attention=True),
        SpectralNormHandler(model, updates=True, per_parameter=True),
        StepStatsHandler(model, optimizer),
        never,
        DriftMonitor(lambda engine: engine.state.iteration),
        SpikeRecorder(never, "spikes"),
        AlignmentHandler(model),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def published():
    """Kind of monitor -> (prefix, all names that it has published in a run)."""
    result = {}

    def run(model, optimizer, monitors, clip):
        trainer = Engine(make_step(model, optimizer, clip=clip))
        for monitor in monitors:
            monitor.attach(trainer)
            names = result.setdefault(type(monitor), (monitor.prefix, set()))[1]
            trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _, m=monitor, n=names: n.update(m.on_host()))
        trainer.run(make_batches(6))

    def run_in_parts():
        nonlocal result
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def loss_of(model, x):
            return F.mse_loss(model(x), 3 * x.sum(1, keepdim=True) + torch.randn(16, 1))

        trainer = Engine(make_step(model, optimizer, parts=2, loss_of=loss_of))
        noise = GradientNoiseScaleHandler(model, optimizer, micro_batches=2, items=lambda _: 32)
        curvature = CurvatureHandler(model, optimizer, loss=lambda model, _: model(torch.ones(2, 6)).square().mean())
        for monitor in (noise, curvature):
            monitor.attach(trainer, Events.ITERATION_STARTED)
        trainer.run([*torch.randn(40, 32, 6)])
        result |= {type(monitor): (monitor.prefix, set(monitor.on_host())) for monitor in (noise, curvature)}

    run_in_parts()
    run(*make_all(), clip=0.01)
    model, optimizer, parametrization = make_parametrized()
    rollback = RollbackHandler({"model": model, "optimizer": optimizer})
    rollback.request("to see it")
    run(model, optimizer, [rollback], clip=1.0)
    run(model, optimizer, [MaxPScheduler(parametrization, optimizer)], clip=1.0)
    for make in HANDLERS.values():
        model, optimizer, _ = make_trainer()
        if type(monitor := make(model, optimizer)) in set(KINDS) - result.keys():
            run(model, optimizer, [monitor], clip=1.0)
    return result


@pytest.mark.parametrize("kind", KINDS)
def test_a_monitor_publishes_the_keys_of_its_schema(kind, published):
    prefix, names = published[kind]
    keys = {name.removeprefix(f"{prefix}/") if prefix else name for name in names}
    assert [key for key in keys if kind.schema.find(key) is None] == []
    expected = [key.pattern for key in kind.schema.keys if not key.when]
    assert expected or kind is ActivationHandler
    assert [pattern for pattern in expected if not any(matches(pattern, key) for key in keys)] == []


def test_everything_was_on(published):
    """Conditional keys are published in the run above too, but for those that the CPU does not have."""
    for kind in KINDS:
        prefix, names = published[kind]
        lacking = [
            key.pattern
            for key in kind.schema.keys
            if not any(matches(key.pattern, name.removeprefix(f"{prefix}/")) for name in names)
        ]
        assert set(lacking) <= {"peak_memory_mb", "reserved_memory_mb", "scale"}, kind


def matches(pattern: str, name: str) -> bool:
    """An own reading of the patterns."""
    parts = [re.escape(part) for part in re.split(r"\{\w+\}", pattern)]
    return re.fullmatch(".+".join(parts), name) is not None


def test_all_monitors_have_a_schema_of_their_own():
    assert {kind.schema.kind for kind in KINDS} == {schema.kind for schema in SCHEMAS}
    assert len({schema.kind for schema in SCHEMAS}) == len(SCHEMAS) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_help_lists_every_key(kind):
    text = inspect.getdoc(kind)
    assert "{keys}" not in text
    for key in kind.schema.keys:
        full = f"{kind.schema.prefix}/{key.pattern}" if kind.schema.prefix else key.pattern
        assert re.search(rf"^- ``{re.escape(full)}``: \S", text, re.MULTILINE), full
    assert max(map(len, text.splitlines())) <= 120


def test_subclasses_keep_their_own_docstring_and_the_schema():
    class Own(GradMonitor):
        """Mine, with {keys}."""

    assert Own.__doc__ == "Mine, with {keys}."
    assert Own.schema is GradMonitor.schema


@pytest.mark.parametrize(
    ("nonfinite", "present"),
    [("", [1.0]), ("inf", [1.0, math.inf, -math.inf]), ("any", [1.0, math.inf, -math.inf, math.nan])],
)
def test_numbers_that_represent_missing_values(nonfinite, present):
    schema = Schema("own", "own", (Key("a/{name}", "", nonfinite=nonfinite), Key("b", "")))
    for number in [1.0, math.inf, -math.inf, math.nan]:
        absent = schema.not_reported({"a/x.y": number, "b": number, "unknown": number})
        assert ("a/x.y" in absent) is (repr(number) not in map(repr, present))
        assert ("b" in absent) is ("unknown" in absent) is (number != 1)


def test_a_key_of_any_length_is_listed():
    long = Key("x" * 150, "a meaning")
    assert long.pattern in Schema("long", "long", (long,)).listing()


def test_a_key_that_is_renamed_is_renamed_in_help():
    schema = GradMonitor.schema
    keys = tuple(replace(key, pattern=key.pattern.replace("norm", "length")) for key in schema.keys)
    renamed = replace(schema, keys=keys)
    assert "``grad/length``" in renamed.listing()
    assert renamed.find("norm") is None


def test_reports_ask_for_keys_that_there_are():
    """Every key that a finding reads exists: a renamed one would silently disable the finding."""
    asked = {limit.key for limit in PERSISTENT}
    for path in (Path(__file__).parent.parent / "ignite_monitor" / "report").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            function, (*_, argument) = ast.unparse(node.func), node.args
            if function in ("monitor.get", "monitor.each") and isinstance(argument, ast.Constant):
                asked.add(argument.value)
            elif function == "map" and ast.unparse(node.args[0]) == "monitor.get":
                asked.update(ast.literal_eval(argument))
    assert len(asked) > 20
    for key in asked:
        names = [key.replace("{}", item) for item in ("a", "a/head_0", "group_0", "group_0/a")]
        assert any(schema.find(name) for schema in SCHEMAS for name in names), key
