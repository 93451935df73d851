"""The base class, by the smallest monitor of one's own."""

from __future__ import annotations

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, ProgressBar
from torch import nn

from ignite_monitor import Key, Monitor, MonitorEvents, RollbackHandler, Schema
from ignite_monitor.monitor.handle import MonitorHandle
from tests._handlers import ClippingMonitor
from tests._helpers import footprint, make_batches, make_trainer


class Smallest(Monitor, schema=Schema("smallest", "smallest", (Key("one", "the number 1"), Key("{name}", "any")))):
    """{keys}"""

    def __init__(self, model, prefix="smallest"):
        super().__init__(model, prefix)

    def handlers(self):
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self.measure)]

    def measure(self, engine):
        self.publish(one=1.0)


def test_a_stateful_filter_in_a_list_is_called_once_per_iteration_as_by_ignite():
    def run(attach):
        _, _, trainer = parts = make_trainer()
        calls, measured = [], set()

        def every_third_call(engine, iteration):
            calls.append(iteration)
            return len(calls) % 3 == 0

        event = Events.ITERATION_STARTED(every=2) | Events.ITERATION_STARTED(event_filter=every_third_call)
        attach(parts, event, measured)
        trainer.run(make_batches(12))
        return calls, measured

    def monitor(parts, event, measured):
        model, _, trainer = parts
        own = Smallest(model)
        own.attach(trainer, event)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: measured.update([engine.state.iteration] * bool(own.metrics))
        )

    def ignite(parts, event, measured):
        parts[2].add_event_handler(event, lambda engine: measured.add(engine.state.iteration))

    assert run(monitor) == run(ignite)


def test_a_monitor_without_state_works_in_a_checkpoint_and_beside_rollback_handler(tmp_path):
    model, optimizer, trainer = make_trainer()
    monitor = Smallest(model)
    monitor.attach(trainer)
    rollback = RollbackHandler({"model": model, "optimizer": optimizer})
    rollback.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=60), lambda engine: rollback.request("a test"))
    saver = Checkpoint({"model": model, "monitor": monitor}, DiskSaver(tmp_path), filename_pattern="saved.pt")
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=70), saver)
    trainer.run(make_batches(70))
    assert trainer.state.metrics["rollback/count"] == trainer.state.metrics["smallest/one"] == 1
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    Checkpoint.load_objects({"model": model, "monitor": Smallest(model)}, saved)
    assert saved["monitor"] == {}


def test_the_latest_value_of_a_name_wins_on_a_device(on_a_device):
    monitor = Smallest(make_trainer()[0])
    monitor.publish(one=torch.tensor(1.0), two=torch.tensor(1.0), three=torch.tensor(1.0), four=3.0)
    monitor.publish(one=2.0, two=torch.tensor(2.0), three=float("nan"), four=torch.tensor(2.0))
    assert monitor.on_host() == {f"smallest/{name}": 2.0 for name in ("one", "two", "four")}


@pytest.mark.parametrize(
    ("handlers", "engine_handlers", "error"),
    [
        ([(MonitorEvents.GRADIENTS_READY, lambda engine, backward: None)], [], AttributeError),
        ([], [(Events.STARTED, print), ("no event", print)], ValueError),
    ],
)
def test_refused_handlers_leave_nothing(handlers, engine_handlers, error):
    model, optimizer, trainer = make_trainer()
    monitor, before = Smallest(model), footprint(trainer, model, optimizer)
    monitor.handlers, monitor.engine_handlers = lambda: handlers, lambda: engine_handlers
    with pytest.raises(error, match=r"__func__|no event"):
        monitor.attach(trainer)
    assert footprint(trainer, model, optimizer) == before
    del monitor.handlers
    calls = []
    monitor.engine_handlers = lambda: [(Events.ITERATION_COMPLETED, calls.append)]
    with monitor.attach(trainer):
        trainer.run(make_batches(2))
    assert len(calls) == 2
    trainer.run(make_batches(2))
    assert len(calls) == 2


