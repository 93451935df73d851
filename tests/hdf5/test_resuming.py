"""Modes, and runs that are resumed."""

from __future__ import annotations

import contextlib

import pytest
import torch
from ignite.engine import Events
from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine

from ignite_monitor import GradMonitor, HDF5Logger, read_hdf5
from tests._helpers import make_batches, make_trainer
from tests.hdf5._runs import as_lists, engine_of, log_output, run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.h5"


def test_x_refuses_w_replaces_a_continues(path):
    run(path, 10)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"run\.h5 exists already; mode 'a' continues it"):
        HDF5Logger(path)
    assert path.read_bytes() == before
    run(path, 20, "a", start=10)
    assert as_lists(path) == {"train/loss": (list(range(1, 21)), [i / 8 for i in range(1, 21)])}
    run(path, 3, "w")
    assert as_lists(path) == {"train/loss": ([1, 2, 3], [1 / 8, 2 / 8, 3 / 8])}
    assert [each.name for each in path.parent.iterdir()] == ["run.h5"]


def test_a_makes_a_file_that_is_not_there(path):
    run(path, 3, "a")
    assert as_lists(path)["train/loss"][0] == [1, 2, 3]


def test_strings_and_changes_of_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    logger, engine = HDF5Logger("run.h5"), engine_of()
    log_output(logger, engine)
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    engine.run(range(3))
    logger.close()
    assert as_lists(str(tmp_path / "run.h5"))["train/loss"][0] == [1, 2, 3]


# Resuming


@pytest.mark.parametrize("every", [1, 7, 40])
@pytest.mark.parametrize("start", [50, 73])
def test_a_resumed_run_takes_the_place_of_what_lies_after_its_start(path, start, every):
    run(path, 100, output=lambda iteration: {"loss": 1.0, f"top/{iteration}": 1.0})
    run(path, 120, "a", output=lambda iteration: {"loss": 2.0, f"again/{iteration}": 2.0}, start=start, every=every)
    read = as_lists(path)
    resumed = [i for i in range(start + 1, 121) if i % every == 0]
    assert read["train/loss"] == ([*range(1, start + 1), *resumed], [1.0] * start + [2.0] * len(resumed))
    assert {name for name in read if "top" in name} == {f"train/top/{i}" for i in range(1, start + 1)}
    assert {name for name in read if "again" in name} == {f"train/again/{i}" for i in resumed}


def test_resuming_again_and_again(path):
    run(path, 100)
    for start, value in ((80, 1.0), (90, 2.0), (40, 3.0), (40, 4.0), (60, 5.0)):
        run(path, start + 20, "a", output=lambda _, value=value: {"loss": value}, start=start)
    steps, values = as_lists(path)["train/loss"]
    assert steps == list(range(1, 81))
    assert values == [i / 8 for i in range(1, 41)] + [4.0] * 20 + [5.0] * 20


def test_a_run_that_starts_over_takes_the_place_of_everything(path):
    run(path, 100)
    run(path, 5, "a", output=lambda _: {"loss": 0.0})
    assert as_lists(path) == {"train/loss": ([1, 2, 3, 4, 5], [0.0] * 5)}


@pytest.mark.parametrize("baseline", [False, True])
@pytest.mark.parametrize("own_steps", [False, True])
def test_resuming_with_an_evaluator(path, baseline, own_steps):
    """Its values after the start go too, and steps of its own, which begin anew each time, take nothing away."""

    def train(mode, start, count, value):
        trainer, evaluator = engine_of(lambda _: {"loss": value}), engine_of(lambda _: {"accuracy": value})
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=20), lambda: evaluator.run(range(3)))
        if baseline:
            trainer.add_event_handler(Events.STARTED, lambda: evaluator.run(range(3)))
        step = None if own_steps else global_step_from_engine(trainer, Events.ITERATION_COMPLETED)
        with HDF5Logger(path, mode) as logger:
            log_output(logger, evaluator, Events.EPOCH_COMPLETED, tag="valid", global_step_transform=step)
            log_output(logger, trainer, Events.ITERATION_COMPLETED)
            if start:
                trainer.load_state_dict({"iteration": start, "epoch_length": count, "max_epochs": 1})
                trainer.run(range(count))
            else:
                trainer.run(range(count), max_epochs=1)

    train("x", 0, 100, 1.0)
    train("a", 50, 120, 2.0)
    read = as_lists(path)
    assert read["train/loss"] == (list(range(1, 121)), [1.0] * 50 + [2.0] * 70)
    first, second = [0] * baseline + [20, 40], [50] * baseline + [60, 80, 100, 120]
    assert read["valid/accuracy"][1] == [1.0] * len(first) + [2.0] * len(second)
    if not own_steps:
        assert read["valid/accuracy"][0] == first + second


