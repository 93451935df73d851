"""Monitors in training on an accelerator: skip, clip, roll back, record, log, resume, and change nothing else."""

from __future__ import annotations

import io
import itertools
import logging
import math

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn
from torch.utils._pytree import tree_leaves

from ignite_monitor import (
    GradMonitor,
    Monitor,
    MonitorEvents,
    RollbackHandler,
    SpikeRecorder,
    StaticThreshold,
    load_spike,
)
from tests._helpers import assert_same, same
from tests.accelerator._trainings import (
    MONITORS,
    Training,
    assert_alike,
    batches,
    copied,
    transformer,
)

pytestmark = pytest.mark.cuda

SPIKE = 4  # 0-based


@pytest.mark.parametrize("kind", ["plain", "scaled"])
def test_a_fused_optimizer_skips_on_the_device(kind, device):
    training = Training(device, kind, fused=True)
    data = batches(SPIKE + 3, device.name, [SPIKE])
    monitor = GradMonitor(
        training.model, training.optimizer, scaler=training.scaler, threshold=StaticThreshold(20.0), on_spike="skip"
    )
    weights = []
    training.trainer.run(data[:1])  # the optimizer's first step makes its state, and is looked at on the host
    training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: weights.append(copied(training.model.state_dict(), device.name))
    )
    rows = training.run([monitor], data)
    assert rows[SPIKE]["grad/spike"] == 1.0
    assert rows[-1]["grad/skipped_count"] == 1
    moved = [not same(*pair) for pair in itertools.pairwise(weights)]
    overflow = [] if kind == "plain" else [2]  # the scaler's own, of the fourth iteration
    assert [place for place, item in enumerate(moved) if not item] == [*overflow, SPIKE - 1]


@pytest.mark.parametrize("factor", [100.0, math.nan])
def test_a_step_that_the_device_skips_leaves_no_trace_in_running_statistics(factor, device):
    data = batches(SPIKE + 3, device.name)
    bad = (*data[SPIKE][:2], factor)
    states = []
    for batch in (bad, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 64))
        training = Training(device, fused=True, model=model)
        training.trainer.run(data[:1])  # makes the optimizer's state
        monitor = GradMonitor(model, training.optimizer, threshold=StaticThreshold(20.0), on_spike="skip")
        training.run([monitor], [*data[:SPIKE], *([batch] if batch else []), *data[SPIKE:]])
        assert float(monitor.metrics["grad/skipped_count"]) == (batch is not None)
        states.append(training.state())
    assert_same(*states)


def test_steps_skipped_before_values_are_read_are_not_those_of_the_last_norm(device, caplog):
    training = Training(device, fused=True, model=transformer(1, 8, records=False))
    data = batches(10, device.name, [3, 5])
    training.trainer.run(data[:1])  # makes the optimizer's state
    monitor = GradMonitor(training.model, training.optimizer, threshold=StaticThreshold(20.0), on_spike="skip")
    monitor.attach(training.trainer)
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), lambda _: monitor.on_host())
    with caplog.at_level(logging.INFO, "ignite_monitor"):
        training.trainer.run(data, max_epochs=1)
    assert float(monitor.metrics["grad/skipped_count"]) == 2
    assert not [line for line in caplog.messages if "skipped" in line]


def test_other_optimizers_read_the_flag_once(device):
    training = Training(device)
    monitor = GradMonitor(training.model, training.optimizer, threshold=StaticThreshold(20.0), on_spike="skip")
    monitor.attach(training.trainer)
    counts = [len(training.synchronizations([batch])) for batch in batches(SPIKE + 2, device.name, [SPIKE])]
    assert max(counts) <= 8  # at the end of each run the counts are read for its last log line
    assert float(monitor.metrics["grad/skipped_count"]) == 1


