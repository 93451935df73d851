"""MonitorEvents: what fires when, for any train step."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import LRScheduler
from ignite.handlers.tensorboard_logger import TensorboardLogger
from torch import nn
from torch._dynamo.utils import counters
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from ignite_monitor import GradMonitor, MonitorEvents, StaticThreshold, WeightUpdateHandler
from ignite_monitor.events.gradient_tracker import GradientsReady
from ignite_monitor.events.hooks import remove_all
from tests._helpers import assert_same, footprint, grad_norm, hooks_only, make_batches, make_step, make_trainer
from tests._models import make_model
from tests._oracle import mean_of

INSIDE = [
    MonitorEvents.GRADIENTS_READY,
    MonitorEvents.OPTIMIZER_STEP_STARTED,
    MonitorEvents.OPTIMIZER_STEP_COMPLETED,
    MonitorEvents.TRAIN_STEP_COMPLETED,
]


def record(engine: Engine, *events: MonitorEvents) -> list[str]:
    """The names of the events fired from now on, in order; also what the train step itself appends."""
    log: list[str] = []
    for event in events or INSIDE:
        engine.add_event_handler(event, lambda _, name: log.append(name), event.value)
    return log


def approx(value: float):
    return pytest.approx(value, rel=1e-5)


# Backward


def test_gradients_ready_fires_once_before_backward_returns():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log: list[str] = []

    model.register_forward_hook(lambda *_: log.append("forward done"))

    def after_backward(engine):
        log.append("backward returned")
        assert float(engine.state.grad_norm) == approx(grad_norm(model))

    after_step = lambda engine: log.append("step returned")  # noqa: E731
    trainer = Engine(make_step(model, optimizer, after_backward=after_backward, after_step=after_step))
    GradMonitor(model).attach(trainer)
    for event in INSIDE:
        trainer.add_event_handler(event, lambda _, name: log.append(name), event.value)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: log.append("completed"))
    trainer.run(make_batches(3))
    one = [
        "forward done", "gradients_ready", "backward returned", "optimizer_step_started", "optimizer_step_completed",
        "step returned", "train_step_completed", "completed",
    ]  # fmt: skip
    assert log == one * 3


class Boom(torch.autograd.Function):
    """Identity whose backward raises."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError("out of memory")


def loss_of(model, batch, start=0):
    hidden = batch[0] if start == 0 else model[:start](batch[0])
    return F.mse_loss(model[start:](hidden), batch[1])


def square_loss(model, batch):
    return model(batch).square().mean()


def twice(model, batch):
    loss_of(model, batch).backward()
    yield
    loss_of(model, batch).backward()
    yield


def create_graph(model, batch):
    loss = loss_of(model, batch)
    (slope,) = torch.autograd.grad(loss, [model[4].weight], create_graph=True)  # reaches no .grad: no event
    loss.backward(retain_graph=True)
    yield
    (loss + slope.square().sum()).backward()
    yield


def inputs(model, batch):
    loss_of(model, batch).backward(inputs=[model[4].bias])
    yield


def detached_head(model, batch):
    F.mse_loss(model[3:](model[:3](batch[0]).detach()), batch[1]).backward()
    yield


def unfrozen(model, batch):
    model[0].requires_grad_(True)
    model[0](batch[0]).sum().backward()  # the unfrozen part alone
    yield
    model[0].requires_grad_(False)


def checkpointed(model, batch):
    F.mse_loss(model[3:](checkpoint(model[:3], batch[0], use_reentrant=False)), batch[1]).backward()
    yield


def retried(model, batch):
    for start in (5, 3):  # before the first gradient, after some gradients
        with pytest.raises(RuntimeError, match="out of memory"):
            F.mse_loss(model[start:](Boom.apply(model[:start](batch[0]))), batch[1]).backward()
    model.zero_grad()
    loss_of(model, batch).backward()
    yield


def nested(model, batch):
    """When the head has its gradients, and the layers below it have none yet."""
    out = model[:3](batch[0])
    out.register_hook(torch.enable_grad()(lambda _: model(batch[0]).square().sum().backward()))
    F.mse_loss(model[3:](out), batch[1]).backward()
    yield 2


def in_a_thread(model, batch):
    thread = threading.Thread(target=loss_of(model, batch).backward)
    thread.start()
    thread.join()
    yield


def of_another_model(model, batch):
    nn.Linear(6, 3)(batch[0]).sum().backward()
    yield from ()


