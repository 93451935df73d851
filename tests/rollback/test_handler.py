"""RollbackHandler: what goes back, to where, when, and what goes on."""

from __future__ import annotations

import copy
import logging
import math
import os

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from ignite.handlers.param_scheduler import CosineAnnealingScheduler
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

from ignite_monitor import (
    GradMonitor,
    MeanStdThreshold,
    MonitorEvents,
    RobustThreshold,
    RollbackHandler,
    SpikeMonitor,
    StaticThreshold,
)
from tests._trainers import assert_same
from tests.rollback import _healthy
from tests.rollback._small import Net, Training, make_batches

FULL = bool(int(os.environ.get("FULL_MATRIX", "0")))
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), capturable=False),
    "two groups": lambda p: torch.optim.RMSprop([{"params": [each], "lr": 1e-3} for each in p]),
}


def messages(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


# What goes back


@pytest.mark.parametrize(
    ("optimizer", "scaler", "where"),
    [
        ("sgd", False, "device"),
        ("adamw", True, "host"),
        ("fused", False, "host"),
        ("tensor lr", False, "device"),
        ("two groups", True, "device"),
    ],
)
def test_everything_is_bitwise_that_of_the_snapshot(optimizer, scaler, where):
    training = Training(OPTIMIZERS[optimizer], scaler=scaler, every=10, quiet=5, where=where, monitor={})
    back = []
    training.trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda engine: back.append(training.state()))
    training.run(make_batches(60), request=[34, 55])
    # Those after 30 and 50 are not good yet.
    assert training.of("restored_iteration") == {34: 20, 55: 40}
    for state, iteration in zip(back, training.of("restored_iteration").values(), strict=True):
        assert_same(state, training.before[iteration])
    assert training.of("count")[60] == 2


def test_state_that_has_come_since_is_gone_again():
    training = Training(OPTIMIZERS["adamw"])
    counts = []
    training.trainer.add_event_handler(
        MonitorEvents.ROLLED_BACK, lambda engine: counts.append(len(training.optimizer.state))
    )
    training.run(make_batches(8), request=[3])
    assert training.of("restored_iteration") == {3: 0}
    assert counts == [0]
    assert len(training.optimizer.state) == len(list(training.model.parameters()))


def test_a_buffer_of_another_shape_and_a_replaced_one_go_back():
    training = Training(names=["model", "optimizer"])
    model = training.model
    model.register_buffer("queue", torch.zeros(1), persistent=False)

    def grow(engine):
        model.queue = torch.cat((model.queue, torch.ones(1)))
        model.steps = model.steps + 0.5

    training.trainer.add_event_handler(Events.ITERATION_STARTED, grow)
    sizes = []
    training.trainer.add_event_handler(
        MonitorEvents.ROLLED_BACK, lambda engine: sizes.append((len(model.queue), float(model.steps)))
    )
    training.run(make_batches(8), request=[5])
    assert sizes == [(1, 0.0)]


