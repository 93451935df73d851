"""Promises of every handler: removed without a trace, fresh values, resumable, no synchronization, training unchanged.

A new handler is one more line in ``HANDLERS`` of tests/_handlers.py.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import itertools
import json
import math
import pickle
import re
import sys
import warnings
import weakref
from collections import Counter
from unittest.mock import MagicMock

import pytest
import torch
import torch.nn.functional as F
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, ProgressBar
from ignite.handlers.mlflow_logger import MLflowLogger
from ignite.handlers.mlflow_logger import OutputHandler as MLflowOutputHandler
from ignite.handlers.tensorboard_logger import TensorboardLogger
from ignite.handlers.wandb_logger import OutputHandler as WandBOutputHandler
from ignite.handlers.wandb_logger import WandBLogger
from ignite.metrics import RunningAverage
from torch import Tensor

from ignite_monitor import ActivationHandler, GradMonitor, MonitorEvents
from tests._handlers import HANDLERS
from tests._helpers import (
    UNSTEADY,
    ListLogger,
    footprint,
    hooks_only,
    in_turn,
    make_batches,
    make_step,
    make_trainer,
    same,
    scalars,
    split,
)
from tests._models import make_model

FILTERS = {
    "callable": (lambda: Events.ITERATION_STARTED(lambda engine, event: event in (1, 5, 12)), [1, 5, 12]),
    "list": (
        lambda: Events.ITERATION_STARTED(every=4) | Events.ITERATION_STARTED(once=[1, 8]),
        [1, 4, 8, 12],
    ),
    "none": (lambda: Events.ITERATION_STARTED, list(range(1, 13))),
}


@pytest.fixture(params=HANDLERS)
def factory(request):
    return HANDLERS[request.param]


@pytest.fixture
def setup(factory):
    model, optimizer, trainer = make_trainer(parts=factory.parts)
    return model, optimizer, trainer, factory(model, optimizer)


def values(monitor) -> dict[str, float]:
    return {name: float(value) for name, value in monitor.metrics.items()}


def publishes(monitor) -> bool:
    return bool(monitor.schema.keys)


def at_each_iteration(trainer, look) -> list:
    """What a function returns at the end of each iteration."""
    seen = []
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: seen.append(look()))
    return seen


def steady(monitor) -> dict[str, float]:
    return {name: value for name, value in values(monitor).items() if name not in UNSTEADY}


# Attaching and leaving


def test_attaching_is_refused_twice_by_a_taken_name_and_at_other_events_and_changes_nothing(factory):
    model, optimizer, trainer = make_trainer()
    monitor, other = factory(model, optimizer), factory(model, optimizer)
    before = footprint(trainer, model, optimizer)
    for event in (Events.EPOCH_STARTED, Events.ITERATION_COMPLETED, MonitorEvents.GRADIENTS_READY, "x"):
        with pytest.raises((ValueError, TypeError), match="event"):
            monitor.attach(trainer, event)
    with pytest.raises(TypeError, match="engine"):
        monitor.attach(model)
    assert footprint(trainer, model, optimizer) == before
    monitor.attach(trainer)
    before = footprint(trainer, model, optimizer)
    for engine in (trainer, Engine(lambda *_: None)):
        with pytest.raises(ValueError, match="attached"):
            monitor.attach(engine)
    assert not any(engine._event_handlers.values())
    with pytest.raises(ValueError, match=r"claimed|prefix"):
        other.attach(trainer)
    assert footprint(trainer, model, optimizer) == before


@pytest.mark.parametrize("how", ["detach", "handle", "with", "detach before any run"])
def test_leaves_everything_as_it_was(setup, how, tmp_path):
    model, optimizer, trainer, monitor = setup
    trainer.state.metrics["mine"] = 1.0
    trainer.add_event_handler(Events.ITERATION_COMPLETED, lambda _: None)
    trainer.run(make_batches(1))
    before = footprint(trainer, model, optimizer)
    with TensorboardLogger(log_dir=tmp_path) as logger:
        handle = monitor.attach(trainer, Events.ITERATION_STARTED(every=2))
        monitor.log_to(logger, trainer)
        monitor.log_to(logger, trainer, MonitorEvents.GRADIENTS_READY(every=3), tag="b")
        monitor.log_to(logger, trainer, Events.ITERATION_COMPLETED(every=3) | Events.COMPLETED, tag="c")
        if how == "with":
            with handle:
                trainer.run(make_batches(4))
                assert bool(values(monitor)) is publishes(monitor)
        elif how != "detach before any run":
            trainer.run(make_batches(4))
        monitor.detach() if how.startswith("detach") else handle.remove()
    after = footprint(trainer, model, optimizer)
    # Ignite gives an engine whose events are registered the attributes that they count by; these were there.
    assert after == before
    assert monitor.metrics == {}
    handle.remove()  # again: nothing to do
    monitor.detach()
    assert footprint(trainer, model, optimizer) == before


@pytest.mark.parametrize("attached", [False, True])
def test_log_to_is_removed_by_detach(setup, attached):
    model, optimizer, trainer, monitor = setup
    before = footprint(trainer, model, optimizer)
    if attached:
        monitor.attach(trainer)
    for logger in (ListLogger(), ProgressBar(disable=True)):
        monitor.log_to(logger, trainer)
    if attached:
        trainer.run(make_batches(2))
    monitor.detach()
    assert footprint(trainer, model, optimizer) == before


def test_attached_again_after_detaching(setup):
    _, _, trainer, monitor = setup
    for _ in range(3):
        old = monitor.attach(trainer)
        trainer.run(make_batches(3))
        assert set(monitor.metrics) <= set(trainer.state.metrics)
        assert bool(monitor.metrics) is publishes(monitor)
        monitor.detach()
    other = Engine(trainer._process_function)
    monitor.attach(other)
    old.remove()  # belongs to an engine that it has left
    other.run(make_batches(3))
    assert bool(monitor.metrics) is publishes(monitor)


AROUND = (Events.ITERATION_STARTED, Events.ITERATION_COMPLETED, Events.EPOCH_COMPLETED, Events.GET_BATCH_COMPLETED)
PLACES = ("forward", "after backward", "after step", "data", *(event.name for event in AROUND))


def test_exceptions_leave_no_hook_and_the_next_run_works(factory):
    """Raise at one place after another, in the second iteration or at the end of the first epoch."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    broken = []

    def fail(place):
        if broken[:1] == [place] and (place == "EPOCH_COMPLETED" or trainer.state.iteration % 3 == 2):
            raise broken.pop(1)

    def train_step(_, batch):
        optimizer.zero_grad()
        for x, y in split(batch, factory.parts):
            loss = F.mse_loss(model(x), y)
            fail("forward")
            loss.backward()
            fail("after backward")
        optimizer.step()
        fail("after step")
        return loss.item()

    class Data(list):
        def __iter__(self):
            for batch in super().__iter__():
                fail("data")
                yield batch

    trainer = Engine(train_step)
    monitor = factory(model, optimizer)
    monitor.attach(trainer)
    for event in AROUND:
        trainer.add_event_handler(event, lambda _, name: fail(name), event.name)
    published = at_each_iteration(trainer, lambda: bool(monitor.metrics))
    before = hooks_only(footprint(trainer, model, optimizer))
    for place, error in [*((place, KeyboardInterrupt) for place in PLACES), ("forward", ZeroDivisionError)]:
        broken[:] = [place, error]
        with pytest.raises(error):
            trainer.run(Data(make_batches(3)))
        broken.clear()
        assert hooks_only(footprint(trainer, model, optimizer)) == before, place
        trainer.state.max_epochs = None
        published.clear()
        trainer.run(Data(make_batches(3)))
        assert published == [publishes(monitor)] * 3, place
        assert hooks_only(footprint(trainer, model, optimizer)) == before, place
        trainer.state.max_epochs = None


