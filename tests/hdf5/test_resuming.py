"""Modes, and runs that are resumed."""

from __future__ import annotations

import contextlib

import pytest
from ignite.engine import Events
from ignite.handlers import global_step_from_engine

from ignite_monitor import HDF5Logger, read_hdf5
from tests.hdf5._runs import as_lists, engine_of, log_output, run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.h5"


def test_x_refuses_w_replaces_a_continues(path):
    run(path, 10)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"run\.h5: it exists already; mode 'a' continues it"):
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


@pytest.mark.parametrize("event", [Events.EPOCH_STARTED, Events.GET_BATCH_COMPLETED, Events.EPOCH_COMPLETED])
def test_other_events_of_a_resumed_run_are_those_of_an_uninterrupted_one(path, event):
    for mode, start, epochs in (("x", 0, 6), ("a", 20, 8)):
        engine = engine_of()
        with HDF5Logger(path, mode) as logger:
            log_output(logger, engine, event, output_transform=lambda _: {"loss": 1.0})
            engine.load_state_dict({"iteration": start, "epoch_length": 5, "max_epochs": epochs})
            engine.run(range(5))
    expected = range(40) if event == Events.GET_BATCH_COMPLETED else range(1, 9)
    assert as_lists(path)["train/loss"][0] == list(expected)


def test_a_later_evaluation_takes_nothing_from_the_training(path):
    for mode, value in (("x", 0.25), ("a", 0.75)):
        trainer, evaluator = engine_of(), engine_of(lambda _, value=value: {"accuracy": value})
        trainer.add_event_handler(Events.ITERATION_COMPLETED(every=20), lambda _, own=evaluator: own.run(range(3)))
        with HDF5Logger(path, mode) as logger:
            log_output(logger, trainer)
            log_output(logger, evaluator, Events.COMPLETED, tag="valid")
            trainer.run(range(100), max_epochs=1) if mode == "x" else evaluator.run(range(200))
    read = as_lists(path)
    assert read["train/loss"][0] == list(range(1, 101))
    assert read["valid/accuracy"][1] == [0.25] * 5 + [0.75]


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
