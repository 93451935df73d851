"""HealthyCheckpoint: files are those of healthy iterations."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, global_step_from_engine
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ignite_monitor import GradMonitor, HealthyCheckpoint, SpikeMonitor, StepStatsHandler, attach_monitors
from tests._helpers import assert_same, make_step, square_loss
from tests._ranks import NEEDS_SHARDS, SHARDS


class Run:
    """A run whose inputs are scaled in some iterations; ``saved`` are the names of the files, in order."""

    def __init__(self, scales=(), monitored=True, **arguments):
        torch.manual_seed(0)
        self.scales = dict(scales)
        self.model = nn.Linear(4, 1)
        self.model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.model.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        factor = lambda engine: self.scales.get(engine.state.iteration, 1.0) ** 2  # noqa: E731
        self.trainer = Engine(make_step(self.model, self.optimizer, loss_of=square_loss, factor=factor))
        self.saved = []
        if monitored:
            self.monitor = GradMonitor(self.model, self.optimizer, threshold=100.0, on_spike="skip")
            self.monitor.attach(self.trainer)
        to_save = {"model": self.model, "optimizer": self.optimizer}
        self.checkpoint = HealthyCheckpoint(to_save, self.save, **{"quiet": 5, "n_saved": None} | arguments)

    def save(self, checkpoint, filename, metadata=None):
        self.saved.append(filename)

    def run(self, iterations=40, event=None, epochs=1):
        self.checkpoint.attach(self.trainer, event or Events.ITERATION_COMPLETED(every=10))
        self.trainer.run(torch.randn(iterations, 8, 4), max_epochs=epochs)
        return [int(name.split("_")[-1].split(".")[0]) for name in self.saved]


@pytest.mark.parametrize(
    ("spikes", "saved", "postponed"),
    [
        ([], [10, 20, 30, 40], 0),
        ([15], [10, 20, 30, 40], 0),  # before the last quiet iterations
        ([16], [10, 21, 30, 40], 1),
        ([20], [10, 25, 30, 40], 1),
        ([39], [10, 20, 30], 1),
        (range(12, 41), [10], 1),
    ],
)
def test_after_a_spike_a_file_is_saved_when_quiet_iterations_are_over(spikes, saved, postponed, caplog):
    """If the run ends before, the log names the file that holds the newest healthy state."""
    assert Run(dict.fromkeys(spikes, 1e4)).run() == saved
    assert caplog.text.count("no checkpoint is saved, since grad had a spike") == postponed
    if len(saved) < 4:
        end = f"in the last 5 iterations; the newest healthy state is that of iteration {saved[-1]}"
        assert caplog.messages[-1].endswith(end)


def test_spikes_before_the_first_call_or_another_run_are_not_known():
    run = Run({8: 1e4})
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), run.checkpoint)
    run.trainer.run(torch.randn(20, 8, 4))
    assert run.saved == ["checkpoint_10.pt", "checkpoint_20.pt"]
    resumed = Run()
    resumed.checkpoint.attach(resumed.trainer, None)
    resumed.monitor.load_state_dict(run.monitor.state_dict())
    assert resumed.run(2, Events.ITERATION_COMPLETED) == [1, 2]


@pytest.mark.parametrize("ruin", ["spike", "weights"])
@pytest.mark.parametrize(("last", "kept"), [(34, 30), (197, 185), (12, 10), (4, None)])
def test_a_run_that_ends_unhealthy_saves_the_newest_healthy_state_and_says_which(ruin, last, kept, caplog):
    """Copies are a tenth of the run old at most."""
    run, seen, states = Run({last - 1: 1e4} if ruin == "spike" else {}), {}, []
    run.checkpoint.save_handler = lambda checkpoint, name, metadata=None: states.append(
        (name, copy.deepcopy(checkpoint))
    )

    @run.trainer.on(Events.ITERATION_COMPLETED)
    def look(engine):
        seen[engine.state.iteration] = copy.deepcopy(run.model.state_dict())
        if ruin == "weights" and engine.state.iteration == last:
            run.model.weight.data.fill_(torch.nan)

    run.run(last, Events.COMPLETED)
    assert [name for name, _ in states] == ([] if kept is None else [f"checkpoint_{kept}.pt"])
    for _, checkpoint in states:
        assert_same(checkpoint["model"], seen[kept])
    reason = "grad had a spike in the last 5 iterations" if ruin == "spike" else "model.weight is not finite"
    which = "not known" if kept is None else f"that of iteration {kept}"
    assert caplog.messages[-1] == (
        f"HealthyCheckpoint: iteration {last}: this state is not saved, since {reason}; "
        f"the newest healthy state is {which}"
    )
    assert (run.trainer.state.iteration, run.trainer.last_event_name) == (last, Events.COMPLETED)


def test_a_state_that_is_healthy_again_as_the_run_ends_is_saved(caplog):
    run = Run(monitored=False)
    weight = run.model.weight.data.clone()
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=40), lambda: run.model.weight.data.fill_(torch.nan))
    run.trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: run.model.weight.data.copy_(weight))
    assert run.run() == [10, 20, 30, 40]
    assert "this state is not saved" not in caplog.text


def test_monitors_in_to_save_are_not_checked():
    """The snapshots of a RollbackHandler hold the model's mask of minus infinity."""
    run = Run(monitored=False)
    parts = {"model": run.model, "optimizer": run.optimizer}
    handle = attach_monitors(run.trainer, run.model, run.optimizer, rollback=parts)
    run.checkpoint = HealthyCheckpoint({**parts, "monitors": handle}, run.save, n_saved=None)
    assert run.run() == [10, 20, 30, 40]