HOWS = ["completes", "terminate", "skip_completed", "legacy", "error swallowed"]
HOWS += ["max_iters"] * ("max_iters" in inspect.signature(Engine.run).parameters)  # not in Ignite 0.5.3


@pytest.mark.parametrize("how", HOWS)
def test_end_of_a_run_leaves_no_hook(setup, how):
    model, optimizer, trainer, monitor = setup
    monitor.attach(trainer, Events.ITERATION_STARTED(every=2))
    before = hooks_only(footprint(trainer, model, optimizer))
    trainer.interrupt_resume_enabled = how != "legacy"
    if how in ("terminate", "skip_completed"):
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(once=3), lambda e: e.terminate(skip_completed=how == "skip_completed")
        )
    if how == "error swallowed":
        trainer.add_event_handler(Events.EXCEPTION_RAISED, lambda *_: None)
    batches = [*make_batches(3), None if how == "error swallowed" else make_batches(1)[0]]
    trainer.run(batches, **({"max_iters": 3} if how == "max_iters" else {"max_epochs": 2}))
    assert hooks_only(footprint(trainer, model, optimizer)) == before


# A run


@pytest.mark.parametrize("name", FILTERS)
def test_values_are_there_in_monitored_iterations_and_in_no_other(setup, name):
    _, _, trainer, monitor = setup
    trainer.state.metrics["mine"] = 1.0
    event, expected = FILTERS[name]
    monitor.attach(trainer, event())
    seen = {at: [] for at in (Events.ITERATION_STARTED, MonitorEvents.GRADIENTS_READY, Events.ITERATION_COMPLETED)}
    for at, iterations in seen.items():

        @trainer.on(at)
        def look(engine, iterations=iterations):
            published = set(engine.state.metrics) - {"mine"}
            assert published == set(monitor.metrics)
            for key in published:
                assert engine.state.metrics[key] is monitor.metrics[key]
                assert type(monitor.metrics[key]) is float
            if published:
                iterations.append(engine.state.iteration)

    trainer.run(make_batches(6), max_epochs=2)
    expected = expected if publishes(monitor) else []
    assert seen[Events.ITERATION_COMPLETED] == expected
    assert seen[Events.ITERATION_STARTED] == []
    assert set(seen[MonitorEvents.GRADIENTS_READY]) <= set(expected)