@pytest.mark.parametrize("name", ["GradMonitor, RobustThreshold", "GradMonitor, clip", "WeightUpdateHandler"])
def test_a_resumed_run_publishes_what_the_whole_one_does(name, device):
    data = batches(7, device.name, [5])
    whole = Training(device)
    rows = whole.run([MONITORS[name](whole.model, whole.optimizer, None)], data)
    first = Training(device)
    monitor = MONITORS[name](first.model, first.optimizer, None)
    first.run([monitor], data[:4])
    file = io.BytesIO()
    torch.save(copied([item.state_dict() for item in (first.model, first.optimizer, monitor)], "cpu"), file)
    for place in ("cpu", device.name):  # where the state is loaded to
        file.seek(0)
        second = Training(device)
        resumed = MONITORS[name](second.model, second.optimizer, None)
        states = copied(torch.load(file, weights_only=True), place)
        for item, state in zip((second.model, second.optimizer, resumed), states, strict=True):
            item.load_state_dict(state)
        assert_alike(second.run([resumed], data[4:]), rows[4:], 1e-5)


def test_whether_a_step_was_made_is_on_the_device_of_the_parameters(device):
    """A GradScaler may keep its scale, and ``found_inf``, on another accelerator than the first parameter's."""

    class Steps(Monitor):
        def __init__(self, model):
            super().__init__(model, "steps")
            self.made = []

        def handlers(self):
            return [(MonitorEvents.OPTIMIZER_STEP_COMPLETED, self.completed)]

        def completed(self, engine, step):
            self.made.append(step.made)

    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, fused=True)

    def train_step(engine, overflows):
        optimizer.found_inf = torch.tensor(float(overflows), device=device.name)
        optimizer.zero_grad()
        model(torch.ones(4, 3)).mean().backward()
        optimizer.step()

    trainer, steps = Engine(train_step), Steps(model)
    with steps.attach(trainer):
        trainer.run([0, 0, 1])
    assert [(made.device.type, bool(made)) for made in steps.made] == [("cpu", True), ("cpu", True), ("cpu", False)]


# Rollback and records of spikes

COUNT = 12


@pytest.mark.parametrize("monitored", [False, True])
def test_one_synchronization_per_iteration_and_one_per_snapshot(monitored, device):
    training = Training(device)
    if monitored:
        GradMonitor(training.model, training.optimizer).attach(training.trainer)
    rollback = RollbackHandler({"model": training.model, "optimizer": training.optimizer}, every=5)
    rollback.attach(training.trainer)
    counts, snapshots = [], 3  # before the iterations 1, 6 and 11
    training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda _: counts.append(len(rollback._snapshots.all))
    )
    synchronizations = training.synchronizations(batches(COUNT, device.name))
    assert len(synchronizations) <= COUNT + snapshots + 8, synchronizations  # counts are read at the end
    assert counts[-1] == snapshots
    alone = Training(device)
    alone.trainer.run(batches(COUNT, device.name), max_epochs=1)
    assert same(training.state(), alone.state())


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("kind", ["plain", "accumulated"])
def test_it_rolls_back_to_the_last_bit(kind, where, device):
    training = Training(device, kind)
    rollback = RollbackHandler({"model": training.model, "optimizer": training.optimizer}, every=4, where=where)
    rollback.attach(training.trainer)
    before, after, kept = {}, [], set()

    def note(engine):
        after.append(training.state())
        leaves = tree_leaves(rollback._snapshots.all[-1]["state"]["model"])
        kept.update(item.device.type for item in leaves if isinstance(item, torch.Tensor))

    training.trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda e: before.update({e.state.iteration - 1: training.state()})
    )
    training.trainer.add_event_handler(Events.ITERATION_STARTED(once=7), lambda _: rollback.request("to see"))
    training.trainer.add_event_handler(MonitorEvents.ROLLED_BACK, note)
    training.trainer.run(batches(9, device.name), max_epochs=1)
    assert same(after, [before[4]])
    assert kept == {"cpu" if where == "host" else torch.device(device.name).type}


def test_a_recorder_synchronizes_for_the_detection_alone(device, tmp_path):
    training = Training(device)
    monitor = GradMonitor(training.model, training.optimizer, threshold=StaticThreshold(20.0))
    monitor.attach(training.trainer)
    recorder = SpikeRecorder(monitor, tmp_path)
    recorder.attach(training.trainer)
    synchronizations = training.synchronizations(batches(COUNT, device.name))
    assert len(synchronizations) <= COUNT + 8  # counts are read at the end
    data = batches(4, device.name, [2])
    training.trainer.state.max_epochs = None
    training.trainer.run(data, max_epochs=1)
    [path] = tmp_path.iterdir()
    spike = load_spike(path)
    assert same(spike.batch, copied(data[2], "cpu"))
