"""Interrupted training runs: published and written values are those of the uninterrupted run.

Attached is everything there is: all monitors, both kinds of files, and Ignite's own handlers.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from ignite.engine import Events

import ignite_monitor
from ignite_monitor import MonitorEvents
from tests._helpers import UNSTEADY, footprint, hooks_only, same
from tests.stress._resumed import END, SAVED, ResumedTraining, Series, train_until_killed, written

EVENTS = {
    "every iteration": lambda: Events.ITERATION_STARTED,
    "every third": lambda: Events.ITERATION_STARTED(every=3),
}


@functools.cache
def unbroken(event: str, accumulate: int = 1) -> tuple[ResumedTraining, Series, Series]:
    """A training that runs from its beginning to its end, and what its files hold."""
    with tempfile.TemporaryDirectory() as folder:
        training = ResumedTraining(Path(folder), EVENTS[event](), accumulate)
        training.train()
        return training, *written(Path(folder))


def steady(published):
    return {
        iteration: {name: value for name, value in named.items() if name not in UNSTEADY}
        for iteration, named in published.items()
    }


def check_files(folder: Path, *expected: Series) -> None:
    """Check the contents of the HDF5 file and of TensorBoard's."""
    for actual, references in zip(written(folder), expected, strict=False):
        assert actual.keys() == references.keys()
        for name in references:
            assert actual[name] == references[name], name


def check(training: ResumedTraining, event: str, accumulate: int = 1, boards: bool = True) -> None:
    """Parameters and all else that training makes, what was published, and what was written.

    TensorBoard's writer takes nothing back: it has to be made anew after a step back.
    """
    whole, *files = unbroken(event, accumulate)
    outcome, expected = training.outcome(), whole.outcome()
    for part in ("model", "optimizer", "ema", "scheduler"):
        assert same(outcome[part], expected[part]), part
    published = steady(whole.published)
    for iteration, named in steady(training.published).items():
        assert same(named, published[iteration]), iteration
    check_files(training.folder, *files[: 1 + boards])


def test_interrupted_and_continued(tmp_path, caplog):
    training = ResumedTraining(tmp_path, EVENTS["every third"](), accumulate=2)
    trainer = training.trainer
    stops = [
        Events.STARTED,
        Events.ITERATION_STARTED(once=2),
        Events.ITERATION_COMPLETED(once=[3, 5, 9]),
        Events.GET_BATCH_STARTED(once=6),
        Events.GET_BATCH_COMPLETED(once=7),
        Events.EPOCH_COMPLETED(once=2),
        Events.EPOCH_STARTED(once=3),
        MonitorEvents.GRADIENTS_READY(once=12),
    ]
    pauses = []

    def steps():
        for stop in stops:
            trainer.add_event_handler(stop, trainer.interrupt)
        training.run()
        while trainer.state.iteration < END:
            pauses.append((trainer.state.iteration, trainer.last_event_name))
            training.validate()
            training.run()

    training.train(steps)
    assert [text for text in caplog.messages if "fast path" not in text] == []  # nothing else is missing
    assert len(pauses) == len(stops) + 2
    check(training, "every third", accumulate=2)


def fail_once(training, place, error, iteration):
    """Raise an error at a place of the train step, once; what is to be back to normal after it is compared."""
    failed = []

    def disturb(now):
        if now == place and training.trainer.state.iteration == iteration and not failed:
            failed.append(True)
            raise error

    training.disturb = disturb


@pytest.mark.parametrize(
    ("place", "error", "iteration", "event", "accumulate", "same_process"),
    [
        ("forward", ZeroDivisionError, 6, "every third", 2, True),
        ("step", KeyboardInterrupt, 14, "every iteration", 1, False),
    ],
)
def test_an_error_and_back_to_the_last_checkpoint(place, error, iteration, event, accumulate, same_process, tmp_path):
    training = ResumedTraining(tmp_path, EVENTS[event](), accumulate)
    start = (iteration - 1) // SAVED * SAVED

    def steps():
        before = hooks_only(footprint(training.trainer, training.model, training.optimizer))
        fail_once(training, place, error, iteration)
        with pytest.raises(error):
            training.continue_run()
        assert hooks_only(footprint(training.trainer, training.model, training.optimizer)) == before
        if same_process:
            assert training.load() == start
            training.continue_run()

    training.train(steps)
    if not same_process:
        training = ResumedTraining(tmp_path, EVENTS[event](), accumulate)
        assert training.load() == start
        training.train()
    check(training, event, accumulate, boards=not same_process)


@contextlib.contextmanager
def interrupted_at_call(number):
    """KeyboardInterrupt, as from Ctrl-C, when that many functions of the package have been entered."""
    package, calls, before = str(Path(ignite_monitor.__file__).parent), itertools.count(1), sys.gettrace()

    def trace(frame, event, _):
        code = frame.f_code
        # In a generator expression it may get lost in what consumes it, and in the end of torch's no_grad it leaves
        # gradients off; neither is the package's doing.
        lost = code.co_name == "<genexpr>" or frame.f_back.f_code.co_filename.endswith("grad_mode.py")
        if code.co_filename.startswith(package) and not lost and next(calls) == number:
            sys.settrace(before)
            raise KeyboardInterrupt

    sys.settrace(trace)
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        sys.settrace(before)


def test_interrupted_at_any_moment_and_back_to_the_last_checkpoint(tmp_path):
    training = ResumedTraining(tmp_path)

    def steps():
        before = hooks_only(footprint(training.trainer, training.model, training.optimizer))
        fail_once(training, "forward", KeyboardInterrupt, 5)
        with pytest.raises(KeyboardInterrupt):
            training.continue_run()
        for number in (*range(1, 24), 80, 700, 1500, 3000, 6000, 10000):
            training.load()
            with interrupted_at_call(number):
                training.continue_run()
            assert hooks_only(footprint(training.trainer, training.model, training.optimizer)) == before, number
        training.load()
        training.continue_run()

    training.train(steps)
    check(training, "every iteration", boards=False)


# Its processes have imported everything already.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.stress._resumed"])


def test_killed_and_resumed_from_the_last_checkpoint(tmp_path):
    for turn, (iteration, place) in enumerate([(6, "backward"), (13, "forward")]):
        process = PROCESSES.Process(target=train_until_killed, args=(tmp_path, iteration, place, turn > 0))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        process.close()
    training = ResumedTraining(tmp_path)
    assert training.load() == 12
    training.train()
    check(training, "every iteration")