def test_iteration_without_backward_publishes_nothing(factory, setup):
    _, _, trainer, monitor = setup
    if not (factory.needs_backward and publishes(monitor)):
        pytest.skip("has something to say all the same, or never")
    step = trainer._process_function
    engine = Engine(lambda e, batch: step(e, batch) if e.state.iteration % 2 else None)
    monitor.attach(engine)
    published = at_each_iteration(engine, lambda: bool(engine.state.metrics))
    engine.run(make_batches(4))
    assert published == [True, False, True, False]


def test_second_run_continues(factory):
    """Two runs publish what one run over both their data does."""

    def published(*runs):
        model, optimizer, trainer = make_trainer(parts=factory.parts)
        monitor = factory(model, optimizer)
        monitor.attach(trainer)
        seen = at_each_iteration(trainer, lambda: steady(monitor))
        for batches in runs:
            trainer.run(batches)
        return seen

    batches = make_batches(24)
    assert same(published(batches[:12], batches[12:]), published(batches))


def test_resumed_run_publishes_what_the_uninterrupted_one_does(factory, tmp_path):
    cuts, factors = [1, 4, 20], {1: 1e3, 2: 1e3, 15: math.inf, 24: 1e3}
    batches = [(x, y * factors.get(place, 1.0)) for place, (x, y) in enumerate(make_batches(30), 1)]

    def start(seed=0):
        model = make_model(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        monitor = factory(model, optimizer)

        def is_bad(engine):
            return engine.state.batch[1].abs().max() >= 100 or getattr(engine.state, "unhealthy_spike", False)

        seed_dropout = lambda engine, _: torch.manual_seed(engine.state.iteration)  # noqa: E731
        trainer = Engine(in_turn(seed_dropout, make_step(model, optimizer, factory.parts, leave_out=is_bad)))
        monitor.attach(trainer)
        seen = {}
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda e: seen.update({e.state.iteration: steady(monitor)})
        )
        return trainer, seen, {"model": model, "optimizer": optimizer, "trainer": trainer, "monitor": monitor}

    trainer, whole, _ = start()
    trainer.run(batches, max_epochs=1)

    trainer, _, to_save = start()
    saver = Checkpoint(to_save, DiskSaver(tmp_path), n_saved=None, global_step_transform=lambda e, _: e.state.iteration)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=cuts), saver)
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=cuts[-1]), trainer.terminate)
    trainer.run(batches, max_epochs=1)

    for cut in cuts:
        trainer, resumed, to_load = start(seed=5)  # all that matters is loaded
        Checkpoint.load_objects(to_load, torch.load(tmp_path / f"checkpoint_{cut}.pt", weights_only=True))
        trainer.add_event_handler(Events.ITERATION_COMPLETED(once=cut + 10), trainer.terminate)
        trainer.run(batches[cut:] + batches[:cut], max_epochs=1)
        expected = {iteration: whole[iteration] for iteration in range(cut + 1, cut + 11)}
        assert sorted(resumed) == sorted(expected)
        for iteration in expected:
            assert resumed[iteration].keys() == expected[iteration].keys(), (cut, iteration)
            assert same(resumed[iteration], expected[iteration]), (cut, iteration)


