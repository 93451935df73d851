"""RollbackHandler: which state is restored, when, and what is kept."""

from __future__ import annotations

import copy
import logging
import math
import os
import threading

import pytest
import torch
import torch.nn.utils.prune
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn
from torch.utils._pytree import tree_map_only

from ignite_monitor import MonitorEvents, RollbackHandler, SpikeMonitor, attach_monitors
from ignite_monitor.model.tensors import tensors_in
from ignite_monitor.rollback import snapshots
from tests._helpers import assert_same
from tests.rollback._small import Training, make_batches, make_net

FULL = bool(int(os.environ.get("FULL_MATRIX", "0")))
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "tensor lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), capturable=False),
    "two groups": lambda p: torch.optim.RMSprop([{"params": [item], "lr": 1e-3} for item in p]),
}


def no_loss(engine):
    """The loss of these batches is noise, which a test of requests does without."""


def messages(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


TWICE = {34: 30, 65: 62}


@pytest.mark.parametrize(
    ("optimizer", "arguments", "restored"),
    [
        ("sgd", {}, TWICE),
        ("adamw", {"scaler": True, "where": "host"}, TWICE),
        ("fused", {"where": "host"}, TWICE),
        ("tensor lr", {}, TWICE),
        ("two groups", {"scaler": True}, TWICE),
        ("adamw", {}, {3: 0}),  # when the optimizer has no state yet
        *(("sgd", {"accumulate": 4, "every": 5}, one) for one in ({13: 10}, {14: 10}, {18: 15})),  # between steps
    ],
)
def test_everything_is_bitwise_that_of_the_snapshot(optimizer, arguments, restored):
    training = Training(OPTIMIZERS[optimizer], monitor={}, loss=no_loss, **arguments)
    back, states, groups = [], training.states(), training.optimizer.param_groups
    rates = [group["lr"] for group in groups if isinstance(group["lr"], torch.Tensor)]
    training.trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda engine: back.append(training.state()))
    training.run(make_batches(70), request=restored)
    assert training.of("restored_iteration") == restored
    for state, iteration in zip(back, restored.values(), strict=True):
        assert_same(state, states[iteration])
    assert training.of("count")[70] == len(restored)
    assert all(group["lr"] is rate for group, rate in zip(groups, rates, strict=False))


def test_snapshots_that_were_loaded_on_another_device_are_not_written_to():
    training = Training(OPTIMIZERS["adamw"], loss=no_loss, every=2)
    back, states = [], training.states()

    def load():
        state = training.rollback.state_dict()
        loaded = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), state["snapshots"])
        training.rollback.load_state_dict(state | {"snapshots": loaded})

    training.at(20, load)
    training.trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda engine: back.append(training.state()))
    training.run(make_batches(40), request=[37])
    assert_same(back, [states[int(training.of("restored_iteration")[37])]])


def test_a_buffer_of_another_shape_and_replaced_ones_are_restored():
    """One of them is shared by two modules."""
    training = Training(names=["model", "optimizer"])
    model = training.model
    model.register_buffer("queue", torch.zeros(1), persistent=False)
    for module in (model[0], model[4]):
        module.register_buffer("shared", model.queue, persistent=False)

    def grow(engine):
        model.queue = torch.cat((model.queue, torch.ones(1)))
        model[4].shared = torch.ones(1)
        model.steps = model.steps + 0.5

    training.trainer.add_event_handler(Events.ITERATION_STARTED, grow)
    restored = []
    training.trainer.add_event_handler(
        MonitorEvents.ROLLED_BACK,
        lambda engine: restored.append((model.queue, model[0].shared, model[4].shared, float(model.steps))),
    )
    training.run(make_batches(8), request=[5])
    [(queue, first, last, steps)] = restored
    assert (queue.tolist(), steps) == ([0.0], 0.0)
    assert [first.tolist(), last.tolist()] == [[0.0], [0.0]]