def train(path, mode, count, value, start=0, events=Events.ITERATION_COMPLETED, tag="train", evaluator=None):
    """A run from iteration ``start``, five iterations an epoch."""
    trainer = engine_of(lambda _: {"loss": value})
    if evaluator is not None:
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=20), lambda: evaluator.run(range(3)))
    with HDF5Logger(path, mode) as logger:
        log_output(logger, trainer, events, tag=tag, output_transform=lambda _: {"loss": value})
        if evaluator is not None:
            log_output(logger, evaluator, Events.COMPLETED, tag="valid")
        if start:
            trainer.load_state_dict({"iteration": start, "epoch_length": 5, "max_epochs": count // 5})
            trainer.run(range(5))
        else:
            trainer.run(range(5), max_epochs=count // 5)


def evaluate(path, value, tag="valid", **kwargs):
    """A program that only evaluates."""
    evaluator = engine_of(lambda _: {"accuracy": value})
    with HDF5Logger(path, "a") as logger:
        log_output(logger, evaluator, Events.COMPLETED, tag=tag, **kwargs)
        evaluator.run(range(200))


def test_all_events_of_an_interrupted_and_an_uninterrupted_run_are_the_same(tmp_path):
    events = (
        Events.STARTED | Events.EPOCH_STARTED | Events.ITERATION_STARTED | Events.GET_BATCH_COMPLETED
        | Events.ITERATION_COMPLETED(every=2) | Events.EPOCH_COMPLETED | Events.COMPLETED
    )  # fmt: skip
    for event in events:
        whole, parts = tmp_path / f"{event}.whole.h5", tmp_path / f"{event}.parts.h5"
        train(whole, "x", 40, 1.0, events=event)
        train(parts, "a", 30, 1.0, events=event)
        train(parts, "a", 40, 1.0, start=20, events=event)
        steps, expected = as_lists(parts)["train/loss"][0], as_lists(whole)["train/loss"][0]
        if event not in {Events.STARTED, Events.COMPLETED}:  # each of the runs has those
            assert steps == expected


def test_a_later_evaluation_takes_nothing_from_the_training(path):
    train(path, "x", 100, 1.0, evaluator=engine_of(lambda _: {"accuracy": 0.25}))
    evaluate(path, 0.75)
    read = as_lists(path)
    assert read["train/loss"][0] == list(range(1, 101))
    assert read["valid/accuracy"][1] == [0.25] * 5 + [0.75]


def test_from_a_checkpoint_with_a_monitor(tmp_path):
    """What stands in the file of a run that was broken off and resumed is what an unbroken run writes."""

    def train(path, mode, epochs, checkpoint=None):
        model, optimizer, trainer = make_trainer()
        monitor = GradMonitor(model, optimizer)
        saved = {"model": model, "optimizer": optimizer, "trainer": trainer, "monitor": monitor}
        folder = DiskSaver(tmp_path / path.stem, create_dir=True, require_empty=False)
        save = Checkpoint(saved, folder, n_saved=None, global_step_transform=lambda *_: trainer.state.epoch)
        trainer.add_event_handler(Events.EPOCH_COMPLETED, save)
        if checkpoint is not None:
            Checkpoint.load_objects(saved, checkpoint)
        with HDF5Logger(path, mode) as logger:
            monitor.log_to(logger, trainer)
            monitor.attach(trainer)

            @trainer.on(Events.ITERATION_STARTED)
            def seed():
                torch.manual_seed(trainer.state.iteration)

            trainer.run(make_batches(30), max_epochs=epochs)

    train(tmp_path / "whole.h5", "x", 3)
    train(tmp_path / "parts.h5", "a", 2)
    train(tmp_path / "parts.h5", "a", 3, tmp_path / "parts" / "checkpoint_1.pt")
    whole, parts = as_lists(tmp_path / "whole.h5"), as_lists(tmp_path / "parts.h5")
    assert set(whole["grad/norm"][0]) == set(range(1, 91))
    assert whole == parts


# An exception


class Stop(BaseException):
    """Neither an error nor a KeyboardInterrupt."""


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("where", [Events.STARTED, Events.ITERATION_COMPLETED])
@pytest.mark.parametrize("same_logger", [True, False])
def test_resuming_after_an_exception_while_the_engine_is_alive(path, error, where, same_logger):
    """As in a notebook, whose traceback keeps the engine."""
    engines, logger = [], HDF5Logger(path)

    def train(value, start, fail_at=None):
        engine = engine_of(lambda _: {"loss": value})
        engines.append(engine)
        log_output(logger, engine)
        engine.load_state_dict({"iteration": start, "epoch_length": 60, "max_epochs": 1})

        def fail():
            if fail_at is not None and engine.state.iteration >= fail_at:
                raise error

        engine.add_event_handler(where, fail)
        with contextlib.suppress(error):
            engine.run(range(60))

    train(1.0, 0, fail_at=31 if where == Events.ITERATION_COMPLETED else None)
    train(2.0, 20, fail_at=20 if where == Events.STARTED else 41)
    if not same_logger:
        logger.close()
        logger = HDF5Logger(path, "a")
    train(3.0, 25)
    logger.close()
    kept = 25 if where == Events.STARTED else 20  # the second run ended before its first iteration
    assert as_lists(path)["train/loss"] == (list(range(1, 61)), [1.0] * kept + [2.0] * (25 - kept) + [3.0] * 35)


def test_sessions_and_iterations(path):
    """Of an evaluator, whose steps are epochs, the iterations of the trainer."""
    for mode, start in (("x", 0), ("a", 10)):
        trainer, evaluator = engine_of(), engine_of(lambda _: {"accuracy": 0.5})
        trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda _, evaluator=evaluator: evaluator.run(range(3)))
        with HDF5Logger(path, mode) as logger:
            log_output(logger, trainer, Events.ITERATION_COMPLETED(every=5))
            log_output(
                logger,
                evaluator,
                Events.COMPLETED,
                tag="valid",
                global_step_transform=global_step_from_engine(trainer, Events.EPOCH_COMPLETED),
            )
            trainer.load_state_dict({"iteration": start, "epoch_length": 10, "max_epochs": 3})
            trainer.run(range(10))
    recording = read_hdf5(path)
    assert recording["valid/accuracy"].steps.tolist() == [1, 2, 3]
    assert recording.iterations("valid/accuracy").tolist() == [10, 20, 30]
    assert recording.iterations("train/loss").tolist() == [5, 10, 15, 20, 25, 30]
    assert recording.sessions("train/loss").tolist() == [0, 0, 1, 1, 1, 1]


def test_an_evaluator_of_a_trainer_that_is_not_attached(path):
    """As validation is usually logged: the steps are epochs, the iterations are the trainer's."""
    trainer, evaluator = engine_of(), engine_of(lambda _: {"accuracy": 0.5})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run([0]))
    with HDF5Logger(path) as logger:
        step = global_step_from_engine(trainer)
        log_output(logger, evaluator, Events.EPOCH_COMPLETED, tag="valid", global_step_transform=step)
        trainer.run(range(10), max_epochs=4)
        trainer.load_state_dict({"iteration": 20, "epoch_length": 10, "max_epochs": 4})
        trainer.run(range(10))
    recording = read_hdf5(path)
    assert recording["valid/accuracy"].steps.tolist() == [1, 2, 3, 4]
    assert recording.iterations("valid/accuracy").tolist() == [10, 20, 30, 40]