class PerGroup(torch.optim.Optimizer):
    """Keeps its averages in the state and its counts in the groups, as schedule-free optimizers do."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, "k": 0, "weight_sum": 0.0, "train_mode": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"] ** 2
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                z.sub_(p.grad, alpha=group["lr"])
                p.lerp_(z, group["lr"] ** 2 / group["weight_sum"])


def free_optimizers():
    yield lambda p: PerGroup(p, lr=1e-3)
    try:
        import schedulefree
    except ImportError:
        return
    yield lambda p: schedulefree.AdamWScheduleFree(p, lr=1e-3)
    yield lambda p: schedulefree.SGDScheduleFree(p, lr=1e-3)


@pytest.mark.parametrize("optimizer", list(free_optimizers()))
def test_schedule_free_optimizers(optimizer):
    training = Training(optimizer, every=10, quiet=5)
    if hasattr(training.optimizer, "train"):
        training.optimizer.train()
    groups, states = {}, []

    def note(engine):
        group = training.optimizer.param_groups[0]
        groups[engine.state.iteration - 1] = {k: v for k, v in group.items() if k != "params"}

    training.trainer.add_event_handler(Events.ITERATION_STARTED, note)
    training.trainer.add_event_handler(
        MonitorEvents.ROLLED_BACK,
        lambda engine: states.append(
            (training.state(), {k: v for k, v in training.optimizer.param_groups[0].items() if k != "params"})
        ),
    )
    training.optimizer.param_groups[0]["weight_decay"] = 0.5

    @training.trainer.on(Events.ITERATION_STARTED(once=30))
    def change(engine):
        training.optimizer.param_groups[0].update(lr=7e-4, weight_decay=0.25)

    training.run(make_batches(40), request=[34])
    [(state, group)] = states
    assert training.of("restored_iteration") == {34: 20}
    assert group == groups[20] | {"lr": 7e-4, "weight_decay": 0.25}
    assert_same(state["model"], training.before[20]["model"])
    assert_same(state["optimizer"]["state"], training.before[20]["optimizer"]["state"])


def test_thresholds_are_those_of_the_snapshot_and_counts_go_on():
    training = Training(monitor={}, every=10, quiet=5)
    value = SpikeMonitor(lambda engine: engine.state.output, prefix="loss")
    value.attach(training.trainer)
    monitors = {"grad": training.monitor, "loss": value}
    known, after = {}, {}
    training.trainer.add_event_handler(
        Events.ITERATION_STARTED,
        lambda e: known.update(
            {e.state.iteration - 1: copy.deepcopy({n: m.state_dict() for n, m in monitors.items()})}
        ),
    )
    training.trainer.add_event_handler(
        MonitorEvents.ROLLED_BACK, lambda _: after.update({n: m.state_dict() for n, m in monitors.items()})
    )
    training.run(make_batches(60, bad=range(42, 60)))
    assert training.of("count")[60] == 1
    [first] = [i for i, count in training.of("count").items() if count == 1][:1]
    iteration = training.of("restored_iteration")[first]
    assert first == 51
    assert iteration == 30
    for name in monitors:
        then, now = known[iteration][name]["detector"], after[name]["detector"]
        assert_same(now["rule"], then["rule"])
        assert now["consecutive"] == then["consecutive"] == 0
        assert now["spike_count"] == then["spike_count"] + 10
        assert now["restarts"] == 1
    # The rule of that time judges what comes: all of it is undone.
    assert training.of("discarded_count")[60] == 8
    assert training.metrics[59]["grad/spike_count"] == 18
    assert float(value.state_dict()["detector"]["spike_count"]) == 18


def test_random_numbers_and_iterations_go_on_and_gradients_are_dropped():
    training = Training(accumulate=3, every=6, quiet=2)
    states, left = [], []

    def note(engine):
        states.append((engine.state.iteration, torch.get_rng_state()))
        left.append([each.grad for each in training.model.parameters()])

    training.trainer.add_event_handler(MonitorEvents.ROLLED_BACK, note)
    training.run(make_batches(30), request=[20])  # one micro-batch after a step
    bare = Training(accumulate=3, handler=False)
    seen = {}
    bare.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: seen.update({e.state.iteration: torch.get_rng_state()})
    )
    bare.run(make_batches(30))
    [(iteration, state)] = states
    assert torch.equal(state, seen[iteration])
    assert left == [[None] * 6]
    assert training.trainer.state.iteration == 30


@pytest.mark.parametrize(("request_at", "expected"), [(13, 8), (14, 8), (17, 8), (18, 16)])
def test_accumulation_snapshots_lie_between_steps(request_at, expected):
    training = Training(accumulate=4, every=5, quiet=1)
    training.run(make_batches(20), request=[request_at])
    assert training.of("restored_iteration") == {request_at: expected}


# When


def test_trouble_before_the_first_good_one_goes_to_the_oldest():
    training = Training(every=5, quiet=50)
    training.run(make_batches(30), request=[18, 27])
    assert training.of("restored_iteration") == {18: 5, 27: 5}  # at most three are kept that are not good


def test_trouble_right_after_a_snapshot_goes_to_the_one_before():
    training = Training(every=10, quiet=5)
    training.run(make_batches(40), request=[21])
    assert training.of("restored_iteration") == {21: 10}


def test_a_snapshot_is_not_taken_after_an_unhealthy_iteration_and_a_spike_starts_the_count_anew():
    training = Training(every=10, quiet=5, monitor={"on_spike": "skip"})
    training.run(make_batches(80, bad=[40, 54]), request=[47, 70])
    # 40 is unhealthy: the snapshot is taken after 41. It is good at 46.
    assert training.of("restored_iteration")[47] == 41
    # After the healing, at 52, there is one more; 54 is a spike, so it is good at 59, as is that after 62 at 67.
    assert training.of("restored_iteration")[70] == 62


@pytest.mark.parametrize("resumed", [False, True])
def test_trouble_again_before_another_is_good_takes_an_earlier_one(resumed):
    training = Training(every=10, quiet=8, probation=1, max_rollbacks=4)
    if resumed:
        training.trainer.add_event_handler(
            Events.ITERATION_COMPLETED(lambda _, i: i in (40, 43)),
            lambda _: training.rollback.load_state_dict(training.rollback.state_dict()),
        )
    training.run(make_batches(60), request=[39, 42, 45, 48])
    assert list(training.of("restored_iteration").values()) == [30, 20, 10, 10]


def test_one_bad_batch_is_left_alone():
    training = Training(monitor={"on_spike": "skip"})
    training.run(make_batches(60, bad=[40, 44, 50]))
    assert training.of("count")[60] == 0


@pytest.mark.parametrize("monitored", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nonfinite_batch_is_its_own_business_if_the_state_is_finite(monitored, value):
    """With the steps left out the weights stay finite, but not the buffers that a forward pass has changed."""
    training = Training(monitor={"on_spike": "skip"} if monitored else None)
    step = training.train_step

    def leaves_out(engine, batch):
        return value if batch[0] is None else step(engine, batch)

    training.trainer._process_function = leaves_out
    batches = make_batches(60)
    for i in [30, 31, 32]:
        batches[i] = (None, None)
    training.run(batches)
    assert training.of("count")[60] == 0


@pytest.mark.parametrize("skip_step", [True, False])
def test_nan_in_the_inputs_once(skip_step):
    batches = make_batches(60)
    batches[39][0][0, 0] = math.nan
    training = Training(monitor={"on_spike": "skip" if skip_step else None})
    training.run(batches)
    assert training.of("restored_iteration") == {40: 0}
    assert training.of("count")[60] == 1
    assert all(torch.isfinite(each).all() for each in training.model.parameters())


def test_so_many_nonfinite_losses_in_a_row_go_back():
    training = Training(patience=4)
    step = training.train_step
    training.trainer._process_function = lambda e, b: math.nan if 30 <= e.state.iteration < 40 else step(e, b)
    training.run(make_batches(60))
    assert training.of("restored_iteration")[33] == 0
    assert training.of("count")[60] == 1
    assert training.of("discarded_count")[60] == 6


@pytest.mark.parametrize("monitor", [None, {}, {"on_spike": "skip"}])
def test_nan_for_ever_ends_the_run_with_a_message(monitor, caplog):
    batches = make_batches(200)
    for x, _ in batches[60:]:
        x.fill_(math.nan)
    training = Training(monitor=monitor)
    training.run(batches)
    assert training.trainer.state.iteration == 61 + 51
    [error] = messages(caplog, logging.ERROR)
    assert "iteration 112" in error
    assert "not finite" in error
    assert all(torch.isfinite(each).all() for each in training.model.parameters())


def test_a_state_that_is_not_finite_again_and_again_ends_the_run(caplog):
    training = Training(max_rollbacks=2)

    @training.trainer.on(Events.ITERATION_STARTED(lambda _, i: i in (60, 80, 100)))
    def wreck(_):
        training.model.layers[0].weight.data[0, 0] = math.nan

    training.run(make_batches(150))
    assert training.trainer.state.iteration == 100
    assert len(messages(caplog, logging.ERROR)) == 1
    assert all(torch.isfinite(each).all() for each in training.model.parameters())


@pytest.mark.parametrize("late", [False, True])
def test_masks_of_minus_infinity_are_no_trouble(late):
    training = Training(monitor={"on_spike": "skip"}, names=["model", "optimizer"])
    if late:

        @training.trainer.on(Events.ITERATION_STARTED(once=20))
        def register(_):
            training.model.register_buffer("late", torch.full((2,), -math.inf), persistent=False)

    step = training.train_step
    training.trainer._process_function = lambda e, b: math.nan if e.state.iteration == 40 else step(e, b)
    training.run(make_batches(60))
    assert training.of("count")[60] == 0


@pytest.mark.parametrize("what", ["parameter", "buffer", "optimizer"])
def test_a_ruined_state_is_seen_where_a_gradient_is_not_finite(what, caplog):
    training = Training(OPTIMIZERS["adamw"], monitor={})

    @training.trainer.on(Events.ITERATION_STARTED(once=40))
    def wreck(_):
        tensor = {
            "parameter": training.model.layers[0].weight.data,
            "buffer": training.model.layers[1].running_var,
            "optimizer": training.optimizer.state[training.model.layers[4].bias]["exp_avg"],
        }[what]
        tensor[0] = math.nan

    training.run(make_batches(60))
    # Statistics are not used in training, and moments show in the next loss.
    assert training.of("restored_iteration") == {41 if what == "optimizer" else 40: 0}
    [warning] = [text for text in messages(caplog) if "Back to" in text]
    assert {"parameter": "parameters", "buffer": "running_var", "optimizer": "optimizer"}[
        what
    ] in warning or "layers" in warning


def test_sixty_bad_batches_are_survived():
    training = Training(monitor={})
    training.run(make_batches(130, bad=range(41, 101)))
    assert training.of("count")[130] == 1
    assert training.of("discarded_count")[130] == 50
    assert training.of("restored_iteration") == dict.fromkeys(range(50, 101), 0)
    assert_same(training.before[100], training.before[0])


@pytest.mark.parametrize("how", ["continue", "terminate"])
def test_a_new_level_is_accepted_once_after_hold_and_patience(how, caplog):
    training = Training(monitor={}, on_exhausted=how)
    training.run(make_batches(180, bad=range(41, 181), factor=30.0))
    warnings = [text for text in messages(caplog) if "new level" in text and "rollback" in text]
    assert len(warnings) == 1
    assert "iteration 101" in warnings[0]
    assert training.of("discarded_count")[101] == 51
    if how == "terminate":
        assert training.trainer.state.iteration == 101
        return
    assert training.of("count")[180] == 1
    assert training.of("discarded_count")[180] == 51
    assert max(training.of("restored_iteration")) == 101


RULES = {
    "default": {},
    "all alike": {"threshold": MeanStdThreshold(3.0, decay=None)},
    "robust": {"threshold": RobustThreshold()},
    "function": {"threshold": lambda mean, std, count: mean + 4 * std},
    "loss": {"loss": lambda engine: engine.state.loss},
}


@pytest.mark.parametrize("handler", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_row_of_spikes_does_not_widen_its_own_threshold(rule, handler):
    """Of nine in a row the first is taken in, and no rule learns from the others."""
    training = Training(monitor=RULES[rule] | {"on_spike": "skip"}, handler=handler)
    value = SpikeMonitor(lambda engine: engine.state.output, threshold=RULES[rule].get("threshold"))
    value.attach(training.trainer)
    known = {}

    def rules_in(state):
        found = [state["rule"]] if "rule" in state else []
        return found + [each for part in state.values() if isinstance(part, dict) for each in rules_in(part)]

    def note(engine):
        states = [rules_in(monitor.state_dict()) for monitor in (training.monitor, value)]
        known[engine.state.iteration] = copy.deepcopy(states)

    training.trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
    training.run(make_batches(49, bad=range(41, 50)))
    assert training.metrics[49]["grad/spike_count"] == 9
    assert [len(each) for each in known[41]] == [2 if rule == "loss" else 1, 1]
    for iteration in range(42, 50):
        assert_same(known[iteration], known[41])


# What goes on


@pytest.mark.parametrize("lr_factor", [1.0, 0.5])
@pytest.mark.parametrize("schedule", ["keep", "rewind"])
@pytest.mark.parametrize("kind", ["step", "cosine"])
def test_schedules_over_a_rollback(kind, schedule, lr_factor):
    def make(optimizer):
        return StepLR(optimizer, 25, 0.5) if kind == "step" else CosineAnnealingLR(optimizer, 100)

    training = Training(scheduler=make, every=10, quiet=5, schedule=schedule, lr_factor=lr_factor)
    training.run(make_batches(60), request=[34])
    bare = Training(scheduler=make, handler=False)
    bare.run(make_batches(60))
    assert training.of("restored_iteration") == {34: 20}
    assert training.rates[:33] == bare.rates[:33]
    # After iteration 34 the schedule is where it was, or that after iteration 20 comes again.
    expected = bare.rates[33:] if schedule == "keep" else bare.rates[19:46]
    assert training.rates[33:] == pytest.approx([lr_factor * rate for rate in expected], rel=1e-9)


def test_schedulers_of_ignite_are_lowered_too():
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = CosineAnnealingScheduler(optimizer, "lr", 0.1, 0.01, 40)
    rollback = RollbackHandler({"model": model, "optimizer": optimizer, "scheduler": scheduler}, lr_factor=0.5)
    trainer = Engine(lambda *_: None)
    rates = []
    trainer.add_event_handler(Events.ITERATION_STARTED, scheduler)
    trainer.add_event_handler(Events.ITERATION_STARTED, lambda _: rates.append(optimizer.param_groups[0]["lr"]))
    rollback.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=10), lambda _: rollback.request("to see"))
    trainer.run(range(20), max_epochs=1)
    cosine = [0.01 + 0.045 * (1 + math.cos(math.pi * i / 40)) for i in range(20)]
    assert rates == pytest.approx(cosine[:10] + [each / 2 for each in cosine[10:]])


def test_no_handler_of_iteration_completed_sees_what_is_left_out(tmp_path):
    training = Training(handler=False, names=["model", "optimizer"], every=10, quiet=5)
    seen = {}
    training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: seen.update({e.state.iteration: training.state()})
    )
    saver = Checkpoint(training.things, DiskSaver(tmp_path), filename_pattern="{name}.pt")
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=34), saver)
    training.rollback.attach(training.trainer)
    training.run(make_batches(40), request=[34])
    assert_same(seen[34], training.before[20])
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert_same(dict(saved["model"]), dict(training.before[20]["model"]))


def test_one_warning_and_one_event_per_rollback(caplog):
    training = Training(every=10, quiet=5)
    events = []
    training.trainer.add_event_handler(
        MonitorEvents.ROLLED_BACK,
        lambda e: events.append((e.state.iteration, e.state.metrics["rollback/restored_iteration"])),
    )
    training.run(make_batches(60, bad=range(44, 60)), request=[34])
    assert events == [(34, 20.0), (53, 20.0)]
    warnings = [text for text in messages(caplog) if "Back to" in text]
    assert len(warnings) == 2
    assert warnings[0] == (
        "rollback: iteration 34: asked to. Back to the state after iteration 20, 14 batches are left out"
    )


@pytest.mark.parametrize("kind", [*_healthy.KINDS] if FULL else ["mlp", "cnn_one_cycle", "gan"])
def test_without_trouble_training_is_bitwise_the_same(kind):
    expected, _ = _healthy.run(kind, seed=0, count=70, handler=False)
    got, rollback = _healthy.run(kind, seed=0, count=70)
    assert_same(got, expected)
    assert rollback.metrics == {"rollback/count": 0.0, "rollback/discarded_count": 0.0}


def test_memory_is_allocated_once_and_as_large_as_promised():
    training = Training(OPTIMIZERS["adamw"], names=["model", "optimizer"], every=5, quiet=3, keep=2)
    addresses, sizes = set(), []

    def tensors(state):
        if isinstance(state, torch.Tensor):
            return [state]
        values = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
        return [tensor for value in values for tensor in tensors(value)]

    def note(engine):
        if engine.state.iteration > 30:
            snapshots = training.rollback._snapshots
            held = [tensors(each.state["parts"]) for each in [*snapshots.good, *snapshots.pending]]
            addresses.update(each.data_ptr() for group in held for each in group)
            sizes.extend(sum(each.nbytes for each in group) for group in held)

    training.trainer.add_event_handler(Events.ITERATION_COMPLETED, note)
    training.run(make_batches(80))
    whole = tensors(training.model.state_dict()) + tensors(training.optimizer.state_dict()) + [training.model.steps]
    assert set(sizes) == {sum(each.nbytes for each in whole)}
    assert len(addresses) <= 3 * len(whole)  # two good ones and one that is not yet


# Resuming


def start_to_resume():
    training = Training(OPTIMIZERS["adamw"], monitor={"on_spike": "skip"}, every=10, quiet=5)
    step = training.train_step

    def seeded(engine, batch):
        torch.manual_seed(engine.state.iteration)  # for the dropout
        return step(engine, batch)

    training.trainer._process_function = seeded
    own = {"trainer": training.trainer, "rollback": training.rollback, "grad": training.monitor}
    return training, training.things | own


CUTS = (33, 52, 57, 61, 66)  # before the trouble, in it, while it gets well, and after


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A training with trouble, its batches, and checkpoints from on the way."""
    folder = tmp_path_factory.mktemp("checkpoints")
    batches = make_batches(80, bad=range(45, 64))
    whole, to_save = start_to_resume()
    steps = {}
    for cut in CUTS:
        saver = Checkpoint(to_save, DiskSaver(folder, require_empty=False), filename_pattern=f"{cut}.pt")
        whole.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=cut), saver)
    whole.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: steps.update({e.state.iteration: whole.model.steps.clone()})
    )
    whole.run(batches)
    return whole, batches, folder, steps