def test_monitors_and_their_handles_are_not_restored():
    training = Training(names=["model", "optimizer"], handler=False)
    monitor = SpikeMonitor(lambda engine: engine.state.output)
    objects = training.objects | {"monitor": monitor, "monitors": monitor.attach(training.trainer)}
    rollback = RollbackHandler(objects, every=10)
    rollback.attach(training.trainer)
    counts = []
    training.at(25, lambda: rollback.request("asked"))
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: counts.append(float(monitor.counts()[1])))
    training.after_step(lambda engine: math.nan if engine.state.iteration == 23 else None)
    training.run(make_batches(30))
    assert rollback._count == 1
    assert counts[-1] == 1.0


def test_random_numbers_and_iterations_go_on_and_gradients_are_dropped():
    training = Training(accumulate=3, every=6)
    states, left = [], []

    def note(engine):
        states.append((engine.state.iteration, torch.get_rng_state()))
        left.append([item.grad for item in training.model.parameters()])

    training.trainer.add_event_handler(MonitorEvents.ROLLED_BACK, note)
    training.run(make_batches(30), request=[20])  # one micro-batch after a step
    bare = Training(accumulate=3, handler=False)
    seen = {}
    bare.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: seen.update({e.state.iteration: torch.get_rng_state()})
    )
    bare.run(make_batches(30))
    [(iteration, state)] = states
    assert_same(state, seen[iteration])
    assert left == [[None] * 6]
    assert training.trainer.state.iteration == 30


def test_an_instability_again_restores_an_older_snapshot():
    """Also if the handler's state was saved and loaded in the meantime."""
    training = Training(max_rollbacks=4, loss=no_loss)

    def resume():
        state = training.rollback.state_dict()
        training.rollback.forget()
        training.rollback.load_state_dict(state)

    for iteration in (41, 50):
        training.at(iteration, resume)
    training.run(make_batches(60), request=[39, 48, 57])
    assert training.of("restored_iteration") == {39: 30, 48: 20, 57: 0}


def announce_change(training):
    training.at(60, training.rollback.accept)


def register_mask(training):
    mask = torch.full((2,), -math.inf)
    training.at(20, lambda: training.model.register_buffer("late", mask, persistent=False))
    return_nonfinite(40, 40, math.nan)(training)


def return_nonfinite(first, last, value):
    return lambda training: training.after_step(
        lambda engine: value if first <= engine.state.iteration <= last else None
    )


@pytest.mark.parametrize("on_spike", ["skip", None])
@pytest.mark.parametrize(
    ("batches", "prepare"),
    [
        (make_batches(60, [40, 44, 50]), lambda training: None),
        *((make_batches(60), return_nonfinite(31, 33, value)) for value in (math.nan, math.inf)),
        (make_batches(60), return_nonfinite(40, 40, math.nan)),  # the model has a mask of minus infinity
        (make_batches(60), register_mask),
        (make_batches(120, range(60, 121), factor=30.0), announce_change),
    ],
    ids=["bad batches", "NaN", "inf", "mask", "late mask", "announced change"],
)
def test_no_rollback(batches, prepare, on_spike, caplog):
    """A single batch is its own business if the state is finite, and so is a change that was announced."""
    training = Training(monitor={"on_spike": on_spike}, names=["model", "optimizer"])
    prepare(training)
    training.run(batches)
    assert training.of("count")[len(batches)] == 0
    assert not [text for text in messages(caplog) if "rolled back" in text]


@pytest.mark.parametrize("on_spike", ["skip", None])
def test_nan_in_the_inputs_once(on_spike):
    batches = make_batches(60)
    batches[44][0][0, 0] = math.nan
    training = Training(monitor={"on_spike": on_spike})
    training.run(batches)
    # A skipped step leaves the running statistics finite too.
    assert training.of("restored_iteration") == ({} if on_spike else {45: 40})
    assert all(torch.isfinite(parameter).all() for parameter in training.model.parameters())


