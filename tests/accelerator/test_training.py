"""Monitors in training on an accelerator: skip, clip, log, resume, and change nothing else."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import logging
import math

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import (
    ActivationHandler,
    CurvatureHandler,
    GradMonitor,
    HistogramHandler,
    Monitor,
    MonitorEvents,
    RCCHandler,
    SpectralNormHandler,
    StaticThreshold,
    WeightUpdateHandler,
)
from ignite_monitor.histograms.handler import EDGES
from tests._helpers import ListLogger, assert_same, same
from tests.accelerator._device import Device
from tests.accelerator._trainings import (
    MONITORS,
    Training,
    all_monitors,
    assert_alike,
    batches,
    copied,
    transformer,
    without_machine,
)

pytestmark = pytest.mark.cuda

SPIKE = 4  # 0-based


@pytest.mark.parametrize("kind", ["plain", "scaled"])
def test_training_is_untouched(kind, device):
    states = []
    for make in (lambda training: [], all_monitors):
        training = Training(device, kind)
        training.run(make(training), batches(3, device.name))
        states.append(training.state())
    assert_same(*states)


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


@pytest.mark.parametrize("listens", [False, True])
def test_a_source_that_is_not_looked_for_is_reported_once_values_are_read(listens, device):
    training = Training(device, model=transformer(1, 8, records=False))
    monitor = GradMonitor(training.model, training.optimizer, threshold=StaticThreshold(1e9))
    monitor.attach(training.trainer)
    if listens:
        training.trainer.add_event_handler(MonitorEvents.SPIKE_DETECTED, lambda engine: None)
    reports = []

    @training.trainer.on(Events.ITERATION_COMPLETED)
    def read(engine):
        monitor.on_host()
        reports.append([item.text for item in monitor.reports if item.kind == "nonfinite_not_located"])

    good, bad = batches(3, device.name), [(*item[:2], math.nan) for item in batches(2, device.name)]
    training.trainer.run([*good, *bad], max_epochs=1)
    assert [len(item) for item in reports[:3]] == [0, 0, 0]
    assert sum("if SPIKE_DETECTED has a handler" in text for text in reports[-1]) == (not listens)


def test_histograms_leave_no_edges_on_the_device(device):
    training = Training(device, model=transformer(1, 8, records=False))

    def edges():
        tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor)]
        return [item for item in tensors if item.device.type == device.name and item.shape == (len(EDGES),)]

    during = []
    with HistogramHandler(training.model).attach(training.trainer):
        training.optimizer.register_step_post_hook(lambda *_: during.append(len(edges())))
        training.trainer.run(batches(2, device.name), max_epochs=1)
    assert during == [1, 1]
    assert edges() == []


def test_curvature_is_read_after_the_run(device):
    model = nn.Linear(3, 1).to(device.name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = CurvatureHandler(model, optimizer, loss=lambda model, x: model(x).square().mean(), lanczos_steps=4)
    trainer = Engine(lambda engine, x: None)
    handler.attach(trainer, Events.ITERATION_STARTED)
    x = torch.randn(8, 3)
    trainer.run([x.to(device.name)], max_epochs=1)
    inputs = torch.cat([x, torch.ones(8, 1)], 1).double()
    expected = torch.linalg.eigvalsh(2 * inputs.T @ inputs / 8)[-1].item()
    assert handler.on_host()["curvature/hessian_max_eigenvalue"] == pytest.approx(expected, rel=1e-3)


def test_steps_skipped_before_values_are_read_are_not_those_of_the_last_norm(device, caplog):
    training = Training(device, fused=True, model=transformer(1, 8, records=False))
    data = batches(10, device.name, [3, 5])
    training.trainer.run(data[:1])  # makes the optimizer's state
    monitor = GradMonitor(training.model, training.optimizer, threshold=StaticThreshold(20.0), on_spike="skip")
    monitor.attach(training.trainer)
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), lambda _: monitor.on_host())
    with caplog.at_level(logging.INFO, "ignite_monitor"):
        training.trainer.run(data, max_epochs=1)
    text = "iteration 10: spikes since values were last read; optimizer step skipped (2 so far)."
    assert [line for line in caplog.messages if "so far" in line] == [f"GradMonitor (grad): {text}"]


def test_other_optimizers_read_the_flag_once(device):
    training = Training(device)
    monitor = GradMonitor(training.model, training.optimizer, threshold=StaticThreshold(20.0), on_spike="skip")
    monitor.attach(training.trainer)
    counts = [len(training.synchronizations([batch])) for batch in batches(SPIKE + 2, device.name, [SPIKE])]
    assert max(counts) <= 8  # at the end of each run the counts are read for its last log line
    assert float(monitor.metrics["grad/skipped_count"]) == 1


@pytest.mark.parametrize("loggers", [1, 3])
def test_one_transfer_for_all_monitors_and_loggers(loggers, device, caplog):
    """Values are logged in the middle of a run; flags are read at its end."""
    caplog.set_level(logging.ERROR)
    training = Training(device)
    writers, counts, counting = [ListLogger() for _ in range(loggers)], [], contextlib.ExitStack()
    training.trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda: counts.append(counting.enter_context(device.counted_synchronizations()))
    )
    for monitor in all_monitors(training):
        monitor.attach(training.trainer)
        for writer in writers:
            monitor.log_to(writer, training.trainer)
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED, counting.close)
    training.trainer.run(batches(4, device.name), max_epochs=1)
    assert [len(item) for item in counts] == [1] * 4, counts
    for writer in writers:
        assert all(isinstance(value, float) for _, row in writer.written for value in row.values())
        assert sum(len(row) for _, row in writer.written) > 400


@pytest.mark.parametrize("name", ["GradMonitor, RobustThreshold", "GradMonitor, loss", "WeightUpdateHandler"])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, device):
    rows = []
    for item in (None, dtype):
        training = Training(device, "scaled" if dtype == torch.float16 else "plain", dtype=item)
        rows.append(without_machine(training.run(all_monitors(training), batches(4, device.name))))
    for actual, expected in zip(*rows, strict=True):
        names = {name for name in (*actual, *expected) if "topk" not in name}
        assert all((name in actual) == (name in expected) for name in names)
        if "grad/norm" in actual:
            assert actual["grad/norm"] == pytest.approx(expected["grad/norm"], rel=0.05, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_low_precision(dtype, device):
    """Weights that do not move differ by rounding alone."""
    rows = []
    for item in (Device("cpu"), device):
        torch.manual_seed(0)
        training = Training(item, model=transformer(records=False).to(dtype), lr=0.0)
        model, optimizer = training.model, training.optimizer
        monitors = [
            ActivationHandler(model, activations=True, parameters=True, gradients=True),
            SpectralNormHandler(model),
            RCCHandler(model),
            WeightUpdateHandler(model, optimizer, sample_size=None),
        ]
        result = training.run(monitors, batches(2, item.name))
        rows.append([{name: value for name, value in row.items() if "topk" not in name} for row in result])
    assert_alike(rows[1], rows[0], 0.1, 1e-2)


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
