"""The log line at the end of a run."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from ignite.engine import Engine, Events, create_supervised_trainer

from ignite_monitor import GradMonitor, RollbackHandler, SpikeMonitor
from tests._helpers import mlp_batches
from tests._models import make_mlp


def lines(caplog):
    return [record.message for record in caplog.records if "end of run" in record.message]


def make():
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=30, gamma=0.1)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: scheduler.step())
    return model, optimizer, trainer


def run(trainer, caplog, spikes=(40, 50), count=60):
    caplog.clear()
    with caplog.at_level(logging.INFO):
        trainer.run(mlp_batches(count, spikes, factor=100.0))
    return lines(caplog)


@pytest.mark.parametrize(
    ("on_spike", "what"),
    [
        (None, "60 optimizer steps in monitored iterations, 2 spikes, 0 skipped"),
        ("skip", "58 optimizer steps in monitored iterations, 2 spikes, 2 skipped"),
        ("clip", "60 optimizer steps in monitored iterations, 2 spikes, 0 skipped, 2 clipped"),
    ],
)
def test_grad_monitor(on_spike, what, caplog):
    model, optimizer, trainer = make()
    GradMonitor(model, optimizer, on_spike=on_spike).attach(trainer)
    assert run(trainer, caplog) == [f"GradMonitor (grad): end of run: {what}."]
    assert ", 1 spike, " in run(trainer, caplog, spikes=(40,))[0]


def test_every_monitor_that_counts_logs_a_line(caplog):
    model, optimizer, trainer = make()
    rollback = RollbackHandler({"model": model, "optimizer": optimizer}, loss=lambda engine: None)
    for monitor in (rollback, GradMonitor(model, optimizer, on_spike="skip"), SpikeMonitor(lambda e: e.state.output)):
        monitor.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=25), lambda: rollback.request("a test"))
    assert run(trainer, caplog) == [
        "RollbackHandler (rollback): end of run: 1 rolled back, 0 discarded.",
        "GradMonitor (grad): end of run: 58 optimizer steps in monitored iterations, 2 spikes, 2 skipped.",
    ]


def test_rollback_handler_alone_counts_every_run_anew(caplog):
    model, optimizer, trainer = make()
    rollback = RollbackHandler({"model": model, "optimizer": optimizer}, loss=lambda engine: None)
    rollback.attach(trainer)
    handler = trainer.add_event_handler(Events.ITERATION_STARTED(once=25), lambda: rollback.request("a test"))
    assert run(trainer, caplog, ()) == ["RollbackHandler (rollback): end of run: 1 rolled back, 0 discarded."]
    handler.remove()
    assert run(trainer, caplog, (), 20) == []


def test_monitors_of_other_iterations_count_their_own(caplog):
    model, optimizer, trainer = make()
    for every in (1, 10):
        monitor = GradMonitor(model, optimizer, on_spike="skip", prefix=f"every_{every}", flag=f"flag_{every}")
        monitor.attach(trainer, Events.ITERATION_STARTED(every=every))
    first, second = run(trainer, caplog, (40,))
    assert "59 optimizer steps in monitored iterations, 1 spike, 1 skipped" in first
    assert "5 optimizer steps in monitored iterations, 0 spikes, 0 skipped" in second


def test_a_state_that_is_loaded_in_a_run_changes_no_count_of_the_run(caplog):
    model, optimizer, trainer = make()
    monitor = GradMonitor(model, optimizer, on_spike="skip")
    rollback = RollbackHandler({"model": model, "optimizer": optimizer}, loss=lambda engine: None)
    monitor.attach(trainer)
    rollback.attach(trainer)
    states = [(item, copy.deepcopy(item.state_dict())) for item in (monitor, rollback)]
    request = trainer.add_event_handler(Events.ITERATION_STARTED(once=25), lambda: rollback.request("a test"))
    run(trainer, caplog)
    request.remove()
    trainer.add_event_handler(Events.ITERATION_STARTED(once=80), lambda: [a.load_state_dict(b) for a, b in states])
    first, *rest = run(trainer, caplog, spikes=(45,))
    assert "59 optimizer steps in monitored iterations, 1 spike, 1 skipped" in first
    assert rest == []


def test_no_line_without_a_step_or_after_an_error(caplog):
    model = make_mlp()
    trainer = Engine(lambda engine, batch: None)
    GradMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1)).attach(trainer)
    assert run(trainer, caplog) == []
    model, optimizer, trainer = make()
    GradMonitor(model, optimizer).attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=5), lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(trainer, caplog)
    assert lines(caplog) == []
    trainer.state.epoch_length = trainer.state.max_epochs = None
    [line] = run(trainer, caplog, count=4)  # of the next run alone
    assert "4 optimizer steps" in line
