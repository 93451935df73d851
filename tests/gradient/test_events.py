"""Events and log messages of GradMonitor: spikes, resets, and a missing optimizer step."""

from __future__ import annotations

import logging

import pytest
import torch
from ignite.engine import Engine, Events

from ignite_monitor import GradMonitor, MeanStdThreshold, MonitorEvents, StaticThreshold
from tests._helpers import grad_norm, make_step, mlp_batches, mse_loss
from tests._models import make_mlp


def trainer_of(model, optimizer, norms):
    return Engine(make_step(model, optimizer, after_backward=lambda _: norms.append(grad_norm(model))))


@pytest.mark.parametrize("own", [False, True])
def test_a_spike_is_in_the_state_while_its_handlers_run(own):
    model, norms, reported, called = make_mlp(), [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    trainer = trainer_of(model, optimizer, norms)
    if own:
        trainer.state.spike = "mine"
    monitor = GradMonitor(
        model, optimizer, threshold=StaticThreshold(50.0), on_spike=lambda engine, _: called.append(engine.state.spike)
    )
    monitor.attach(trainer)

    @trainer.on(MonitorEvents.SPIKE_DETECTED)
    def tell(engine):
        reported.append(engine.state.spike)

    trainer.run(mlp_batches(6, spikes=[4]))
    assert called == reported == [(monitor, "grad/norm", pytest.approx(norms[3], rel=1e-5), 50.0, {}, None)]
    assert reported[0].monitor is monitor
    assert (reported[0].name, reported[0].threshold, reported[0].culprits) == ("grad/norm", 50.0, {})
    assert getattr(trainer.state, "spike", None) == ("mine" if own else None)
    assert hasattr(trainer.state, "spike") is own


def test_a_regime_change_is_reported_once_at_the_reset(caplog):
    model, norms, reported, resets = make_mlp(), [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    trainer = trainer_of(model, optimizer, norms)
    monitor = GradMonitor(model, optimizer, threshold=MeanStdThreshold(k=10.0, warmup=5), max_consecutive_spikes=4)
    monitor.attach(trainer)
    trainer.add_event_handler(MonitorEvents.SPIKE_DETECTED, lambda engine: reported.append(engine.state.iteration))

    @trainer.on(MonitorEvents.THRESHOLD_RESET)
    def level(engine):
        resets.append((engine.state.iteration, engine.state.spike, engine.state.metrics["grad/spike_count"]))

    with caplog.at_level(logging.WARNING):
        trainer.run(mlp_batches(30, spikes=range(11, 31)))
    assert reported == [11, 12, 13, 14]
    [(iteration, spike, count)] = resets
    assert (iteration, spike.monitor, spike.name, count) == (14, monitor, "grad/norm", 4.0)
    assert spike.value == pytest.approx(norms[13], rel=1e-5)
    assert spike.value > spike.threshold > max(norms[:10])
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("every", "leaves_out"), [(3, False), (1, True)])
def test_a_reset_is_reported_once_while_gradients_accumulate_or_are_discarded(every, leaves_out, caplog):
    model, resets = make_mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    step = make_step(
        model, optimizer, every=every, leave_out=lambda engine: leaves_out and engine.state.unhealthy_spike
    )
    monitor = GradMonitor(model, optimizer, threshold=MeanStdThreshold(k=20.0, warmup=5), max_consecutive_spikes=4)
    monitor.attach(trainer := Engine(step))
    trainer.add_event_handler(MonitorEvents.THRESHOLD_RESET, lambda engine: resets.append(engine.state.iteration))
    with caplog.at_level(logging.WARNING):
        trainer.run(mlp_batches(40 * every, spikes=range(20 * every + 1, 40 * every + 1), factor=1e4))
    # A discarded gradient is known to be one at the next backward.
    assert resets == [24 * every + leaves_out]
    assert len([text for text in caplog.messages if "regime change" in text]) == 1
    assert monitor.counts().tolist()[2] == 1.0


def test_a_regime_change_of_one_tensor_is_reported_too(caplog):
    model, now, resets = make_mlp(), [0], []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    model[0].bias.register_hook(lambda gradient: gradient * (100 if now[0] > 40 else 1))

    trainer = Engine(make_step(model, optimizer))
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda engine: now.__setitem__(0, engine.state.iteration))
    monitor = GradMonitor(
        model, optimizer, threshold=StaticThreshold(1e9), max_consecutive_spikes=4, per_parameter=True
    )
    monitor.attach(trainer)
    trainer.add_event_handler(
        MonitorEvents.THRESHOLD_RESET, lambda engine: resets.append((engine.state.iteration, engine.state.spike))
    )
    with caplog.at_level(logging.WARNING):
        trainer.run(mlp_batches(60))
    assert [iteration for iteration, _ in resets] == [44]
    [(_, spike)] = resets
    assert spike.name == "grad/norm"
    assert [*spike.culprits] == ["0.bias"]
    assert len([record for record in caplog.records if "regime change" in record.getMessage()]) == 1
    # Spikes, norms that are not finite, fresh starts: what a RollbackHandler goes by.
    assert monitor.counts().tolist() == [4.0, 0.0, 1.0]
    again = GradMonitor(model, optimizer, threshold=StaticThreshold(1e9), max_consecutive_spikes=4, per_parameter=True)
    again.load_state_dict(monitor.state_dict())
    assert again.counts().tolist() == [4.0, 0.0, 1.0]