@pytest.mark.parametrize("cut", CUTS)
def test_killed_and_resumed(cut, uninterrupted):
    whole, batches, folder, steps = uninterrupted
    resumed, to_load = start_to_resume()
    Checkpoint.load_objects(to_load, torch.load(folder / f"{cut}.pt", weights_only=True))
    resumed.model.steps.copy_(steps[cut])
    resumed.run(batches[cut:] + batches[:cut])
    assert whole.of("count")[80] == 1
    assert whole.of("discarded_count")[80] == 9
    for name in ("count", "discarded_count", "restored_iteration"):
        assert resumed.of(name) == {i: value for i, value in whole.of(name).items() if i > cut}
    assert_same(resumed.state(), whole.state())


# Bad input


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"to_save": None}, TypeError, "to_save"),
        ({"to_save": {}}, ValueError, "to_save should hold a model"),
        ({"to_save": {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}}, ValueError, "model"),
        ({"to_save": {"model": nn.Linear(2, 2), "loss": 3.0}}, TypeError, "'loss'"),
        ({"to_save": {1: nn.Linear(2, 2)}}, TypeError, "strings"),
        ({"to_save": {"model": nn.Linear(2, 2), "trainer": Engine(lambda *_: None)}}, ValueError, "'trainer'"),
        ({"every": 0}, ValueError, "every"),
        ({"keep": 0}, ValueError, "keep"),
        ({"quiet": 1.5}, TypeError, "quiet"),
        ({"patience": "3"}, TypeError, "patience"),
        ({"probation": 0}, ValueError, "probation"),
        ({"hold": None}, TypeError, "hold"),
        ({"max_rollbacks": 0}, ValueError, "max_rollbacks"),
        ({"window": True}, TypeError, "window"),
        ({"where": "disk"}, ValueError, "where"),
        ({"where": torch.device("cpu")}, TypeError, "where"),
        ({"loss": 3.0}, TypeError, "loss"),
        ({"schedule": "forward"}, ValueError, "schedule"),
        ({"lr_factor": 0.0}, ValueError, "lr_factor"),
        ({"lr_factor": 2.0}, ValueError, "lr_factor"),
        ({"on_exhausted": "raise"}, ValueError, "on_exhausted"),
        ({"prefix": "a b"}, ValueError, "prefix"),
    ],
)
def test_bad_arguments(kwargs, error, text):
    with pytest.raises(error, match=text):
        RollbackHandler(**{"to_save": {"model": nn.Linear(2, 2)}} | kwargs)