def test_overflows_that_a_grad_scaler_handles_never_roll_back():
    training = Training(scaler=True, monitor={}, patience=3, names=["model", "optimizer", "scaler"])
    scales = []

    def overflow(gradient):
        return gradient * math.inf if 40 <= training.trainer.state.iteration < 46 else gradient

    training.model[0].weight.register_hook(overflow)
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: scales.append(training.scaler.get_scale()))
    training.run(make_batches(60))
    assert training.of("count")[60] == 0
    assert scales[45] == scales[38] / 2**6


def test_half_of_the_patience_in_nonfinite_losses_in_a_row_rolls_back():
    training = Training(patience=8)
    training.after_step(lambda engine: math.nan if 32 <= engine.state.iteration < 42 else None)
    training.run(make_batches(48))
    assert set(training.of("restored_iteration")) == set(range(35, 42))
    assert training.of("restored_iteration")[35] == 30
    assert (training.of("count")[48], training.of("discarded_count")[48]) == (1, 6)


@pytest.mark.parametrize("monitor", [None, {}, {"on_spike": "skip"}])
def test_nan_for_ever_ends_the_run_with_a_message(monitor, caplog):
    batches = make_batches(240)
    for x, _ in batches[60:]:
        x.fill_(math.nan)
    training = Training(monitor=monitor)
    training.run(batches)
    skips = monitor is not None and "on_spike" in monitor  # then the state is finite at first, and the patience counts
    assert training.trainer.state.iteration == 60 + 121 + 4 * skips
    [error] = [text for text in messages(caplog) if "the run ends" in text]
    assert f"iteration {60 + 121 + 4 * skips}" in error
    assert "not finite" in error
    assert all(torch.isfinite(parameter).all() for parameter in training.model.parameters())


@pytest.mark.parametrize("what", ["parameter", "optimizer"])
def test_a_ruined_state_is_seen_where_a_gradient_is_not_finite(what, caplog):
    training = Training(OPTIMIZERS["adamw"], monitor={})

    def wreck():
        bias = training.model[4].bias
        tensor = bias.data if what == "parameter" else training.optimizer.state[bias]["exp_avg"]
        tensor[0] = math.nan

    training.at(42, wreck)
    training.run(make_batches(60))
    # Moments show in the next loss.
    assert next(iter(training.of("restored_iteration").items())) == (43 if what == "optimizer" else 42, 40)
    [warning] = [text for text in messages(caplog) if "rolled back to" in text]
    assert "model." in warning


@pytest.mark.parametrize("kind", ["exponent bit", "weight"])
def test_a_ruined_weight_costs_at_most_25_steps(kind):
    training = Training(monitor={"on_spike": "skip"}, names=["model", "optimizer"])

    def ruin():
        weight = training.model[4].weight.data.view(-1)[:1]
        if kind == "weight":
            weight.fill_(1000.0)
        else:
            weight.view(torch.int32).bitwise_xor_(1 << 30)

    training.at(69, ruin)
    training.run(make_batches(100))
    restored = training.of("restored_iteration")
    assert set(restored.values()) == {60}
    assert max(restored) - 60 <= 25
    assert training.model[4].weight.abs().max() < 10


def test_after_thirty_bad_batches_training_continues_from_the_snapshot():
    """The restored weights do badly on the bad batches, and as before on the batches after them."""
    training = Training(monitor={}, names=["model", "optimizer"])
    states, started = {}, training.states()
    training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: states.update({e.state.iteration: training.state()})
    )
    training.run(make_batches(130, range(47, 77)))
    restored = training.of("restored_iteration")
    returned = max(restored)
    assert training.of("count")[130] == 1
    assert (restored[49], restored[returned]) == (40, 40)
    assert 77 <= returned <= 77 + 15
    assert_same(started[returned], started[40])
    assert training.of("discarded_count")[130] == len(restored) - 4 < 15  # the rollback and three probes
    assert training.metrics[130]["grad/spike_count"] >= 3


