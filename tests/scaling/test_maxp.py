"""MaxPScheduler: learning rates by definition, schedules of the prefactor, resuming, and unchanged training."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import (
    Checkpoint,
    CosineAnnealingScheduler,
    DiskSaver,
    LRScheduler,
    ReduceLROnPlateauScheduler,
    create_lr_scheduler_with_warmup,
)
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ignite_monitor.scaling import AlignmentHandler, MaxPScheduler, parametrize
from ignite_monitor.scaling.solver import FULL
from tests._helpers import assert_same, make_batches, make_step
from tests._models import Lambda

N = 24
TERMS = ("z0_dW", "dZ_w0", "dZ_dW")


def model_of(n):
    layers = [nn.Linear(6, n), nn.BatchNorm1d(n), nn.ReLU(), nn.Dropout(0.2), nn.Linear(n, n), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(n, 3))


@functools.cache
def parametrized(weight_decay, pin):
    torch.manual_seed(0)
    options = {"weight_decay": weight_decay, "c_overrides": {} if pin is None else {"4": pin}}
    return parametrize(model_of, (8, N), sample_input=torch.zeros(2, 6), lr_prefactor=0.02, **options)


def make(weight_decay=None, pin=None):
    """A parametrization, with dropout and running statistics in the model, and its optimizer."""
    parametrization = copy.deepcopy(parametrized(weight_decay, pin))
    torch.manual_seed(0)
    return parametrization, torch.optim.Adam(parametrization.param_groups)


def trainer_of(model, optimizer):
    step = make_step(model, optimizer)

    def train_step(engine, batch):
        torch.manual_seed(engine.state.iteration)  # for the dropout
        return step(engine, batch)

    return Engine(train_step)


def run(parametrization, optimizer, *attached, steps=6):
    """Learning rates after each iteration, by layer and whether of a bias."""
    engine = trainer_of(parametrization.model, optimizer)
    for item in attached:
        item.attach(engine)
    seen = []

    @engine.on(Events.ITERATION_COMPLETED)
    def look(_):
        seen.append(rates(optimizer))

    engine.run(make_batches(steps))
    return seen


def rates(optimizer):
    """Learning rates by layer, and {layer}.bias."""
    groups = [group for group in optimizer.param_groups if group.get("layer_name")]
    return {f"{group['layer_name']}{'.bias' * bool(group.get('bias'))}": group["lr"] for group in groups}


def expected_rates(solution, prefactor, optimizer):
    return {key: prefactor * N ** -solution.c.get(key, 0.0) for key in rates(optimizer)}


@pytest.mark.parametrize(("c_ema", "pin"), [(0.0, None), (0.6, None), (0.0, 1.1)])
def test_learning_rates_are_those_of_the_definition(c_ema, pin):
    """A second handler measures the alignment, from which each solution is computed again; a pin stays."""
    parametrization, optimizer = make(pin=pin)
    scheduler = MaxPScheduler(parametrization, optimizer, c_ema=c_ema)
    handler = AlignmentHandler(parametrization)
    engine = trainer_of(parametrization.model, optimizer)
    handler.attach(engine)
    scheduler.attach(engine)
    alignment, c = dict.fromkeys(parametrization.layers, (1.0, 0.5, 1.0)), dict(parametrization.solution.c)
    rates_of_layer = set()

    @engine.on(Events.ITERATION_COMPLETED)
    def check(engine):
        if engine.state.iteration == 1:
            assert scheduler.solution is parametrization.solution  # nothing had changed
            return
        for name, old in alignment.items():
            keys = [f"alignment/{term}/{name}" for term in ("z0_dW", "dZ_w0", "dZ_dW")]
            alignment[name] = tuple(
                float(handler.metrics.get(key, value)) for key, value in zip(keys, old, strict=True)
            )
        solved = parametrization.solve(alignment).c
        c.update({key: c_ema * old + (1 - c_ema) * solved[key] for key, old in c.items()})
        assert pin in (None, c["4"])
        for key, lr in rates(optimizer).items():
            assert lr == pytest.approx(0.02 * N ** -c.get(key, 0.0), rel=1e-9), key
            assert float(engine.state.metrics[f"maxp/lr/{key}"]) == lr
        for name in parametrization.layers:
            assert float(engine.state.metrics[f"maxp/c/{name}"]) == pytest.approx(c[name], rel=1e-9)
        rates_of_layer.add(rates(optimizer)["6"])

    engine.run(make_batches(6))
    assert len(rates_of_layer) == 5


def test_warmup_interval_and_end():
    parametrization, optimizer = make()
    scheduler = MaxPScheduler(parametrization, optimizer, warmup_steps=3, solve_interval=4, freeze_after=15)
    engine = trainer_of(parametrization.model, optimizer)
    scheduler.attach(engine)
    changed = []
    last = [rates(optimizer)]

    @engine.on(Events.ITERATION_COMPLETED)
    def look(engine):
        if rates(optimizer) != last[0]:
            changed.append(engine.state.iteration)
            last[0] = rates(optimizer)

    engine.run(make_batches(18))
    assert changed == [4, 8, 12]


def test_learning_rates_that_are_tensors_are_written_in_place():
    parametrization, _ = make()
    groups = [group | {"lr": torch.tensor(group["lr"])} for group in parametrization.param_groups]
    optimizer = torch.optim.Adam(groups)
    held = [group["lr"] for group in optimizer.param_groups]
    scheduler = MaxPScheduler(parametrization, optimizer)
    run(parametrization, optimizer, scheduler, steps=3)
    for group, lr in zip(optimizer.param_groups, held, strict=True):
        assert group["lr"] is lr
    expected = expected_rates(scheduler.solution, 0.02, optimizer)
    assert {key: float(lr) for key, lr in rates(optimizer).items()} == pytest.approx(expected, rel=1e-6)


def test_a_weight_that_is_used_functionally_too_has_the_alignment_of_its_module():
    def forward(self, x):
        x = self.first(x).relu()
        return self.head(self.mid(x + F.linear(x, self.mid.weight).tanh()).relu())

    def model(n):
        return Lambda(forward, first=nn.Linear(6, n), mid=nn.Linear(n, n), head=nn.Linear(n, 3))

    parametrization = parametrize(model, (8, 48), sample_input=torch.zeros(2, 6))
    (module,) = [name for name, layer in parametrization.layers.items() if layer.module == "mid"]
    (other,) = [
        name for name, layer in parametrization.layers.items() if layer.weight == "mid.weight" and name != module
    ]
    optimizer = torch.optim.Adam(parametrization.param_groups)
    scheduler, handler = MaxPScheduler(parametrization, optimizer), AlignmentHandler(parametrization)
    run(parametrization, optimizer, handler, scheduler, steps=3)
    assert scheduler.alignment[other] == FULL
    assert scheduler.alignment[module] == tuple(handler.metrics[f"alignment/{term}/mid"] for term in TERMS)


def test_failed_solves_change_nothing_and_warn_once(monkeypatch, caplog):
    parametrization, optimizer = make()
    scheduler = MaxPScheduler(parametrization, optimizer)
    before = rates(optimizer)
    monkeypatch.setattr(parametrization, "solve", lambda alignment: (_ for _ in ()).throw(ValueError("no way")))
    with caplog.at_level(logging.WARNING):
        seen = run(parametrization, optimizer, scheduler, steps=4)
    assert seen == [before] * 4
    assert [record.message for record in caplog.records if record.name.startswith("ignite")] == [
        "MaxPScheduler (maxp): iteration 2: no solution for the measured alignment; exponents are unchanged: no way"
    ]


@pytest.mark.parametrize("zeroed", [False, True])
def test_weight_decay_follows_the_rates_inversely(zeroed):
    """lr * weight_decay stays lr_prefactor * weight_decay, and 0 where the user sets it to 0."""
    parametrization, _ = make(weight_decay=0.1)
    groups = [
        group | ({"weight_decay": 0.0} if zeroed and group["bias"] else {}) for group in parametrization.param_groups
    ]
    optimizer = torch.optim.AdamW(groups)
    run(parametrization, optimizer, scheduler := MaxPScheduler(parametrization, optimizer))
    assert scheduler.solution.c["4"] != parametrization.solution.c["4"]
    for group in optimizer.param_groups:
        expected = 0.0 if zeroed and group["bias"] else 0.02 * 0.1
        assert group["lr"] * group["weight_decay"] == pytest.approx(expected, rel=1e-9)
    scheduler.lr_prefactor = 0.0  # at the end of a schedule
    assert all(math.isfinite(group["weight_decay"]) for group in optimizer.param_groups)


def test_weight_decay_is_not_for_adams_penalty():
    parametrization, adam = make(weight_decay=0.1)
    with pytest.raises(ValueError, match="Adam adds an L2 penalty"):
        MaxPScheduler(parametrization, adam)
    MaxPScheduler(parametrization, torch.optim.SGD(parametrization.param_groups, lr=0.1))


@pytest.mark.parametrize("scheduled", [Events.ITERATION_STARTED, Events.ITERATION_COMPLETED])
@pytest.mark.parametrize("last", ["trainer", "optimizer"])
def test_resumed_run_is_the_uninterrupted_one(scheduled, last, tmp_path):
    batches, cut = make_batches(12), 5

    def start():
        parametrization, optimizer = make()
        scheduler = MaxPScheduler(parametrization, optimizer, warmup_steps=1, solve_interval=2, c_ema=0.3)
        cosine = CosineAnnealingScheduler(scheduler.as_optimizer(), "lr", 0.05, 0.001, cycle_size=20)
        engine = trainer_of(parametrization.model, optimizer)
        engine.add_event_handler(scheduled, cosine)
        scheduler.attach(engine)
        seen = {}

        @engine.on(Events.ITERATION_COMPLETED)
        def look(engine):
            weights = [parameter.detach().clone() for parameter in parametrization.model.parameters()]
            values = {name: float(value) for name, value in scheduler.metrics.items()}
            seen[engine.state.iteration] = (rates(optimizer), values, weights)

        parts = {"optimizer": optimizer, "scheduler": scheduler, "cosine": cosine, "trainer": engine}
        return engine, seen, {"model": parametrization.model, **parts}

    engine, whole, _ = start()
    engine.run(batches, max_epochs=1)
    engine, _, to_save = start()
    saver = Checkpoint(to_save, DiskSaver(tmp_path, create_dir=True, require_empty=False), filename_pattern="c.pt")
    engine.add_event_handler(Events.ITERATION_COMPLETED(once=cut), saver)
    engine.run(batches, max_epochs=1)
    engine, resumed, to_load = start()
    with torch.no_grad():
        for parameter in to_load["model"].parameters():
            parameter += 1.0  # another start
    to_load[last] = to_load.pop(last)
    Checkpoint.load_objects(to_load, torch.load(tmp_path / "c.pt", weights_only=True))
    engine.run(batches[cut:] + batches[:cut], max_epochs=1)
    assert sorted(resumed) == list(range(cut + 1, 13))
    for iteration, (lr, values, weights) in resumed.items():
        assert lr == whole[iteration][0], iteration
        assert values == whole[iteration][1], iteration
        assert all(map(torch.equal, weights, whole[iteration][2])), iteration


def test_training_is_bitwise_unchanged_at_the_same_rates(monkeypatch):
    """Outputs, weights, running statistics and RNG state, with a smaller last batch."""
    batches, alignments = [*make_batches(5), *make_batches(1, seed=9, size=3)], []

    def train(watched):
        parametrization, optimizer = make()
        model, solution, outputs = parametrization.model, parametrization.solution, []

        def keep(module, args, output):
            if module is model:
                outputs.append(output.detach().clone())

        hook = register_module_forward_hook(keep)
        torch.manual_seed(3)
        engine = trainer_of(model, optimizer)
        if watched:
            monkeypatch.setattr(parametrization, "solve", lambda result: alignments.append(result) or solution)
            MaxPScheduler(parametrization, optimizer).attach(engine)
        engine.run(batches, max_epochs=2)
        hook.remove()
        return [*outputs, *model.state_dict().values(), torch.get_rng_state()]

    assert_same([*train(True)], [*train(False)])
    assert len(alignments) == 11


def test_a_dropped_scheduler_is_freed():
    def run_and_drop():
        parametrization, optimizer = make()
        engine = trainer_of(parametrization.model, optimizer)
        scheduler = MaxPScheduler(parametrization, optimizer)
        scheduler.attach(engine)
        engine.add_event_handler(Events.ITERATION_STARTED, cosine(scheduler.as_optimizer()))
        engine.run(make_batches(3))
        return [weakref.ref(item) for item in (scheduler, parametrization, parametrization.model, engine)]

    run_and_drop()  # the first use leaves reference cycles of torch's own
    gc.collect()
    gc.disable()
    try:
        assert [reference() for reference in run_and_drop()] == [None] * 4
    finally:
        gc.enable()


def test_bad_input():
    parametrization, optimizer = make()
    with pytest.raises(TypeError, match="parametrization"):
        MaxPScheduler(parametrization.model, optimizer)
    with pytest.raises(ValueError, match="param_groups"):
        MaxPScheduler(parametrization, torch.optim.Adam(parametrization.model.parameters()))
    with pytest.raises(ValueError, match="param_groups"):  # layers of another model have the same names
        MaxPScheduler(parametrization, torch.optim.Adam(parametrization.param_groups + make()[0].param_groups))
    wrapper = object.__new__(torch.optim.Adam)  # as one that has not called torch's constructor
    with pytest.raises(ValueError, match="should call step hooks"):
        MaxPScheduler(parametrization, wrapper)
    wrong = [("warmup_steps", -1), ("solve_interval", 0), ("freeze_after", 0), ("sample_size", 0), ("c_ema", 1.0)]
    for name, value in wrong:
        with pytest.raises(ValueError, match=name):
            MaxPScheduler(parametrization, optimizer, **{name: value})
    scheduler = MaxPScheduler(parametrization, optimizer)
    state = copy.deepcopy(scheduler.state_dict())
    state["c"].pop("4")
    with pytest.raises(ValueError, match="same layers"):
        scheduler.load_state_dict(state)


def test_groups_that_the_user_has_divided():
    """A group for every parameter, norms and biases without weight decay, and one of another module."""
    parametrization, _ = make()
    other = nn.Linear(2, 2)
    groups = [
        {"params": [parameter], "layer_name": group["layer_name"], "weight_decay": 0.1 * (parameter.ndim > 1)}
        | ({"bias": True} if group["bias"] else {})
        for group in parametrization.param_groups
        for parameter in group["params"]
    ]
    optimizer = torch.optim.AdamW([*groups, {"params": other.parameters(), "lr": 0.3}])
    scheduler = MaxPScheduler(parametrization, optimizer)
    engine = trainer_of(parametrization.model, optimizer)
    scheduler.attach(engine)
    engine.run(make_batches(4))
    expected = expected_rates(scheduler.solution, 0.02, optimizer)
    assert rates(optimizer) == pytest.approx(expected, rel=1e-12)
    for group in optimizer.param_groups[:-1]:
        assert group["weight_decay"] == 0.1 * (group["params"][0].ndim > 1)
    assert optimizer.param_groups[-1]["lr"] == 0.3
    assert float(scheduler.metrics["maxp/lr/4.bias"]) == expected["4.bias"]


def test_the_prefactor_acts_on_the_next_step_until_the_scheduler_is_detached(caplog):
    """Also before the second step of an iteration, and in iterations that are not monitored; hooks do not remain."""
    parametrization, optimizer = make()
    scheduler = MaxPScheduler(parametrization, optimizer, warmup_steps=100)
    (group,), used = scheduler.as_optimizer().param_groups, []
    values = iter([0.5, 0.25, "x", math.nan, 0.125, torch.ones(2), -1.0, 1.0])

    def train_step(engine, batch):
        for _ in range(2):
            group["lr"] = next(values)
            optimizer.step()
            used.append(rates(optimizer))

    engine = Engine(train_step)
    handle = scheduler.attach(engine, Events.ITERATION_STARTED(every=3))
    engine.run([0] * 4)
    expected = [0.5, 0.25, 0.25, 0.25, 0.125, 0.125, 0.125, 1.0]
    assert used == [expected_rates(scheduler.solution, prefactor, optimizer) for prefactor in expected]
    assert [record.message for record in caplog.records if "lr_prefactor" in record.message] == [
        "MaxPScheduler (maxp): iteration 2: Argument lr_prefactor should be a number, but given <class 'str'>; "
        "it remains 0.25"
    ]
    handle.remove()
    assert not optimizer._optimizer_step_pre_hooks
    group["lr"] = 2.0
    optimizer.step()
    assert rates(optimizer) == used[-1]


@pytest.mark.parametrize("first", [False, True])
def test_a_hook_of_the_users_removes_itself_within_a_step(first):
    """torch allows it for the last hook in line."""
    parametrization, optimizer = make()
    called = []

    def register():
        handle = optimizer.register_step_pre_hook(lambda *_: called.append(handle.remove()))

    if first:
        register()
    scheduler = MaxPScheduler(parametrization, optimizer)
    engine = trainer_of(parametrization.model, optimizer)
    scheduler.attach(engine)
    if not first:
        register()
    scheduler.lr_prefactor = 0.01
    engine.run(make_batches(2))
    assert len(called) == 1
    assert rates(optimizer) == pytest.approx(expected_rates(scheduler.solution, 0.01, optimizer))


def cosine(target):
    return CosineAnnealingScheduler(target, "lr", 0.1, 0.001, cycle_size=10)


def after_warmup(target):
    return create_lr_scheduler_with_warmup(
        cosine(target), warmup_start_value=0.0, warmup_end_value=0.1, warmup_duration=4
    )


def exponential(target):
    return LRScheduler(torch.optim.lr_scheduler.ExponentialLR(target, 0.5))


def plateau(target):
    return ReduceLROnPlateauScheduler(target, metric_name="loss", factor=0.5, patience=0)


@pytest.mark.parametrize("schedule_of", [cosine, after_warmup, exponential, plateau])
@pytest.mark.parametrize("scheduler_first", [True, False])
def test_schedules_of_ignite_and_torch(schedule_of, scheduler_first):
    """They set the prefactor to what they give another optimizer in the same iteration, before its step."""
    parametrization, optimizer = make()
    scheduler = MaxPScheduler(parametrization, optimizer)
    alone = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.02)
    schedule, reference = schedule_of(scheduler.as_optimizer()), schedule_of(alone)
    engine = trainer_of(parametrization.model, optimizer)
    engine.state.metrics["loss"] = 1.0
    engine.add_event_handler(Events.ITERATION_STARTED, reference)
    if scheduler_first:
        scheduler.attach(engine)
    engine.add_event_handler(Events.ITERATION_STARTED, schedule)
    if not scheduler_first:
        scheduler.attach(engine)
    used = []
    optimizer.register_step_pre_hook(
        lambda *_: used.append((alone.param_groups[0]["lr"], rates(optimizer), scheduler.solution))
    )
    engine.run(make_batches(9))
    assert len({prefactor for prefactor, *_ in used}) > 7
    for prefactor, result, solution in used:
        assert result == pytest.approx(expected_rates(solution, prefactor, optimizer), rel=1e-12)
    schedule.load_state_dict(schedule.state_dict())
    assert scheduler.lr_prefactor == alone.param_groups[0]["lr"]
