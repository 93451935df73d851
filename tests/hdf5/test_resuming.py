"""Modes, and runs that are resumed."""

from __future__ import annotations

import pytest
from ignite.engine import Events
from ignite.handlers import global_step_from_engine

from ignite_monitor import HDF5Logger, Monitor, attach_monitors, read_hdf5
from ignite_monitor.monitor.base import NoModel
from tests._helpers import make_batches, make_trainer
from tests.hdf5._runs import as_lists, engine_of, log_output, resume, run


def test_x_refuses_w_replaces_a_continues(path):
    run(path, 10)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"run\.h5: file exists; mode 'a' continues it"):
        HDF5Logger(path)
    assert path.read_bytes() == before
    run(path, 20, "a", start=10)
    assert as_lists(path) == {"train/loss": (list(range(1, 21)), [i / 8 for i in range(1, 21)])}
    run(path, 3, "w")
    assert as_lists(path) == {"train/loss": ([1, 2, 3], [1 / 8, 2 / 8, 3 / 8])}
    assert [item.name for item in path.parent.iterdir()] == ["run.h5"]


# Resuming


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
        with HDF5Logger(path, mode, trainer=trainer) as logger:
            log_output(logger, evaluator, Events.EPOCH_COMPLETED, tag="valid", global_step_transform=step)
            log_output(logger, trainer, Events.ITERATION_COMPLETED)
            resume(trainer, start, count)

    train("x", 0, 100, 1.0)
    train("a", 50, 120, 2.0)
    read = as_lists(path)
    assert read["train/loss"] == (list(range(1, 121)), [1.0] * 50 + [2.0] * 70)
    first, second = [0] * baseline + [20, 40], [50] * baseline + [60, 80, 100, 120]
    assert read["valid/accuracy"][1] == [1.0] * len(first) + [2.0] * len(second)
    assert read_hdf5(path).iterations("valid/accuracy").tolist() == first + second
    if not own_steps:
        assert read["valid/accuracy"][0] == first + second


@pytest.mark.parametrize("event", [Events.EPOCH_STARTED, Events.GET_BATCH_COMPLETED, Events.EPOCH_COMPLETED])
def test_other_events_of_a_resumed_run_are_those_of_an_uninterrupted_one(path, event):
    for mode, start, epochs in (("x", 0, 6), ("a", 20, 8)):
        engine = engine_of()
        with HDF5Logger(path, mode, trainer=engine) as logger:
            log_output(logger, engine, event, output_transform=lambda _: {"loss": 1.0})
            engine.load_state_dict({"iteration": start, "epoch_length": 5, "max_epochs": epochs})
            engine.run(range(5))
    expected = range(40) if event == Events.GET_BATCH_COMPLETED else range(1, 9)
    assert as_lists(path)["train/loss"][0] == list(expected)


@pytest.mark.parametrize("start", [None, 0, 40])
@pytest.mark.parametrize("loaded", [0, 60])
def test_an_evaluation_without_training_replaces_nothing(path, loaded, start):
    """Its values are those of the trainer's iteration: the one that it has loaded, or 0."""

    def session(value, train):
        trainer, evaluator = engine_of(lambda _: {"loss": value}), engine_of(lambda _: {"accuracy": value})
        with HDF5Logger(path, "a", trainer=trainer, flush_every=1) as logger:
            log_output(logger, trainer)
            log_output(logger, evaluator, Events.COMPLETED, tag="valid")
            train(trainer, evaluator)
            logger.flush()
            return as_lists(path)  # as after a kill

    def evaluate(trainer, evaluator):
        trainer.state.iteration = loaded
        evaluator.run(range(3))

    def resume_later(trainer, evaluator):
        evaluator.run(range(3))  # before the checkpoint is loaded
        trainer.add_event_handler(Events.STARTED, lambda: evaluator.run(range(3)))
        resume(trainer, start, 100)

    session(1.0, lambda trainer, _: trainer.run(range(100)))
    read = session(2.0, evaluate)
    assert read["train/loss"] == ([*range(1, 101)], [1.0] * 100)
    assert read_hdf5(path).iterations("valid/accuracy").tolist() == [loaded]
    if start is not None:
        read = session(3.0, resume_later)
        assert read["train/loss"] == ([*range(1, 101)], [1.0] * start + [3.0] * (100 - start))
        assert read["valid/accuracy"][1][-2:] == [3.0, 3.0]
        assert read_hdf5(path).iterations("valid/accuracy").tolist()[-2:] == [0, start]
        assert set(read_hdf5(path).runs("valid/accuracy")[-2:]) == {2}


