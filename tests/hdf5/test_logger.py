"""Values given to an HDF5Logger are returned by read_hdf5."""

from __future__ import annotations

import gc
import math
import os
import re
import runpy
import sys
import threading
import tracemalloc
import weakref

import h5py
import numpy as np
import pytest
import torch
from ignite.engine import Events, create_supervised_trainer
from ignite.metrics import Average

from ignite_monitor import ActivationHandler, GradMonitor, HDF5Logger, SetupCheck, read_hdf5
from ignite_monitor.hdf5 import layout, recorder
from tests._helpers import footprint, make_batches, make_trainer
from tests.hdf5._runs import as_lists, engine_of, log_output, resume, run

# What Ignite's loggers can do


def test_output_metrics_and_state_attributes(path):
    trainer = engine_of(lambda iteration: float(iteration))
    Average().attach(trainer, "average")
    trainer.state.alpha = 0.5
    with HDF5Logger(path) as logger:
        log_output(logger, trainer, metric_names="all", state_attributes=["alpha"])
        log_output(logger, trainer, Events.EPOCH_COMPLETED, tag="epoch", metric_names=["average"])
        log_output(logger, trainer, Events.ITERATION_COMPLETED(every=2), tag=None, state_attributes=["alpha"])
        trainer.run(range(4), max_epochs=2)
    read = as_lists(path)
    iterations = list(range(1, 9))
    assert read["train/output"] == (iterations, [float(i) for i in iterations])
    assert read["train/alpha"] == (iterations, [0.5] * 8)
    assert read["train/average"] == ([5, 6, 7, 8], [2.5] * 4)
    assert read["epoch/average"] == ([1, 2], [2.5, 6.5])
    assert read["output"] == ([2, 4, 6, 8], [2.0, 4.0, 6.0, 8.0])
    assert set(read) == {f"train/{name}" for name in ("output", "alpha", "average")} | {
        *("epoch/average", "epoch/output", "output", "alpha")
    }


def test_optimizer_parameters(path):
    _, optimizer, trainer = make_trainer(lr=0.25)
    with HDF5Logger(path) as logger:
        logger.attach_opt_params_handler(trainer, Events.ITERATION_STARTED, optimizer=optimizer)
        logger.attach_opt_params_handler(trainer, Events.ITERATION_STARTED(every=2), optimizer, "momentum", tag="t")
        trainer.run(make_batches(4))
    assert as_lists(path) == {
        "lr/group_0": ([1, 2, 3, 4], [0.25] * 4),
        "t/momentum/group_0": ([2, 4], [0.9] * 2),
    }


@pytest.mark.parametrize("step", [1.5, "2", None, 2**63, 10**400, math.nan, 4.0, np.int64(4), torch.tensor(4)])
def test_values_at_a_step_that_is_no_integer_are_left_out(path, caplog, step):
    engine = engine_of()
    with HDF5Logger(path) as logger:
        log_output(
            logger,
            engine,
            global_step_transform=lambda engine, _: engine.state.iteration + 0.5 if step == 1.5 else step,
        )
        engine.run(range(3))
    is_integer = isinstance(step, (float, np.int64, torch.Tensor)) and step == 4
    assert as_lists(path) == ({"train/loss": ([4, 4, 4], [1 / 8, 2 / 8, 3 / 8])} if is_integer else {})
    assert len(caplog.messages) == (0 if is_integer else 1)
    assert is_integer or "values of tag 'train' are not written: " in caplog.text


# Values


def test_precision(path):
    values = [1e300, -1e-50, 5e-324, 1.7976931348623157e308, 2.0**53 - 1, -0.0, math.inf, math.nan, 0.1, math.pi]
    run(path, len(values), output=lambda iteration: values[iteration - 1])
    _, read = read_hdf5(path)["train/output"]
    assert read.tobytes() == np.array(values, np.float64).tobytes()


def test_names_of_every_kind(path):
    names = ["a b", "ä/é", "line\nfeed", 'quote"', "nul\0", "\ud800", "a\\b", "x" * 5000, "", "日本", "😀"]
    run(
        path, 2, output=lambda _: dict.fromkeys([*names, "\ud83d\ude00"], 1.0)
    )  # two surrogates are read as one character
    assert list(read_hdf5(path)) == [f"train/{name}" for name in names]