def test_what_is_not_known_yet_is_absent_after_non_finite_batches(setup):
    """The first batches overflow; norms themselves may be published as they are."""
    model, *_, monitor = setup
    trainer = Engine(lambda _, batch: (model.zero_grad(), F.mse_loss(model(batch[0]), batch[1]).backward()))
    monitor.attach(trainer)
    wrong = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def look(engine):
        wrong.extend(
            (engine.state.iteration, name, float(value))
            for name, value in engine.state.metrics.items()
            if not name.endswith("/norm")
            and not name.startswith(("monitor/grad_", "monitor/smallest_grad/", "step/batch_rms/"))
            and not math.isfinite(value)
        )

    batches = make_batches(8)
    for place in (0, 1, 5):
        batches[place] = (batches[place][0], batches[place][1] * math.inf)
    trainer.run(batches)
    assert wrong == []


def test_state_dict_is_a_copy_that_later_iterations_do_not_change_and_that_loads(setup):
    _, _, trainer, monitor = setup
    monitor.attach(trainer)
    trainer.run(make_batches(5))
    state = monitor.state_dict()
    frozen = copy.deepcopy(state)
    trainer.run(make_batches(5))
    assert same(dict(state), dict(frozen))
    monitor.load_state_dict(state)
    assert same(dict(monitor.state_dict()), dict(frozen))


def test_load_state_dict_refuses_what_is_not_its_own_and_stays_as_it_was(setup):
    _, _, trainer, monitor = setup
    monitor.attach(trainer)
    trainer.run(make_batches(5))
    before = copy.deepcopy(monitor.state_dict())
    with pytest.raises(TypeError):
        monitor.load_state_dict([1])
    for wrong in ({"nonsense": 1}, {**before, "nonsense": 1}, *[{}] * bool(before)):
        with pytest.raises(ValueError, match="state"):
            monitor.load_state_dict(wrong)
    assert same(dict(monitor.state_dict()), dict(before))


OPTIMIZERS = {
    "SGD": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "fused AdamW": functools.partial(torch.optim.AdamW, fused=True),
}


def trained(name, parts, attach):
    """All that training makes. ``attach`` returns a context."""
    model = make_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    gradients = []
    keep = lambda _: gradients.append([p.grad.clone() for p in model.parameters()])  # noqa: E731
    trainer = Engine(make_step(model, optimizer, parts, before_step=keep))
    outputs = at_each_iteration(trainer, lambda: trainer.state.output)
    with attach(model, optimizer, trainer):
        trainer.run(make_batches(10), max_epochs=2)
    modes = [module.training for module in model.modules()]
    flags = [(p.requires_grad, p._version) for p in model.parameters()]
    left = [p.grad for p in model.parameters()]
    state = [dict(model.state_dict()), optimizer.state_dict(), torch.get_rng_state()]
    return [*state, outputs, gradients, left, modes, flags]


@functools.cache
def trained_alone(name, parts):
    return trained(name, parts, lambda *_: contextlib.nullcontext())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_is_untouched_to_the_last_bit(factory, name, tmp_path):
    """Three of four iterations are monitored."""

    @contextlib.contextmanager
    def attach(model, optimizer, trainer):
        monitor = factory(model, optimizer)
        monitor.attach(trainer, Events.ITERATION_STARTED(event_filter=lambda engine, event: event % 4))
        with TensorboardLogger(log_dir=tmp_path) as logger:
            monitor.log_to(logger, trainer)
            yield

    assert same(trained(name, factory.parts, attach), trained_alone(name, factory.parts))


# References and memory


def run_and_drop(factory, logger=None):
    """Return the objects, by weak references, that are alive after a run was dropped without detaching."""
    model, optimizer, trainer = make_trainer(parts=factory.parts)
    monitor = factory(model, optimizer)
    monitor.attach(trainer)
    if logger is not None:
        monitor.log_to(logger, trainer)
    trainer.run(make_batches(5))
    references = [weakref.ref(part) for part in (model, optimizer, trainer, monitor, *model.parameters())]
    del model, optimizer, trainer, monitor
    return [type(ref()) for ref in references if ref() is not None]


def test_dropped_run_is_freed_by_reference_counting_alone(factory):
    run_and_drop(factory, ListLogger())  # the first use leaves reference cycles of torch's own
    gc.disable()
    try:
        for logger in (None, ListLogger()):
            assert run_and_drop(factory, logger) == []
    finally:
        gc.enable()


