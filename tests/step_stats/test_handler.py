"""StepStatsHandler: time, items, memory, learning rates."""

from __future__ import annotations

import functools
import math
import time
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events, create_supervised_trainer
from torch import nn

from ignite_monitor import GradMonitor, MonitorEvents, StaticThreshold, StepStatsHandler
from ignite_monitor.model.tensors import count_items
from ignite_monitor.step_stats import handler as step_stats_handler
from tests._helpers import grad_norm, make_step, run_monitored
from tests._truth import norm


def run(model, batches, loss=F.mse_loss, **arguments):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, loss)
    handler = StepStatsHandler(model, optimizer, **arguments)
    handler.attach(trainer)
    seen = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda _: seen.append({name: float(v) for name, v in handler.metrics.items()})
    )
    trainer.run(batches)
    return handler, seen


def linear_batches():
    return [(torch.randn(16, 5), torch.randn(16, 7)) for _ in range(3)]


@pytest.mark.parametrize(
    ("items", "count"),
    [
        *((None, 16), (lambda batch: batch[0].numel(), 80), (lambda batch: torch.tensor(batch[0].numel()), 80)),
        *((lambda batch: -1, None), (lambda batch: torch.tensor(-1), None), (lambda batch: math.nan, None)),
    ],
)
def test_throughput_is_that_of_the_published_time(items, count):
    """There is none of a negative number of items, or of NaN."""
    _, seen = run(nn.Linear(5, 7), linear_batches(), items=items)
    rates = [count and pytest.approx(count / (values["step/time_ms"] / 1e3)) for values in seen]
    assert [values.get("step/items_per_s") for values in seen] == rates


@pytest.mark.parametrize(
    ("batch", "items"),
    [
        (0, lambda batch: batch[0]),
        (torch.ones(3), lambda batch: batch),
        (0, lambda batch: torch.tensor(3 + 1j)),
        (0, lambda batch: torch.tensor(3.0, device="meta")),
        (torch.ones(2).to(torch.float8_e4m3fn), None),
    ],
)
def test_a_batch_that_cannot_be_measured_does_not_end_training(batch, items, caplog):
    model = nn.Linear(5, 7)
    handler = StepStatsHandler(model, torch.optim.SGD(model.parameters(), lr=0.1), items=items)
    rows = run_monitored(lambda *_: None, [batch] * 2, handler)
    assert all("step/time_ms" in row and "step/batch_rms/0" not in row for row in rows)
    (message,) = caplog.messages
    assert "the batch can't be measured" in message


def test_time_is_that_of_the_train_step():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def data():
        while True:
            time.sleep(0.05)
            yield torch.ones(1)

    trainer = Engine(lambda *_: time.sleep(0.02))
    handler = StepStatsHandler(model, optimizer)
    handler.attach(trainer)
    before = []
    trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda _: (before.append(time.perf_counter()), time.sleep(0.05))
    )
    bounds = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def check(_):
        elapsed = 1e3 * (time.perf_counter() - before[-1])
        bounds.append(20 <= float(handler.metrics["step/time_ms"]) <= elapsed - 49)

    trainer.run(data(), max_epochs=1, epoch_length=3)
    assert bounds == [True] * 3


class Slow(StepStatsHandler):
    """A monitor whose preparation for a train step, and whose context around it, take time."""

    def before_train_step(self, engine):
        time.sleep(0.05)

    @contextmanager
    def _context(self):
        time.sleep(0.05)
        yield
        time.sleep(0.05)

    def train_step_contexts(self):
        time.sleep(0.05)
        return [self._context()]


@pytest.mark.parametrize("first", [True, False])
def test_the_time_is_without_what_other_monitors_do_around_the_train_step(first):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stats, slow = StepStatsHandler(model, optimizer), Slow(model, optimizer, prefix="slow")
    slow.measures_time = False
    trainer = Engine(lambda *_: None)
    for monitor in (stats, slow) if first else (slow, stats):
        monitor.attach(trainer)
    trainer.run([0])
    assert stats.metrics["step/time_ms"] < 45