STEPS = [
    *(twice, create_graph, inputs, detached_head, unfrozen, checkpointed, retried, nested, in_a_thread),
    of_another_model,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_events_and_gradient_norms_of_a_train_step(step):
    """A step yields after each backward, with the number of backward passes since."""
    model = make_model()
    model[0].requires_grad_(step is not unfrozen)
    expected = []

    def train_step(engine, batch):
        model.zero_grad()
        for count in step(model, batch):
            expected.append(count or 1)
            assert len(log) == sum(expected)
            assert float(engine.state.grad_norm) == approx(grad_norm(model))

    trainer = Engine(train_step)
    GradMonitor(model).attach(trainer)
    log = record(trainer, MonitorEvents.GRADIENTS_READY)
    trainer.run(make_batches(2))
    assert len(log) == sum(expected)
    assert bool(trainer.state.metrics) is bool(expected)


def test_exception_in_a_handler_of_gradients_ready_can_be_caught_around_backward():
    model, optimizer, trainer = make_trainer()
    calls = []

    def train_step(engine, batch):
        for outcome in (pytest.raises(ZeroDivisionError), contextlib.nullcontext()):
            optimizer.zero_grad()
            with outcome:
                loss_of(model, batch).backward()
        assert float(engine.state.grad_norm) == approx(grad_norm(model))
        optimizer.step()

    trainer = Engine(train_step)
    GradMonitor(model, optimizer).attach(trainer)

    @trainer.on(MonitorEvents.GRADIENTS_READY)
    def fail(_):
        calls.append(1)
        if len(calls) % 2:
            raise ZeroDivisionError

    trainer.run(make_batches(2))
    assert len(calls) == 4


# Several monitors, several models


def test_two_monitors_on_one_model_share_one_event():
    model, optimizer, trainer = make_trainer()
    l2 = GradMonitor(model, optimizer)
    largest = GradMonitor(model, norm_type=math.inf, prefix="max", flag="max_spike")
    l2.attach(trainer, Events.ITERATION_STARTED(every=2))
    largest.attach(trainer)
    log = record(trainer)
    published = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def compare(engine):
        published.append(("grad/norm" in engine.state.metrics, "max/norm" in engine.state.metrics))
        assert float(engine.state.metrics["max/norm"]) == approx(
            max(float(p.grad.abs().max()) for p in model.parameters())
        )
        if "grad/norm" in engine.state.metrics:
            assert float(engine.state.metrics["grad/norm"]) == approx(grad_norm(model))

    trainer.run(make_batches(4))
    assert log == [event.value for event in INSIDE] * 4
    assert published == [(False, True), (True, True)] * 2


# Handlers and loggers of the user's own


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ({"every": 3}, [3, 6, 9]),
        ({"once": 4}, [4]),
        ({"once": [2, 5]}, [2, 5]),
        ({"before": 3}, [1, 2]),
        ({"after": 8}, [9, 10]),
        ({"event_filter": lambda engine, event: event % 4 == 1}, [1, 5, 9]),
    ],
)
@pytest.mark.parametrize("event", INSIDE)
def test_filters_count_iterations_also_where_no_monitor_watches(event, kwargs, expected):
    model, _, trainer = make_trainer()
    GradMonitor(model).attach(trainer, Events.ITERATION_STARTED(once=1000))
    seen = []
    trainer.add_event_handler(event(**kwargs), lambda e: seen.append(e.state.iteration))
    trainer.run(make_batches(5), max_epochs=2)
    assert seen == expected
    assert trainer.state.metrics == {}


def test_spike_detected_fires_before_the_step_of_that_iteration():
    model, optimizer, trainer = make_trainer(lr=1e-6)
    GradMonitor(model, optimizer, threshold=StaticThreshold(50.0)).attach(trainer)
    log = record(trainer, *INSIDE, MonitorEvents.SPIKE_DETECTED)
    seen = []
    trainer.add_event_handler(MonitorEvents.SPIKE_DETECTED, lambda e: seen.append(e.state.iteration))
    trainer.run(make_batches(4, spikes=[3]))
    assert seen == [3]
    third = [name for name in log if name != "gradients_ready"][6:]
    assert third[:2] == ["spike_detected", "optimizer_step_started"]


