"""Objects in ``to_save`` besides a model and a plain optimizer, each with its own state."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from ignite.engine import Engine, Events
from ignite.handlers.param_scheduler import (
    ConcatScheduler,
    CosineAnnealingScheduler,
    LinearCyclicalScheduler,
    LRScheduler,
    ParamGroupScheduler,
    PiecewiseLinear,
    create_lr_scheduler_with_warmup,
)
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import lr_scheduler as of_torch

from ignite_monitor import MonitorEvents, RollbackHandler
from ignite_monitor.rollback.snapshots import TrainingState, clone, finite
from tests._helpers import assert_same
from tests._ranks import NEEDS_SHARDS, SHARDS
from tests.rollback._small import Training, make_batches, make_net

SCHEDULES = {
    "one cycle": lambda o: of_torch.OneCycleLR(o, 0.01, total_steps=70),
    "cyclic": lambda o: of_torch.CyclicLR(o, 1e-4, 1e-2, step_size_up=7),
    "function": lambda o: of_torch.LambdaLR(o, lambda i: 0.95**i),
    "sequential": lambda o: of_torch.SequentialLR(
        o, [of_torch.LinearLR(o, 0.1, total_iters=10), of_torch.CosineAnnealingLR(o, 60)], [10]
    ),
    "chained": lambda o: of_torch.ChainedScheduler([of_torch.LinearLR(o, 0.1), of_torch.ExponentialLR(o, 0.97)]),
    "averaged": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.01, anneal_epochs=20),
    "restarts": lambda o: of_torch.CosineAnnealingWarmRestarts(o, 13),
    "pieces": lambda o: PiecewiseLinear(o, "lr", [(0, 0.1), (20, 0.5), (40, 0.0)]),
    "concatenated": lambda o: ConcatScheduler(
        [LinearCyclicalScheduler(o, "lr", 0.1, 0.5, 20), CosineAnnealingScheduler(o, "lr", 0.5, 0.01, 30)], [10]
    ),
    "warmed up": lambda o: create_lr_scheduler_with_warmup(of_torch.StepLR(o, 7, 0.5), 0.0, 8),
    "wrapped": lambda o: LRScheduler(of_torch.StepLR(o, 7, 0.5)),
    "groups": lambda o: ParamGroupScheduler([LinearCyclicalScheduler(o, "lr", 0.1, 0.5, 20)], names=["all"]),
}
# A rollback is requested in two iterations; the first restores the state after iteration 10, the second, before that
# is confirmed, the state after iteration 5.
ASKED, AGAIN, FIRST, SECOND = 14, 24, 10, 5


def of_schedule(make, *, rolls_back=False):
    """Rate and momentum of each step with a schedule."""
    model, seen = make_net(), []

    class Recording(torch.optim.SGD):
        def step(self, closure=None):
            seen.append((self.param_groups[0]["lr"], self.param_groups[0]["momentum"]))

    optimizer = Recording(model.parameters(), lr=0.1, momentum=0.5)
    schedule = make(optimizer)
    trainer = Engine(lambda *_: optimizer.step())
    of_ignite = not isinstance(schedule, of_torch.LRScheduler)
    trainer.add_event_handler(
        Events.ITERATION_STARTED if of_ignite else Events.ITERATION_COMPLETED,
        schedule if of_ignite else lambda _: schedule.step(),
    )

    if rolls_back:
        to_save = {"model": model, "optimizer": optimizer, "schedule": schedule}
        rollback = RollbackHandler(to_save, every=5)
        rollback.attach(trainer)
        for iteration in (ASKED, AGAIN):
            trainer.add_event_handler(Events.ITERATION_STARTED(once=iteration), lambda _: rollback.request("to see"))
    trainer.run(range(40), max_epochs=1)
    return torch.tensor(seen, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # SequentialLR gives it in torch 2.6
@pytest.mark.parametrize("kind", SCHEDULES)
def test_schedules_are_restored(kind):
    bare = of_schedule(SCHEDULES[kind])
    got = of_schedule(SCHEDULES[kind], rolls_back=True)
    assert_same(got[:ASKED], bare[:ASKED])
    assert_same(got[ASKED:AGAIN], bare[FIRST:][: AGAIN - ASKED])
    assert_same(got[AGAIN:], bare[SECOND:][: len(got) - AGAIN])


class Lookahead(torch.optim.Optimizer):
    """Wraps an optimizer, has its groups, and keeps slow weights in a state_dict of its own kind."""

    def __init__(self, optimizer, every=3, alpha=0.5):
        self.optim = self.optimizer = optimizer
        self.every, self.alpha = every, alpha
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        self.steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        self.steps += 1
        if self.steps % self.every == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, fast, strict=True):
                p.copy_(slow.lerp_(p, self.alpha))

    def zero_grad(self, *_):
        self.optimizer.zero_grad()

    def state_dict(self):
        return {"fast": self.optimizer.state_dict(), "slow": self.slow, "steps": self.steps}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["fast"])
        self.param_groups = self.optimizer.param_groups
        self.slow, self.steps = [item.clone() for item in state["slow"]], state["steps"]


class ScheduleFree(torch.optim.Optimizer):
    """SGD by the recurrence of A. Defazio et al., arXiv:2405.15682: weights are y in training, x in evaluation."""

    def __init__(self, params, lr, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, 1 / group["k"]).sub_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - 1 / group["k"])))
                z.sub_(p.grad, alpha=group["lr"])


class Prepared(torch.optim.Optimizer):
    """Optimizer prepared by accelerate: torch's constructor is not called, so it has no step hooks."""

    __module__ = "accelerate.optimizer"

    def __init__(self, optimizer):
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return self.optimizer.state_dict()

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state)


