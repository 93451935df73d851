"""Compiled functions around models that are monitored."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    RCCHandler,
    StaticThreshold,
    WeightUpdateHandler,
)
from ignite_monitor.model import _torch
from tests._helpers import assert_same

# Dynamo itself looks at the gradient of whatever a compiled function goes on with after a backward.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")

BATCHES = [torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
BACKENDS = ["eager", "aot_eager", "inductor"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def model_of(compiled, backend):
    """A model, and what the train step calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if compiled == "in place":
        model.compile(backend=backend)
    return model, torch.compile(model, backend=backend) if compiled == "wrapped" else model


def norm_of(model):
    """In float64, of the gradients that there are."""
    return float(torch.stack([each.grad.double().square().sum() for each in model.parameters()]).sum().sqrt())


def train(backend, monitors=lambda model, optimizer: [], whole=False, compiled="", every=1, **options):
    """Compiled is the function with forward and backward, or the whole step.

    Returns:
        The model, and for each iteration the norm of its gradients, the flag after the backward, and the metrics.
    """
    model, called = model_of(compiled, backend)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    norms, flags, metrics = [], [], []

    @torch.compile(backend=backend, **options)
    def function(x):
        if whole:
            optimizer.zero_grad()
        loss = called(x).square().mean()
        loss.backward()
        if whole:
            optimizer.step()
        return loss.detach()

    def step(engine, x):
        if not whole:
            optimizer.zero_grad()
        loss = function(x)
        norms.append(norm_of(model))
        flags.append(getattr(engine.state, "unhealthy_spike", None))
        if not whole:
            optimizer.step()
        return loss

    trainer = Engine(step)
    for monitor in monitors(called, optimizer):
        monitor.attach(trainer, Events.ITERATION_STARTED(every=every))
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED,
        lambda engine: metrics.append({k: float(v) for k, v in engine.state.metrics.items()}),
    )
    trainer.run(BATCHES)
    return model, norms, [None if flag is None else bool(flag) for flag in flags], metrics


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("whole", "compiled"),
    [(False, ""), (False, "wrapped"), (False, "in place"), (True, "")],
    ids=lambda each: str(each),
)
def test_backward_in_a_compiled_function(backend, whole, compiled):
    plain, norms, *_ = train(backend, whole=whole, compiled=compiled)
    limit = sorted(norms)[2]
    torch._dynamo.reset()

    def monitors(model, optimizer):
        rule = StaticThreshold(limit * (1 + 1e-6))
        return [GradMonitor(model, optimizer, threshold=rule), WeightUpdateHandler(model, optimizer)]

    model, seen, flags, metrics = train(backend, monitors, whole, compiled)
    assert_same([*model.parameters()], [*plain.parameters()])
    assert seen == norms
    assert flags == [norm > limit for norm in norms]
    assert [each["grad/norm"] for each in metrics] == pytest.approx(norms, rel=1e-6)
    assert all(each["monitor/update_ratio_median"] > 0 for each in metrics)