class Halving(torch.optim.Optimizer):
    """Its steps need no learning rate."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.mul_(0.5)


@pytest.mark.parametrize("defaults", [{"lr": None}, {"scale": 2.0}, {"lr": torch.ones(2)}, {"lr": torch.tensor(1j)}])
def test_groups_without_a_learning_rate_have_none(defaults):
    """Groups of transformers' Adafactor have a rate of None; others have another name for it, or many rates."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 7))
    groups = [{"params": model[0].parameters()}, {"params": model[1].parameters(), "lr": 0.5}]
    optimizer = Halving(groups, defaults)
    trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
    stats = StepStatsHandler(model, optimizer)
    stats.attach(trainer)
    GradMonitor(model, optimizer).attach(trainer)
    trainer.run(linear_batches())
    assert {name: value for name, value in stats.metrics.items() if "lr" in name} == {"step/lr/group_1": 0.5}


class Batch(dict):
    pass


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(5, 2), 5),
        ((torch.zeros(5, 2), torch.zeros(7)), 5),
        ([{"a": "text", "b": [torch.zeros(4)]}], 4),
        ({"ids": torch.zeros(6, 3), "labels": torch.zeros(9)}, 6),
        (Batch(scale=torch.zeros(()), x=torch.zeros(3)), 3),
        (torch.zeros(0, 4), 0),
        ("text", None),
        (7, None),
        ((), None),
        (torch.zeros(()), None),
    ],
)
def test_items_of_a_batch(batch, count):
    assert count_items(batch) == count


@pytest.mark.parametrize("items", [None, lambda batch: batch["x"].numel(), lambda batch: batch["count"]])
def test_items_are_those_that_the_train_step_was_given(items):
    """A train step may take its batch apart, and change what is in it."""
    model = nn.Linear(5, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = StepStatsHandler(model, optimizer, items=items)
    trainer = Engine(lambda _, batch: (model(batch.pop("x")), batch["count"].zero_()))
    handler.attach(trainer)
    trainer.run([{"x": torch.ones(16, 5), "count": torch.tensor(80)} for _ in range(2)])
    seconds = float(handler.metrics["step/time_ms"]) / 1e3
    assert float(handler.metrics["step/items_per_s"]) == pytest.approx((80 if items else 16) / seconds)


def test_each_tensor_of_a_batch_has_a_name_that_loggers_keep():
    model = nn.Linear(5, 7)
    handler = StepStatsHandler(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = {"x:0": torch.full((3,), 2.0), 1: torch.full((3,), 3.0), "1": torch.full((3,), 4.0)}
    (row,) = run_monitored(lambda *_: None, [batch], handler)
    scales = {name.removeprefix("step/batch_rms/"): value for name, value in row.items() if "batch_rms" in name}
    assert scales == pytest.approx({"x_0": 2, "1": 3, "1_2": 4})


def test_batch_without_tensors_has_no_items_and_one_note():
    model = nn.Linear(2, 2)
    handler = StepStatsHandler(model, torch.optim.SGD(model.parameters(), lr=0.1))
    rows = run_monitored(lambda *_: None, ["a", "b", "c"], handler)
    assert all("step/time_ms" in row and "step/items_per_s" not in row for row in rows)
    assert [(report.kind, report.severity) for report in handler.reports] == [("unknown_items", "note")]


def rates_of(handler):
    return [float(handler.metrics[f"step/lr/group_{i}"]) for i in range(len(handler.optimizer.param_groups))]


def published_rates(trainer, handler, batches):
    handler._attached_to() or handler.attach(trainer)
    rates = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: rates.append(rates_of(handler)))
    trainer.run(batches)
    return rates


def test_learning_rates_are_those_that_the_step_used():
    """Set before the train step, and changed in it right after the optimizer's step, in place or not."""
    model = nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": torch.tensor(0.25)}]
    optimizer = torch.optim.SGD(groups)

    def train_step(engine, _):
        optimizer.param_groups[0]["lr"] = 1.0 / engine.state.iteration
        optimizer.param_groups[1]["lr"] = torch.tensor(0.25)
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.param_groups[1]["lr"].zero_()

    assert published_rates(Engine(train_step), StepStatsHandler(model, optimizer), [0, 1]) == [[1.0, 0.25], [0.5, 0.25]]


def moved_by_a_gradient_of_ones(train):
    """Return the movement of a parameter with gradient 1 in each iteration: the learning rate that SGD used."""
    moves = []
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    handler = StepStatsHandler(model, optimizer)

    def train_step(engine, _):
        before = model.weight.item()
        optimizer.zero_grad()
        model(torch.ones(1, 1)).sum().backward()
        train(engine, optimizer)
        moves.append([pytest.approx(before - model.weight.item(), rel=1e-4)])

    return Engine(train_step), model, optimizer, handler, moves


@pytest.mark.parametrize("event", [MonitorEvents.SPIKE_DETECTED, MonitorEvents.OPTIMIZER_STEP_STARTED])
@pytest.mark.parametrize("first", [True, False])
def test_a_learning_rate_that_a_handler_lowers_is_the_one_that_moved_the_weights(event, first):
    """Whichever monitor is attached first."""
    trainer, model, optimizer, handler, moves = moved_by_a_gradient_of_ones(lambda _, optimizer: optimizer.step())
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e-6))
    for listener in (monitor, handler) if first else (handler, monitor):
        listener.attach(trainer)

    @trainer.on(event)
    def lower(_):
        optimizer.param_groups[0]["lr"] *= 0.1

    assert published_rates(trainer, handler, [0] * 3) == moves
    assert moves == [[0.1], [0.01], [0.001]]