def wrapped_optimizers():
    yield "prepared", lambda p: Prepared(torch.optim.AdamW(p, lr=1e-3))
    yield "lookahead", lambda p: Lookahead(torch.optim.SGD(p, lr=1e-3, momentum=0.9))
    yield "schedule-free", lambda p: ScheduleFree(p, lr=1e-3)


@pytest.mark.parametrize(("kind", "make"), list(wrapped_optimizers()))
def test_optimizers_with_a_state_of_their_own(kind, make):
    training, back = Training(make, every=10), []
    states = training.states()
    training.trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda _: back.append(training.state()))
    training.run(make_batches(40), request=[34])
    assert training.of("restored_iteration") == {34: 30}
    assert_same(back, [states[30]])


class PreparedSchedule:
    """Scheduler prepared by accelerate: it has the optimizers, no ``optimizer``."""

    __module__ = "accelerate.scheduler"

    def __init__(self, schedule):
        self.schedule = schedule
        self.state_dict, self.load_state_dict = schedule.state_dict, schedule.load_state_dict


def test_a_prepared_schedule_is_restored():
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = of_torch.MultiStepLR(optimizer, [3, 7], 0.5)  # which keeps them in a Counter
    to_save = {"model": model, "optimizer": Prepared(optimizer), "schedule": PreparedSchedule(schedule)}
    rollback, trainer = RollbackHandler(to_save, every=5), Engine(lambda *_: optimizer.step())
    rollback.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: schedule.step())
    trainer.add_event_handler(Events.ITERATION_STARTED(once=9), lambda _: rollback.request("to see"))
    trainer.run(range(9))
    assert (schedule.last_epoch, schedule.get_last_lr(), schedule.milestones) == (5, [0.05], {3: 1, 7: 1})


class Packed(torch.Tensor):
    """Tensor whose values another one holds, as of 8-bit optimizers; it has ``copy_``, but no operation on lists."""

    @staticmethod
    def __new__(cls, held):
        return cls._make_wrapper_subclass(cls, held.shape, dtype=held.dtype)

    def __init__(self, held):
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, function, types, args, kwargs=None):
        if function is torch.ops.aten.copy_.default:
            args[0].held.copy_(args[1].held)
            return args[0]
        assert function in (torch.ops.aten._to_copy.default, torch.ops.aten.detach.default)
        return cls(function(args[0].held, **(kwargs or {})))