def test_spikes_of_discarded_iterations_do_not_recur(caplog):
    """Each restore makes the next spike an isolated one."""
    training = Training(monitor={"on_spike": "skip"}, names=["model", "optimizer"], loss=no_loss)
    training.at(43, lambda: training.rollback.request("asked"))
    batches = [batch for pair in zip(make_batches(12), make_batches(12, range(13)), strict=True) for batch in pair]
    training.run([*make_batches(43), *batches])
    assert training.of("discarded_count")[67] >= 8
    assert "isolated spikes" not in caplog.text


def test_signs_from_before_a_recovery_are_not_the_first_ones_of_the_next_instability():
    training = Training(monitor={}, names=["model", "optimizer"])
    training.run(make_batches(90, [*range(47, 50), *range(70, 73)]))
    restored = training.of("restored_iteration")
    assert (restored[49], restored[72] > 49) == (40, True)


def test_weights_ruined_after_a_long_data_fault_are_restored():
    """The gradient is smaller than in the fault, in which the loss alone was accepted."""
    training = Training(monitor={"on_spike": "skip"}, names=["model", "optimizer"])
    training.at(160, lambda: training.model[4].bias.data.add_(4.0))
    training.run(make_batches(220, range(47, 77)))
    norms = {iteration: values["grad/norm"] for iteration, values in training.metrics.items()}
    assert norms[160] < max(norms[iteration] for iteration in range(47, 77))
    assert training.of("count")[159] == 1
    assert training.of("count")[220] == 2
    assert training.model[4].bias.abs().max() < 1


def test_changed_data_cost_at_most_15_steps(caplog):
    training = Training(monitor={}, names=["model", "optimizer"])
    training.run(make_batches(180, range(45, 181), factor=30.0))
    [text] = [text for text in messages(caplog) if "continues with such batches" in text]
    assert "restored weights exceeded a threshold on new batches as well" in text
    assert training.of("count")[180] == 1
    assert 180 - float(training.model.steps) == training.of("discarded_count")[180] <= 15


ALTERNATING = [(period, jump) for period in (30, 60, 100, 150, 300) for jump in (0.5, 1.0, 3.0, 10.0)]