@pytest.mark.parametrize("event", [None, MonitorEvents.OPTIMIZER_STEP_COMPLETED])
def test_a_scheduler_that_steps_right_after_the_optimizer_comes_too_late(event):
    trainer, _, optimizer, handler, moves = moved_by_a_gradient_of_ones(
        lambda _, optimizer: (optimizer.step(), None if event else scheduler.step())
    )
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    handler.attach(trainer)
    if event:
        trainer.add_event_handler(event, lambda _: scheduler.step())
    assert published_rates(trainer, handler, [0] * 3) == moves
    assert moves == [[1.0], [0.5], [0.25]]


def first_of_two_steps(_, optimizer):
    for lr in (0.5, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()


def none_in_the_second_iteration(engine, optimizer):
    optimizer.param_groups[0]["lr"] = 0.5**engine.state.iteration
    if engine.state.iteration != 2:
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 7.0


@pytest.mark.parametrize(
    ("train", "expected"),
    [(first_of_two_steps, [[0.5]] * 3), (none_in_the_second_iteration, [[0.5], [0.25], [0.125]])],
)
def test_the_first_step_s_learning_rate_or_what_the_train_step_leaves(train, expected):
    trainer, _, _, handler, _ = moved_by_a_gradient_of_ones(train)
    assert published_rates(trainer, handler, [0] * 3) == expected


def test_parameter_norm_and_the_memory_that_a_step_takes():
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7).double())
    kept = []
    trainer = Engine(lambda engine, _: kept.append(torch.ones(2**26)) if engine.state.iteration == 2 else None)
    handler = StepStatsHandler(model, torch.optim.SGD(model.parameters(), lr=0.1))
    handler.attach(trainer)
    sizes = []
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda _: sizes.append(float(handler.metrics["step/resident_memory_mb"]))
    )
    trainer.run([0, 1])
    assert 200 < sizes[1] - sizes[0] < 280  # 256, and what the process frees meanwhile
    assert 50 < sizes[1] < 1e6
    assert handler.metrics["step/parameter_norm"] == pytest.approx(norm(model.parameters()), rel=1e-6)