def hint(caplog):
    return [record.getMessage() for record in caplog.records if "made no step" in record.getMessage()]


@pytest.mark.parametrize("how", ["steps of another optimizer", "no steps", "a long accumulation"])
def test_runs_without_steps_and_long_accumulations_are_no_fault(how, caplog):
    model, published = make_mlp(), []
    own, other = (torch.optim.SGD(model.parameters(), lr=1e-6) for _ in range(2))
    stepping, every = other if "another" in how else own, 64 if "long" in how else 1
    trainer = Engine(make_step(model, stepping, every=every, leave_out=lambda engine: how == "no steps"))
    GradMonitor(model, own).attach(trainer)
    trainer.add_event_handler(
        MonitorEvents.TRAIN_STEP_COMPLETED, lambda engine: published.append(dict(engine.state.metrics))
    )
    with caplog.at_level(logging.WARNING):
        trainer.run(mlp_batches(130))
    assert hint(caplog) == []
    assert published[0] == {"grad/stepped": 0.0}


@pytest.mark.parametrize(("on_spike", "action"), [("skip", "optimizer step skipped"), ("clip", "gradient scaled")])
def test_the_first_skip_or_clip_is_reported_with_its_spike(on_spike, action, caplog):
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    trainer = trainer_of(model, optimizer, norms := [])
    monitor = GradMonitor(model, optimizer, threshold=20.0, on_spike=on_spike, max_consecutive_spikes=1000)
    monitor.attach(trainer)
    with caplog.at_level(logging.INFO, "ignite_monitor"):
        trainer.run(mlp_batches(30, spikes=[7, 9], factor=1e3))
    [report] = monitor.reports
    assert (report.iteration, report.severity) == (7, "note")
    text = f"gradient norm {norms[6]:.3g}, {norms[6] / 20.0:.3g} x its threshold; {action}"
    assert report.text.startswith(text)
    [line] = caplog.messages
    assert line.startswith(f"GradMonitor (grad): iteration 7: {text}")
    name = "skipped" if on_spike == "skip" else "clipped"
    assert float(monitor.state_dict()[f"{name}_count"]) == 2


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_return_at_a_spike_while_gradients_accumulate_is_warned_of_whenever_it_stops_training(with_optimizer, caplog):
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step(engine, batch):
        (mse_loss(model, batch) / 4).backward()
        if engine.state.unhealthy_spike and engine.state.iteration != 160:
            return
        if engine.state.iteration % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()

    trainer = Engine(step)
    monitor = GradMonitor(model, optimizer if with_optimizer else None, threshold=50.0)
    monitor.attach(trainer)
    with caplog.at_level(logging.WARNING):
        trainer.run(mlp_batches(300, spikes=[50, 200], factor=1e4))
    texts = hint(caplog)
    assert [text.split(":")[1].strip() for text in texts] == ["iteration 99", "iteration 249"]
    assert all("zero_grad() before that return" in text for text in texts)