def test_copies_made_during_a_run_carry_no_hook(setup):
    """A snapshot of the best model, by deepcopy or pickle."""
    model, optimizer, trainer, monitor = setup
    monitor.attach(trainer)
    copies = []

    @trainer.on(Events.ITERATION_COMPLETED(once=2))
    def snapshot(_):
        copies.extend([copy.deepcopy(model), pickle.loads(pickle.dumps(model))])
        copy.deepcopy(optimizer)
        pickle.dumps(optimizer)

    trainer.run(make_batches(3))
    before = footprint(Engine(lambda *_: None), make_model(), optimizer)["hooks"]
    assert [footprint(Engine(lambda *_: None), element, optimizer)["hooks"] for element in copies] == [before] * 2


def test_memory_and_handlers_do_not_grow(setup):
    """Not by a handler, hook or tensor, nor by two Python objects or a reference cycle an iteration.

    The smallest growth of five spans counts: a leak grows in each of them, a cache of the process in one.
    """
    model, optimizer, trainer, monitor = setup
    gc.collect()
    gc.freeze()  # what was there before is not examined again
    monitor.attach(trainer, Events.ITERATION_STARTED(every=2))
    blocks, cycles, at_first = [], [], []

    @trainer.on(Events.ITERATION_COMPLETED)
    def count(engine):
        if engine.state.iteration >= 100 and engine.state.iteration % 20 == 4:  # SetupCheck is at work in 100, 150, 200
            cycles.append(gc.collect())
            handlers = sum(map(len, engine._event_handlers.values()))
            tensors = sum(issubclass(type(element), Tensor) for element in gc.get_objects())
            counts = handlers, tensors, hooks_only(footprint(engine, model, optimizer))["hooks"]
            if engine.state.iteration > 104:  # until then snapshots are added
                at_first[:] = at_first or [counts]
                assert counts == at_first[0]
            del counts
            blocks.append(sys.getallocatedblocks())

    trainer.run(make_batches(21), max_epochs=10)
    assert min(later - earlier for earlier, later in itertools.pairwise(blocks)) < 40
    assert min(cycles[1:]) < 20


def test_a_model_that_loses_its_parameters_ends_nothing(factory, setup):
    model, _, _, monitor = setup
    if factory.reads_parameter:
        pytest.skip("its function here reads a parameter")
    engine = Engine(lambda engine, batch: 1.0)
    monitor.attach(engine)

    @engine.on(Events.ITERATION_COMPLETED(once=2))
    def lose(engine):
        for module in model.modules():
            module._parameters.clear()

    engine.run(make_batches(5))
    assert engine.state.iteration == 5


def test_no_tensor_of_the_run_is_kept_after_its_end(setup):
    model, _, trainer, monitor = setup
    monitor.attach(trainer)
    trainer.run(make_batches(3))
    kept = [weakref.ref(p.grad) for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    assert [ref() for ref in kept] == [None] * len(kept)


# Loggers


# event -> the steps that are written, whether log_to() comes before attach(), and a tag
WRITTEN = {
    "iteration": (Events.ITERATION_COMPLETED, [3, 6, 9, 12], False, None),
    "every 2": (Events.ITERATION_COMPLETED(every=2), [6, 12], True, "train"),
    "epoch": (Events.EPOCH_COMPLETED, [1, 2], False, "train"),
    "train step": (MonitorEvents.TRAIN_STEP_COMPLETED, [3, 6, 9, 12], True, None),
}


def test_tensorboard(setup, tmp_path):
    _, _, trainer, monitor = setup
    published: dict[int, dict[str, float]] = {}
    with contextlib.ExitStack() as stack:
        loggers = {name: stack.enter_context(TensorboardLogger(log_dir=tmp_path / name)) for name in WRITTEN}
        for early in (True, False):
            for name, (event, _, log_first, tag) in WRITTEN.items():
                if log_first is early:
                    monitor.log_to(loggers[name], trainer, event, tag)
            if early:
                monitor.attach(trainer, Events.ITERATION_STARTED(every=3))
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda e: published.update({e.state.iteration: values(monitor)})
        )
        trainer.run(make_batches(6), max_epochs=2)
    for logger, (_, steps, _, tag) in WRITTEN.items():
        expected: dict[str, list[tuple[int, float]]] = {}
        for step in steps:
            for name, value in published[step * 6 if logger == "epoch" else step].items():
                if not math.isnan(value):
                    expected.setdefault(name if tag is None else f"{tag}/{name}", []).append((step, value))
        got = scalars(tmp_path / logger)
        assert sorted(got) == sorted(expected), logger
        for name, rows in expected.items():
            assert [step for step, _ in got[name]] == [step for step, _ in rows], logger
            assert [value for _, value in got[name]] == pytest.approx([value for _, value in rows], rel=1e-6)


