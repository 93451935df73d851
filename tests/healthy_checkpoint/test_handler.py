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

from ignite_monitor import GradMonitor, HealthyCheckpoint, SpikeMonitor, attach_monitors
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
        self.saved, self.states = [], []
        if monitored:
            self.monitor = GradMonitor(self.model, self.optimizer, threshold=100.0, on_spike="skip")
            self.monitor.attach(self.trainer)
        to_save = {"model": self.model, "optimizer": self.optimizer}
        self.checkpoint = HealthyCheckpoint(to_save, self.save, **{"quiet": 5, "n_saved": None} | arguments)

    def save(self, checkpoint, filename, metadata=None):
        self.saved.append(filename)
        self.states.append(copy.deepcopy(checkpoint))

    def run(self, iterations=40, event=None, epochs=1):
        self.checkpoint.attach(self.trainer, event or Events.ITERATION_COMPLETED(every=10))
        self.trainer.run(torch.randn(iterations, 8, 4), max_epochs=epochs)
        return [int(name.split("_")[-1].split(".")[0]) for name in self.saved]


@pytest.mark.parametrize(
    ("spikes", "saved", "warned"),
    [
        ([], [10, 20, 30, 40], []),
        ([15], [10, 20, 30, 40], []),  # before the last quiet iterations
        ([16], [10, 15, 30, 40], [(20, 15)]),
        ([39], [10, 20, 30, 35], [(40, 35)]),
        (range(12, 41), [10], [(20, 10), (30, 10), (40, 10)]),  # which is in a file
        (range(1, 41), [], [(10, None), (20, None), (30, None), (40, None)]),
    ],
)
def test_the_newest_healthy_state_takes_the_place_of_an_unhealthy_one(spikes, saved, warned, caplog):
    assert Run(dict.fromkeys(spikes, 1e4)).run() == saved
    assert [text for text in caplog.messages if text.startswith("HealthyCheckpoint")] == [
        f"HealthyCheckpoint: iteration {iteration}: grad had a spike in the last 5 iterations; "
        f"the newest healthy state is {'not known' if healthy is None else f'that of iteration {healthy}'}"
        for iteration, healthy in warned
    ]


@pytest.mark.parametrize("ruin", ["spike", "weights"])
@pytest.mark.parametrize(("last", "kept"), [(34, 30), (197, 180), (12, 10), (4, None)])
def test_a_run_that_ends_unhealthy_saves_the_newest_healthy_state(ruin, last, kept, caplog):
    """Copies are at most a tenth of the run old."""
    run, seen = Run({last - 1: 1e4} if ruin == "spike" else {}), {}

    @run.trainer.on(Events.ITERATION_COMPLETED)
    def look(engine):
        seen[engine.state.iteration] = copy.deepcopy([run.model.state_dict(), run.optimizer.state_dict()])
        if ruin == "weights" and engine.state.iteration == last:
            run.model.weight.data.fill_(torch.nan)

    assert run.run(last, Events.COMPLETED) == ([] if kept is None else [kept])
    for checkpoint in run.states:
        assert_same([checkpoint["model"], checkpoint["optimizer"]], seen[kept])
    reason = "grad had a spike in the last 5 iterations" if ruin == "spike" else "model.weight is not finite"
    assert f"iteration {last}: {reason}; the newest" in caplog.messages[-1]
    assert (run.trainer.state.iteration, run.trainer.last_event_name) == (last, Events.COMPLETED)


def test_a_file_of_an_epoch_has_the_name_of_the_epoch():
    run = Run({20: 1e4}, n_saved=1)
    run.checkpoint.global_step_transform = global_step_from_engine(run.trainer)
    assert run.run(10, Events.EPOCH_COMPLETED, epochs=3) == [1, 2, 3]


@pytest.mark.parametrize("last", [19, 20])
def test_spikes_are_those_of_the_run_and_without_attach_those_since_the_first_call(last):
    run = Run({8: 1e4, last: 1e4})
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), run.checkpoint)
    run.trainer.run(torch.randn(20, 8, 4))
    assert run.saved == ["checkpoint_10.pt", "checkpoint_15.pt"]
    resumed = Run()
    resumed.monitor.load_state_dict(run.monitor.state_dict())
    assert resumed.run(2, Events.ITERATION_COMPLETED) == [1, 2]
    resumed.scales = dict.fromkeys(range(1, 7), 1e4)
    resumed.trainer.run(torch.randn(6, 8, 4), max_epochs=1)
    assert resumed.saved[2:] == []