def test_what_can_not_be_written_is_warned_of_once(path, caplog):
    engine = engine_of(lambda iteration: {"loss": 1.0, "text": "no", "image": torch.zeros(2, 2)})
    with HDF5Logger(path) as logger:
        log_output(logger, engine, metric_names=["typo"])
        engine.run(range(20))
    assert list(read_hdf5(path)) == ["train/loss"]
    assert caplog.messages == [
        f"HDF5Logger ({path}): metric typo is not in engine.state.metrics: [].",
        f"HDF5Logger ({path}): can't write train/text, a value of type str.",
        f"HDF5Logger ({path}): can't write train/image, a value of shape (2, 2).",
    ]


# Monitors


def test_the_file_says_which_monitor_published_a_name(path):
    """The source of a value decides; a user's value may have the name of a monitor's."""
    model, optimizer, trainer = make_trainer()
    monitors = [GradMonitor(model, optimizer), GradMonitor(model, optimizer, prefix="g/2", flag="second")]
    monitors += [ActivationHandler(model, activations=True)]
    with HDF5Logger(path) as logger:
        for monitor, tag in zip(monitors, (None, "train", None), strict=True):
            monitor.log_to(logger, trainer, tag=tag, include=lambda name: name != "grad/mean")
            monitor.attach(trainer)
        log_output(logger, trainer, tag="own", output_transform=lambda _: {"batch": 1.0, "grad/norm": 2.0})
        log_output(logger, trainer, tag="grad", output_transform=lambda _: {"mean": 2.0})
        log_output(logger, trainer, tag="again", output_transform=None, metric_names=["grad/norm"])
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda: logger._write(trainer, 1, {"grad/std": 1.0}, tag="by hand")
        )
        trainer.run(make_batches(3))
    recording = read_hdf5(path)
    expected = {
        "grad/norm": ("grad", "grad"),
        "train/g/2/norm": ("grad", "train/g/2"),
        **dict.fromkeys(
            ["own/batch", "own/grad/norm", "grad/mean", "again/grad/norm", "by hand/grad/std"], ("user", "")
        ),
    }
    assert {name: recording.monitor(name) for name in expected} == expected
    activations = [name for name in recording if name.startswith("activation/")]
    assert activations
    assert {recording.monitor(name) for name in activations} == {("activation", "")}


def test_reports_are_recorded_once_whenever_they_were_made(path):
    """Before and after log_to, by a monitor without keys, in a run, and after the monitor is detached."""
    model, optimizer, trainer = make_trainer()
    early, setup = GradMonitor(model, optimizer), SetupCheck(model, optimizer)
    early.report("early", "before\x1b[2J", severity="note", names=["a.weight"])
    with HDF5Logger(path) as logger:
        setup.attach(trainer)
        with early.attach(trainer):
            for monitor in (early, early, setup):
                monitor.log_to(logger, trainer)
            trainer.add_event_handler(
                Events.ITERATION_COMPLETED(once=2), lambda: setup.report("two", Exception("at 2"), names=[0])
            )
            trainer.add_event_handler(
                Events.ITERATION_STARTED(once=3), lambda: early.report("three", "at 3", severity="problem")
            )
            trainer.run(make_batches(5))
        early.report("late", "after the run", once=False)
        early.report("late", "after the run", once=False)
    early_title, setup_title = "GradMonitor (grad)", "SetupCheck (setup)"
    recorded = [
        (0, early_title, "early", "note", "before\\x1b[2J", ("a.weight",), 0),
        (2, setup_title, "two", "warning", "at 2", ("0",), 0),
        (3, early_title, "three", "problem", "at 3", (), 0),
        *2 * [(5, early_title, "late", "warning", "after the run", (), 0)],
    ]
    assert read_hdf5(path).reports == recorded
    assert read_hdf5(path, "nothing").reports == recorded


# The file


