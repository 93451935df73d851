"""An error of a monitor ends its measuring, and not the training."""

import logging
import signal
from contextlib import contextmanager

import pytest
import torch
from ignite.engine import Engine, Events
from torch import nn

from ignite_monitor import (
    ActivationHandler,
    GradientNoiseScaleHandler,
    GradMonitor,
    HistogramHandler,
    Monitor,
    MonitorEvents,
    RollbackHandler,
    RoutingHandler,
    StaticThreshold,
    StepStatsHandler,
)
from ignite_monitor.events.source import EventSource
from ignite_monitor.histograms import handler as histograms
from ignite_monitor.routing import decisions
from tests._helpers import assert_same, make_step, mlp_batches

PLACES = (
    "before_train_step",
    "train_step_contexts",
    "context",
    "context left",
    "GRADIENTS_READY",
    "OPTIMIZER_STEP_STARTED",
    "OPTIMIZER_STEP_COMPLETED",
    "TRAIN_STEP_COMPLETED",
    "ITERATION_COMPLETED",
    "on_run_end",
)


class Failing(Monitor):
    """A monitor with an error at one place of the second iteration; it publishes the number of iterations."""

    def __init__(self, model, place):
        super().__init__(model, "failing")
        self.place, self.count = place, 0

    def fails_at(self, place):
        if place == self.place and self.count == 2:
            raise RuntimeError(f"no memory\nin {place}")

    def handlers(self):
        events = (MonitorEvents.GRADIENTS_READY, MonitorEvents.OPTIMIZER_STEP_STARTED)
        return [
            *((event, self.about) for event in (*events, MonitorEvents.OPTIMIZER_STEP_COMPLETED)),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self.completed),
        ]

    def engine_handlers(self):
        return [(Events.ITERATION_COMPLETED, lambda engine: self.fails_at("ITERATION_COMPLETED"))]

    def before_train_step(self, engine):
        self.count += 1
        self.fails_at("before_train_step")

    def train_step_contexts(self):
        @contextmanager
        def context():
            self.fails_at("context")
            yield
            self.fails_at("context left")

        self.fails_at("train_step_contexts")
        return [context()]

    def about(self, engine, about):
        if not hasattr(about, "optimizer"):
            self.fails_at("GRADIENTS_READY")
        else:
            self.fails_at("OPTIMIZER_STEP_COMPLETED" if self.seen_start else "OPTIMIZER_STEP_STARTED")
            self.seen_start = not self.seen_start

    seen_start = False

    def completed(self, engine):
        self.fails_at("TRAIN_STEP_COMPLETED")
        self.publish(count=self.count)

    def on_run_end(self):
        self.fails_at("on_run_end")


def fails(*_):
    raise RuntimeError("of a function")