@pytest.mark.parametrize("same_logger", [True, False])
def test_reports_of_replaced_iterations_go_with_the_values(path, same_logger):
    """Also a report made again between two iterations, in the first run or in the last."""
    logger = None
    for start, end in ((0, 60), (40, 50), (45, 70)):
        if logger is None or not same_logger:
            engine, monitor = engine_of(), Monitor(NoModel(), "own")
            logger = HDF5Logger(path, "a", trainer=engine)
            monitor.attach(engine)
            monitor.log_to(logger, engine)
            log_output(logger, engine)
            again = lambda engine, own=monitor: own.report("start", "again", once=False)  # noqa: E731
            engine.add_event_handler(Events.STARTED, again)
            engine.add_event_handler(Events.STARTED, logger.flush)
            engine.add_event_handler(
                Events.ITERATION_COMPLETED(every=7),
                lambda engine, own=monitor: own.report("seven", f"{engine.state.iteration} {engine.start}", once=False),
            )
        engine.start = start
        resume(engine, start, end)
        if not same_logger:
            logger.close()
    logger.close()
    reports = read_hdf5(path).reports
    assert [it.text for it in reports if it.kind == "seven"] == [f"{i} 0" for i in (7, 14, 21, 28, 35)] + [
        "42 40", *(f"{i} 45" for i in (49, 56, 63, 70))]  # fmt: skip
    assert [(it.iteration, it.run) for it in reports if it.kind == "start"] == [(0, 0), (40, 1), (45, 2)]


@pytest.mark.parametrize("sessions", [1, 3])
def test_evaluators_between_runs_of_the_trainer(path, sessions):
    """The last session evaluates only."""
    for session in range(sessions + 1):
        trainer, evaluator = engine_of(), engine_of(lambda _, session=session: {"accuracy": session})
        with HDF5Logger(path, "a", flush_every=7, trainer=trainer) as logger:
            log_output(logger, evaluator, Events.EPOCH_COMPLETED, tag="valid")
            log_output(logger, trainer)
            first = max(0, 3 * session - 1)  # resumed one epoch before the last
            if session == sessions:
                trainer.load_state_dict({"iteration": 15 * sessions, "epoch_length": 5, "max_epochs": 3 * sessions})
                evaluator.run(range(3))
                break
            if first:
                trainer.load_state_dict({"iteration": 5 * first, "epoch_length": 5, "max_epochs": first})
            else:
                evaluator.run(range(3))  # before the first iteration
            for epoch in range(first, 3 * session + 3):
                trainer.run(range(5), max_epochs=epoch + 1)
                evaluator.run(range(3))
    read, count = read_hdf5(path), 3 * sessions
    assert read["train/loss"].steps.tolist() == list(range(1, 5 * count + 1))
    assert read.iterations("valid/accuracy").tolist() == [5 * epoch for epoch in (*range(count + 1), count)]
    assert read["valid/accuracy"].values[-1] == sessions


def test_engines_are_refused_unless_it_is_known_which_one_trains(tmp_path):
    """The only engine of a new file trains; several engines, or a continued file, need a name."""
    trainer, other, monitor = engine_of(), engine_of(), Monitor(NoModel(), "own")
    uses = (lambda logger, engine: monitor.log_to(logger, engine), log_output)
    refused = pytest.raises(ValueError, match=r"name the one that trains: HDF5Logger\(path, trainer=trainer\)")
    for number, use in enumerate(uses):
        with HDF5Logger(tmp_path / f"new{number}.h5") as logger:
            for first in uses:
                first(logger, trainer)
            with refused:
                use(logger, other)
        with HDF5Logger(tmp_path / "continued.h5", "a") as logger, refused:
            use(logger, other)  # the trainer, or an evaluator
        for mode in "xa":
            with HDF5Logger(tmp_path / f"named{number}.h5", mode, trainer=trainer) as logger:
                for engine in (other, trainer):
                    use(logger, engine)