@pytest.mark.parametrize(("one", "other"), [("a", "a/b"), ("a/b", "a"), ("a/b", "a/b")])
def test_a_prefix_inside_of_another_is_refused(one, other):
    model, _, trainer = make_trainer()
    Smallest(model, one).attach(trainer)
    Smallest(model, f"{one}_b").attach(trainer)
    with pytest.raises(ValueError, match=f"prefix '{one}'"):
        Smallest(model, other).attach(trainer)


def test_an_error_of_one_monitor_detaches_the_others():
    class Failing(Smallest):
        def reset_run_state(self):
            raise RuntimeError("no report")

    model, optimizer, trainer = make_trainer()
    before = footprint(trainer, model, optimizer)
    kinds = {"a": Failing, "b": Smallest, "c": Failing}
    handle = MonitorHandle(
        trainer, {name: (kind(model, name), Events.ITERATION_STARTED) for name, kind in kinds.items()}
    )
    with pytest.raises(RuntimeError, match="no report"):
        handle.remove()
    assert footprint(trainer, model, optimizer) == before


def test_removing_a_progress_bar_keeps_the_user_s_own_closing_handler():
    model, _, trainer = make_trainer()
    bar = ProgressBar(disable=True)
    bar.attach(trainer)
    monitor = Smallest(model)
    before = {event: list(handlers) for event, handlers in trainer._event_handlers.items() if handlers}
    monitor.log_to(bar, trainer)
    monitor.detach()
    assert {event: list(handlers) for event, handlers in trainer._event_handlers.items() if handlers} == before


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_turns_non_finite_is_no_longer_reported(number):
    model, _, trainer = make_trainer()
    monitor = Smallest(model)
    monitor.attach(trainer)
    monitor.publish(one=1.0, other=2.0)
    monitor.publish(one=number)
    assert monitor.metrics == trainer.state.metrics == {"smallest/other": 2.0}


# The monitor of the guide


@pytest.mark.parametrize("order", ["gd", "dg"])
def test_the_monitor_of_the_guide_in_a_gan(order):
    torch.manual_seed(0)
    models = {"g": nn.Linear(3, 4), "d": nn.Linear(4, 1)}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    expected = {}

    def train_step(engine, batch):
        for name in order:
            optimizers[name].zero_grad()
            fake = models["g"](batch)
            loss = -models["d"](fake).mean() if name == "g" else models["d"](fake.detach()).square().mean()
            loss.backward()
            total = torch.stack([p.grad.double().norm() for p in models[name].parameters()]).norm()
            expected[f"{name}/kept"] = pytest.approx(min(1.0, 0.1 / float(total)), rel=1e-4)
            nn.utils.clip_grad_norm_(models[name].parameters(), 0.1)
            optimizers[name].step()

    trainer = Engine(train_step)
    for name, model in models.items():
        ClippingMonitor(model, optimizers[name], prefix=name).attach(trainer)
    trainer.run(list(torch.randn(3, 8, 3)))
    assert trainer.state.metrics == expected


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled", [False, True])
def test_the_monitor_of_the_guide_with_a_scaler_and_accumulation(fused, unscaled, given):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    kept = []

    def train_step(engine, batch):
        optimizer.zero_grad()
        for part in batch.chunk(2):
            scaler.scale(model(part).square().mean() / 2).backward()
        kept[:] = [1.0]
        if unscaled:
            scaler.unscale_(optimizer)
            kept[:] = [min(1.0, 0.1 / float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))]
        scaler.step(optimizer)
        scaler.update()

    trainer = Engine(train_step)
    monitor = ClippingMonitor(model, optimizer, scaler=scaler if given else None)
    monitor.attach(trainer)
    trainer.run(list(torch.randn(3, 8, 3)))
    assert [report.kind for report in monitor.reports] == ["scaler_not_given"] * (not given)
    if given:
        assert trainer.state.metrics == {"clipping/kept": pytest.approx(kept[0], rel=1e-4)}