@pytest.mark.parametrize(("period", "jump"), ALTERNATING if FULL else [(30, 10.0), (300, 1.0)])
def test_a_loss_that_alternates_keeps_most_of_its_steps(period, jump):
    """Two data sets in turn: the higher level is accepted once."""
    training = Training(names=["model", "optimizer"], loss=lambda engine: engine.state.loss)

    def add(engine):
        engine.state.loss = engine.state.loss + jump * ((engine.state.iteration // period) % 2)

    training.after_step(add)
    training.run(make_batches(1200))
    assert float(training.model.steps) >= (0.88 if period < 60 else 0.94) * 1200


def test_data_that_alternate_every_450_iterations_cost_one_rollback():
    generator, model = torch.Generator().manual_seed(0), nn.Linear(2, 2)

    def loss(engine, _):
        i = engine.state.iteration
        noise = 1.0 + 0.05 * float(torch.randn((), generator=generator))
        return (1.0 + 2.0 * 0.99**i) * noise + 3.0 * ((i // 450) % 2)

    trainer, rollback = Engine(loss), RollbackHandler({"model": model})
    rollback.attach(trainer)
    trainer.run(range(2000), max_epochs=1)
    assert rollback._count == 1


@pytest.mark.parametrize("changed", [29, 35, 37])  # before a snapshot is due, after it, in the iteration of a rollback
def test_no_snapshot_of_a_model_that_has_changed_is_restored(changed, caplog):
    """The next one is taken when no older one fits: when it is due, or when an older one should have been restored."""
    training, seen = Training(names=["model", "optimizer"]), {}
    prune = torch.nn.utils.prune.l1_unstructured

    @training.trainer.on(Events.ITERATION_COMPLETED(once=changed))
    def change(engine):
        prune(training.model[0], "weight", 0.3)
        seen[changed] = training.state()

    training.trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda engine: seen.update({engine.state.iteration: training.state()})
    )
    training.run(make_batches(50), request=[37, 45])
    assert training.of("restored_iteration") == {29: {37: 30, 45: 30}, 35: {45: 37}, 37: {37: 30, 45: 37}}[changed]
    assert caplog.text.count("the snapshots are of other objects or parameters: dropped") == 1
    if changed == 37:  # what the handler has changed stays
        assert_same(seen[38], seen[37])


def test_a_group_that_is_added_makes_snapshots_unfit():
    """Moments are kept by the place of their parameter in the groups."""
    training = Training(names=["model", "optimizer"])
    group = {"params": [nn.Parameter(torch.ones(1))]}
    training.at(36, lambda: training.optimizer.param_groups.insert(0, training.optimizer.param_groups[0] | group))
    training.run(make_batches(50), request=[37, 45])
    assert training.of("restored_iteration") == {45: 37}


def test_weights_loaded_by_the_user_are_not_rolled_back_after_forget_or_a_new_run():
    training = Training(names=["model", "optimizer"])

    def load(value):
        torch.nn.init.constant_(training.model[0].weight, value)

    loading = training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=35), lambda _: load(7.0))
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=35), lambda _: training.rollback.forget())
    training.run(make_batches(40), request=[37])
    assert training.of("restored_iteration") == {37: 35}
    loading.remove()
    load(-7.0)
    training.at(3, lambda: training.rollback.request("asked"))
    training.trainer.run(make_batches(10), max_epochs=1)
    assert training.of("restored_iteration")[3] < 3
    assert training.model[0].weight.mean() < -6.0


@pytest.mark.parametrize("end", ["forget", "detach"])
def test_weights_loaded_in_the_iteration_of_a_rollback_stay(end):
    training, seen = Training(names=["model", "optimizer"], handler=False), []

    def load(engine):
        torch.nn.init.constant_(training.model[0].weight, 7.0)
        getattr(training.rollback, end)()

    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=34), load)
    training.rollback.attach(training.trainer)
    training.trainer.add_event_handler(
        Events.ITERATION_STARTED(once=35), lambda _: seen.append(training.model[0].weight.mean())
    )
    training.run(make_batches(36), request=[34])
    assert seen == [7.0]


@pytest.mark.parametrize("prefix", ["loss", "spike"])
def test_a_monitor_of_any_name_leaves_the_triggers_of_the_loss(prefix):
    """A loss that grows by 1 % an iteration, which the monitor does not take for a spike."""
    losses = [2.3 * 0.97**i + 0.1 for i in range(200)]
    losses += [losses[-1] * 1.01**i for i in range(300)]
    trainer, rollback = Engine(lambda engine, loss: loss), RollbackHandler({"model": nn.Linear(2, 2)})
    SpikeMonitor(lambda engine: engine.state.output, threshold=1e6, prefix=prefix).attach(trainer)
    rollback.attach(trainer)
    trainer.run(losses, max_epochs=1)
    assert rollback._count > 0


def test_a_request_ends_with_its_run():
    training = Training(names=["model", "optimizer"])
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=10), lambda _: training.rollback.request("late"))
    for _ in range(2):
        training.trainer.run(make_batches(10), max_epochs=1)
    assert training.of("count")[10] == 0


def test_a_rate_that_was_set_too_high_and_left_is_restored():
    training = Training(names=["model", "optimizer"], monitor={"on_spike": "skip"})
    training.at(60, lambda: training.optimizer.param_groups[0].update(lr=1e6))
    training.run(make_batches(100))
    assert training.of("count")[100] == 1
    assert training.optimizer.param_groups[0]["lr"] == 1e-3
    assert all(torch.isfinite(parameter).all() for parameter in training.model.parameters())


