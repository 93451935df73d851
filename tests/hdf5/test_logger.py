"""What goes in by an HDF5Logger comes out by read_hdf5."""

from __future__ import annotations

import gc
import logging
import math
import os
import subprocess
import sys
import time
import tracemalloc
import weakref
from pathlib import Path

import h5py
import ignite.distributed as idist
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ignite.engine import Engine, Events
from ignite.handlers import global_step_from_engine
from ignite.handlers.base_logger import BaseOutputHandler
from ignite.metrics import Average

from ignite_monitor import GradMonitor, HDF5Logger, read_hdf5
from tests._helpers import footprint, make_batches, make_trainer

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.h5"


def engine_of(output=lambda iteration: {"loss": iteration / 10}):
    return Engine(lambda engine, batch: output(engine.state.iteration))


def log_output(logger, engine, event=Events.ITERATION_COMPLETED, **kwargs):
    kwargs = {"tag": "train", "output_transform": lambda output: output, **kwargs}
    return logger.attach_output_handler(engine, event, **kwargs)


def as_lists(path):
    return {name: (steps.tolist(), values.tolist()) for name, (steps, values) in read_hdf5(path).items()}


def run(path, count, mode="x", output=lambda iteration: {"loss": iteration / 10}, start=0, every=1, **kwargs):
    """A run of ``count`` iterations that resumes from ``start``."""
    engine = engine_of(output)
    with HDF5Logger(path, mode, **kwargs) as logger:
        log_output(logger, engine, Events.ITERATION_COMPLETED(every=every))
        if start:
            engine.load_state_dict({"iteration": start, "epoch_length": count, "max_epochs": 1})
            engine.run(range(count))
        else:
            engine.run(range(count), max_epochs=1)


# What Ignite's loggers can do


def test_output_metrics_and_state_attributes(path):
    trainer = engine_of(lambda iteration: float(iteration))
    Average().attach(trainer, "average")
    trainer.state.alpha = 0.5
    with HDF5Logger(path) as logger:
        log_output(logger, trainer, metric_names="all", state_attributes=["alpha"])
        log_output(logger, trainer, Events.EPOCH_COMPLETED, tag="epoch", metric_names=["average", "absent"])
        log_output(logger, trainer, Events.ITERATION_COMPLETED(every=2), tag=None, state_attributes=["alpha"])
        trainer.run(range(4), max_epochs=2)
    read = as_lists(path)
    iterations = list(range(1, 9))
    assert read["train/output"] == (iterations, [float(i) for i in iterations])
    assert read["train/alpha"] == (iterations, [0.5] * 8)
    assert read["train/average"] == ([5, 6, 7, 8], [2.5] * 4)
    assert read["epoch/average"] == ([1, 2], [2.5, 6.5])
    assert read["output"] == ([2, 4, 6, 8], [2.0, 4.0, 6.0, 8.0])
    assert set(read) == {
        "train/output",
        "train/alpha",
        "train/average",
        "epoch/average",
        "epoch/output",
        "output",
        "alpha",
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


def test_several_events_and_a_step_of_ones_own(path):
    trainer, evaluator = engine_of(), engine_of(lambda iteration: {"accuracy": 0.5})
    trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(range(3)))
    with HDF5Logger(path) as logger:
        log_output(logger, trainer, Events.EPOCH_STARTED | Events.EPOCH_COMPLETED)
        log_output(
            logger,
            evaluator,
            Events.COMPLETED,
            tag="valid",
            global_step_transform=global_step_from_engine(trainer, Events.ITERATION_COMPLETED),
        )
        trainer.run(range(4), max_epochs=2)
    read = as_lists(path)
    assert read["valid/accuracy"] == ([4, 8], [0.5, 0.5])
    assert read["train/loss"][0] == [1, 2, 2]


def test_a_monitor(path):
    model, optimizer, trainer = make_trainer()
    monitor, published = GradMonitor(model, optimizer), []
    with HDF5Logger(path) as logger:
        monitor.log_to(logger, trainer)
        monitor.attach(trainer, Events.ITERATION_STARTED(every=3))
        trainer.add_event_handler(
            Events.ITERATION_COMPLETED(every=3), lambda: published.append(float(monitor.metrics["grad/norm"]))
        )
        trainer.run(make_batches(90))
    read = as_lists(path)
    assert read["grad/norm"] == (list(range(3, 91, 3)), published)
    assert read["grad/threshold"][0] == list(range(63, 91, 3))  # absent while warming up