def test_logger_on_spike_detected_writes_spikes_alone(tmp_path, monkeypatch):
    model, optimizer, trainer = make_trainer(lr=1e-6)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(50.0))
    monitor.attach(trainer)
    with TensorboardLogger(log_dir=tmp_path) as logger:
        written = []
        monkeypatch.setattr(logger.writer, "add_scalar", lambda key, value, step: written.append((key, value, step)))
        monitor.log_to(logger, trainer, MonitorEvents.SPIKE_DETECTED)
        trainer.run(make_batches(6, spikes=[2, 5]))
    assert [(value, step) for key, value, step in written if key == "grad/spike"] == [(1.0, 2), (1.0, 5)]
    assert all(value > 50 for key, value, _ in written if key == "grad/norm")


# Optimizers


@pytest.mark.parametrize("scheduler", [False, True])
def test_two_optimizers_of_one_model_each_fire(scheduler):
    model = make_model()
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[4].parameters())]
    stray = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    trainer = Engine(make_step(model, [*optimizers, stray]))
    if scheduler:
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, LRScheduler(torch.optim.lr_scheduler.StepLR(optimizers[0], 2))
        )
    GradMonitor(model).attach(trainer)
    log = record(trainer, *INSIDE[1:3])
    trainer.run(make_batches(3))
    assert log == ["optimizer_step_started", "optimizer_step_completed"] * 2 * 3


@pytest.mark.parametrize("skip", [False, True])
def test_step_that_raises_and_is_retried_by_the_train_step(skip):
    """An optimizer that runs out of memory; the step is skipped again if it was to be skipped."""

    class Flaky(torch.optim.SGD):
        fail = False

        def step(self, closure=None):
            if self.fail:
                self.fail = False
                raise RuntimeError("out of memory")
            return super().step(closure)

    model = make_model()
    optimizer = Flaky(torch.optim.SGD(model.parameters(), lr=0.1).param_groups, lr=0.001)  # now both steps call hooks
    used, changed = [], []

    def train_step(engine, batch):
        optimizer.zero_grad()
        F.mse_loss(model(batch[0]), batch[1]).backward()
        used.append(grad_norm(model))
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.fail = engine.state.iteration == 2
        try:
            optimizer.step()
        except RuntimeError:
            optimizer.step()
        changed.append(any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)))
        assert all(p.grad is not None for p in model.parameters())

    trainer = Engine(train_step)
    monitor = GradMonitor(model, optimizer, **({"threshold": 50.0, "on_spike": "skip"} if skip else {}))
    monitor.attach(trainer)
    log = record(trainer, *INSIDE[1:3])
    trainer.run(make_batches(3, spikes=[2] if skip else []))
    one = ["optimizer_step_started", "optimizer_step_completed"]
    assert changed == [True, not skip, True]
    assert skip or log == [*one, one[0], *one, *one]
    assert skip or float(monitor.metrics["grad/mean"]) == approx(mean_of(used[:2]))


@pytest.mark.parametrize("wraps", [False, True])
def test_a_step_within_a_step_completes_with_the_outer_one(wraps):
    class Outer(torch.optim.SGD):
        def step(self, closure=None):
            inner.step() if wraps else super().step()
            super().step()  # hooked too, since there are instances of its class
            log.append("more work")

    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = Outer(model.parameters(), lr=0.1)
    trainer = Engine(make_step(model, optimizer))
    GradMonitor(model, optimizer).attach(trainer)
    log = record(trainer, *INSIDE[1:3])
    trainer.run(make_batches(3))
    assert log == ["optimizer_step_started", "more work", "optimizer_step_completed"] * 3


@pytest.mark.parametrize("event", [MonitorEvents.GRADIENTS_READY, *INSIDE[1:3]])
@pytest.mark.parametrize("closure", [False, True])
def test_hooks_of_all_optimizers_that_the_user_adds_while_a_handler_detaches(event, closure):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called, handles = [], []

    def add(engine):
        if engine.state.iteration == 1:
            handles.append(register_optimizer_step_pre_hook(lambda *_: called.append("pre")))
            handles.append(register_optimizer_step_post_hook(lambda *_: called.append("post")))

    trainer = Engine(make_step(model, optimizer, before_step=add, closure=closure))
    before = hooks_only(footprint(trainer, model, optimizer))
    monitor = GradMonitor(model, optimizer)
    monitor.attach(trainer)
    trainer.add_event_handler(event(once=2), lambda _: monitor.detach())
    trainer.run(make_batches(4))
    remove_all(handles)
    assert called == ["pre", "post"] * 4
    assert hooks_only(footprint(trainer, model, optimizer)) == before