def test_no_handler_of_iteration_completed_sees_discarded_iterations(tmp_path):
    training = Training(handler=False, names=["model", "optimizer"], every=10)
    seen, states = {}, training.states()
    training.trainer.add_event_handler(
        Events.ITERATION_COMPLETED, lambda e: seen.update({e.state.iteration: training.state()})
    )
    saver = Checkpoint(training.objects, DiskSaver(tmp_path), filename_pattern="{name}.pt")
    training.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=34), saver)
    training.rollback.attach(training.trainer)
    training.run(make_batches(40), request=[34])
    assert_same(seen[34], states[30])
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert_same(dict(saved["model"]), dict(states[30]["model"]))


def test_one_warning_and_one_event_per_rollback(caplog):
    training = Training(names=["model", "optimizer"])
    events = []
    training.trainer.add_event_handler(
        MonitorEvents.ROLLED_BACK,
        lambda e: events.append((e.state.iteration, e.state.metrics["rollback/restored_iteration"])),
    )
    training.run(make_batches(90, range(62, 65)), request=[34])
    assert events == [(34, 30.0), (64, 52.0)]
    assert [text for text in messages(caplog) if "rollback" in text] == [
        "RollbackHandler (rollback): iteration 34: asked to; rolled back to iteration 30, 4 batches skipped; "
        "restored model, optimizer",
        *[text for text in messages(caplog) if "iteration 64:" in text],
    ]


def test_without_instability_training_is_bitwise_the_same():
    ends = []
    for handler in (False, True):
        training = Training(OPTIMIZERS["adamw"], scaler=True, handler=handler)
        training.run(make_batches(70))
        ends.append([training.state(), torch.get_rng_state()])
    assert_same(ends[1], ends[0])
    assert training.rollback.metrics == {"rollback/count": 0.0, "rollback/discarded_count": 0.0}


def test_memory_is_as_large_as_promised(monkeypatch):
    """Also while a state is copied."""
    training, counts, copied = Training(names=["model", "optimizer"]), [], snapshots.clone

    def clone(*args, **kwargs):
        counts.append(len(training.rollback._snapshots.all) + 1)
        return copied(*args, **kwargs)

    monkeypatch.setattr("ignite_monitor.rollback.handler.clone", clone)
    training.run(make_batches(300))
    assert max(counts) == 2 + 3
    assert counts[-1] >= 3


def start_to_resume():
    training = Training(OPTIMIZERS["adamw"], monitor={"on_spike": "skip"}, every=10)
    step = training.train_step

    def seeded(engine, batch):
        torch.manual_seed(engine.state.iteration)  # for the dropout
        return step(engine, batch)

    training.trainer._process_function = seeded
    own = {"trainer": training.trainer, "rollback": training.rollback, "grad": training.monitor}
    return training, training.objects | own