def test_backward_in_the_graph_itself():
    """No hook on a parameter is called by it, and the step that follows judges what there is."""
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch can't")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        plain, norms, *_ = train("aot_eager", fullgraph=True)
        torch._dynamo.reset()
        grad = lambda model, optimizer: [GradMonitor(model, optimizer)]  # noqa: E731
        model, _, _, metrics = train("aot_eager", grad, fullgraph=True)
    assert_same([*model.parameters()], [*plain.parameters()])
    assert [each["grad/norm"] for each in metrics] == pytest.approx(norms, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_skipped_steps_of_a_compiled_train_step(backend):
    _, norms, *_ = train(backend, whole=True)
    torch._dynamo.reset()
    rule = StaticThreshold(norms[0] / 2)  # every norm is greater
    model, _, flags, metrics = train(
        backend, lambda model, optimizer: [GradMonitor(model, optimizer, threshold=rule, on_spike="skip")], whole=True
    )
    start, _ = model_of("", backend)
    assert_same([*model.parameters()], [*start.parameters()])
    assert flags == [True] * len(BATCHES)
    assert metrics[-1]["grad/skipped_count"] == len(BATCHES)


class Counting:
    """A backend that counts the runs of what it is given."""

    def __init__(self):
        self.runs = 0

    def __call__(self, graph, inputs):
        def run(*args):
            self.runs += 1
            return graph(*args)

        return run


@pytest.mark.parametrize("kind", ["activations", "reference", "rcc"])
@pytest.mark.parametrize("fullgraph", [False, True])
def test_functions_that_hold_no_module_of_the_model_stay_compiled(kind, fullgraph):
    """One of a library's, and another model."""
    counting = {"model": Counting(), "function": Counting(), "other": Counting()}

    @torch.compile(backend=counting["function"], fullgraph=fullgraph)
    def function(x):
        return x * x.sin().sum(-1, keepdim=True)

    def run(make):
        torch._dynamo.reset()
        torch.manual_seed(0)
        raw = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        model = torch.compile(raw, backend=counting["model"])
        other = torch.compile(nn.Linear(6, 6).requires_grad_(False), backend=counting["other"], fullgraph=fullgraph)
        optimizer = torch.optim.SGD(raw.parameters(), 0.1)
        runs, metrics, means = [], [], []

        def step(engine, x):
            before = {name: each.runs for name, each in counting.items()}
            given = other(x)
            with torch.no_grad():
                first = nn.functional.linear(given.double(), raw[0].weight.double(), raw[0].bias.double())
                means.append(float(first.mean()))
            optimizer.zero_grad()
            function(model(given)).square().mean().backward()
            optimizer.step()
            runs.append({name: each.runs - before[name] for name, each in counting.items()})

        trainer = Engine(step)
        if make is not None:
            make(model).attach(trainer, Events.ITERATION_STARTED(every=2))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: metrics.append(dict(engine.state.metrics)))
        trainer.run(BATCHES)
        return raw, runs, metrics, means

    make = {
        "activations": lambda model: ActivationHandler(model, activations=True),
        "reference": lambda model: ActivationHandler(
            model, activations=True, reference="init", activation_differences={"d": lambda a, b: (a - b).norm()}
        ),
        "rcc": RCCHandler,
    }[kind]
    plain, *_ = run(None)
    model, runs, metrics, means = run(make)
    monitored = [iteration % 2 == 0 for iteration in range(1, len(BATCHES) + 1)]
    assert [each["function"] for each in runs] == [1] * len(BATCHES)
    assert [each["other"] for each in runs] == [1] * len(BATCHES)
    assert [each["model"] for each in runs] == [int(not each) for each in monitored]
    assert_same([*model.parameters()], [*plain.parameters()])  # this backend computes what is written
    assert [bool(each) for each in metrics] == monitored
    if kind != "rcc":
        found = [float(each["activation/0/mean"]) for each in metrics if each]
        assert found == pytest.approx([mean for mean, each in zip(means, monitored, strict=True) if each], rel=1e-5)


class Holder:
    def __init__(self, model):
        self.model = model

    def step(self, x):
        return self.model(x)


def with_a_default(model):
    def function(x, model=model):
        return model(x)

    return function


GLOBAL = Holder(nn.Linear(6, 3))
FUNCTIONS = {  # over a model, as train scripts compile them
    "closure": lambda model: lambda x: model(x),
    "in a comprehension": lambda model: lambda x: torch.stack([model(row) for row in x]).mean(0),
    "default": with_a_default,
    "method": lambda model: Holder(model).step,
    "global": lambda model: lambda x: GLOBAL.step(x),
}


@pytest.mark.parametrize("kind", [*FUNCTIONS, "argument"])
def test_a_compiled_function_over_the_model_runs_eagerly_where_it_is_monitored(kind):
    model = GLOBAL.model.requires_grad_(True)
    given = (model,) if kind == "argument" else ()
    function = torch.compile((lambda x, model: model(x)) if given else FUNCTIONS[kind](model), backend="eager")
    means, metrics = [], []

    def step(engine, x):
        model.zero_grad()
        means.append(
            nn.functional.linear(x.double(), *(item.detach().double() for item in model.parameters())).mean().item()
        )
        function(x, *given).square().mean().backward()

    trainer = Engine(step)
    ActivationHandler(model, activations={"mean": True}).attach(trainer, Events.ITERATION_STARTED(every=2))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: metrics.append(dict(engine.state.metrics)))
    trainer.run(BATCHES)
    found = [float(each.get("activation/_root_/mean", 0.0)) for each in metrics]
    assert found == pytest.approx([mean * (place % 2) for place, mean in enumerate(means)], rel=1e-5)


def test_everything_runs_eagerly_without_the_private_names(monkeypatch):
    counting = Counting()
    function = torch.compile(lambda x: x.sin(), backend=counting)
    model = nn.Linear(6, 3)
    trainer = Engine(lambda engine, x: function(model(x)).sum().backward())
    ActivationHandler(model, activations=True).attach(trainer, Events.ITERATION_STARTED(every=2))
    monkeypatch.setattr(_torch, "_find", _torch.Gone)
    trainer.run(BATCHES)
    assert counting.runs == len(BATCHES) - 2