def test_a_second_run_keeps_copies_of_its_own():
    run = Run({48: 1e4})
    assert run.run(50, Events.COMPLETED) == [45]
    run.scales = {19: 1e4}
    run.trainer.run(torch.randn(20, 8, 4), max_epochs=1)
    assert run.saved == ["checkpoint_45.pt", "checkpoint_15.pt"]


def test_a_run_that_continues_knows_its_spikes():
    run = Run({40: 1e4})
    assert run.run(event=Events.ITERATION_COMPLETED(every=6))[-1] == 36
    run.trainer.run(torch.randn(40, 8, 4), max_epochs=2)
    assert run.saved[6:8] == ["checkpoint_45.pt", "checkpoint_48.pt"]


@pytest.mark.allows_failed_monitors
def test_the_loss_and_the_tensors_decide_without_a_monitor_that_has_failed(monkeypatch):
    run = Run({12: math.inf})
    run.trainer.add_event_handler(
        Events.ITERATION_STARTED(once=3),
        lambda: monkeypatch.setattr(run.monitor, "start_iteration", lambda engine: 1 / 0),
    )
    assert run.run(event=Events.ITERATION_COMPLETED(every=5)) == [5, 10]


def test_a_run_that_resumes_from_the_healthy_state_forgets_the_spikes_after_it():
    run, states = Run(dict.fromkeys(range(11, 16), 1e4)), []
    run.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=10), lambda: states.append(copy.deepcopy(run.monitor.state_dict()))
    )
    assert run.run(15, Events.ITERATION_COMPLETED(every=2)) == [2, 4, 6, 8, 10]
    run.scales = {}
    run.monitor.load_state_dict(states[0])
    run.trainer.load_state_dict({"iteration": 10, "epoch_length": 15, "max_epochs": 1})
    run.trainer.run(torch.randn(15, 8, 4))
    assert run.saved[5:] == ["checkpoint_12.pt", "checkpoint_14.pt"]


def test_a_checkpoint_that_a_failed_run_postponed_is_not_saved_by_the_next_run():
    run = Run(dict.fromkeys(range(8, 13), 1e4))
    with (
        run.trainer.add_event_handler(Events.ITERATION_STARTED(once=12), lambda _: 1 / 0),
        pytest.raises(ZeroDivisionError),
    ):
        run.run()
    run.scales = {}
    vars(run.trainer.state).update(iteration=0, epoch=0, max_epochs=None)
    run.trainer.run(torch.randn(20, 8, 4), max_epochs=1)
    assert run.saved == ["checkpoint_10.pt", "checkpoint_20.pt"]