CUTS = (33, 46, 52, 57, 66)  # before the instability, during it, during the recovery, and after


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A training run with an instability, its batches, and checkpoints of it."""
    folder = tmp_path_factory.mktemp("checkpoints")
    batches = make_batches(80, range(45, 64))
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
    assert whole.of("discarded_count")[80] >= 5
    for name in ("count", "discarded_count", "restored_iteration"):
        assert resumed.of(name) == {i: value for i, value in whole.of(name).items() if i > cut}
    assert_same(resumed.state(), whole.state())


@pytest.mark.parametrize(("every", "ruins"), [(1, (61, 85)), (12, (61, 85)), (10, (59, 79, 99))])
def test_the_run_ends_with_finite_weights(every, ruins, caplog):
    """Each ruin shows an iteration after it: a snapshot may have been taken in between."""
    training = Training(names=["model", "optimizer"], every=every, max_rollbacks=len(ruins) - 1)

    def ruin(engine):
        if engine.state.iteration in ruins:
            training.model[4].weight.data[0, 0] = math.nan

    training.after_step(ruin)
    training.run(make_batches(120))
    assert training.trainer.state.iteration == ruins[-1] + 1
    assert len([text for text in messages(caplog) if "the run ends" in text]) == 1
    assert all(torch.isfinite(parameter).all() for parameter in training.model.parameters())


def test_a_new_run_does_not_know_what_was_accepted_before():
    model = nn.Linear(2, 2)
    rollback = RollbackHandler({"model": model})

    def count(level):
        trainer = Engine(lambda e, _: (2.0 if e.state.iteration > 10 else 4.0) + level * (e.state.iteration > 100))
        before = rollback._count
        with rollback.attach(trainer):
            trainer.run(range(300), max_epochs=1)
            return rollback._count - before

    assert [count(6.0), count(6.0), count(4.0)] == [1, 1, 1]


def test_a_spike_right_after_resuming_a_recovery_is_seen():
    def start():
        training = Training(names=["model", "optimizer"], monitor={"threshold": 1e4}, loss=no_loss)
        own = {"trainer": training.trainer, "rollback": training.rollback, "grad": training.monitor}
        return training, training.objects | own

    batches, saved = make_batches(60, [43], factor=3e4), {}
    whole, to_save = start()
    whole.trainer.add_event_handler(
        Events.ITERATION_COMPLETED(once=42),
        lambda _: saved.update(copy.deepcopy({name: thing.state_dict() for name, thing in to_save.items()})),
    )
    whole.run(batches, request=[40])
    resumed, to_load = start()
    for name, thing in to_load.items():
        thing.load_state_dict(saved[name])
    resumed.run(batches[42:] + batches[:42])
    assert [whole.of("discarded_count")[i] for i in (42, 43)] == [0, 1]
    assert resumed.of("restored_iteration") == {43: whole.of("restored_iteration")[43]}


def test_attached_while_an_iteration_starts():
    training, calls = Training(names=["model", "optimizer"], handler=False), []

    def attach():
        calls.append(training.trainer.state.iteration)
        training.rollback.attach(training.trainer)

    training.at(3, attach)
    training.run(make_batches(40), request=[30])
    assert calls == [3]
    assert training.of("count")[40] == 1


class Uncopied:
    """An object whose state can't be copied."""

    def state_dict(self):
        return {"lock": threading.Lock()}

    def load_state_dict(self, state):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"to_save": None}, TypeError, "to_save"),
        ({"to_save": {}}, ValueError, "to_save should hold a model"),
        ({"to_save": {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}}, ValueError, "model"),
        ({"to_save": {"model": nn.Linear(2, 2), "loss": 3.0}}, TypeError, "'loss'"),
        (
            {"to_save": {"model": nn.Linear(2, 2), "own": Uncopied()}},
            TypeError,
            "that can be copied, but 'own': cannot",
        ),
        ({"to_save": {"model": nn.LazyLinear(2)}}, ValueError, "to_save has lazy modules"),
        ({"every": 0}, ValueError, "every"),
        ({"patience": "3"}, TypeError, "patience"),
        ({"max_rollbacks": 0}, ValueError, "max_rollbacks"),
        ({"where": "disk"}, ValueError, "where"),
        ({"where": torch.device("cpu")}, TypeError, "where"),
        ({"loss": 3.0}, TypeError, "loss"),
        ({"prefix": "a b"}, ValueError, "prefix"),
    ],
)
def test_bad_arguments(kwargs, error, text):
    with pytest.raises(error, match=text):
        RollbackHandler(**{"to_save": {"model": nn.Linear(2, 2)}} | kwargs)


def state_with_snapshots():
    training, states = Training(names=["model", "optimizer"]), []
    training.at(25, lambda: states.append(copy.deepcopy(training.rollback.state_dict())))
    training.run(make_batches(25))
    return states[0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state["policy"].pop("phase"),
        lambda state: state["snapshots"].pop("all"),
        lambda state: state["triggers"].update(more=1.0),
        lambda state: state.update(counts=[1, 2, 3]),
        lambda state: state.update(triggers=None),
    ],
)
def test_a_refused_state_changes_nothing(spoil):
    state = state_with_snapshots()
    rollback = Training(names=["model", "optimizer"]).rollback
    before = copy.deepcopy(rollback.state_dict())
    spoil(state)
    with pytest.raises((TypeError, ValueError)):
        rollback.load_state_dict(state)
    assert_same(dict(rollback.state_dict()), dict(before))