# torch.compile


@pytest.mark.parametrize("given", ["compiled", "original"])
def test_compiled_model_without_extra_recompiles(given):
    def compiles(watched):
        torch._dynamo.reset()
        counters.clear()
        model = make_model()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Engine(make_step(compiled, optimizer))
        log = None
        if watched:
            monitor = GradMonitor(compiled if given == "compiled" else model, optimizer)
            monitor.attach(trainer, Events.ITERATION_STARTED(every=2))
            log = record(trainer)
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED(every=2),
                lambda e: norms.append((float(e.state.metrics["grad/norm"]), grad_norm(model))),
            )
        for _ in range(2):
            trainer.run(make_batches(4), max_epochs=2)
        return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), log

    norms: list[tuple[float, float]] = []
    plain, watched = compiles(watched=False), compiles(watched=True)
    assert watched[:2] == plain[:2]
    assert watched[2] == [event.value for event in INSIDE] * 16
    assert [got for got, _ in norms] == [approx(expected) for _, expected in norms]
    assert len(norms) == 8


# Exceptions


def test_a_backward_that_raised_an_error_leaves_no_reference_to_parameters():
    def gone_after_run():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

        def train_step(engine, batch):
            with contextlib.suppress(RuntimeError):
                model[1](Boom.apply(model[0](batch))).sum().backward()
            reached.append(model[1].weight.grad is not None)

        trainer = Engine(train_step)
        GradMonitor(model).attach(trainer)
        trainer.run([torch.ones(2, 4)] * 2)
        return weakref.ref(model[1].weight)

    reached: list[bool] = []
    gone_after_run()  # the first use of autograd in a process leaves cycles of its own
    gc.collect()
    gc.disable()
    try:
        gone = gone_after_run()
        assert gone() is None
    finally:
        gc.enable()
    assert all(reached)


@pytest.mark.parametrize("event", INSIDE)
def test_an_error_in_a_handler_at_a_skipped_step_leaves_the_gradients(event):
    model, optimizer, trainer = make_trainer(lr=1e-6)
    GradMonitor(model, optimizer, threshold=50.0, on_spike="skip").attach(trainer)
    trainer.add_event_handler(event(once=2), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.run(make_batches(4, spikes=[2]))
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("event", INSIDE)
@pytest.mark.parametrize(
    ("action", "iterations"),
    [
        (lambda e: e.terminate(), [1, 2]),
        (lambda e: e.terminate(skip_completed=True), [1, 2]),
        (lambda e: e.terminate_epoch(), [1, 2, 3, 4]),
        (lambda e: e.interrupt(), [1, 2]),
    ],
    ids=["terminate", "terminate skip_completed", "terminate_epoch", "interrupt"],
)
def test_control_from_inside_a_handler(event, action, iterations):
    model, optimizer, trainer = make_trainer()
    monitor = GradMonitor(model, optimizer)
    monitor.attach(trainer)
    before = hooks_only(footprint(trainer, model, optimizer))
    seen = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: seen.append((e.state.iteration, "grad/norm" in e.state.metrics))
    )
    handle = trainer.add_event_handler(event(once=2), action)
    trainer.run(make_batches(2), max_epochs=2) if len(iterations) == 4 else trainer.run(make_batches(4))
    assert seen == [(iteration, True) for iteration in iterations]
    assert hooks_only(footprint(trainer, model, optimizer)) == before
    handle.remove()
    trainer.run(make_batches(4), max_epochs=3)  # goes on, or starts anew
    assert all(published for _, published in seen)
    assert hooks_only(footprint(trainer, model, optimizer)) == before