def test_logger_on_gradients_ready_sees_this_backward(setup):
    _, _, trainer, monitor = setup
    logger, seen = ListLogger(), []
    monitor.attach(trainer)
    monitor.log_to(logger, trainer, MonitorEvents.GRADIENTS_READY)
    trainer.add_event_handler(
        MonitorEvents.GRADIENTS_READY, lambda e: seen.append((e.state.iteration, set(monitor.metrics)))
    )
    trainer.run(make_batches(4))
    written = [(step, set(named)) for step, named in logger.written]
    assert written == [(step, names) for step, names in seen if names]


def spied(kind, handler, **attributes):
    """A mock of a logger whose service is not there, with Ignite's real way of attaching and of making values."""
    logger = MagicMock(spec=kind, **attributes)
    logger.attach = lambda *args, **kwargs: kind.attach(logger, *args, **kwargs)
    logger._create_output_handler = handler
    return logger


def make_mlflow(note, monkeypatch):
    for name in ("mlflow", "mlflow.utils", "mlflow.utils.validation"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    return spied(MLflowLogger, MLflowOutputHandler, log_metrics=lambda named, step: note(step, named))


# note(step, names and values), monkeypatch -> logger
SERVICES = {
    "wandb": lambda note, _: spied(
        WandBLogger, WandBOutputHandler, log=lambda named, step, sync=None: note(step, named)
    ),
    "mlflow": make_mlflow,
}


def test_other_loggers(setup, monkeypatch):
    """For one logger log_to() precedes attach(), and the other one has a tag."""
    _, _, trainer, monitor = setup
    got: dict[str, dict[int, dict[str, float]]] = {service: {} for service in SERVICES}
    tags = {service: "train" if place % 3 == 1 else None for place, service in enumerate(SERVICES)}

    def note(service, step, named):
        assert all(type(value) is float for value in named.values())
        got[service].setdefault(step, {}).update({name.replace(" ", "/"): value for name, value in named.items()})

    for early in (True, False):
        for service in [*SERVICES][not early :: 2]:
            logger = SERVICES[service](functools.partial(note, service), monkeypatch)
            monitor.log_to(logger, trainer, tag=tags[service])
        if early:
            monitor.attach(trainer, Events.ITERATION_STARTED(every=2))
    expected = {}

    @trainer.on(Events.ITERATION_COMPLETED(every=2))
    def keep(engine):
        named = {name: value for name, value in values(monitor).items() if not math.isnan(value)}
        expected.update({engine.state.iteration: named} if named else {})

    trainer.run(make_batches(6))
    for service, tag in tags.items():
        start = "" if tag is None else f"{tag}/"
        assert {step: named for step, named in got[service].items() if named} == {
            step: {f"{start}{name}": value for name, value in named.items()} for step, named in expected.items()
        }, service


@pytest.mark.parametrize(("every", "expected"), [(1, [2, 4, 6]), (3, [6])])
def test_logger_is_not_called_where_nothing_was_monitored(setup, every, expected):
    """An empty record is a request to the server for MLflow, and a step of its own for WandB."""
    _, _, trainer, monitor = setup
    if not publishes(monitor):
        pytest.skip("publishes nothing")
    logger = ListLogger()
    monitor.attach(trainer, Events.ITERATION_STARTED(every=2))
    monitor.log_to(logger, trainer, Events.ITERATION_COMPLETED(every=every))
    trainer.run(make_batches(6))
    assert [step for step, _ in logger.written] == expected


def test_logger_gets_what_is_chosen(setup):
    """Names that are known late, when the values come to the host, can be chosen as well."""
    _, _, trainer, monitor = setup
    if not publishes(monitor):
        pytest.skip("publishes nothing")
    monitor.attach(trainer)
    whole, one, others, none = (ListLogger() for _ in range(4))
    monitor.log_to(whole, trainer)
    trainer.run(make_batches(3))
    name = list(whole.written[-1][1])[-1]
    monitor.log_to(one, trainer, include=f"^{re.escape(name)}$")
    monitor.log_to(others, trainer, include=lambda other: other != name)
    monitor.log_to(none, trainer, include="no such name")
    trainer.run(make_batches(3))
    last = whole.written[-1][1]
    assert [set(named) for _, named in one.written[-1:]] == [{name} & set(last)][: len(one.written)]
    rest = last.keys() - {name}
    assert [set(named) for _, named in others.written[-1:]] == ([rest] if rest else [])
    assert none.written == []
    with pytest.raises(ValueError, match="include"):
        monitor.log_to(ListLogger(), trainer, include="(")


@pytest.mark.parametrize("log_first", [False, True])
def test_progress_bar(setup, log_first, tmp_path):
    _, _, trainer, monitor = setup
    if not publishes(monitor):
        pytest.skip("publishes nothing")
    shown, published = {}, {}
    with (tmp_path / "bar").open("w") as file, warnings.catch_warnings():
        warnings.simplefilter("error")
        bar = ProgressBar(file=file)
        bar_reset = bar._reset

        def reset(pbar_total):
            bar_reset(pbar_total)
            bar.pbar.set_postfix = lambda named: shown.update({trainer.state.iteration: dict(named)})

        bar._reset = reset
        if log_first:
            monitor.log_to(bar, trainer)
        monitor.attach(trainer, Events.ITERATION_STARTED(every=2))
        if not log_first:
            monitor.log_to(bar, trainer)
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda e: published.update({e.state.iteration: values(monitor)})
        )
        trainer.run(make_batches(6))
    assert sorted(step for step, named in shown.items() if named) == [2, 4, 6]
    for step in (2, 4, 6):
        expected = {name: value for name, value in published[step].items() if not math.isnan(value)}
        assert {name: shown[step][name] for name in expected} == expected


