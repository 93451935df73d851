"""Training runs that are interrupted and continued, in memory or from a checkpoint in another process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver, global_step_from_engine
from ignite.handlers.tensorboard_logger import TensorboardLogger

from ignite_monitor import HDF5Logger, read_hdf5
from tests._helpers import UNSTEADY, scalars
from tests.stress._training import EPOCHS, LENGTH, MONITORS, Batch, Training, seed_all

DAMAGED = 9  # the iteration whose batch is; with two of them to a step, the first one
SAVED = 4  # iterations from one checkpoint to the next, so that most lie within an epoch
END = EPOCHS * LENGTH

Series = dict[str, tuple[list[int], list[float]]]


class Loader:
    """Batches that a resumed training goes on with where it was left, as a stateful loader does."""

    def __init__(self, batches: list[Batch], trainer: Engine) -> None:
        self._batches, self._trainer = batches, trainer

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self):
        return iter(self._batches[self._trainer.state.iteration % len(self) :])


class ResumedTraining(Training):
    """A training with all monitors and loggers, whose RNG state depends on the iteration alone.

    Args:
        folder: where its files are, those of an earlier process perhaps.
        event: which iterations are monitored.
        accumulate: iterations from one optimizer step to the next.
        names: its monitors.
    """

    def __init__(
        self, folder: Path, event: Any = Events.ITERATION_STARTED, accumulate: int = 1, names: Any = tuple(MONITORS)
    ) -> None:
        super().__init__(accumulate=accumulate, damaged=DAMAGED)
        self.folder = folder
        self.monitors = {name: MONITORS[name](self.model, self.optimizer) for name in names}
        self.trainer.add_event_handler(Events.ITERATION_STARTED, lambda engine: seed_all(engine.state.iteration))
        for monitor in self.monitors.values():
            monitor.attach(self.trainer, event)
        attaching = self.surroundings(folder / "epochs")
        for name in ("scheduler", "ema", "evaluator"):
            attaching[name]()
        self.trainer.add_event_handler(Events.ITERATION_COMPLETED(once=END), self.trainer.terminate)
        self.loader = Loader(self.batches, self.trainer)
        self.saved = {
            "model": self.model,
            "optimizer": self.optimizer,
            "trainer": self.trainer,
            "ema": self.ema.ema_model,
            "scheduler": self.scheduler,
            **self.monitors,
        }

    def train(self, steps: Callable[[], Any] | None = None) -> None:
        """Run to the end, or whatever else is to be done, with loggers that continue what there is in the folder.

        Args:
            steps: what to do.
        """
        path = self.folder / "run.h5"
        with ExitStack() as stack:
            purge = {"purge_step": self.trainer.state.iteration + 1} if path.exists() else {}
            # They are read in the order of their names, which tell the second, and not more.
            for number, older in enumerate(
                sorted((self.folder / "board").glob("*"), key=lambda item: item.stat().st_mtime_ns)
            ):
                older.rename(older.with_name(f"events.out.tfevents.{number:010d}"))
            board = stack.enter_context(TensorboardLogger(log_dir=self.folder / "board", **purge))
            file = stack.enter_context(HDF5Logger(path, "a"))
            for monitor in self.monitors.values():
                for logger in (board, file):
                    monitor.log_to(logger, self.trainer)
            self.note()
            at = Events.ITERATION_COMPLETED(every=SAVED)
            self.trainer.add_event_handler(at, lambda: (file.flush(), board.writer.flush()))
            self.trainer.add_event_handler(at, self.saver())
            (steps or self.continue_run)()

    def saver(self) -> Checkpoint:
        return Checkpoint(
            self.saved,
            DiskSaver(self.folder / "checkpoints", create_dir=True, require_empty=False),
            n_saved=None,
            global_step_transform=global_step_from_engine(self.trainer, Events.ITERATION_COMPLETED),
        )

    def run(self, **kwargs: Any) -> None:
        # More epochs than there will be: one that is broken off does not count less than others.
        self.trainer.run(self.loader, max_epochs=2 * EPOCHS)

    def continue_run(self) -> None:
        """Run to the end."""
        while self.trainer.state.iteration < END:  # after an exception Ignite's first run() does nothing
            self.run()

    def load(self) -> int:
        """Restore the last checkpoint in the folder; return its iteration."""
        paths = (self.folder / "checkpoints").glob("*.pt")
        last = max(paths, key=lambda path: int(path.stem.rpartition("_")[2]))
        Checkpoint.load_objects(self.saved, torch.load(last, weights_only=True))
        return self.trainer.state.iteration


def written(folder: Path) -> tuple[Series, Series]:
    """Return the contents of the HDF5 file and of the event files, without clocks."""
    file = {name: (steps.tolist(), values.tolist()) for name, (steps, values) in read_hdf5(folder / "run.h5").items()}
    board = {name: tuple(map(list, zip(*points, strict=True))) for name, points in scalars(folder / "board").items()}
    return tuple({name: item[name] for name in item if name not in UNSTEADY} for item in (file, board))  # type: ignore[return-value]


def train_until_killed(folder: Path, iteration: int, place: str, loads: bool) -> None:
    """Train in a process that is killed in a train step.

    Args:
        folder: where the files are.
        iteration: when it is killed.
        place: where in the train step.
        loads: whether it goes on from the last checkpoint.
    """
    torch.set_num_threads(1)
    training = ResumedTraining(folder)
    if loads:
        training.load()

    def disturb(now: str) -> None:
        if now == place and training.trainer.state.iteration == iteration:
            os.kill(os.getpid(), signal.SIGKILL)

    training.disturb = disturb
    training.train()
