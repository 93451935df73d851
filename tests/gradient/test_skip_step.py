"""on_spike="skip": a run in which a spike is skipped is bitwise the run that leaves its batch out."""

from __future__ import annotations

import math

import pytest
import torch
from ignite.engine import Engine, create_supervised_trainer
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import register_optimizer_step_post_hook

from ignite_monitor import (
    ActivationHandler,
    GradMonitor,
    SpectralNormHandler,
    StaticThreshold,
    WeightUpdateHandler,
)
from ignite_monitor.events.step_owner import skips_on_device
from tests._helpers import Recorder, assert_same, make_step, mlp_batches, moves_of, mse_loss, train, training_state
from tests._models import make_mlp
from tests._optimizers import EVERY_FOREIGN, FEW, OPTIMIZERS, build
from tests.gradient._skipped import LIMIT, compare


@pytest.mark.parametrize("name", [*OPTIMIZERS, *EVERY_FOREIGN])
@pytest.mark.parametrize("spikes", [(7,), (1,), (1, 2, 6, 7, 8)])
def test_a_skipped_spike_leaves_no_trace_in_parameters_gradients_and_optimizer_state(name, spikes):
    compare(name, spikes, lambda model, optimizer, _: make_step(model, optimizer))


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("spikes", [(7,), (1, 2)])
def test_non_finite_gradients_are_skipped(name, value, spikes):
    compare(name, spikes, lambda model, optimizer, _: make_step(model, optimizer), factor=value)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("form", [{"zero_at": "end"}, {"clip": 0.5}, {"closure": True}])
@pytest.mark.parametrize("spikes", [(7,), (1, 5)])
def test_any_form_of_train_step(name, form, spikes):
    compare(name, spikes, lambda model, optimizer, _: make_step(model, optimizer, **form))


@pytest.mark.parametrize("name", [*FEW, *EVERY_FOREIGN])
@pytest.mark.parametrize("form", [{}, {"zero_at": "end"}, {"clip": 0.5}])
@pytest.mark.parametrize("spikes", [(7,), (1, 5)])
def test_with_a_scaler(name, form, spikes):
    compare(
        name,
        spikes,
        lambda model, optimizer, scaler: make_step(model, optimizer, scaler=scaler, **form),
        scaler=lambda: GradScaler("cpu", init_scale=2.0**10),
    )


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("spikes", [(7,), (1, 5)])
def test_in_create_supervised_trainer(name, spikes):
    compare(name, spikes, lambda *both: create_supervised_trainer(*both[:2], nn.functional.mse_loss)._process_function)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("spikes", [(7,), (1, 5)])
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_step_that_was_kept_from_before_is_skipped_too(name, spikes, with_closure):
    """As the optimizers of accelerate keep it, for a GradScaler."""

    def step_of(model, optimizer, _):
        kept = optimizer.step

        def step(engine, batch):
            def closure():
                optimizer.zero_grad()
                loss = mse_loss(model, batch)
                loss.backward()
                return loss

            if with_closure:
                return kept(closure).item()
            loss = closure()
            kept()
            return loss.item()

        return step

    compare(name, spikes, step_of)


def test_accelerates_optimizer_with_a_scaler():
    optimizers = pytest.importorskip("accelerate.optimizer")
    pytest.importorskip("accelerate").Accelerator(cpu=True)

    def step_of(model, optimizer, scaler):
        prepared = optimizers.AcceleratedOptimizer(optimizer, device_placement=False, scaler=scaler)

        def step(engine, batch):
            prepared.zero_grad()
            loss = mse_loss(model, batch)
            scaler.scale(loss).backward()
            prepared.step()
            vars(optimizer).pop("step")  # which it leaves there
            return loss.item()

        return step

    compare("SGD momentum", (3, 7), step_of, scaler=lambda: GradScaler("cpu", init_scale=2.0**10))