def test_bad_reason_loss_and_state():
    training = Training()
    with pytest.raises(TypeError, match="reason"):
        training.rollback.request(3)
    with pytest.raises(ValueError, match="other"):
        RollbackHandler({"other": nn.Linear(2, 2)}).load_state_dict(run_a_little().rollback.state_dict())
    wrong = Training(loss=lambda engine: "much")
    with pytest.raises(TypeError, match="loss"):
        wrong.run(make_batches(2))


def run_a_little():
    training = Training()
    training.run(make_batches(3))
    return training


def test_it_says_so_where_nothing_tells_of_trouble(caplog):
    model = nn.Linear(2, 2)
    trainer = Engine(lambda *_: None)
    RollbackHandler({"model": model}).attach(trainer)
    trainer.run(range(50), max_epochs=1)
    [warning] = messages(caplog)
    assert "loss=" in warning


def test_it_says_so_where_the_optimizer_makes_no_step(caplog):
    training = Training(every=3)
    stranger = torch.optim.SGD(Net().parameters(), lr=0.1)
    other = RollbackHandler({"model": training.model, "optimizer": stranger}, every=3, prefix="other")
    other.attach(training.trainer)
    training.run(make_batches(100))
    [warning] = messages(caplog)
    assert warning.startswith("other: no step")


