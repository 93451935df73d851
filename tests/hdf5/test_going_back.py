"""Runs that go back to a checkpoint while their logger stays."""

from __future__ import annotations

import pytest
from ignite.engine import Events

from ignite_monitor import HDF5Logger
from tests.hdf5._runs import as_lists, engine_of, log_output


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.h5"


def run_from(engine, start, count):
    engine.load_state_dict({"iteration": start, "epoch_length": count, "max_epochs": 1})
    engine.run(range(count))


@pytest.mark.parametrize(("flush_every", "same_logger"), [(1, True), (50, True), (50, False)])
@pytest.mark.parametrize("every", [1, 7, 40])
def test_what_lies_after_the_checkpoint_is_taken_back(path, every, flush_every, same_logger):
    value, logger, engine = [1.0], None, None
    for start, value[0] in ((0, 1.0), (40, 2.0), (30, 3.0), (45, 4.0)):
        if logger is None or not same_logger:
            engine = engine_of(lambda iteration: {"loss": value[0], f"top/{iteration}": value[0]})
            logger = HDF5Logger(path, "a", flush_every=flush_every)
            log_output(logger, engine, Events.ITERATION_COMPLETED(every=every))
        run_from(engine, start, 60)
        if not same_logger:
            logger.close()
    logger.close()
    read = as_lists(path)
    steps = [step for step in range(1, 61) if step % every == 0]
    expected = [1.0 if step <= 30 else 3.0 if step <= 45 else 4.0 for step in steps]
    assert read["train/loss"] == (steps, expected)
    assert {name: series for name, series in read.items() if "top" in name} == {
        f"train/top/{step}": ([step], [value]) for step, value in zip(steps, expected, strict=True)
    }


def test_a_run_from_the_beginning_takes_nothing_back(path):
    """Another loader, another epoch length: what has been recorded stays."""
    engine = engine_of()
    with HDF5Logger(path) as logger:
        log_output(logger, engine)
        engine.run(range(20), max_epochs=1)
        engine.state.max_epochs = None
        engine.run(range(5), max_epochs=2)
    assert as_lists(path)["train/loss"][0] == [*range(1, 21), *range(1, 11)]


@pytest.mark.parametrize("same_logger", [True, False])
def test_only_the_run_that_is_continued_loses_what_lies_after_its_checkpoint(path, same_logger):
    value = [1.0]

    def output(iteration):
        # Some names are only in the first run and in the last.
        rare = {f"top/{iteration}": 0.0} if value[0] != 2.0 and iteration > 25 else {}
        return {"loss": value[0]} | rare

    engine = engine_of(output)
    logger = HDF5Logger(path)
    log_output(logger, engine)
    for value[0] in (1.0, 2.0):
        engine.state.max_epochs = None
        engine.run(range(30), max_epochs=1)
    value[0] = 3.0
    if not same_logger:
        logger.close()
        logger, engine = HDF5Logger(path, "a"), engine_of(output)
        log_output(logger, engine)
    run_from(engine, 20, 30)
    logger.close()
    read = as_lists(path)
    steps, values = read["train/loss"]
    assert steps == [*range(1, 31), *range(1, 31)]
    assert values == [1.0] * 30 + [2.0] * 20 + [3.0] * 10
    assert all(read[f"train/top/{step}"][0] == [step, step] for step in range(26, 31))


@pytest.mark.parametrize("same_logger", [True, False])
def test_what_is_written_at_the_start_of_an_epoch(path, same_logger):
    """A run that is resumed writes it with the iteration that the one before it has ended with."""
    logger, engine = HDF5Logger(path), engine_of()

    def log(logger, engine):
        log_output(logger, engine)
        log_output(logger, engine, Events.EPOCH_STARTED, output_transform=lambda _: {"epoch": 1.0})

    log(logger, engine)
    engine.run(range(10), max_epochs=4)
    for start in (30, 20, 10):
        if not same_logger:
            logger.close()
            logger, engine = HDF5Logger(path, "a"), engine_of()
            log(logger, engine)
        engine.load_state_dict({"iteration": start, "epoch_length": 10, "max_epochs": 4})
        engine.run(range(10))
    logger.close()
    read = as_lists(path)
    assert read["train/loss"][0] == list(range(1, 41))
    assert read["train/epoch"][0] == [1, 2, 3, 4]


@pytest.mark.parametrize("how", ["within a run", "interrupted"])
def test_the_engine_goes_back_without_a_new_run(path, how):
    value = [1.0]
    engine = engine_of(lambda iteration: {"loss": value[0]} | ({"rare": value[0]} if iteration % 7 == 0 else {}))

    def back():
        engine.load_state_dict({"iteration": 20, "epoch_length": 100, "max_epochs": 1})
        value[0] = 2.0

    @engine.on(Events.ITERATION_COMPLETED)
    def look():
        if engine.state.iteration == 30 and value[0] == 1.0:
            engine.interrupt() if how == "interrupted" else back()
        if engine.state.iteration == 40:
            engine.terminate()

    with HDF5Logger(path) as logger:
        log_output(logger, engine, Events.ITERATION_COMPLETED(every=3))
        log_output(logger, engine, Events.ITERATION_COMPLETED, tag="all")
        handlers = engine._event_handlers[Events.ITERATION_COMPLETED]
        handlers.append(handlers.pop(0))  # goes back when everything of the iteration has been written
        engine.run(range(100))
        if how == "interrupted":
            back()
            engine.run(range(100))
    read = as_lists(path)
    assert read["all/loss"] == (list(range(1, 41)), [1.0] * 20 + [2.0] * 20)
    assert read["train/loss"] == (list(range(3, 40, 3)), [1.0] * 6 + [2.0] * 7)
    assert read["all/rare"] == ([7, 14, 21, 28, 35], [1.0] * 2 + [2.0] * 3)