# Nobody waits


@pytest.fixture
def synchronisations(monkeypatch):
    """Counts every way in which Python reads a tensor's value on the host."""
    counts: Counter[str] = Counter()
    readers = ["item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "numpy", "__array__"]
    readers += ["cpu", "nonzero", "is_nonzero", "equal", "allclose", "__contains__", "__format__", "__repr__"]

    def counting(name, original):
        def wrapped(self, *args, **kwargs):
            counts[name] += 1
            return original(self, *args, **kwargs)

        return wrapped

    for name in readers:
        monkeypatch.setattr(Tensor, name, counting(name, getattr(Tensor, name)), raising=False)
    return counts


def quiet_trainer(parts):
    """A trainer whose optimizer reads no tensor on the host itself."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, Engine(make_step(model, optimizer, parts))


def test_nothing_is_read_on_the_host_without_loggers(factory, synchronisations, on_a_device):
    """Nothing but SetupCheck's report, once in a run, and the result of every second pass."""
    model, optimizer, trainer = quiet_trainer(factory.parts)
    monitor = factory(model, optimizer)
    if factory.decides:
        pytest.skip("looks on the host, as its user asked")
    monitor.attach(trainer)
    synchronisations.clear()
    counts = {}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: counts.update(synchronisations))
    trainer.run(make_batches(15), max_epochs=2)  # the log line at its end reads counts
    counts.pop("nonzero", None)
    assert counts == factory.reads


def test_a_logger_without_attach_is_reported_once(factory, caplog):
    _, _, trainer = quiet_trainer(factory.parts)
    model, optimizer, _ = make_trainer()
    logger = ListLogger()
    monitor = factory(model, optimizer)
    monitor.log_to(logger, trainer)
    trainer.run(make_batches(3))
    assert [element for element in caplog.messages if "is not attached" in element] == [
        f"{monitor._title}: log_to() was called, but the monitor is not attached, so nothing is measured"
    ]
    assert not logger.written


def test_a_monitor_detached_before_its_logger_writes_is_not_reported(caplog):
    """Ignite still calls the logger's handler, since another handler of the same event has removed it."""
    model, optimizer, trainer = make_trainer()
    monitor, logger = GradMonitor(model, optimizer), ListLogger()
    trainer.add_event_handler(Events.ITERATION_COMPLETED(once=3), monitor.detach)
    monitor.attach(trainer)
    monitor.log_to(logger, trainer)
    trainer.run(make_batches(6))
    assert len(logger.written) == 2
    assert "not attached" not in caplog.text