@pytest.mark.parametrize("event", [MonitorEvents.TRAIN_STEP_COMPLETED, Events.ITERATION_COMPLETED])
@pytest.mark.parametrize("with_step", [False, True])
def test_backward_in_a_handler_after_the_train_step_is_not_the_train_steps(event, with_step):
    """A handler that looks at gradients of its own, or an engine that trains the same model for a moment."""

    def published(disturbed):
        model, optimizer, trainer = make_trainer(lr=0.0)
        model.eval()
        optimizer.param_groups[0]["momentum"] = 0.0
        monitor = GradMonitor(model, optimizer)
        monitor.attach(trainer)
        seen = []

        @trainer.on(event)
        def saliency(engine):
            if disturbed:
                optimizer.zero_grad()
                (1000 * F.mse_loss(model(engine.state.batch[0]), engine.state.batch[1])).backward()
                if with_step:
                    optimizer.step()

        @trainer.on(Events.ITERATION_COMPLETED)
        def look(engine):
            seen.append({**{k: float(v) for k, v in monitor.metrics.items()}, "state": float(engine.state.grad_norm)})

        trainer.run(make_batches(5))
        return seen

    assert published(disturbed=True) == published(disturbed=False)


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("same model", Events.ITERATION_COMPLETED),
        ("another model", MonitorEvents.OPTIMIZER_STEP_COMPLETED),
        *(("evaluator", event) for event in INSIDE),
    ],
)
def test_engine_that_runs_in_a_handler_fires_its_own_events_alone(kind, event):
    model, optimizer, trainer = make_trainer()
    inner = Engine(lambda _, batch: model(batch[0]).detach())
    if kind != "evaluator":
        inner_model, inner_optimizer, inner = make_trainer()
        if kind == "same model":
            inner_model, inner_optimizer, inner = model, optimizer, Engine(make_step(model, optimizer))
        GradMonitor(inner_model, inner_optimizer).attach(inner)
        inner_log = record(inner)
    GradMonitor(model, optimizer).attach(trainer)
    outer_log = record(trainer)
    trainer.add_event_handler(event, lambda _: inner.run(make_batches(2)))
    trainer.run(make_batches(3))
    assert outer_log == [event.value for event in INSIDE] * 3
    assert kind == "evaluator" or inner_log == [event.value for event in INSIDE] * 6


@pytest.mark.parametrize("skip_step", [False, True])
@pytest.mark.parametrize(
    "event", [Events.ITERATION_STARTED, *INSIDE, MonitorEvents.SPIKE_DETECTED, Events.ITERATION_COMPLETED]
)
def test_handler_that_detaches_in_the_middle_of_an_iteration(event, skip_step):
    model, optimizer, trainer = make_trainer(lr=1e-6)
    before = footprint(trainer, model, optimizer)
    rule = StaticThreshold(50.0)
    monitor = GradMonitor(model, optimizer, threshold=rule, on_spike="skip" if skip_step else None)
    other = GradMonitor(model, threshold=rule, prefix="other", flag="other_spike")
    monitor.attach(trainer)
    other_handle = other.attach(trainer)
    handle = trainer.add_event_handler(event(once=2), lambda _: monitor.detach())
    trainer.run(make_batches(4, spikes=[2]))
    assert not hasattr(trainer.state, "unhealthy_spike")
    assert float(trainer.state.metrics["other/norm"]) == approx(grad_norm(model))
    assert sorted(trainer.state.metrics) == sorted(other.metrics)
    assert int(other.metrics["other/spike_count"]) == 1
    handle.remove()
    other_handle.remove()
    picture = footprint(trainer, model, optimizer)
    assert picture == {**before, "state": picture["state"]}


def test_last_monitor_detached_inside_gradients_ready_leaves_nothing_at_once():
    model, optimizer, trainer = make_trainer()
    before = hooks_only(footprint(trainer, model, optimizer))
    monitor = GradMonitor(model, optimizer)
    monitor.attach(trainer)
    log = record(trainer)
    pictures = []

    @trainer.on(MonitorEvents.GRADIENTS_READY(once=2))
    def leave(_):
        monitor.detach()
        pictures.append(hooks_only(footprint(trainer, model, optimizer)))

    trainer.run(make_batches(4))
    assert pictures == [before]
    assert log == [*(event.value for event in INSIDE), "gradients_ready"]
    assert trainer.state.metrics == {}


def test_gradients_can_be_taken_in_handlers():
    """Handlers of Ignite's events may call autograd, although it is disabled in the middle of backward."""
    model, optimizer, trainer = make_trainer()
    taken = []

    def take(engine, *_):
        loss = loss_of(model, engine.state.batch)
        taken.append(all(gradient.any() for gradient in torch.autograd.grad(loss, list(model.parameters()))))

    GradMonitor(model, optimizer, threshold=1e-12, on_spike=take).attach(trainer)
    for event in (MonitorEvents.GRADIENTS_READY, MonitorEvents.SPIKE_DETECTED):
        trainer.add_event_handler(event, take)
    trainer.run(make_batches(1))
    assert len(taken) == 3