def trained(*makes, iterations=4, runs=1, model=None):
    """Train; return the state, and the metrics of every iteration."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)) if model is None else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    rows = []

    def train_step(engine, batch):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        return loss.item()

    trainer = Engine(train_step)
    monitors = [make(model, optimizer) for make in makes]
    for monitor in monitors:
        monitor.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda: rows.append(dict(trainer.state.metrics)))
    batches = list(torch.randn(iterations, 5, 3, generator=torch.Generator().manual_seed(1)))
    for run in range(runs):
        trainer.run(batches, max_epochs=run + 1)
    return [model.state_dict(), optimizer.state_dict()], rows, monitors, trainer


@pytest.mark.allows_failed_monitors
@pytest.mark.parametrize("place", PLACES)
def test_training_continues_and_the_others_measure(place, caplog):
    states, rows, (failing, other), _ = trained(lambda m, _: Failing(m, place), GradMonitor, runs=2, iterations=2)
    expected, *_ = trained(iterations=2, runs=2)
    assert_same(states, expected)
    assert [row.get("failing/count") for row in rows] == [1, 2 if place == "on_run_end" else None, None, None]
    assert all("grad/norm" in row for row in rows)
    [report] = [report for report in failing.reports if report.kind == "failed"]
    assert report.text == "an error ends its measuring: RuntimeError: no memory"
    assert report.severity == "warning"
    assert not other.reports
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [str(record.exc_info[1]) for record in errors] == [f"no memory\nin {place}"]


def test_an_error_while_it_is_detached_leaves_nothing_attached():
    _, _, [monitor], trainer = trained(lambda model, _: Failing(model, None))
    monitor.reset_run_state = lambda: 1 / 0
    before = len(EventSource.on(trainer).monitors)
    with pytest.raises(ZeroDivisionError):
        monitor.detach()
    assert (before, EventSource.on(trainer), monitor.metrics) == (1, None, {})


@pytest.mark.allows_failed_monitors
def test_it_measures_again_when_attached_again():
    _, rows, (failing,), trainer = trained(lambda m, _: Failing(m, "before_train_step"))
    assert [row.get("failing/count") for row in rows] == [1, None, None, None]
    failing.detach()
    failing.place = None
    failing.attach(trainer)
    trainer.run([torch.ones(5, 3)], max_epochs=2)
    assert rows[-1]["failing/count"] == 6


def test_errors_of_the_users_handlers_end_training():
    def monitor(model, optimizer):
        return GradMonitor(model, optimizer, threshold=StaticThreshold(1e-9), prefix="grad")

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    trainer = Engine(lambda engine, batch: model(batch).sum().backward())
    monitor(model, torch.optim.SGD(model.parameters(), 0.1)).attach(trainer)

    @trainer.on(MonitorEvents.SPIKE_DETECTED)
    def stop():
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        trainer.run([torch.ones(2, 3)] * 3)
    assert not hasattr(trainer.state, "spike")


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_other_ranks_errors_end_training(ranks, monkeypatch):
    """They would wait for this one in a collective."""

    def failing(model, _):
        monitor = Failing(model, "TRAIN_STEP_COMPLETED" if ranks == 2 else None)
        monkeypatch.setattr(monitor.ranks, "resolve", lambda: vars(monitor.ranks).update(size=ranks))
        return monitor

    if ranks == 1:
        trained(failing)
    else:
        with pytest.raises(RuntimeError, match="no memory"):
            trained(failing)


def test_errors_while_weights_are_restored_end_training(monkeypatch):
    def handler(model, optimizer):
        result = RollbackHandler({"model": model, "optimizer": optimizer})
        monkeypatch.setattr(result._training, "restore", lambda state: 1 / 0)
        monkeypatch.setattr(type(result), "before_train_step", lambda self, engine: self.request("to see it fail"))
        return result

    with pytest.raises(ZeroDivisionError):
        trained(StepStatsHandler, handler)


@pytest.mark.allows_failed_monitors
def test_errors_of_on_spike_end_training():
    def stop(engine, norm):
        raise ZeroDivisionError("of the user")

    with pytest.raises(ZeroDivisionError, match="of the user"):
        trained(lambda m, o: GradMonitor(m, o, threshold=StaticThreshold(1e-9), on_spike=stop))


def raise_signal(*_):
    return signal.raise_signal(signal.SIGUSR1)


class Signalled(Failing):
    def fails_at(self, place):
        if place == "TRAIN_STEP_COMPLETED":
            raise_signal()


@pytest.mark.allows_failed_monitors
@pytest.mark.parametrize(
    "make",
    [
        lambda model, _: Signalled(model, None),
        lambda *both: StepStatsHandler(*both, items=raise_signal),
        lambda *both: GradientNoiseScaleHandler(*both, micro_batches=2, items=raise_signal),
    ],
    ids=["monitor", "items", "items of the noise scale"],
)
def test_errors_of_signal_handlers_end_training(make):
    def interrupted(signal_number, frame):
        raise TimeoutError("preempted")

    before = signal.signal(signal.SIGUSR1, interrupted)
    try:
        with pytest.raises(TimeoutError, match="preempted"):
            trained(make)
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.allows_failed_monitors
@pytest.mark.parametrize(
    ("method", "function"),
    [("deferred_tensors", fails), ("deferred_tensors", lambda monitor: None), ("resolve_deferred", fails)],
)
def test_errors_while_values_are_read_end_the_measuring_alone(method, function):
    class Deferred(Failing):
        def fails_at(self, place):
            self._is_resolved = False

    setattr(Deferred, method, function)
    with_values = [lambda m, _: Deferred(m, None), GradMonitor]
    _, _, (failing, other), _ = trained(*with_values, iterations=2)
    assert other.on_host()["grad/norm"] > 0
    assert [report.kind for report in failing.reports] == ["failed"]
    failing.detach()


def test_only_a_run_that_no_error_ends_is_reported_on():
    """After an error the device may not answer, and a collective of other ranks may not end."""
    ends, fails_in = [], {3}
    model = nn.Linear(3, 1)

    def train_step(engine, batch):
        if engine.state.iteration in fails_in:
            raise RuntimeError("of the user")

    trainer, monitor = Engine(train_step), Failing(model, None)
    monitor.on_run_end = lambda: ends.append(trainer.state.iteration)
    with monitor.attach(trainer):
        with pytest.raises(RuntimeError, match="of the user"):
            trainer.run([0] * 5)
        fails_in.clear()
        trainer.state.max_epochs = None
        trainer.run([0] * 4)
    assert ends == [4]


@pytest.mark.allows_failed_monitors
def test_a_failed_monitor_is_not_asked_again():
    _, _, (failing,), _ = trained(lambda m, _: Failing(m, "before_train_step"), runs=2)
    failing.place, failing.count = "on_run_end", 2
    failing.detach()
    assert [report.text for report in failing.reports] == ["an error ends its measuring: RuntimeError: no memory"]


@pytest.mark.allows_failed_monitors
def test_a_spike_holds_for_the_rest_of_the_iteration_in_which_its_monitor_fails():
    model, flags = nn.Linear(4, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Engine(make_step(model, optimizer, after_step=lambda engine: flags.append(engine.state.unhealthy_spike)))
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e-9))
    monitor._window.step_started = fails
    monitor.attach(trainer)
    trainer.run(mlp_batches(3))
    assert [report.kind for report in monitor.reports] == ["failed"]
    assert flags == [True, False, False]


def activations(model, _):
    return ActivationHandler(model, activations={"mine": fails})


@pytest.mark.allows_failed_monitors
@pytest.mark.parametrize("make", ["activations", "histograms", "routing"])
def test_errors_in_a_forward_pass_end_the_measuring_alone(make, monkeypatch):
    monkeypatch.setattr(histograms, "count", fails)
    monkeypatch.setattr(decisions, "routing_sums", fails)
    makes = {
        "activations": activations,
        "histograms": lambda model, _: HistogramHandler(model),
        "routing": lambda model, _: RoutingHandler(model, routers="0$", top_k=2),
    }
    states, rows, (monitor, _), _ = trained(makes[make], GradMonitor)
    expected, *_ = trained()
    assert_same(states, expected)
    assert [report.kind for report in monitor.reports] == ["failed"]
    assert "of a function" in monitor.reports[0].text
    assert [{name.partition("/")[0] for name in row} for row in rows] == [{"grad"}] * 4