def test_memory_does_not_depend_on_the_number_of_iterations(path):
    engine = engine_of(lambda iteration: {"a": 0.5, **{f"top/{(iteration * 7 + k) % 50}": 1.0 for k in range(5)}})
    measured = []
    run(path, 10, output=lambda iteration: {"a": 0.5})
    with HDF5Logger(path, "a", trainer=engine) as logger:
        log_output(logger, engine)

        @engine.on(Events.ITERATION_STARTED(event_filter=lambda _, iteration: iteration in {401, 801, 1601}))
        def measure():
            if not measured:
                tracemalloc.start()
            gc.collect()
            measured.append(tracemalloc.get_traced_memory()[0])

        engine.run(range(1700), max_epochs=1)
    tracemalloc.stop()
    assert measured[2] - measured[1] < 25_000
    assert len(read_hdf5(path)["train/a"].steps) == 1700


def test_closing_leaves_nothing_behind_but_what_was_attached(path, caplog):
    model, optimizer, trainer = make_trainer()
    before = footprint(trainer, model, optimizer)
    monitor = GradMonitor(model, optimizer)
    logger = HDF5Logger(path, "a", trainer=trainer)
    monitor.log_to(logger, trainer)
    handle = log_output(logger, trainer)
    monitor.attach(trainer)
    trainer.run(make_batches(3))
    logger.close()
    logger.close()
    trainer.run(make_batches(3), max_epochs=2)
    closed = f"HDF5Logger ({path}): the logger is closed; nothing is written. Close it after the last run."
    assert [record.message for record in caplog.records if "hdf5" in record.name] == [closed]
    monitor.detach()
    handle.remove()
    assert footprint(trainer, model, optimizer) == before
    assert [element.name for element in path.parent.iterdir()] == ["run.h5"]
    descriptors = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert not [name for name in descriptors if name.startswith(str(path.parent))]
    assert read_hdf5(path)["grad/norm"].steps.tolist() == [1, 2, 3]


def test_a_dropped_logger_writes_what_waits_and_is_freed(path):
    engine = engine_of()
    logger = HDF5Logger(path)
    log_output(logger, engine)
    engine.run(range(20), max_epochs=2)
    engine.state.iteration = 41
    logger._write(engine, 41, {"x": 1.0})
    gone = weakref.ref(logger)
    del logger, engine
    assert gone() is None
    assert read_hdf5(path)["x"].steps.tolist() == [41]


def test_slow_iterations_are_written_in_time(path, monkeypatch):
    now, seen = [0.0], []
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now[0])
    engine = engine_of()
    with HDF5Logger(path) as logger:
        log_output(logger, engine)

        @engine.on(Events.ITERATION_STARTED)
        def wait():
            now[0] += 4.0
            seen.append(len(as_lists(path).get("train/loss", ((), ()))[0]))

        engine.run(range(10), max_epochs=1)
    assert seen == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9]


@pytest.mark.parametrize("every", [1, 20, 51])
def test_never_more_than_flush_every_iterations_wait(path, every):
    engine, missing = engine_of(), []
    with HDF5Logger(path) as logger:
        log_output(logger, engine, Events.ITERATION_COMPLETED(every=every))

        @engine.on(Events.ITERATION_STARTED(every=7))
        def look():
            read = as_lists(path)
            first_missing = (max(read["train/loss"][0]) if read else 0) + every
            missing.append(engine.state.iteration - first_missing)

        engine.run(range(300), max_epochs=1)
    assert max(missing) <= 50