@pytest.mark.parametrize("name", ["SGD momentum", "fused SGD momentum", "MuonLike"])
def test_monitors_of_two_engines_on_one_optimizer(name):
    def run(batches, monitored):
        model, optimizer = build(name)
        inner = Engine(make_step(model, optimizer))
        outer = Engine(lambda engine, batch: inner.run([batch], max_epochs=1).output)
        for engine in [inner, outer] * monitored:
            GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip").attach(engine)
        outer.run(batches, max_epochs=1)
        assert not hasattr(optimizer, "found_inf")
        return training_state(model, optimizer)

    batches = mlp_batches(8, [3])
    assert_same(run(batches, True), run([*batches[:2], *batches[3:]], False))


def test_gradients_that_a_hook_makes_after_a_skipped_step_stay():
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = Engine(make_step(model, optimizer))
    GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip").attach(engine)

    @optimizer.register_step_post_hook
    def replace(*_):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)

    engine.run(mlp_batches(3, [3]), max_epochs=1)
    assert engine.state.metrics["grad/skipped_count"] == 1
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "closure"), [*((name, closure) for name in FEW for closure in (False, True)), ("NeedsAll", False)]
)
def test_the_hooks_of_a_skipped_step_see_what_those_of_another_see(name, closure):
    model, optimizer = build(name)
    seen = []

    def look(given, args, kwargs):
        groups = [[id(parameter) for parameter in group["params"]] for group in args[0].param_groups]
        seen.append((given is args[0] is optimizer, groups, len(args), [*kwargs]))

    optimizer.register_step_pre_hook(lambda _, args, kwargs: (args, {**kwargs} if args[1:] else {"closure": None}))
    optimizer.register_step_post_hook(look)
    with_hooks = register_optimizer_step_post_hook(look)
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip")
    recorder = train(make_step(model, optimizer, closure=closure), mlp_batches(3, [2]), monitor)
    with_hooks.remove()
    assert recorder.of("grad/stepped") == [1.0, 0.0, 1.0]
    assert len(seen) == 6
    assert seen == seen[:1] * 6
    assert seen[0][0]


@pytest.mark.parametrize("name", [*FEW, "NeedsAll"])
def test_the_gradients_are_still_there_after_a_skipped_step(name):
    def run(factor):
        model, optimizer = build(name)
        GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip").attach(
            engine := Engine(make_step(model, optimizer))
        )
        engine.run(mlp_batches(3, [3], factor), max_epochs=1)
        return model, mlp_batches(3, [3], factor)[2]

    model, batch = run(1e3)
    result = [parameter.grad for parameter in model.parameters()]
    assert_same(result, list(torch.autograd.grad(mse_loss(model, batch), list(model.parameters()))))


def test_gradients_set_by_hand_are_skipped():
    for name in FEW:
        compare(name, (1, 6), lambda model, optimizer, _: make_step(model, optimizer, by_hand=True))


@pytest.mark.parametrize("name", FEW)
def test_parameters_that_the_optimizer_holds_outside_the_model_are_skipped_too(name):
    def run(batches, monitored):
        model, extra = make_mlp(), nn.Parameter(torch.ones(2))
        optimizer = OPTIMIZERS[name]([*model.parameters(), extra])
        step = make_step(
            model, optimizer, loss_of=lambda m, batch: nn.functional.mse_loss(m(batch[0]) * extra, batch[1])
        )
        monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip")
        train(step, batches, *[monitor] * monitored)
        return training_state(model, optimizer), extra.detach(), extra.grad

    batches = mlp_batches(10, [1, 6])
    assert_same(run(batches, True), run([batch for i, batch in enumerate(batches, 1) if i not in (1, 6)], False))