def test_attach_monitors_names_the_trainer(path):
    model, optimizer, trainer = make_trainer()
    for _ in range(2):
        with HDF5Logger(path, "a") as logger, attach_monitors(trainer, model, optimizer, loggers=logger):
            log_output(logger, engine_of(), tag="valid")
            trainer.run(make_batches(3))
    with HDF5Logger(path, "w") as logger:
        log_output(logger, engine_of())
        with pytest.raises(ValueError, match="records one training"):
            attach_monitors(trainer, model, optimizer, loggers=logger)


# Runs that restore a checkpoint while their logger stays


@pytest.mark.parametrize(("flush_every", "same_logger"), [(1, True), (50, True), (50, False)])
@pytest.mark.parametrize("every", [1, 40])
def test_values_after_the_checkpoint_are_superseded(path, every, flush_every, same_logger):
    value, logger, engine = [1.0], None, None
    for start, value[0] in ((0, 1.0), (40, 2.0), (30, 3.0), (45, 4.0)):
        if logger is None or not same_logger:
            engine = engine_of(lambda iteration: {"loss": value[0], f"top/{iteration}": value[0]})
            logger = HDF5Logger(path, "a", flush_every=flush_every, trainer=engine)
            log_output(logger, engine, Events.ITERATION_COMPLETED(every=every))
        resume(engine, start, 60)
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


def test_a_run_from_the_beginning_supersedes_nothing(path):
    """Another loader, another epoch length: what has been recorded stays."""
    engine = engine_of()
    with HDF5Logger(path, trainer=engine) as logger:
        log_output(logger, engine)
        engine.run(range(20), max_epochs=1)
        engine.state.max_epochs = None
        engine.run(range(5), max_epochs=2)
    assert as_lists(path)["train/loss"][0] == [*range(1, 21), *range(1, 11)]
    assert read_hdf5(path).restarts == [20]


@pytest.mark.parametrize("same_logger", [True, False])
def test_only_the_run_that_is_continued_loses_values_after_its_checkpoint(path, same_logger):
    value = [1.0]

    def output(iteration):
        # Some names are only in the first run and in the last.
        rare = {f"top/{iteration}": 0.0} if value[0] != 2.0 and iteration > 25 else {}
        return {"loss": value[0]} | rare

    engine = engine_of(output)
    logger = HDF5Logger(path, trainer=engine)
    log_output(logger, engine)
    for value[0] in (1.0, 2.0):
        engine.state.max_epochs = None
        engine.run(range(30), max_epochs=1)
    value[0] = 3.0
    if not same_logger:
        logger.close()
        engine = engine_of(output)
        logger = HDF5Logger(path, "a", trainer=engine)
        log_output(logger, engine)
    resume(engine, 20, 30)
    logger.close()
    read = as_lists(path)
    steps, values = read["train/loss"]
    assert steps == [*range(1, 31), *range(1, 31)]
    assert values == [1.0] * 30 + [2.0] * 20 + [3.0] * 10
    assert all(read[f"train/top/{step}"][0] == [step, step] for step in range(26, 31))


@pytest.mark.parametrize("start", [20, 29])
@pytest.mark.parametrize("how", ["within a run", "interrupted"])
def test_the_engine_is_rewound_without_a_new_run(path, how, start):
    value = [1.0]
    engine = engine_of(lambda iteration: {"loss": value[0]} | ({"rare": value[0]} if iteration % 7 == 0 else {}))

    def back():
        engine.load_state_dict({"iteration": start, "epoch_length": 100, "max_epochs": 1})
        value[0] = 2.0

    @engine.on(Events.ITERATION_COMPLETED)
    def rewind_or_end():
        if engine.state.iteration == 30 and value[0] == 1.0:
            engine.interrupt() if how == "interrupted" else back()
        if engine.state.iteration == 40:
            engine.terminate()

    with HDF5Logger(path, trainer=engine) as logger:
        log_output(logger, engine, Events.ITERATION_COMPLETED(every=3))
        log_output(logger, engine, Events.ITERATION_COMPLETED, tag="all")
        handlers = engine._event_handlers[Events.ITERATION_COMPLETED]
        handlers.append(handlers.pop(0))  # rewinds when everything of the iteration has been written
        engine.run(range(100))
        if how == "interrupted":
            back()
            engine.run(range(100))
    read = as_lists(path)
    for name, steps in (("all/loss", range(1, 41)), ("train/loss", range(3, 40, 3)), ("all/rare", range(7, 40, 7))):
        assert read[name] == ([*steps], [1.0 if step <= start else 2.0 for step in steps])
