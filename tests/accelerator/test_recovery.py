"""Rollback and records of spikes on an accelerator: how often they synchronize."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Events
from torch.utils._pytree import tree_leaves

from ignite_monitor import GradMonitor, MonitorEvents, RollbackHandler, SpikeRecorder, StaticThreshold, load_spike
from tests._helpers import same
from tests.accelerator._trainings import Training, batches, copied

pytestmark = pytest.mark.cuda

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