@pytest.mark.parametrize("name", FEW)
def test_a_parameter_whose_first_gradient_comes_with_a_spike(name):
    def run(batches, monitored):
        model, late = make_mlp(), nn.Linear(2, 2)
        late.load_state_dict({"weight": torch.eye(2), "bias": torch.zeros(2)})
        whole = nn.ModuleList([model, late])
        optimizer = OPTIMIZERS[name](whole.parameters())

        def loss_with_late(_, batch):
            outputs = model(batch[0])
            return nn.functional.mse_loss(late(outputs) if batch[1].abs().max() > 100 else outputs, batch[1])

        step = make_step(whole, optimizer, loss_of=loss_with_late)
        monitor = GradMonitor(whole, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip")
        train(step, batches, *[monitor] * monitored)
        return training_state(whole, optimizer)["model"], optimizer.state_dict()

    batches = mlp_batches(8, [5])
    assert_same(run(batches, True), run([batch for i, batch in enumerate(batches, 1) if i != 5], False))


def test_the_other_optimizer_of_the_train_step_is_not_skipped():
    model = make_mlp()
    watched, free = (torch.optim.SGD(model[i].parameters(), lr=1e-4) for i in (0, 2))
    step, moves = moves_of(model, make_step(model, [watched, free]))
    train(step, mlp_batches(3, [3]), GradMonitor(model, watched, threshold=StaticThreshold(50.0), on_spike="skip"))
    assert [move > 0 for move in moves[2].values()] == [False, False, True, True]


def test_at_most_max_consecutive_spikes_steps_are_lost_in_a_row():
    model, optimizer = build("AdamW")
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip", max_consecutive_spikes=3)
    recorder = train(make_step(model, optimizer), mlp_batches(20, range(6, 21)), monitor)
    assert recorder.of("grad/skipped_count")[-1] == 3
    assert float(optimizer.state_dict()["state"][0]["step"]) == 17


def test_iterations_that_are_not_monitored_are_not_skipped():
    model, optimizer = build("AdamW")
    engine = Engine(make_step(model, optimizer))
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip")
    recorder = Recorder(engine)
    with monitor.attach(engine):
        engine.run(mlp_batches(4, [2]), max_epochs=1)
    engine.run(mlp_batches(4, [2]), max_epochs=1)
    assert recorder.of("grad/skipped_count")[:4] == [0, 1, 1, 1]
    assert float(optimizer.state_dict()["state"][0]["step"]) == 3 + 4


@pytest.mark.parametrize("name", FEW)
def test_what_is_published_of_a_skipped_step_is_the_same_in_any_order_of_attaching(name):
    def published(order):
        model, optimizer = build(name)
        monitors = {
            "grad": GradMonitor(model, optimizer, threshold=StaticThreshold(LIMIT), on_spike="skip"),
            "update": WeightUpdateHandler(model, optimizer),
            "activation": ActivationHandler(model, gradients={"norm": torch.linalg.vector_norm}),
            "spectral": SpectralNormHandler(model, updates=True),
        }
        engine = Engine(make_step(model, optimizer, clip=0.5))
        for monitor in sorted(monitors, reverse=order == "last"):
            monitors[monitor].attach(engine)
        recorder = Recorder(engine)
        engine.run(mlp_batches(8, [6]), max_epochs=1)
        return recorder.metrics

    first, last = published("first"), published("last")
    for one, other in zip(first, last, strict=True):
        assert one == pytest.approx(other, rel=0, abs=0, nan_ok=True)
    assert "gradient/0.weight/norm" in first[5]
    assert math.isnan(first[5].get("monitor/update_ratio_max", math.nan))


@pytest.mark.parametrize(
    ("name", "first"), [("fused SGD", True), ("fused SGD momentum", False), ("fused AdamW", False)]
)
def test_steps_of_fused_optimizers_are_skipped_on_the_device_once_they_have_their_state(name, first):
    """SGD without momentum has none."""
    model, optimizer = build(name)
    seen = []
    engine = Engine(make_step(model, optimizer, before_step=lambda _: seen.append(skips_on_device(optimizer))))
    engine.run(mlp_batches(3, []))
    assert seen == [first, True, True]