def test_a_layer_replaced_by_a_handler_that_comes_after_the_monitor():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []

    def replace():
        model[2] = nn.Linear(4, 4)
        optimizer.param_groups[0]["params"] = list(model.parameters())

    note = lambda engine: expected.append(grad_norm(model))  # noqa: E731
    trainer = Engine(make_step(model, optimizer, loss_of=square_loss, before_step=note))
    GradMonitor(model, optimizer).attach(trainer)
    updates = WeightUpdateHandler(model, optimizer, sample_size=None)
    updates.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=3), replace)
    result, with_ratio = [], []

    @trainer.on(Events.ITERATION_COMPLETED)
    def keep(engine):
        result.append(float(engine.state.metrics["grad/norm"]))
        with_ratio.append("monitor/update_ratio_max" in engine.state.metrics)

    trainer.run([torch.randn(3, 4) for _ in range(5)], max_epochs=1)
    assert result == pytest.approx(expected, rel=1e-5)
    assert with_ratio == [True] * 5


def test_the_end_of_a_run_lets_go_of_what_the_optimizer_held():
    """Also of what is no part of the model."""
    model, other = nn.Linear(4, 4), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), other], lr=0.1)

    trainer = Engine(make_step(model, optimizer, loss_of=square_loss))
    GradMonitor(model, optimizer).attach(trainer)
    trainer.run([torch.randn(3, 4)] * 2, max_epochs=1)
    gone = weakref.ref(other)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    del other
    assert gone() is None


@pytest.mark.parametrize("devices", [["cpu", "meta"], ["meta", "cpu"], ["cpu"], []])
def test_the_scale_is_read_on_a_device_of_the_gradients_other_than_the_cpu(devices):
    parameters = [nn.Parameter(torch.ones(1, device=device)) for device in devices]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    backward = GradientsReady(SimpleNamespace(parameters=parameters), set(), shared=False, in_step=False)
    scale = backward.scale(SimpleNamespace(scale=lambda tensor: 8.0 * tensor))
    assert scale.device.type == ("meta" if "meta" in devices else "cpu")


@pytest.mark.parametrize("is_added", [False, True])
@pytest.mark.parametrize("place", range(4))  # among the handlers of the source
def test_an_interrupt_while_a_monitor_is_attached_leaves_nothing(monkeypatch, place, is_added):
    """It comes before or after the addition of a handler, and the monitor can be attached afterwards."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(make_step(model, optimizer))
    before, added = footprint(engine, model, optimizer), []

    def add(*arguments):
        added.append(arguments)
        if len(added) - 1 != place:
            return Engine.add_event_handler(engine, *arguments)
        if is_added:
            Engine.add_event_handler(engine, *arguments)
        raise KeyboardInterrupt

    monitor = GradMonitor(model, optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "add_event_handler", add)
        with pytest.raises(KeyboardInterrupt):
            monitor.attach(engine)
    assert footprint(engine, model, optimizer) == before
    monitor.attach(engine)
    engine.run(make_batches(2))
    assert monitor.metrics["grad/stepped"] == 1.0


@pytest.mark.parametrize("is_global", [False, True])
@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook"])
def test_a_hook_of_a_forward_pass_that_detaches(kind, is_global):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(make_step(model, optimizer))
    handle = GradMonitor(model, optimizer).attach(engine)

    def hook(*_):
        if engine.state.iteration == 2:
            handle.remove()

    place = torch.nn.modules.module if is_global else model
    registered = getattr(place, f"register_{'module_' if is_global else ''}{kind}")(hook)
    engine.run(make_batches(3))
    registered.remove()
    other = make_model()
    Engine(make_step(other, torch.optim.SGD(other.parameters(), lr=0.1))).run(make_batches(3))
    assert_same(model.state_dict(), other.state_dict())


def test_handles_are_removed_after_an_interrupt():
    class Handle:
        is_interrupted = True

        def remove(self):
            if self.is_interrupted:
                self.is_interrupted = False
                raise KeyboardInterrupt
            removed.append(self)

    removed: list[Handle] = []
    first, last = handles = [Handle(), Handle()]
    first.is_interrupted = False
    with pytest.raises(KeyboardInterrupt):
        remove_all(handles)
    remove_all(handles)
    assert removed == [last, first]