@pytest.mark.parametrize("wrong", [1.5, "2", None])
def test_a_step_that_is_no_integer(path, wrong):
    engine = engine_of()
    with HDF5Logger(path) as logger:
        log_output(logger, engine, global_step_transform=lambda *_: wrong)
        with pytest.raises(TypeError, match="global_step must be int"):
            engine.run(range(1))


def test_a_handler_of_another_logger_is_refused(path):
    with HDF5Logger(path) as logger:
        handler = logger._create_output_handler("t", "all")
        params = logger._create_opt_params_handler(make_trainer()[1])
    for each in (handler, params):
        with pytest.raises(RuntimeError, match="works only with HDF5Logger"):
            each(engine_of(), object(), Events.ITERATION_COMPLETED)


# Values


def test_late_and_rare_names_hold_only_what_was_written(path):
    def output(iteration):
        named = {"loss": float(iteration)}
        if iteration % 7 == 0:
            named["rare"] = torch.tensor(float(iteration))
        if iteration > 150:
            named = {"late": iteration, **named}
        return named

    run(path, 200, output=output)
    read = as_lists(path)
    assert read["train/loss"] == (list(range(1, 201)), [float(i) for i in range(1, 201)])
    assert read["train/rare"] == (list(range(7, 201, 7)), [float(i) for i in range(7, 201, 7)])
    assert read["train/late"] == (list(range(151, 201)), [float(i) for i in range(151, 201)])
    assert list(read) == ["train/loss", "train/rare", "train/late"]


def test_every_bit_survives_in_ordinary_writes(path):
    values = [0.1, math.pi, 2.0**53 - 1, 5e-324, 1.7976931348623157e308, -0.0, math.inf, -math.inf, math.nan, 1 / 3]
    run(path, len(values), output=lambda iteration: values[iteration - 1])
    _, read = read_hdf5(path)["train/output"]
    assert read.tobytes() == np.array(values).tobytes()


def test_large_writes_keep_float32_integers_and_nine_digits(path):
    generator = np.random.default_rng(0)
    doubles = generator.lognormal(0, 20, 1500)
    integers = generator.integers(0, 2**53, 1500)
    singles = generator.normal(size=1500).astype(np.float32)
    odd = [math.nan, math.inf, -math.inf, 2.0**53 - 1, 0.0]
    run(path, 1, output=lambda _: {"d": doubles, "i": integers, "s": singles, "o": odd})
    read = {name: series.values[0] for name, series in read_hdf5(path).items()}
    np.testing.assert_allclose([read[f"train/d/{i}"] for i in range(1500)], doubles, rtol=2e-9)
    np.testing.assert_array_equal([read[f"train/i/{i}"] for i in range(1500)], integers)
    np.testing.assert_array_equal([read[f"train/s/{i}"] for i in range(1500)], singles)
    np.testing.assert_array_equal([read[f"train/o/{i}"] for i in range(5)], odd)


def test_names_of_every_kind(path):
    names = ["a b", "ä/é", "line\nfeed", 'quote"', "nul\0", "\ud800", "a\\b", "x" * 5000, "", "日本"]
    run(path, 2, output=lambda _: dict.fromkeys(names, 1.0))
    assert list(read_hdf5(path)) == [f"train/{name}" if name else "train" for name in names]


def test_what_is_no_number_is_warned_of_once(path, caplog):
    run(path, 20, output=lambda iteration: {"loss": 1.0, "text": "no", "image": torch.zeros(2, 2)})
    assert list(read_hdf5(path)) == ["train/loss"]
    assert [record.message for record in caplog.records] == [
        "Metric text is no number and is left out: type str",
        "Metric image is no number and is left out: shape (2, 2)",
    ]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.none(),
            st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), min_size=1, max_size=5),
            st.dictionaries(st.sampled_from("abc"), st.floats(allow_nan=False), min_size=1),
        ),
        max_size=30,
    ),
    st.integers(1, 9),
)
def test_any_writes_and_reopenings(tmp_path, writes, flush_every):
    """None closes and continues."""
    path, engine = tmp_path / "any.h5", engine_of()
    expected: dict[str, tuple[list[int], list[float]]] = {}
    logger = HDF5Logger(path, "w", flush_every=flush_every)
    for step, named in enumerate(writes, 1):
        if named is None:
            logger.close()
            assert as_lists(path) == expected
            logger = HDF5Logger(path, "a", flush_every=flush_every)
            continue
        engine.state.iteration = step
        logger.write(engine, step, named)
        for name, value in named.items():
            steps, values = expected.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    logger.close()
    assert as_lists(path) == expected


