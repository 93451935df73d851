"""Compare a run in which steps are skipped with the run that leaves their batches out."""

from __future__ import annotations

import torch

from ignite_monitor import GradMonitor, StaticThreshold
from tests._helpers import assert_same, mlp_batches, train, training_state
from tests._optimizers import build

LIMIT = 60.0


def attributes(optimizer):
    """Everything else that an optimizer keeps, as far as it can be compared."""
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, (int, float, str, bool, torch.Tensor))
    }


def compare(name, spikes, step_of, count=12, factor=1e3, limit=LIMIT, scaler=None, threshold=None):
    """Train with the spikes and a monitor, and without either; both end in the same state."""
    batches = mlp_batches(count, spikes, factor)
    model, optimizer = build(name)
    monitor = GradMonitor(
        model, optimizer, threshold=threshold or StaticThreshold(limit), on_spike="skip", scaler=scaler and scaler()
    )
    recorder = train(step_of(model, optimizer, monitor.scaler), batches, monitor)
    skipped = [0.0, *recorder.of("grad/skipped_count")]
    assert [i for i in range(1, count + 1) if skipped[i] > skipped[i - 1]] == list(spikes)
    assert recorder.of("grad/spike_count")[-1] == skipped[-1] == len(spikes)
    assert [i for i, flag in enumerate(recorder.flags, 1) if flag] == list(spikes)

    other, other_optimizer = build(name)
    kept = [batch for i, batch in enumerate(batches, 1) if i not in spikes]
    train(step_of(other, other_optimizer, scaler and scaler()), kept)
    assert_same(training_state(model, optimizer), training_state(other, other_optimizer))
    assert_same(attributes(optimizer), attributes(other_optimizer))
    return recorder