def test_a_monitor_of_every_value_can_ask(caplog):
    """THRESHOLD_RESET of any monitor on the engine, whatever it judges."""
    training = Training(every=10, quiet=5)
    watched = SpikeMonitor(
        lambda engine: 2.0 if 40 <= engine.state.iteration < 47 else 1.0,
        threshold=StaticThreshold(1.5),
        max_consecutive_spikes=4,
        prefix="share",
    )
    watched.attach(training.trainer)
    training.run(make_batches(46))
    assert training.of("restored_iteration") == dict.fromkeys((43, 44, 45, 46), 30)
    assert "share" in messages(caplog)[-1]


def test_gan_goes_back_as_a_whole():
    train_step, to_save, monitors = _healthy.gan(100)
    trainer = Engine(train_step)
    for monitor in monitors:
        monitor.attach(trainer)
    rollback = RollbackHandler(to_save, every=10, quiet=5)
    rollback.attach(trainer)
    before, after = {}, {}

    def states():
        return copy.deepcopy({name: thing.state_dict() for name, thing in to_save.items()})

    trainer.add_event_handler(Events.ITERATION_STARTED(once=21), lambda _: before.update(states()))
    trainer.add_event_handler(Events.ITERATION_STARTED(once=34), lambda _: rollback.request("to see"))
    trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda _: after.update(states()))
    trainer.run(_healthy.data("gan", 0, 50), max_epochs=1, epoch_length=50)
    assert_same(after, before)
    assert isinstance(monitors[0], GradMonitor)
