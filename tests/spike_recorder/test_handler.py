"""State recorded at a spike, and repetition of the step from it."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import gc
import logging
import math
import os
import random
import resource
import signal
import sys
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from torch import nn
from torch.utils.checkpoint import checkpoint

from ignite_monitor import (
    GradMonitor,
    SpikeMonitor,
    SpikeRecorder,
    StaticThreshold,
    load_spike,
    record,
)
from ignite_monitor.spike_recorder import record as spike_files
from tests._helpers import assert_same, grad_norm, make_step, run_monitored, same, square_loss
from tests._models import Lambda


class Net(nn.Module):
    """Draws from torch, Python and NumPy."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x):
        x = F.dropout(self.norm(self.first(x)).relu(), 0.5, self.training)
        return self.last(x * (1 + random.random()) + float(np.random.randn()))


def batches(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(6, 4, generator=generator),
            "y": torch.randint(3, (6,), generator=generator),
            "id": [f"{place}.{i}" for i in range(6)],
        }
        for place in range(count)
    ]


def losses_of(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def train(directory, data, *, spikes=(3,), epochs=1, compared=None, trainer=None, **options):
    """A run that has spikes in some iterations; weights before, and the loss of, each of them, and the recorder."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    before, losses = {}, {}

    def loss_of(model, batch):
        before[engine.state.iteration] = copy.deepcopy(model.state_dict())
        losses[engine.state.iteration] = losses_of(model, batch)
        record("losses", losses[engine.state.iteration])
        return losses[engine.state.iteration].mean()

    def has_spike(engine):
        return engine.state.iteration in spikes

    factor = lambda engine: 1e6 if has_spike(engine) else 1.0  # noqa: E731
    engine = Engine(make_step(model, optimizer, loss_of=loss_of, factor=factor, leave_out=has_spike))
    monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e3))
    monitor.attach(engine)
    recorder = SpikeRecorder(monitor, directory, **options)
    recorder.attach(engine)
    if trainer is not None:
        trainer(engine)
    engine.run(data, max_epochs=epochs)
    return before, losses, recorder


def record_outputs(directory, step=lambda engine, batch: 1.0, *, every=1, kind=SpikeRecorder, **options):
    """A trainer with a recorder, for which outputs of the train step above 0.5 are spikes."""
    engine = Engine(step)
    monitor = SpikeMonitor(lambda engine: engine.state.output, threshold=StaticThreshold(0.5))
    monitor.attach(engine)
    recorder = kind(monitor, directory, **options)
    recorder.attach(engine, Events.ITERATION_STARTED(every=every))
    return engine, recorder


def files(directory):
    return sorted(os.listdir(directory))


def test_the_step_made_again_has_the_same_loss_to_the_last_bit(tmp_path):
    data = batches(7)
    before, losses, _ = train(tmp_path, data, spikes=(3, 6))
    assert files(tmp_path) == ["grad-00000003-rank0.spike.pt", "grad-00000006-rank0.spike.pt"]
    for iteration, name in zip((3, 6), files(tmp_path), strict=True):
        spike = load_spike(tmp_path / name)
        assert (spike.iteration, spike.epoch, spike.rank) == (iteration, 1, 0)
        assert (spike.name, spike.threshold, spike.lr, spike.culprits, spike.source) == (
            ("grad/norm", 1e3, [0.05], {}, None)
        )
        assert same(spike.batch, data[iteration - 1])
        assert same(spike.losses, losses[iteration])
        model = Net()
        model.load_state_dict(before[iteration])
        random.random(), np.random.randn(3), torch.rand(5)
        spike.restore_random_state()
        again = losses_of(model, spike.batch)
        assert_same(again, losses[iteration])
        (again.mean() * 1e6).backward()
        assert spike.norm == pytest.approx(grad_norm(model), rel=1e-6)


def test_random_numbers_drawn_in_the_train_step_are_drawn_again(tmp_path):
    """Also where NumPy has one in store, which is no part of its generator's memory."""
    drawn = {}

    def step(engine, batch):
        drawn[engine.state.iteration] = (random.random(), np.random.randn(), float(torch.rand(())), np.random.rand())
        return 1.0

    record_outputs(tmp_path, step, keep=40)[0].run(range(10))
    for name in files(tmp_path):
        spike = load_spike(tmp_path / name)
        spike.restore_random_state()
        assert (random.random(), np.random.randn(), float(torch.rand(())), np.random.rand()) == drawn[spike.iteration]
        assert (spike.batch, spike.norm, spike.lr) == (spike.iteration - 1, 1.0, None)
    assert len(files(tmp_path)) == 10


def test_training_is_the_same_with_a_recorder(tmp_path):
    outcomes = []
    for is_recorded in (True, False):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def recorded(model, batch):
            losses = losses_of(model, batch)
            record("losses", losses)  # backward calls it again, for the square
            return losses.square().mean()

        def loss_of(model, batch):
            return checkpoint(recorded, model, batch, use_reentrant=False)

        monitor = GradMonitor(model, optimizer, threshold=StaticThreshold(1e-9))
        monitors = [monitor, SpikeRecorder(monitor, tmp_path)] if is_recorded else []
        run_monitored(make_step(model, optimizer, loss_of=loss_of), batches(6), *monitors)
        outcomes.append((model.state_dict(), torch.get_rng_state(), random.getstate(), np.random.rand()))
    assert same(*outcomes)
    assert {len(load_spike(tmp_path / name).losses) for name in files(tmp_path)} == {6}


def test_what_is_not_finite_comes_first_and_several_losses_of_a_row_count_by_their_mean(tmp_path):
    def step(engine, batch):
        record("losses", torch.tensor([[1.0, 9.0], [2.0, 2.0]]))
        record("losses", torch.tensor([[3.0, math.nan], [6.0, 6.0]], requires_grad=True))
        record("losses", 5.0)
        record("others", torch.ones(3))
        return 1.0

    record_outputs(tmp_path, step, batch=False)[0].run([torch.zeros(2)])
    spike = load_spike(tmp_path / "spike-00000001-rank0.spike.pt")
    assert spike.rows == [2, 3, 0]
    assert spike.row_losses[[0, 1, 3]].tolist() == [5.0, 2.0, 6.0]
    assert (spike.losses.shape, spike.losses.requires_grad, spike.batch) == ((4, 2), False, None)


class Subclass(torch.Tensor):
    """A tensor of a class that torch.load(weights_only=True) refuses."""


@pytest.mark.parametrize(
    ("losses", "is_kept"),
    [
        (torch.ones(3).as_subclass(Subclass), True),
        (torch.ones(3, dtype=torch.complex64), False),
        (torch.ones(3).to_sparse(), False),
    ],
)
def test_losses_of_all_kinds_leave_a_file_that_can_be_read(tmp_path, losses, is_kept, caplog):
    record_outputs(tmp_path, lambda engine, batch: record("losses", losses) or 1.0)[0].run([X])
    spike = load_spike(tmp_path / "spike-00000001-rank0.spike.pt")
    assert same(spike.batch, X)
    assert same(spike.losses, torch.ones(3) if is_kept else None)
    assert ("no dense real tensors" in caplog.text) != is_kept


def test_the_oldest_go_and_files_of_others_stay(tmp_path):
    others = ["grad-00000001-rank1.spike.pt", "loss-00000001-rank0.spike.pt", "grad-00000001-rank0.spike.pt.bak"]
    for name in others:
        (tmp_path / name).write_bytes(b"")
    _, _, recorder = train(tmp_path, batches(20), spikes=range(2, 20, 2), keep=4)
    own = [f"grad-{iteration:08d}-rank0.spike.pt" for iteration in (12, 14, 16, 18)]
    assert files(tmp_path) == sorted([*others, *own])
    assert recorder.count == recorder.metrics["grad_record/recorded_count"] == 9


def test_state(tmp_path):
    _, _, recorder = train(tmp_path, batches(3), spikes=(3, 4, 5), epochs=2)
    assert [load_spike(tmp_path / name).epoch for name in files(tmp_path)] == [1, 2, 2]
    other = SpikeRecorder(recorder.monitor, tmp_path)
    other.load_state_dict(recorder.state_dict())
    assert other.state_dict() == recorder.state_dict() == {"count": 3}


def test_files_of_earlier_runs_are_kept(tmp_path):
    """A second run of a trainer, and of a second trainer; only a recorder's own files are deleted."""

    def trainer():
        return record_outputs(tmp_path, lambda engine, batch: float(engine.state.iteration > 2), keep=3)[0]

    def content():
        return {name.split("-", 1)[1][6:-9]: load_spike(tmp_path / name).batch for name in files(tmp_path)}

    first = trainer()
    first.run([0, 1, 12, 13], max_epochs=1)
    assert content() == {"03-rank0": 12, "04-rank0": 13}
    assert first.state.metrics["spike_record/recorded_count"] == 2
    first.run([0, 1, 22], max_epochs=1)
    assert content() == {"03-rank0": 12, "03-rank0-2": 22, "04-rank0": 13}
    trainer().run([0, 1, 32, 33, 34, 35], max_epochs=1)
    assert content() == {"03-rank0": 12, "03-rank0-2": 22, "04-rank0": 13, "04-rank0-2": 33, "05-rank0": 34} | {
        "06-rank0": 35
    }


@pytest.mark.parametrize("limit", [0, 3000])
def test_a_full_disk_is_one_warning(tmp_path, limit, caplog):
    """The system refuses to let a file grow; a record has more than 5,000 bytes of random state alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    free = []

    def fill(engine):
        engine.add_event_handler(
            Events.ITERATION_STARTED(once=2), lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        )
        engine.add_event_handler(
            Events.ITERATION_STARTED(once=7), lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        )
        engine.add_event_handler(Events.ITERATION_COMPLETED(once=6), lambda _: free.extend(files(tmp_path)))

    try:
        with caplog.at_level(logging.WARNING, "ignite_monitor.spike_recorder"):
            _, losses, recorder = train(tmp_path, batches(9), spikes=(3, 5, 8), trainer=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(losses) == 9
    assert [text for item in caplog.records if "can't be recorded" in (text := item.getMessage())] == caplog.messages
    assert len(caplog.messages) == 1
    assert free == []
    assert files(tmp_path) == ["grad-00000008-rank0.spike.pt"]
    assert recorder.count == 1


def test_a_large_batch_is_omitted(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(spike_files, "_LARGEST", 100)
    engine, _ = record_outputs(tmp_path)
    with caplog.at_level(logging.WARNING):
        engine.run([torch.zeros(25), torch.zeros(26), torch.zeros(1000)[:25], torch.zeros(27)])
    result = [load_spike(tmp_path / name).batch for name in files(tmp_path)]
    assert [item is None for item in result] == [False, True, False, True]
    assert len(caplog.messages) == 1
    assert os.path.getsize(tmp_path / files(tmp_path)[2]) < os.path.getsize(tmp_path / files(tmp_path)[0]) + 500


# What a batch may be

Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass
class Sample:
    x: torch.Tensor
    name: str


def one_record(directory, batch, change=None, **options):
    """Return the record of a batch that a train step may have changed."""

    def step(engine, given):
        if change is not None:
            change(given)
        return 1.0

    record_outputs(directory, step, **options)[0].run([batch])
    content = torch.load(directory / files(directory)[0], weights_only=True)
    assert content["spike"]["iteration"] == 1
    return load_spike(directory / files(directory)[0])


X = torch.arange(6.0).view(2, 3)


@pytest.mark.parametrize(
    ("batch", "kept"),
    [
        (X, X),
        ((X, [X.int(), "a", 1, 2.5, None, True, b"c", 1j]), (X, [X.int(), "a", 1, 2.5, None, True, b"c", 1j])),
        (collections.OrderedDict(a=X, b={1: (X,)}), {"a": X, "b": {1: (X,)}}),
        (collections.UserDict(a=X), {"a": X}),
        (Pair(X, 1), (X, 1)),
        (X.to(torch.bfloat16), X.to(torch.bfloat16)),
        (X.clone().requires_grad_() * 2, X * 2),
    ],
)
def test_batches_of_all_kinds(tmp_path, batch, kept):
    assert same(one_record(tmp_path, batch).batch, kept)


def test_a_batch_keeps_its_memory_format(tmp_path):
    images = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    kept = one_record(tmp_path, images).batch
    assert kept.is_contiguous(memory_format=torch.channels_last)
    assert same(kept, images)


def test_what_the_train_step_puts_in_the_batchs_containers_is_not_what_it_was_given(tmp_path):
    batch = {"x": X, "more": [X]}

    def change(given):
        given["x"] = given["x"] * 2
        given["more"].append(1)

    assert same(one_record(tmp_path, batch, change).batch, {"x": X, "more": [X]})


OTHER_TYPES = "only tensors, numbers and strings"
CYCLE = {"x": X}
CYCLE["batch"] = CYCLE


@pytest.mark.parametrize(
    ("batch", "change", "text"),
    [
        *((batch, None, OTHER_TYPES) for batch in [(X, object()), np.zeros(3), np.float64(2.0), Sample(X, "n")]),
        (CYCLE, None, "RecursionError"),
        (X.to_sparse(), None, "not a single dense array"),
        ({"x": X.clone()}, lambda given: given["x"].mul_(2), "the train step changes it in place"),
    ],
)
def test_a_batch_that_cannot_be_saved_is_omitted(tmp_path, batch, change, text, caplog):
    assert one_record(tmp_path, batch, change).batch is None
    [warning] = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert text in warning


def test_each_recorder_keeps_the_spikes_of_its_own_monitor(tmp_path):
    def attach(engine):
        monitor = SpikeMonitor(
            lambda engine: float(engine.state.iteration == 4), threshold=StaticThreshold(0.5), prefix="a/b"
        )
        monitor.attach(engine)
        SpikeRecorder(monitor, tmp_path).attach(engine)

    train(tmp_path, batches(5), trainer=attach)
    assert files(tmp_path) == ["a_b-00000004-rank0.spike.pt", "grad-00000003-rank0.spike.pt"]


def test_where_a_value_comes_from_that_is_not_finite(tmp_path):
    torch.manual_seed(0)

    model = nn.Sequential(nn.Linear(3, 4), Lambda(lambda self, x: x + (x * 0).sqrt()), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = Engine(make_step(model, optimizer, loss_of=square_loss, leave_out=lambda _: True))
    monitor = GradMonitor(model)
    monitor.attach(engine)
    SpikeRecorder(monitor, tmp_path).attach(engine)
    engine.run([X] * 3)
    spike = load_spike(tmp_path / files(tmp_path)[0])
    assert (spike.iteration, spike.source["name"], spike.source["kind"]) == (1, "1", "backward")
    assert math.isnan(spike.norm)
    assert same(spike.batch, X)


def test_nothing_is_kept_after_an_iteration_nor_after_detaching(tmp_path):
    (engine, recorder), seen = record_outputs(tmp_path), []
    engine.add_event_handler(Events.ITERATION_STARTED, lambda engine: seen.append(weakref.ref(engine.state.batch)))
    # Ignite forgets a batch before it asks for the next one.
    engine.add_event_handler(Events.GET_BATCH_STARTED, lambda _: alive.append([item() is not None for item in seen]))
    alive = []
    gc.disable()
    try:
        engine.run((X * i for i in range(3)), epoch_length=3)
    finally:
        gc.enable()
    assert alive == [[], [False], [False] * 2]
    recorder.detach()
    recorder.monitor.detach()
    assert not any(engine.has_event_handler(handler) for handler in (recorder.reset_run_state, recorder._start))
    assert files(tmp_path) == ["spike-00000001-rank0.spike.pt", "spike-00000002-rank0.spike.pt", files(tmp_path)[-1]]


def test_with_filters(tmp_path):
    record_outputs(tmp_path, every=3)[0].run(range(7), max_epochs=1)
    assert files(tmp_path) == [f"spike-{iteration:08d}-rank0.spike.pt" for iteration in (3, 6)]


class RunsCode:
    def __reduce__(self):
        return sys.exit, ("code was run",)


GOOD = {"format": "ignite_monitor spike", "version": 2, "spike": {"iteration": 1}}


@pytest.mark.parametrize("content", [b"", b"text", [1], GOOD | {"version": 9}, GOOD, GOOD | {"spike": RunsCode()}])
def test_what_is_no_record_is_refused(tmp_path, content):
    path = tmp_path / "a.spike.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=str(path)):
        load_spike(path)
    with pytest.raises(FileNotFoundError):
        load_spike(tmp_path / "none")


def test_other_fields_are_refused(tmp_path):
    one_record(tmp_path, X)
    path = tmp_path / files(tmp_path)[0]
    content = torch.load(path, weights_only=True)
    content["spike"]["unknown"] = 1
    torch.save(content, path)
    with pytest.raises(ValueError, match=f"{path} is damaged: its fields"):
        load_spike(path)


def test_a_file_that_is_cut_or_has_a_flipped_bit_is_refused_or_read_as_it_was(tmp_path):
    batch = torch.randn(500)
    record = one_record(tmp_path, batch)
    path = tmp_path / files(tmp_path)[0]
    whole, refused = path.read_bytes(), 0
    for place in np.random.default_rng(0).permutation(len(whole))[:300].tolist():
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        try:
            assert same(dataclasses.asdict(load_spike(path)), dataclasses.asdict(record))
        except ValueError:
            refused += 1
    assert refused > 100
    for end in range(0, len(whole), len(whole) // 23):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"damaged|no spike file"):
            load_spike(path)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("where", ["torch.save", "os.replace", "Path.mkdir", "Path.open", "Path.exists", "count"])
def test_a_kill_at_any_moment_leaves_whole_files_only(tmp_path, where, after):
    """The next run takes a name of its own, also where the killed one has left an unfinished file."""
    engine, _ = record_outputs(tmp_path)
    engine.run([X])
    child = os.fork()
    if child == 0:
        *owner, name = where.split(".")
        target = functools.reduce(getattr, owner, spike_files)
        original = getattr(target, name)

        def kill(*args, **kwargs):
            original(*args, **kwargs) if after else None
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(target, name, kill)
        record_outputs(tmp_path)[0].run([X * 2])
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    record_outputs(tmp_path)[0].run([X * 3])
    batches = [load_spike(path).batch for path in sorted(tmp_path.glob("*.spike.pt"))]
    finished = [X * 2] * (where == "os.replace" and after)
    assert same(sorted(batch[1, 2].item() for batch in batches), [5.0, *(10.0 for _ in finished), 15.0])
    for unfinished in tmp_path.glob(".*"):
        os.utime(unfinished, (0.0, 0.0))
    record_outputs(tmp_path)[0].run([X * 4])
    assert [*tmp_path.glob(".*")] == []
    assert len(files(tmp_path)) == len(batches) + 1


def test_an_unfinished_file_of_another_process_stays(tmp_path):
    unfinished = tmp_path / ".spike-00000001-rank0.spike.pt.unfinished"
    unfinished.touch()
    record_outputs(tmp_path)[0].run([X])
    assert files(tmp_path) == [unfinished.name, "spike-00000001-rank0-2.spike.pt"]