def planted(patch, waits, restarts=False, **arguments):
    """A training on a clock that a loader alone moves on, by so many milliseconds before each batch."""
    model = nn.Linear(5, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, F.mse_loss)
    handler = StepStatsHandler(model, optimizer, **arguments)
    time_now = [0.0]
    patch.setattr(step_stats_handler, "perf_counter", lambda: time_now[0])

    class Loader:
        def __iter__(self):
            for wait in waits:
                time_now[0] += wait / 1e3
                yield torch.randn(4, 5), torch.randn(4, 7)

    seen = []
    handler.attach(trainer, Events.ITERATION_STARTED(every=2))
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: seen.append(dict(handler.metrics)))
    trainer.run(Loader(), epoch_length=len(waits) * (2 if restarts else 1), max_epochs=1)
    return trainer, handler, seen


def test_a_planted_wait_for_data_is_what_is_published(monkeypatch):
    _, _, seen = planted(monkeypatch, [0, 50, 3, 7])
    assert [values.get("step/data_wait_ms") for values in seen] == pytest.approx([None, 50.0, None, 7.0])
    for values in seen[1::2]:
        wait, taken = values["step/data_wait_ms"], values["step/time_ms"]
        assert values["step/data_wait_share"] == pytest.approx(wait / (wait + taken))
    _, _, seen = planted(monkeypatch, [50], restarts=True)  # starting a loader anew is waiting too
    assert seen[1]["step/data_wait_ms"] == pytest.approx(50.0)


def test_a_run_without_data_waits_for_none():
    model = nn.Linear(5, 7)
    handler = StepStatsHandler(model, torch.optim.SGD(model.parameters(), lr=0.1))
    trainer, seen = Engine(lambda *_: None), []
    handler.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: seen.append("step/data_wait_ms" in handler.metrics))
    trainer.run([0, 1])
    trainer.run(epoch_length=2)
    assert seen == [True, True, False, False]


class Overwriting(torch.optim.SGD):
    """Changes the gradients that it is given, as Muons and optimizers with weight decay of their own do."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.mul_(3.0)


@pytest.mark.parametrize("make", [torch.optim.SGD, Overwriting, functools.partial(torch.optim.SGD, fused=True)])
@pytest.mark.parametrize("scale", [40.0, 1e30])
def test_the_gradient_of_the_step_and_the_scale_of_the_batch(make, scale):
    """Clipping comes between the backward and the step; only floating-point tensors of the batch have a scale."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.0)

    def train_step(engine, batch):
        optimizer.zero_grad()
        (100 * model(batch["x"] / scale).square().sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()

    trainer = Engine(train_step)
    StepStatsHandler(model, optimizer).attach(trainer)
    x = torch.randn(7, 3, dtype=torch.float64).float()
    trainer.run([{"x": scale * x, "y": torch.ones(7, dtype=torch.long)}])
    metrics = trainer.state.metrics
    assert metrics["step/gradient_norm"] == pytest.approx(0.25, rel=1e-4)
    assert metrics["step/batch_rms/x"] == pytest.approx(scale * float(x.double().square().mean().sqrt()), rel=1e-6)
    assert "step/batch_rms/y" not in metrics


@pytest.mark.parametrize("scale", [1.0, 2.0**12])
def test_the_gradient_that_a_fused_step_unscales(scale):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = make_step(model, optimizer, scaler=torch.amp.GradScaler("cpu", init_scale=scale))
    handler = StepStatsHandler(model, optimizer)
    run_monitored(step, [(torch.randn(7, 3), torch.randn(7, 2))], handler)
    assert handler.metrics["step/gradient_norm"] == pytest.approx(grad_norm(model), rel=1e-6)


@pytest.mark.parametrize(("scaled", "expected"), [(True, None), (False, math.inf)])
def test_a_skipped_step_uses_no_gradient(scaled, expected):
    """Only the device may know that an overflow has skipped a step; without a scaler a step uses what is not finite."""
    model, seen = torch.nn.Linear(2, 5), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if scaled else None
    trainer = Engine(make_step(model, optimizer, scaler=scaler))
    handler = StepStatsHandler(model, optimizer)
    handler.attach(trainer)
    trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda: seen.append(handler.metrics.get("step/gradient_norm"))
    )
    trainer.run([(torch.full((3, 2), size), torch.ones(3, 5)) for size in (1.0, 1e25)])
    assert 0 < seen[0] < math.inf
    assert seen[1] == expected
