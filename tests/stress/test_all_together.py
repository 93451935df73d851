"""All monitors, loggers and handlers of Ignite on one trainer: training is as without, every value as alone."""

from __future__ import annotations

import functools
import math
import random
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ignite.engine import Events
from ignite.handlers.tensorboard_logger import TensorboardLogger

from ignite_monitor import HDF5Logger, MonitorEvents, read_hdf5
from tests._helpers import UNSTEADY, assert_same, scalars
from tests.stress._training import EPOCHS, LENGTH, MONITORS, SPIKE, Training

# What each one watches, where it is not every iteration; the damaged batch is in one that all of them do.
SPREAD = {"update": 2, "moments": 2, "activation": 5, "rcc": 2, "spectral": 5, "alignment": 2}
ALL = tuple(MONITORS)


class Monitored:
    """A training that was watched, and what has been written of it."""

    def __init__(
        self,
        folder: Path,
        names: tuple[str, ...] = ALL,
        spread: bool = False,
        order: int | None = None,
        detached: str | None = None,
        at: Any = None,
        on_board: bool = True,
    ) -> None:
        # Where nothing else detached the damaged step out, the train step does.
        self.training = training = Training(skips=[] if "grad" in names and detached != "grad" else [SPIKE])
        trainer = training.trainer
        self.monitors = {name: MONITORS[name](training.model, training.optimizer) for name in names}
        with ExitStack() as stack:
            loggers = {"file": stack.enter_context(HDF5Logger(folder / "run.h5"))}
            if on_board:
                loggers["board"] = stack.enter_context(TensorboardLogger(log_dir=folder / "board"))
            attaching = training.surroundings(folder / "checkpoints", **self.monitors)
            for name, monitor in self.monitors.items():
                every = SPREAD.get(name, 1) if spread else 1
                event = Events.ITERATION_STARTED(every=every) if every > 1 else Events.ITERATION_STARTED
                attaching[f"attach {name}"] = functools.partial(monitor.attach, trainer, event)
                for kind, logger in loggers.items():
                    attaching[f"{kind} {name}"] = functools.partial(monitor.log_to, logger, trainer)
            keys = list(attaching)
            if order is not None:
                random.Random(order).shuffle(keys)
            for key in keys:
                attaching[key]()
            if detached is not None:
                trainer.add_event_handler(at, self.monitors[detached].detach)
            training.note()
            training.run()
        self.board = scalars(folder / "board") if on_board else {}
        self.file = read_hdf5(folder / "run.h5")


def monitored(**kwargs: Any) -> Monitored:
    with tempfile.TemporaryDirectory() as folder:
        return Monitored(Path(folder), **kwargs)


@functools.cache
def alone(name: str, spread: bool = False) -> dict[int, dict[str, float]]:
    """Return the metrics of a monitor without others: iteration -> name -> value."""
    if spread and name not in SPREAD:
        return alone(name)
    return monitored(names=(name,), spread=spread, on_board=False).training.published


@functools.cache
def unwatched() -> dict[str, Any]:
    """The outcome of the training without monitors."""
    training = Training(skips=[SPIKE])
    with tempfile.TemporaryDirectory() as folder:
        for attach in training.surroundings(Path(folder)).values():
            attach()
        training.run()
    return training.outcome()


def check_published(actual: dict[str, float], references: dict[str, float], iteration: int) -> None:
    assert actual.keys() == references.keys(), iteration
    for name, value in actual.items():
        assert value == references[name] or name in UNSTEADY, (iteration, name, value, references[name])
        assert math.isfinite(value), (iteration, name)


def check_written(run: Monitored) -> None:
    """Each published value stands in both loggers' files, once, at its step; and nothing else does."""
    expected: dict[str, list[tuple[int, float]]] = {}
    for iteration, named in run.training.published.items():
        for name, value in named.items():
            expected.setdefault(name, []).append((iteration, value))
    in_float32 = {
        name: [(step, float(np.float32(value))) for step, value in points] for name, points in expected.items()
    }
    assert run.board == in_float32
    assert set(run.file) == set(expected)
    for name, (steps, values) in run.file.items():
        written = list(zip(steps.tolist(), values.tolist(), strict=True))
        for got, whole, rounded in zip(written, expected[name], in_float32[name], strict=True):
            assert got in (whole, rounded), name


@pytest.mark.parametrize(("spread", "order"), [(False, 0), (True, 2)])
def test_in_any_order(spread, order):
    run = monitored(spread=spread, order=order)
    published = run.training.published
    assert [iteration for iteration, named in published.items() if named["grad/spike"]] == [SPIKE]
    assert published[EPOCHS * LENGTH]["grad/skipped_count"] == 1
    assert_same(run.training.outcome(), unwatched())
    for iteration in range(1, EPOCHS * LENGTH + 1):
        references = {key: value for name in ALL for key, value in alone(name, spread)[iteration].items()}
        check_published(published[iteration], references, iteration)
    check_written(run)


def test_what_was_watched():
    """None of the comparisons above is one of nothing with nothing."""
    families = {
        "grad": {"grad/norm", "grad/threshold"},
        "update": {"monitor/update_ratio_median", "monitor/grad_max"},
        "activation": {
            "activation/stem.1/std", "attention_entropy/places.attention/head_1",
            "gradient/head.weight/l2_norm", "parameter/head.bias/mean_abs",
            "activation_difference/residual/cosine", "parameter_difference/head.weight/max_abs",
        },
        "rcc": {"rcc/weight_update/stem.0", "rcc/input_drift/residual.conv"},
        "spectral": {"spectral/norm_max", "spectral/update_norm_max", "spectral/topk/residual.conv.weight"},
        "stats": {"step/lr/group_0", "step/parameter_norm"},
        "alignment": {"alignment/z0_dW/residual.conv", "alignment/dZ_dW/head"},
    }  # fmt: skip
    for name, keys in families.items():
        assert keys <= alone(name)[LENGTH].keys()
    # An iteration whose step is skipped changes no weight.
    assert "monitor/update_ratio_median" not in alone("update")[SPIKE]
    assert "spectral/update_norm_max" not in alone("spectral")[SPIKE]


@pytest.mark.parametrize(
    ("detached", "at"), [("grad", MonitorEvents.GRADIENTS_READY), ("activation", Events.ITERATION_STARTED)]
)
def test_one_is_detached_in_the_middle(detached, at):
    run = monitored(detached=detached, at=at(once=7), on_board=False)
    assert_same(run.training.outcome(), unwatched())
    for iteration, published in run.training.published.items():
        names = [name for name in ALL if name != detached or iteration < 7]
        references = {key: value for name in names for key, value in alone(name)[iteration].items()}
        check_published(published, references, iteration)
    for name, (steps, _) in run.file.items():
        if name in alone(detached)[LENGTH]:
            assert steps.tolist() == [step for step in range(1, 7) if name in alone(detached)[step]]