def test_a_state_of_another_class_is_restored():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.state[model.weight]["packed"] = packed = Packed(torch.zeros(3))
    rollback = RollbackHandler({"model": model, "optimizer": optimizer}, every=1)

    def step(engine, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        packed.held.fill_(engine.state.iteration)

    trainer = Engine(step)
    rollback.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=12), lambda _: rollback.request("to see"))
    trainer.run([torch.randn(4, 3) for _ in range(12)])
    assert optimizer.state[model.weight]["packed"] is packed
    assert packed.held.tolist() == [rollback.metrics["rollback/restored_iteration"]] * 3


def test_zero_redundancy_optimizer(one_rank):
    """Its own state_dict() needs a collective beforehand; moments and rates of this rank's part are restored."""
    training, states, back = Training(lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=1e-3)), {}, []

    def state():
        moments = training.optimizer.optim.state_dict()["state"]
        return copy.deepcopy([training.model.state_dict(), moments, training.optimizer.param_groups[0]["lr"]])

    training.trainer.add_event_handler(
        Events.ITERATION_STARTED, lambda e: states.update({e.state.iteration - 1: state()})
    )
    training.at(33, lambda: training.optimizer.param_groups[0].update(lr=1.0))
    training.trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda _: back.append(state()))
    training.run(make_batches(40), request=[34])
    assert training.of("restored_iteration")[34] == 30
    assert_same(back[0], states[30])


@pytest.mark.skipif(not SHARDS, reason=NEEDS_SHARDS)
def test_fsdp_after_an_evaluation(one_rank):
    """It leaves unsharded parameters of another dtype: snapshots are of the sharded ones, and fit."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, states, back = nn.Linear(3, 1), {}, []
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def state():
        return [parameter.to_local().clone() for parameter in model.parameters()]

    def step(engine, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        states[engine.state.iteration] = state()
        with torch.no_grad():
            model(batch)

    rollback, trainer = RollbackHandler({"model": model, "optimizer": optimizer}, every=4), Engine(step)
    rollback.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=10), lambda _: rollback.request("to see"))
    trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda _: back.append(state()))
    trainer.run([torch.randn(4, 3) for _ in range(12)])
    assert_same(back, [states[8]])
    assert [report.kind for report in rollback.reports] == ["rolled_back"]


def test_an_expanded_buffer_is_restored():
    model = nn.Linear(3, 1)
    model.register_buffer("mask", torch.ones(1, 3).expand(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rollback, before, back = RollbackHandler({"model": model, "optimizer": optimizer}, every=4), {}, []

    def step(engine, batch):
        before[engine.state.iteration] = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        (model(batch * model.mask).square().mean()).backward()
        optimizer.step()

    trainer = Engine(step)
    rollback.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=10), lambda _: rollback.request("to see"))
    trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda _: back.append(copy.deepcopy(model.state_dict())))
    trainer.run([torch.randn(4, 3) for _ in range(12)])
    assert_same(back, [before[9]])


def test_a_buffer_that_was_replaced_is_restored_and_the_replacement_is_unchanged():
    model = nn.Linear(3, 1)
    model.register_buffer("cache", torch.arange(6.0).view(2, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rollback, back = RollbackHandler({"model": model, "optimizer": optimizer}, every=4), []
    with torch.inference_mode():
        longer = torch.ones(5, 3)

    def step(engine, batch):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        if engine.state.iteration == 9:
            model.cache = longer
            rollback.request("to see")

    trainer = Engine(step)
    rollback.attach(trainer)
    trainer.add_event_handler(MonitorEvents.ROLLED_BACK, lambda _: back.append(model.cache.clone()))
    trainer.run([torch.randn(4, 3) for _ in range(12)])
    assert_same(back, [torch.arange(6.0).view(2, 3)])
    assert_same(longer.clone(), torch.ones(5, 3))


def test_tensors_whose_keys_look_the_same_are_restored():
    """Places in a state are keys, not texts."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    places = [(1,), ("1",), ("a", "b"), ("a/b",)]
    for i, (key, *inner) in enumerate(places):
        value = torch.full((2,), float(i))
        optimizer.state[model.weight].setdefault(key, {} if inner else value)
        if inner:
            optimizer.state[model.weight][key][inner[0]] = value
    training = TrainingState({"model": model, "optimizer": optimizer})
    kept, flags = clone(training.state()), finite(training.state())
    optimizer.state[model.weight]["1"].fill_(math.nan)
    assert [place[-1] for place, is_finite in finite(training.state()).items() if flags[place] > is_finite] == ["1"]
    optimizer.state[model.weight][1].fill_(7.0)
    training.restore(kept)
    state = optimizer.state[model.weight]
    assert [state[1][0], state["1"][0], state["a"]["b"][0], state["a/b"][0]] == [0.0, 1.0, 2.0, 3.0]