# The file


def test_plain_datasets_for_other_programs(path):
    run(path, 100)
    with h5py.File(path, "r") as file:
        for dataset in file.values():
            assert dataset.chunks
            assert dataset.compression == "gzip"
            assert dataset.maxshape == (None,)


def test_small_and_rare_writes_stay_small(path):
    run(path, 1000, output=lambda iteration: {f"m{i}": torch.rand(()) for i in range(10)})
    assert path.stat().st_size < 8 * 10_000


def test_ten_thousand_values_take_five_bytes_each(path):
    generator = np.random.default_rng(0)
    names = [f"activation/layer.{i}/mean" for i in range(10_000)]
    run(path, 20, output=lambda _: dict(zip(names, generator.lognormal(0, 9, 10_000).tolist(), strict=True)))
    assert path.stat().st_size <= 5 * 200_000


@pytest.mark.parametrize("kind", ["floats", "tensors"])
def test_ten_thousand_metrics_cost_less_than_ignites_flattening(path, kind):
    """Compression, the writes and the closing included; benchmarks/bench_hdf5.py says how much less."""

    class Flattening(BaseOutputHandler):
        def __call__(self, engine):
            self._setup_output_metrics_state_attrs(engine, key_tuple=False)

    engine, generator = engine_of(), np.random.default_rng(0)
    logger = HDF5Logger(path)
    ours, theirs = logger._create_output_handler("train", "all"), Flattening("train", "all")
    times = {"ours": 0.0, "theirs": 0.0}
    for step in range(1, 11):
        values = generator.lognormal(size=10_000)
        leaves = values.tolist() if kind == "floats" else torch.from_numpy(values).unbind()
        engine.state.iteration = step
        engine.state.metrics = {f"layer.{i}/norm": leaf for i, leaf in enumerate(leaves)}
        begin = time.perf_counter()
        ours(engine, logger, Events.ITERATION_COMPLETED)
        middle = time.perf_counter()
        theirs(engine)
        times["ours"] += middle - begin
        times["theirs"] += time.perf_counter() - middle
    begin = time.perf_counter()
    logger.close()
    times["ours"] += time.perf_counter() - begin
    assert times["ours"] < times["theirs"]


def test_memory_and_file_do_not_depend_on_the_number_of_iterations(path):
    engine = engine_of()
    with HDF5Logger(path) as logger:

        def write(first, last):
            for step in range(first, last):
                engine.state.iteration = step
                top = {f"top/{(step * 7 + k) % 50}": 1.0 for k in range(5)}  # other names every time
                logger.write(engine, step, {"a": 0.5, **top})

        write(1, 1000)
        gc.collect()
        tracemalloc.start()
        write(1000, 2000)
        gc.collect()
        first, _ = tracemalloc.get_traced_memory()
        write(2000, 12_000)
        gc.collect()
        second, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert second - first < 50_000
    assert len(read_hdf5(path)["a"].steps) == 11_999


def test_closing_leaves_nothing_behind(path):
    model, optimizer, trainer = make_trainer()
    before = footprint(trainer, model, optimizer)
    monitor = GradMonitor(model, optimizer)
    logger = HDF5Logger(path, "a")
    log_output(logger, trainer)
    monitor.log_to(logger, trainer)
    logger.attach_opt_params_handler(trainer, Events.EPOCH_STARTED | Events.EPOCH_COMPLETED, optimizer)
    monitor.attach(trainer)
    trainer.run(make_batches(3))
    logger.close()
    logger.close()
    monitor.detach()
    assert footprint(trainer, model, optimizer) == before
    descriptors = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_link(fd)]
    assert str(path) not in descriptors


def _is_link(descriptor):
    return os.path.islink(f"/proc/self/fd/{descriptor}")


def test_detaching_the_monitor_does_not_hide_the_start(path):
    """The logger's own handler is neither the monitor's to take down nor to silence."""
    for mode, start in (("x", 0), ("a", 50)):
        model, optimizer, trainer = make_trainer()
        monitor = GradMonitor(model, optimizer)
        with HDF5Logger(path, mode) as logger:
            monitor.log_to(logger, trainer)
            monitor.attach(trainer, Events.ITERATION_STARTED(every=30 if start else 1))
            if start:
                trainer.load_state_dict({"iteration": start, "epoch_length": 100, "max_epochs": 1})
                trainer.run(make_batches(100))
            else:
                trainer.run(make_batches(100))
    assert read_hdf5(path)["grad/norm"].steps.tolist() == [*range(1, 51), 60, 90]


