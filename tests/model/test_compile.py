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
from tests._helpers import assert_same, grad_norm, make_step

# Dynamo itself looks at the gradient of whatever a compiled function goes on with after a backward.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor:UserWarning")

BATCHES = [torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]


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
        norms.append(grad_norm(model))
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


@pytest.mark.parametrize(
    ("backend", "whole", "compiled"),
    [("aot_eager", True, ""), ("aot_eager", False, ""), ("eager", False, "wrapped"), ("eager", False, "in place")],
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
    assert [element["grad/norm"] for element in metrics] == pytest.approx(norms, rel=1e-6)
    assert all(element["monitor/update_ratio_median"] > 0 for element in metrics)


def test_backward_in_the_graph_itself():
    """No hook on a parameter is called by it, and the gradient is compared at the step that follows."""
    if not hasattr(torch._dynamo.config, "trace_autograd_ops"):
        pytest.skip("this torch can't")
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        plain, norms, *_ = train("aot_eager", fullgraph=True)
        torch._dynamo.reset()
        grad = lambda model, optimizer: [GradMonitor(model, optimizer)]  # noqa: E731
        model, _, _, metrics = train("aot_eager", grad, fullgraph=True)
    assert_same([*model.parameters()], [*plain.parameters()])
    assert [element["grad/norm"] for element in metrics] == pytest.approx(norms, rel=1e-6)


def test_skipped_steps_of_a_compiled_train_step():
    backend = "aot_eager"
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


MONITORS = {
    "activations": lambda model: [ActivationHandler(model, activations=True)],
    "reference": lambda model: [RCCHandler(model)],
    "two": lambda model: [RCCHandler(model), ActivationHandler(model, activations=True)],
}


@pytest.mark.parametrize(("kind", "fullgraph"), [*((kind, False) for kind in MONITORS), ("two", True)])
def test_only_flex_attention_stays_compiled_in_monitored_iterations(kind, fullgraph):
    counting = {name: Counting() for name in ("model", "function", "attention")}

    def attention(x):
        return x * x.sin().sum(-1, keepdim=True)

    attention.__module__ = "torch.nn.attention.flex_attention"
    attention = torch.compile(attention, backend=counting["attention"], fullgraph=fullgraph)

    def run(make):
        torch._dynamo.reset()
        raw, _ = model_of("", "eager")
        model, heads = torch.compile(raw[:2], backend=counting["model"]), [raw[2]]
        function = torch.compile(lambda x: heads[0](x).square().mean(), backend=counting["function"])
        optimizer = torch.optim.SGD(raw.parameters(), 0.1)
        train_step = make_step(model, optimizer, loss_of=lambda model, given: function(model(given)))
        runs, metrics, means = [], [], []

        def step(engine, x):
            before = {name: item.runs for name, item in counting.items()}
            given = attention(x)
            with torch.no_grad():
                first = nn.functional.linear(given.double(), raw[0].weight.double(), raw[0].bias.double())
                means.append(float(first.mean()))
            train_step(engine, given)
            runs.append({name: item.runs - before[name] for name, item in counting.items()})

        trainer = Engine(step)
        for monitor in make(raw):
            monitor.attach(trainer, Events.ITERATION_STARTED(every=2))
        trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda engine: metrics.append(dict(engine.state.metrics)))
        trainer.run(BATCHES)
        return raw, runs, metrics, means

    plain, *_ = run(lambda model: [])
    model, runs, metrics, means = run(MONITORS[kind])
    monitored = [iteration % 2 == 0 for iteration in range(1, len(BATCHES) + 1)]
    assert [item["attention"] for item in runs] == [1] * len(monitored)
    assert [item["model"] for item in runs] == [item["function"] for item in runs] == [int(not i) for i in monitored]
    assert_same([*model.parameters()], [*plain.parameters()])  # this backend computes what is written
    if kind != "reference":
        result = [item.get("activation/0/mean", 0.0) for item in metrics]
        assert result == pytest.approx([mean * is_on for mean, is_on in zip(means, monitored, strict=True)], rel=1e-5)
        assert all(("activation/2/mean" in item) == is_on for item, is_on in zip(metrics, monitored, strict=True))


@pytest.mark.parametrize("hooked", [False, True])
def test_the_monitors_of_a_compiled_optimizer_step_are_not_traced(hooked):
    """With a hook of the user's, too, after which the step is reported."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if hooked:
        optimizer.register_step_pre_hook(lambda *_: None)
    step = torch.compile(lambda: optimizer.step(), backend="aot_eager")
    traced = []

    class Looking(GradMonitor, schema=GradMonitor.schema):
        def _on_step_started(self, engine, step):
            traced.append(torch.compiler.is_compiling())
            super()._on_step_started(engine, step)

    def train_step(engine, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        step()

    trainer = Engine(train_step)
    Looking(model, optimizer).attach(trainer)
    trainer.run(torch.randn(4, 5, 3))
    assert traced == [False] * 4
