"""Runs that are logged to a file."""

from __future__ import annotations

from ignite.engine import Engine, Events

from ignite_monitor import HDF5Logger, read_hdf5


def engine_of(output=lambda iteration: {"loss": iteration / 8}):
    return Engine(lambda engine, batch: output(engine.state.iteration))


def log_output(logger, engine, event=Events.ITERATION_COMPLETED, **kwargs):
    kwargs = {"tag": "train", "output_transform": lambda output: output, **kwargs}
    return logger.attach_output_handler(engine, event, **kwargs)


def as_lists(path):
    return {name: (steps.tolist(), values.tolist()) for name, (steps, values) in read_hdf5(path).items()}


def run(path, count, mode="x", output=lambda iteration: {"loss": iteration / 8}, start=0, every=1, **kwargs):
    """A run of ``count`` iterations that resumes from ``start``."""
    engine = engine_of(output)
    with HDF5Logger(path, mode, trainer=engine, **kwargs) as logger:
        log_output(logger, engine, Events.ITERATION_COMPLETED(every=every))
        resume(engine, start, count)


def resume(engine, start, count):
    """Run an engine from the iteration after ``start`` to ``count``; its state is reset."""
    engine.load_state_dict({"iteration": start, "epoch_length": count, "max_epochs": 1})
    engine.run(range(count))