def test_a_dropped_logger_writes_what_waits_and_is_freed(path):
    engine = engine_of()
    logger = HDF5Logger(path)
    log_output(logger, engine)
    engine.run(range(20), max_epochs=2)
    engine.state.iteration = 41
    logger.write(engine, 41, {"x": 1.0})
    gone = weakref.ref(logger)
    del logger, engine
    assert gone() is None
    assert read_hdf5(path)["x"].steps.tolist() == [41]


def test_a_finished_run_can_be_read_before_closing(path):
    trainer, logger = engine_of(), HDF5Logger(path)
    log_output(logger, trainer)
    log_output(logger, trainer, Events.COMPLETED, tag="end")
    trainer.run(range(7), max_epochs=2)
    read = as_lists(path)
    assert read["train/loss"][0] == list(range(1, 15))
    assert read["end/loss"][0] == [2]
    logger.close()


def test_slow_iterations_are_written_in_time(path, monkeypatch):
    import ignite_monitor.hdf5.writer as writer

    now = [0.0]
    monkeypatch.setattr(writer.time, "monotonic", lambda: now[0])
    engine = engine_of()
    with HDF5Logger(path) as logger:
        for step in (1, 2, 3):
            engine.state.iteration = step
            logger.write(engine, step, {"a": 1.0})
        assert as_lists(path) == {}
        now[0] = 11.0
        engine.state.iteration = 4
        logger.write(engine, 4, {"a": 1.0})
        assert as_lists(path)["a"][0] == [1, 2, 3, 4]


@pytest.mark.parametrize("every", [1, 3, 20, 49, 50, 51, 100])
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


def test_flush(path):
    engine = engine_of()
    with HDF5Logger(path) as logger:
        logger.write(engine, 1, {"a": 1.0})
        logger.flush()
        assert as_lists(path) == {"a": ([1], [1.0])}


@pytest.mark.parametrize("end", ["", "raise KeyError", "sys.exit(3)"])
def test_a_program_that_forgets_to_close(path, end):
    script = f"""
import sys
from ignite.engine import Engine, Events
from ignite_monitor import HDF5Logger
engine = Engine(lambda engine, batch: 0.5)
logger = HDF5Logger({str(path)!r})
logger.attach_output_handler(engine, Events.ITERATION_COMPLETED, output_transform=lambda output: output)
@engine.on(Events.ITERATION_COMPLETED(once=30))
def end():
    {end or "engine.terminate()"}
engine.run(range(100))
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], stderr=subprocess.DEVNULL, env=ENVIRONMENT)
    assert read_hdf5(path)["output"].steps.tolist() == list(range(1, 31))


@pytest.mark.parametrize("number", [*range(1, 24), 30])
def test_interrupted_while_it_writes(path, monkeypatch, number):
    """Ctrl-C in a notebook, where training then goes on with the same logger: no value comes under another's name."""
    pwrite, calls = os.pwrite, [0]

    def interrupt(*args):
        calls[0] += 1
        if calls[0] == number:
            raise KeyboardInterrupt
        return pwrite(*args)

    engine = engine_of()

    def write(steps):
        for step in steps:
            engine.state.iteration = step
            logger.write(engine, step, {f"{step % 7}": step % 7, "step": step})

    with HDF5Logger(path, flush_every=10) as logger:
        write(range(1, 16))
        monkeypatch.setattr(os, "pwrite", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(range(16, 99))
        monkeypatch.setattr(os, "pwrite", pwrite)
        write(range(100, 121))
    read = as_lists(path)
    assert set(read["step"][0]) >= {*range(1, 11), *range(100, 121)}
    assert len(read["step"][0]) == len(set(read["step"][0]))
    assert read.pop("step")[1] == [float(step) for step in as_lists(path)["step"][0]]
    for name, (steps, values) in read.items():
        assert values == [float(name)] * len(steps)
        assert {step % 7 for step in steps} == {int(name)}


# Modes


def test_x_refuses_w_replaces_a_continues(path):
    run(path, 10)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"run\.h5 is there already; mode 'a' continues it"):
        HDF5Logger(path)
    assert path.read_bytes() == before
    run(path, 20, "a", start=10)
    assert as_lists(path) == {"train/loss": (list(range(1, 21)), [i / 10 for i in range(1, 21)])}
    run(path, 3, "w")
    assert as_lists(path) == {"train/loss": ([1, 2, 3], [0.1, 0.2, 0.3])}
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
    assert values == [i / 10 for i in range(1, 41)] + [4.0] * 20 + [5.0] * 20