def test_an_engine_without_monitors_is_not_taken_for_the_trainer(caplog):
    """Its output is not the trainer's loss."""
    run, evaluator = Run(), Engine(lambda engine, batch: math.nan if batch > 4 else 0.1)
    evaluator.add_event_handler(Events.COMPLETED, run.checkpoint)
    for _ in range(2):
        evaluator.run(range(8))
    assert run.saved == ["checkpoint_8.pt"] * 2
    assert [text for text in caplog.messages if "attach" in text] == [
        "HealthyCheckpoint knows no trainer, and no spikes: call attach(trainer, event)"
    ]
    run.model.weight.data.fill_(math.nan)
    evaluator.run(range(8))
    assert len(run.saved) == 2
    run.model.weight.data.fill_(1.0)
    run.scales = dict.fromkeys(range(1, 11), 1e4)
    assert run.run(30) == [8, 8, 20, 30]
    assert (
        "iteration 10: grad had a spike in the last 5 iterations; the newest healthy state is not known" in caplog.text
    )


@pytest.mark.allows_failed_monitors
def test_the_loss_and_the_tensors_decide_without_a_monitor_that_has_failed(monkeypatch):
    run = Run({12: math.inf})
    run.trainer.add_event_handler(
        Events.ITERATION_STARTED(once=3),
        lambda: monkeypatch.setattr(run.monitor, "before_train_step", lambda engine: 1 / 0),
    )
    assert run.run(event=Events.ITERATION_COMPLETED(every=5)) == [5, 10]


def test_monitors_in_to_save_are_not_checked():
    """The snapshots of a RollbackHandler hold the model's mask of minus infinity."""
    run = Run(monitored=False)
    parts = {"model": run.model, "optimizer": run.optimizer}
    handle = attach_monitors(run.trainer, run.model, run.optimizer, rollback=parts)
    run.checkpoint = HealthyCheckpoint({**parts, "monitors": handle}, run.save, n_saved=None)
    assert run.run() == [10, 20, 30, 40]


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
    assert run.run() == [10, 15, 30, 40]


@pytest.mark.parametrize("score", [None, lambda engine: 1.0])
def test_the_checkpoint_of_an_evaluator(score, caplog):
    """A score is not that of an earlier state."""
    run = Run({18: 1e4}, monitored=False)
    run.optimizer.param_groups[0]["lr"] = 0.0
    SpikeMonitor(lambda engine: engine.state.output, threshold=10.0).attach(run.trainer)
    step = global_step_from_engine(run.trainer, Events.ITERATION_COMPLETED)
    arguments = {"score_function": score, "greater_or_equal": True, "global_step_transform": step}
    run.checkpoint = HealthyCheckpoint({"model": run.model}, run.save, quiet=5, n_saved=None, **arguments)
    run.checkpoint.attach(run.trainer, None)
    evaluator = Engine(lambda engine, batch: None)
    evaluator.add_event_handler(Events.COMPLETED, run.checkpoint)
    run.trainer.add_event_handler(Events.ITERATION_COMPLETED(every=10), lambda: evaluator.run([0]))
    run.trainer.run(torch.randn(40, 8, 4))
    names = [10, 15, 30, 40] if score is None else [10, 30, 40]
    assert [int(name.split("_")[1].split(".")[0]) for name in run.saved] == names
    assert "iteration 20: spike had a spike" in caplog.text


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


def test_a_refused_argument_makes_no_directory(tmp_path):
    with pytest.raises(ValueError, match="Argument quiet"):
        HealthyCheckpoint({"model": nn.Linear(2, 2)}, tmp_path / "new", quiet=0)
    assert not (tmp_path / "new").exists()


def test_without_monitors_nothing_but_the_state_counts(tmp_path):
    model = nn.Linear(2, 1)
    engine = Engine(lambda engine, batch: 1.0)
    engine.add_event_handler(Events.COMPLETED, HealthyCheckpoint({"model": model}, tmp_path))
    engine.run([0, 1, 2])
    assert [path.name for path in tmp_path.iterdir()] == ["model_3.pt"]