@pytest.mark.parametrize("evaluates_first", [False, True])
def test_a_name_belongs_to_the_trainer_or_to_other_engines(path, caplog, evaluates_first):
    """Whoever writes it first, in a resumed run too: values of both are never mixed."""
    for start in (0, 3):
        trainer, evaluator = engine_of(lambda i: {"loss": float(i)}), engine_of(lambda _: {"loss": -1.0})
        with HDF5Logger(path, "a", trainer=trainer) as logger:
            log_output(logger, trainer)
            log_output(logger, evaluator, Events.COMPLETED)
            event = Events.EPOCH_COMPLETED if start or not evaluates_first else Events.STARTED
            trainer.add_event_handler(event, lambda _, own=evaluator: own.run(range(2)))
            resume(trainer, start, 6)
    expected = [-1.0, -1.0] if evaluates_first else [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert read_hdf5(path)["train/loss"].values.tolist() == expected
    assert caplog.text.count("is a name of") == 2


def test_engines_in_threads_of_their_own(path):
    engines = [engine_of(lambda iteration: float(iteration)) for _ in range(3)]
    with HDF5Logger(path, flush_every=2, trainer=engines[0]) as logger:
        for number, engine in enumerate(engines):
            log_output(logger, engine, tag=str(number))
        threads = [threading.Thread(target=engine.run, args=(range(40),)) for engine in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    read = as_lists(path)
    assert [read[f"{number}/output"][0] for number in range(3)] == [list(range(1, 41))] * 3


def test_a_file_that_is_open_can_be_read_and_continued(path):
    run(path, 3)
    with h5py.File(path, "r"):
        run(path, 5, "a", start=3)
        assert as_lists(path)["train/loss"][0] == [1, 2, 3, 4, 5]


def test_metrics_by_regular_expression(path):
    run(path, 3, output=lambda i: {"a/norm": 1.0, "a/std": 2.0, "b/norm": 3.0})
    assert list(read_hdf5(path, "norm$")) == ["train/a/norm", "train/b/norm"]
    assert list(read_hdf5(path, re.compile("A/", re.IGNORECASE))) == ["train/a/norm", "train/a/std"]
    assert list(read_hdf5(path, "nothing")) == []
    with pytest.raises(ValueError, match=r"Argument metrics should be a regular expression, but given '\('"):
        read_hdf5(path, "(")
    with pytest.raises(TypeError, match="Argument metrics should be a regular expression"):
        read_hdf5(path, 3)


def test_without_h5py(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    runpy.run_path(layout.__file__)  # the package is imported without it
    for use in (HDF5Logger, read_hdf5):
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'ignite-monitor\[hdf5\]'"):
            use(path)


def test_reports_of_an_evaluators_monitor(path):
    """They belong to the trainer's run and iteration."""
    trainer, evaluator, monitor = engine_of(), engine_of(), GradMonitor(torch.nn.Linear(1, 1))
    trainer.add_event_handler(Events.STARTED, lambda: evaluator.run(range(1)))
    trainer.add_event_handler(Events.ITERATION_COMPLETED(every=5), lambda: evaluator.run(range(9)))
    evaluator.add_event_handler(Events.ITERATION_COMPLETED(once=9), lambda: monitor.report("nine", "at 9"))
    monitor.attach(evaluator)
    with HDF5Logger(path, trainer=trainer) as logger:
        log_output(logger, trainer)
        monitor.log_to(logger, evaluator)
        for trainer.state.max_epochs in (None, None):
            trainer.run(range(10), max_epochs=1)
    recording = read_hdf5(path)
    assert [(it.kind, it.iteration, it.run) for it in recording.reports if it.kind == "nine"] == [("nine", 5, 0)]


def test_versions_and_seed_are_recorded_apart_from_reports(tmp_path):
    torch.manual_seed(17)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss)
    monitor = GradMonitor(model, optimizer, on_spike="skip", prefix="g")
    monitor.attach(trainer)
    with HDF5Logger(tmp_path / "run.h5") as logger:
        monitor.log_to(logger, trainer)
        logger.attach_opt_params_handler(trainer, Events.EPOCH_STARTED, optimizer=optimizer)
        for _ in range(2):
            trainer.run([(torch.ones(3, 2), torch.ones(3, 1))] * 2)
        assert len(logger._recorder.sources) == 1  # not one more per run
    recording = read_hdf5(tmp_path / "run.h5")
    assert recording.reports == []
    assert [(it.run, it.monitor, it.severity) for it in recording.settings] == [(0, "run", "note"), (1, "run", "note")]
    assert f"torch {torch.__version__.partition('+')[0]}" in recording.settings[0].text
    assert "seed 17 " in recording.settings[0].text