@pytest.mark.parametrize(
    "other",
    [
        {"model": nn.Sequential(nn.Linear(3, 3)), "optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)},
        {"model": make_net().double()},
        {"other": make_net()},
    ],
)
def test_saved_snapshots_of_other_objects_or_parameters_are_dropped(other, caplog):
    state = state_with_snapshots()
    rollback = RollbackHandler({**Training(names=["model", "optimizer"]).objects, **other})
    rollback.load_state_dict(state)
    assert not rollback.state_dict()["snapshots"]["all"]
    assert "the snapshots are of other objects or parameters: dropped" in caplog.text


def test_a_recovery_is_resumed_with_other_wrappers(one_rank):
    """The weights are restored that the run without wrappers had."""
    model, state, back = make_net(), state_with_snapshots(), []
    wrapped = nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
    rollback = RollbackHandler({"model": wrapped, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    rollback.load_state_dict(state)
    torch.nn.init.constant_(model[0].weight, 7.0)
    trainer = Engine(lambda engine, batch: rollback.request("to see") if engine.state.iteration == 26 else None)
    rollback.attach(trainer)
    trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda _: back.append(copy.deepcopy(model.state_dict())))
    trainer.load_state_dict({"iteration": 25, "epoch_length": 30, "max_epochs": 1})
    trainer.run(range(30))
    saved = state["snapshots"]["all"][-1]["state"]["model"]
    assert_same(back, [{name: saved[name] for name in model.state_dict()}])


def test_snapshots_of_later_iterations_are_dropped():
    """The state of the handler is resumed, and not that of the trainer."""
    training, back = Training(names=["model", "optimizer"]), []
    torch.nn.init.constant_(training.model[0].weight, 7.0)
    states = training.states()
    training.rollback.load_state_dict(state_with_snapshots())
    training.trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda _: back.append(training.state()))
    training.run(make_batches(30), request=[13])
    assert training.of("restored_iteration") == {13: 10}
    assert_same(back, [states[10]])


def test_states_are_saved_and_loaded_without_a_copy_of_the_snapshots(monkeypatch):
    """Also by a handle, which loads them again if another monitor refuses its state."""
    training = Training(handler=False, names=["model", "optimizer"])
    to_save = training.objects
    handle = attach_monitors(training.trainer, training.model, training.optimizer, rollback=to_save, extra="replicas")
    monitor = handle.monitors["rollback"]

    def storages(state):
        return {tensor.untyped_storage().data_ptr() for _, tensor in tensors_in(state["snapshots"])}

    def reload():
        state = handle.state_dict()
        kept = storages({"snapshots": monitor._snapshots.all})
        assert len(monitor._snapshots.all) == 3
        assert storages(state["rollback"]) == kept
        with pytest.raises(ValueError, match="should be a state of"):
            handle.load_state_dict({**state, [*handle.monitors][-1]: {"wrong": 1}})
        handle.load_state_dict(state)
        assert storages(monitor.state_dict()) == kept

    training.at(25, reload)
    training.run(make_batches(40))
    assert monitor._count == 0


@pytest.mark.parametrize("loss", [None, math.nan])
def test_a_warning_without_any_trigger(loss, caplog):
    model = nn.Linear(2, 2)
    trainer = Engine(lambda *_: loss)
    RollbackHandler({"model": model}, patience=200).attach(trainer)
    trainer.run(range(50), max_epochs=1)
    assert ["loss=" in warning for warning in messages(caplog)] == [True] * (loss is None)