def test_a_run_that_starts_over_takes_the_place_of_everything(path):
    run(path, 100)
    run(path, 5, "a", output=lambda _: {"loss": 0.0})
    assert as_lists(path) == {"train/loss": ([1, 2, 3, 4, 5], [0.0] * 5)}


def test_resuming_without_writing_keeps_everything(path):
    run(path, 10)
    HDF5Logger(path, "a").close()
    assert as_lists(path)["train/loss"][0] == list(range(1, 11))


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


# What is refused


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "message"),
    [
        ((3,), {}, TypeError, "Argument path should be of type str or os.PathLike"),
        (("a.h5", "r"), {}, ValueError, "Argument mode should be one of 'x', 'w' and 'a', but given 'r'"),
        (("a.h5", None), {}, ValueError, "Argument mode should be"),
        (("a.h5",), {"flush_every": 0}, ValueError, "Argument flush_every should be at least 1"),
        (("a.h5",), {"flush_every": 1.5}, TypeError, "Argument flush_every should be an integer"),
        (("absent/a.h5",), {}, FileNotFoundError, r"The directory of .*absent/a\.h5 is not there"),
        ((".", "w"), {}, IsADirectoryError, "is a directory"),
    ],
)
def test_wrong_arguments(tmp_path, monkeypatch, args, kwargs, error, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        HDF5Logger(*args, **kwargs)
    assert list(tmp_path.iterdir()) == []


def damaged(path, kind):
    run(path, 100)
    data = path.read_bytes()
    if kind == "text":
        data = b"no HDF5\n" * 1000
    elif kind == "empty":
        data = b""
    elif kind == "cut":
        data = data[: len(data) // 2]
    elif kind == "head only":
        data = data[:50]
    path.write_bytes(data)
    if kind == "foreign":
        with h5py.File(path, "w") as file:
            file["x"] = [1]
    elif kind == "later version":
        with h5py.File(path, "r+") as file:
            file.attrs["version"] = 9


@pytest.mark.parametrize("kind", ["text", "empty", "cut", "head only", "foreign", "later version"])
def test_a_foreign_or_damaged_file(path, kind):
    damaged(path, kind)
    before = path.read_bytes()
    for use in (read_hdf5, lambda path: HDF5Logger(path, "a")):
        with pytest.raises(ValueError, match=r"run\.h5 (is|was) ") as caught:
            use(path)
        assert len(str(caught.value).splitlines()) == 1
    assert path.read_bytes() == before
    run(path, 3, "w")
    assert as_lists(path)["train/loss"][0] == [1, 2, 3]


@pytest.mark.parametrize("seed", range(30))
def test_a_file_with_wrong_bytes_gives_numbers_or_a_clear_error(path, seed):
    run(path, 200)
    data = bytearray(path.read_bytes())
    generator = np.random.default_rng(seed)
    place = int(generator.integers(0, len(data) - 40))
    data[place : place + 40] = generator.bytes(40)
    path.write_bytes(data)
    try:
        read = read_hdf5(path)
    except ValueError as error:
        message = str(error)
        assert "run.h5" in message
    else:
        assert isinstance(read, dict)


def test_no_file(path):
    with pytest.raises(FileNotFoundError, match=r"run\.h5"):
        read_hdf5(path)
    with pytest.raises(TypeError, match="Argument path should be of type str or"):
        read_hdf5(3)
    with pytest.raises(ValueError, match="is a directory"):
        read_hdf5(path.parent)


@pytest.mark.parametrize("mode", ["a", "w"])
def test_a_second_writer_is_refused(path, mode):
    first, engine = HDF5Logger(path), engine_of()
    log_output(first, engine)
    with pytest.raises(BlockingIOError, match=r"run\.h5 is open in another program"):
        HDF5Logger(path, mode)
    with pytest.raises(OSError, match="lock"):
        h5py.File(path, "r+")
    engine.run(range(5))
    first.close()
    assert as_lists(path)["train/loss"][0] == [1, 2, 3, 4, 5]
    HDF5Logger(path, mode).close()


def test_a_directory_that_can_not_be_written_to(tmp_path):
    with pytest.raises(OSError, match=r"Can't write /dev/full/a\.h5|The directory of /dev/full/a\.h5"):
        HDF5Logger("/dev/full/a.h5")
    with pytest.raises(OSError, match=r"Can't write /proc/a\.h5"):
        HDF5Logger("/proc/a.h5")


# A disk that is full


@pytest.mark.parametrize("room", [0, 100, 3000])
def test_a_full_disk_is_warned_of_once_and_training_goes_on(path, caplog, monkeypatch, room):
    pwrite, written = os.pwrite, [0]

    def full(descriptor, data, address):
        if written[0] >= room:
            raise OSError(28, os.strerror(28))
        part = data[: room - written[0]]  # a disk takes what it has room for
        written[0] += len(part)
        return pwrite(descriptor, part, address)

    engine, completed = engine_of(), []
    with HDF5Logger(path, flush_every=10) as logger:
        log_output(logger, engine)
        engine.add_event_handler(Events.ITERATION_COMPLETED, lambda: completed.append(1))
        with caplog.at_level(logging.WARNING):
            engine.add_event_handler(
                Events.ITERATION_STARTED(once=101), lambda: monkeypatch.setattr(os, "pwrite", full)
            )
            engine.run(range(300), max_epochs=1)
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert len(completed) == 300
    (record,) = caplog.records
    assert record.message.startswith(f"Can't write to {path} any more")
    assert "No space left on device" in record.message
    steps = as_lists(path)["train/loss"][0]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= 100
    run(path, 400, "a", start=len(steps))
    assert as_lists(path)["train/loss"][0] == list(range(1, 401))


def test_a_limit_on_the_size_of_files(path):
    script = """
import logging, resource, sys
from ignite.engine import Engine, Events
from ignite_monitor import HDF5Logger, read_hdf5
logging.basicConfig()
engine = Engine(lambda engine, batch: {str(i): engine.state.iteration / (i + 1) for i in range(100)})
logger = HDF5Logger(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
logger.attach_output_handler(engine, Events.ITERATION_COMPLETED, output_transform=lambda output: output)
engine.run(range(1000), max_epochs=1)
print(engine.state.iteration, len(read_hdf5(sys.argv[1])["0"].steps))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    iterations, kept = map(int, done.stdout.split())
    assert iterations == 1000
    assert 40 < kept < 200
    assert kept % 50 == 0
    assert done.stderr.count("WARNING") == 1
    assert f"Can't write to {path} any more" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_room_for_the_first_byte(tmp_path):
    script = """
import resource, sys
import torch
from ignite_monitor import HDF5Logger
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    HDF5Logger(sys.argv[1])
except OSError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run.h5")],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        check=True,
    )
    assert done.stdout.startswith(f"Can't write {tmp_path}/run.h5: ")
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []


# Ranks, and what need not be installed


def test_other_ranks_do_nothing(path, monkeypatch):
    monkeypatch.setattr(idist, "get_rank", lambda: 1)
    run(path, 10)
    assert not path.exists()


def test_to_pandas(path):
    pytest.importorskip("pandas")
    run(path, 4, output=lambda i: {"a": i / 2, **({"b": math.nan} if i == 3 else {})})
    frame = read_hdf5(path).to_pandas()
    assert frame.columns.tolist() == ["name", "step", "value"]
    assert frame["name"].astype(str).tolist() == ["train/a"] * 4 + ["train/b"]
    assert frame["step"].tolist() == [1, 2, 3, 4, 3]
    assert frame["value"].tolist()[:4] == [0.5, 1.0, 1.5, 2.0]
    assert math.isnan(frame["value"].tolist()[4])
    wide = frame.pivot_table("value", "step", "name", observed=True)
    assert wide["train/a"].tolist() == [0.5, 1.0, 1.5, 2.0]
    with HDF5Logger(path, "w"):
        pass
    assert len(read_hdf5(path).to_pandas()) == 0


def test_without_pandas(path, monkeypatch):
    run(path, 1)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas"):
        read_hdf5(path).to_pandas()


def test_without_h5py(path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    for use in (HDF5Logger, read_hdf5):
        with pytest.raises(ModuleNotFoundError, match=r"pip install ignite-monitor\[hdf5\]"):
            use(path)


def test_importing_the_package_does_not_import_h5py():
    script = "import sys, ignite_monitor; print([name for name in ('h5py', 'pandas', 'fcntl') if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env=ENVIRONMENT,
    )
    assert "h5py" not in done.stdout
    assert "pandas" not in done.stdout