def test_one_transfer_per_iteration_for_three_loggers_of_two_monitors(factory, synchronisations, on_a_device):
    model, optimizer, trainer = quiet_trainer(factory.parts)
    other_model, other_optimizer = make_model(3), None
    other = GradMonitor(other_model, other_optimizer, prefix="other", flag="other_spike")
    monitor = factory(model, optimizer)
    if factory.decides and not factory.on_device:
        pytest.skip("decides on the host, and publishes numbers")
    unused = torch.optim.SGD(other_model.parameters(), lr=0.1)
    engine = Engine(in_turn(make_step(other_model, unused, leave_out=lambda _: True), trainer._process_function))
    engine.add_event_handler(Events.ITERATION_STARTED, lambda _: synchronisations.clear())
    loggers = [ListLogger() for _ in range(3)]
    other.log_to(loggers[0], engine)
    monitor.attach(engine)
    other.attach(engine)
    for logger in loggers:
        monitor.log_to(logger, engine)
        other.log_to(logger, engine, tag="again")
    reads = at_each_iteration(engine, lambda: dict(synchronisations))
    engine.run(make_batches(6))
    sizes = [len(named) for logger in loggers for _, named in logger.written]
    assert min(sizes) >= 1
    assert len(sizes) == (7 if publishes(monitor) else 4) * 6
    for counts in reads:
        for name in ("nonzero", *factory.ignored):
            counts.pop(name, None)
        assert counts.pop("tolist", 0) - factory.second_pass in ([1] if factory.on_device else [0, 1])
        assert sum(counts.values()) <= factory.decides


def test_tensors_until_someone_asks_and_floats_from_then_on(factory, setup, on_a_device):
    _, _, trainer, monitor = setup
    if not factory.on_device:
        pytest.skip("decides on the host, and publishes numbers or nothing")
    monitor.attach(trainer)
    seen_iterations = []

    @trainer.on(Events.ITERATION_COMPLETED)
    def look(engine):
        before = dict(monitor.metrics)
        tensors = {name: value for name, value in before.items() if isinstance(value, Tensor)}
        assert tensors
        assert all(value.ndim == 0 and not value.requires_grad for value in tensors.values())
        host = dict(monitor.on_host())
        assert all(type(value) is float for value in host.values())
        assert monitor.metrics == engine.state.metrics == host
        # What is absent was not finite, and what comes up with the others has had no tensor.
        expected = {name: float(value) for name, value in before.items()}
        assert {name: value for name, value in expected.items() if math.isfinite(value)}.items() <= host.items()
        assert not any(math.isfinite(expected[name]) for name in expected.keys() - host.keys())
        seen_iterations.append(engine.state.iteration)

    trainer.run(make_batches(6))
    assert seen_iterations == [1, 2, 3, 4, 5, 6]


def test_ignite_writes_metrics_as_its_dcgan_example_does():
    """Rounded, with two monitors, to a CSV file; and as JSON."""
    model, optimizer, trainer = make_trainer()
    GradMonitor(model, optimizer).attach(trainer)
    ActivationHandler(model, activations=True, gradients=True).attach(trainer)
    RunningAverage(output_transform=float).attach(trainer, "loss")
    rows = []

    @trainer.on(Events.ITERATION_COMPLETED(every=10))
    def print_logs(engine):
        rows.append({name: float(str(round(value, 5))) for name, value in engine.state.metrics.items()})
        assert json.loads(json.dumps(engine.state.metrics)) == engine.state.metrics
        assert type(engine.state.unhealthy_spike) is bool
        assert type(engine.state.grad_norm) is float

    trainer.run(make_batches(20))
    assert len(rows) == 2
    assert {"loss", "grad/norm", "activation/0/mean", "gradient/0.weight/std"} <= set(rows[0])


class WithLeftover(torch.nn.Sequential):
    """A model whose first parameters have stayed on the meta device."""

    def __init__(self):
        super().__init__()
        self.leftover = torch.nn.Linear(6, 6, device="meta")
        for name, module in make_model().named_children():
            self.add_module(name, module)

    def forward(self, x):
        for module in list(self)[1:]:
            x = module(x)
        return x


def test_parameters_without_data_are_skipped(factory):
    published = []
    for model in (make_model(), WithLeftover()):
        optimizer = torch.optim.SGD(
            [element for element in model.parameters() if not element.is_meta], lr=0.05, momentum=0.9
        )
        trainer = Engine(make_step(model, optimizer, factory.parts))
        monitor = factory(model, optimizer)
        monitor.attach(trainer)
        torch.manual_seed(0)
        trainer.run(make_batches(3), max_epochs=1)
        published.append({name: value for name, value in monitor.on_host().items() if name not in UNSTEADY})
    assert published[1] == pytest.approx(published[0])


def test_a_model_without_data_is_refused(factory):
    if not factory.has_model:
        pytest.skip("watches no model")
    model, optimizer, _ = make_trainer()
    with pytest.raises(ValueError, match="model"):
        factory(model.to("meta"), optimizer)