@pytest.mark.parametrize("part", ["parameter", "buffer", "moment"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nothing_is_saved_with_a_tensor_that_is_not_finite(part, value):
    run = Run(monitored=False)
    run.optimizer.param_groups[0]["momentum"] = 0.9
    run.model.register_buffer("mean", torch.zeros(1))
    run.checkpoint = HealthyCheckpoint({"model": run.model, "optimizer": run.optimizer}, run.save, n_saved=None)

    @run.trainer.on(Events.ITERATION_COMPLETED(once=15))
    def ruin():
        moment = run.optimizer.state[run.model.bias]["momentum_buffer"]
        {"parameter": run.model.bias.data, "buffer": run.model.mean, "moment": moment}[part].fill_(value)

    assert run.run() == [10]


def test_an_output_that_is_not_finite():
    run = Run(monitored=False)
    run.trainer._process_function = lambda engine, batch: torch.tensor(
        float("nan" if 15 < engine.state.iteration < 24 else 1)
    )
    assert run.run() == [10, 24, 30, 40]


def test_given_monitors_and_the_checkpoint_of_an_evaluator(caplog):
    run = Run({18: 1e4}, monitored=False)
    run.optimizer.param_groups[0]["lr"] = 0.0
    monitor = SpikeMonitor(lambda engine: engine.state.output, threshold=10.0)
    monitor.attach(run.trainer)
    run.checkpoint = HealthyCheckpoint({"model": run.model}, run.save, monitors=[monitor], quiet=5, n_saved=None)
    evaluator = Engine(lambda engine, batch: None)
    evaluator.add_event_handler(Events.COMPLETED, run.checkpoint)
    run.checkpoint.global_step_transform = global_step_from_engine(run.trainer, Events.ITERATION_COMPLETED)
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), lambda: evaluator.run([0]))
    run.trainer.run(torch.randn(40, 8, 4))
    assert [name.split("_")[-1] for name in run.saved] == ["10.pt", "30.pt", "40.pt"]
    assert "iteration 20: no checkpoint is saved" in caplog.text


def test_a_late_file_is_named_as_the_checkpoint_that_was_due():
    run = Run({10: 1e4}, n_saved=1)
    run.checkpoint.global_step_transform = global_step_from_engine(run.trainer)
    assert run.run(10, Events.EPOCH_COMPLETED, epochs=3) == [2, 2, 3]


def test_it_is_ignites_checkpoint(tmp_path):
    run = Run()
    run.checkpoint = HealthyCheckpoint({"model": run.model}, tmp_path, n_saved=2, filename_prefix="good")
    run.run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good_model_30.pt", "good_model_40.pt"]
    other = nn.Linear(4, 1)
    other.register_buffer("mask", torch.zeros(2, 2))
    Checkpoint.load_objects({"model": other}, torch.load(tmp_path / "good_model_40.pt", weights_only=True))
    assert torch.equal(other.weight, run.model.weight)


@pytest.mark.parametrize(
    "kind", ["zero", pytest.param("fsdp", marks=pytest.mark.skipif(not SHARDS, reason=NEEDS_SHARDS)), "ema"]
)
def test_sharded_optimizers_and_models_and_averages(one_rank, kind):
    """Saved as by Ignite, from the trainer's state and from the copy; a ruined tensor of a part is found."""
    model, states = nn.Linear(4, 1), []
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if kind == "fsdp":
        fully_shard(model)
    if kind == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    else:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = Engine(make_step(model, optimizer, loss_of=square_loss))
    to_save = {"model": model, "optimizer": optimizer, "average": average}
    save = lambda checkpoint, name, metadata=None: states.append((name, copy.deepcopy(checkpoint)))  # noqa: E731
    checkpoint = HealthyCheckpoint(to_save, save, quiet=4, n_saved=None)
    seen = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def update(engine):
        average.update_parameters(model) if kind == "ema" else None
        if engine.state.iteration == 28:
            optimizer.consolidate_state_dict() if kind == "zero" else None
            seen.append(copy.deepcopy({name: thing.state_dict() for name, thing in to_save.items()}))
        if engine.state.iteration == 29:
            inner = optimizer.optim if kind == "zero" else optimizer
            parameter = next(iter(average.parameters() if kind == "ema" else model.parameters()))
            ruined = inner.state[parameter]["exp_avg"] if kind == "zero" else parameter.data
            ruined.fill_(torch.nan)

    checkpoint.attach(trainer, Events.ITERATION_COMPLETED(once=30))
    trainer.run(torch.randn(30, 8, 4))
    [(name, saved)] = states
    assert name == "checkpoint_28.pt"
    assert_same(saved, seen[0])


def test_bad_input():
    model = nn.Linear(1, 1)
    with pytest.raises(TypeError, match="Argument monitors"):
        HealthyCheckpoint({"model": model}, "unused", monitors=[model])
    stats = StepStatsHandler(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match="Argument monitors"):
        HealthyCheckpoint({"model": model}, "unused", monitors=[stats])
    with pytest.raises(ValueError, match="Argument quiet"):
        HealthyCheckpoint({"model": model}, "unused", quiet=0)