def test_buffers_that_became_one_are_restored_as_two():
    """And two that were one are one again."""
    model = nn.Module()
    for i, name in enumerate("abcd"):
        model.register_buffer(name, torch.full((2,), float(i)))
    model.d = model.c
    training = TrainingState({"model": model})
    kept = clone(training.state())
    model.a = model.b
    model.d = torch.ones(2)
    training.restore(kept)
    assert [float(getattr(model, name)[0]) for name in "abcd"] == [0.0, 1.0, 2.0, 2.0]
    assert model.c is model.d


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs_continues_from_the_snapshot_as_from_its_state(search):
    """Its history is a list that has another length by then."""

    def start():
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=3, history_size=4, line_search_fn=search)

        def step(engine, batch):
            def closure():
                optimizer.zero_grad()
                loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean() + 1.0
                loss.backward()
                return loss

            return float(optimizer.step(closure).detach())

        return model, optimizer, Engine(step)

    batches = torch.randn(20, 8, 3, generator=torch.Generator().manual_seed(0))
    model, optimizer, trainer = start()
    rollback = RollbackHandler({"model": model, "optimizer": optimizer}, every=2)
    rollback.attach(trainer)
    trainer.add_event_handler(Events.ITERATION_STARTED(once=9), lambda _: rollback.request("to see"))
    restored = []
    trainer.add_event_handler(
        MonitorEvents.ROLLED_BACK, lambda e: restored.append(int(e.state.metrics["rollback/restored_iteration"]))
    )
    trainer.run(batches)
    bare, _, other = start()
    other.run([*batches[: restored[0]], *batches[9:]])
    assert_same(model.state_dict(), bare.state_dict())


@pytest.mark.parametrize("shape", [(2, 3), (4, 3)])
def test_buffers_are_restored_to_the_device_of_the_model(shape):
    """Snapshots may be on another one, and buffers have another shape by then."""
    model = nn.Linear(3, 1)
    model.register_buffer("queue", torch.ones(2, 3))
    training = TrainingState({"model": model})
    kept = clone(training.state())
    model.to("meta")
    model.queue = torch.empty(shape, device="meta")
    training.restore(kept)
    assert (model.queue.device.type, model.queue.shape) == ("meta", (2, 3))


def in_inference_mode(make):
    with torch.inference_mode():
        return make()


@pytest.mark.parametrize(
    "make",
    [
        lambda tensor: nn.Parameter(tensor.to_sparse()),
        lambda tensor: nn.Parameter(tensor[:, :1].expand(2, 2)),
        lambda tensor: in_inference_mode(lambda: nn.Parameter(tensor.clone())),
    ],
    ids=["sparse", "expanded", "inference"],
)
def test_parameters_with_unusual_storage_are_restored_too(make):
    model = nn.Module()
    model.values = values = make(torch.tensor([[0.0, 3.0], [5.0, 0.0]]))
    training, expected = TrainingState({"model": model}), values.to_dense().tolist()
    kept = clone(training.state())
    in_inference_mode(lambda: setattr(values, "data", make(torch.full((2, 2), 8.0)).data))
    assert values.to_dense().tolist() == [[8.0, 8.0]] * 2
    training.restore(kept)
    assert model.values is values
    assert values.to_dense().tolist() == expected


def test_an_object_that_cannot_be_restored_is_refused():
    class Counter:
        def state_dict(self):
            return {"steps": 4}

    with pytest.raises(TypeError, match="but 'counter': 'Counter' object has no attribute 'load_state_dict'"):
        TrainingState({"model": nn.Linear(2, 2), "counter": Counter()})
