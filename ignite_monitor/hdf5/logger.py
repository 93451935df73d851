"""An Ignite logger that writes to an HDF5 file."""

from __future__ import annotations

import logging
import operator
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ignite.distributed as idist
from ignite.engine import Engine, Events
from ignite.engine.events import RemovableEventHandle
from ignite.handlers.base_logger import BaseLogger

from ignite_monitor.checks import check_count
from ignite_monitor.hdf5.clock import Clock
from ignite_monitor.hdf5.handlers import OptimizerParamsHandler, OutputHandler
from ignite_monitor.hdf5.layout import TROUBLE, import_h5py, one_line
from ignite_monitor.hdf5.values import flatten
from ignite_monitor.hdf5.writer import Writer
from ignite_monitor.model._torch import put_first

MODES = ("x", "w", "a")


class HDF5Logger(BaseLogger):
    """Writes metrics to an HDF5 file, which other programs can read at any time.

    What was written is in the file even when the process is killed, but for the last ``flush_every`` iterations:
    at every moment the file is a complete one. :func:`~ignite_monitor.read_hdf5` gives the values back by name.

    Values are float32, as TensorBoard's are. Those that float32 would turn into another number (integers beyond
    16,777,216, magnitudes beyond 3.4e38 or below 1.2e-38) are kept in float64; NaN and infinite ones stay what they
    are.

    When a write fails (a full disk), the logger warns once, stops, and training goes on; the file keeps what it holds.
    With several processes only rank 0 writes: make the logger after the process group.

    While it is open, two hidden files stand beside the file: a copy of it that is written next, and a lock.

    Args:
        path: the file. Its directory has to be there.
        mode: ``"x"`` makes a new file, ``"w"`` replaces one that is there, ``"a"`` continues it, or makes it. A run
            that is resumed from iteration n and continues the file takes the place of what the file holds after n;
            so does, in any mode, one that goes back to a checkpoint while the logger stays. A run from the beginning
            with the same logger (another loader) adds its steps to those that are there.
        flush_every: how many iterations are collected in memory before they are written. They are also written after
            ten seconds, at the end of a run, and by :meth:`close`.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if ``mode`` is another, or the file to be continued is damaged or not one of HDF5Logger's.
        FileExistsError: if the file is there already, in mode ``"x"``.
        FileNotFoundError: if its directory is not there.
        BlockingIOError: if another logger is writing it.
        ModuleNotFoundError: if h5py is not installed.

    Examples:
        .. code-block:: python

            with HDF5Logger("run.h5") as logger:
                monitor.log_to(logger, trainer)
                logger.attach_output_handler(
                    trainer, Events.ITERATION_COMPLETED, tag="train", output_transform=lambda loss: {"loss": loss}
                )
                trainer.run(loader, max_epochs=5)

            steps, losses = read_hdf5("run.h5")["train/loss"]
    """

    def __init__(self, path: str | os.PathLike[str], mode: str = "x", *, flush_every: int = 50) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"Argument path should be of type str or os.PathLike, but given {type(path)}")
        if mode not in MODES:
            raise ValueError(f"Argument mode should be one of 'x', 'w' and 'a', but given {mode!r}")
        check_count("flush_every", flush_every, least=1)
        self.path = Path(os.path.realpath(os.fspath(path)))
        self.logger = logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._told: set[str] = set()
        self._one_thread = threading.RLock()  # engines may run side by side
        self._is_closed = False
        self._writer: Writer | None = None
        if idist.get_rank() == 0:
            self._writer = _open(self.path, mode)
            self._clock = Clock(self._writer.first_run, flush_every)
            # Also at the exit of a program that forgot to close, or that an exception ends.
            self._finalizer = weakref.finalize(self, _close, self._writer, self.logger)

    def attach(
        self, engine: Engine, log_handler: Callable[..., Any], event_name: Any, *args: Any, **kwargs: Any
    ) -> RemovableEventHandle:
        self._follow(engine)
        return super().attach(engine, log_handler, event_name, *args, **kwargs)

    def flush(self) -> None:
        """Write what waits in memory."""
        if self._writer is None or not self._writer.is_own:
            return
        with self._one_thread:
            if self._writer is not None and self._writer.waits:
                self._attempt(self._writer.flush)
                self._clock.written()

    def close(self) -> None:
        """Write what waits, and let go of the file. What is logged from then on is lost, with one warning."""
        self._is_closed = True
        if self._writer is None or not self._writer.is_own:  # a lock may be another thread's, which was not forked
            return
        with self._one_thread:
            writer, self._writer = self._writer, None
            if writer is not None:
                self._finalizer.detach()
                self._leave()
                _close(writer, self.logger)

    def write(self, engine: Engine, step: Any, values: dict[Any, Any], tag: str | None = None) -> None:
        """Append values to the file; for handlers of your own.

        Args:
            engine: the engine that they come from.
            step: their step.
            values: name -> number, 0-dim or 1-dim tensor, or a dict, list or tuple of such.
            tag: what to put before the names, with a slash.

        Raises:
            TypeError: if ``step`` is no integer.
            ValueError: if it has more than 64 bits.
        """
        try:
            step = operator.index(step)
        except TypeError:
            raise TypeError(
                f"global_step must be int, got {type(step)}. Please check the output of global_step_transform."
            ) from None
        if not -(2**63) <= step < 2**63:
            raise ValueError(f"global_step must have 64 bits at most, but given {step}")
        if not self.is_writing:
            return
        names, numbers = flatten(values, self._leave_out)
        with self._one_thread:
            if names and self._writer is not None:
                self._follow(engine)
                self._attempt(self._writer.add, step, tag, names, numbers, self._clock.place(engine))
                if self._clock.is_time():
                    self.flush()
        self._tell_of_gap()

    @property
    def is_writing(self) -> bool:
        """Whether values are taken: not on other ranks, in forked processes, or after a close or failed write."""
        if self._writer is None and self._is_closed:
            self.warn_once("closed", f"{self.path} is closed, and nothing more is logged there")
        return self._writer is not None and self._writer.is_own and idist.get_rank() == 0

    def warn_once(self, about: str, message: str) -> None:
        """Give a warning, unless there was one about the same.

        Args:
            about: what it is about.
            message: the warning.
        """
        if about not in self._told:
            self._told.add(about)
            warnings.warn(message, stacklevel=2)

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)

    def _attempt(self, writing: Callable[..., None], *args: Any) -> None:
        try:
            writing(*args)
        except TROUBLE as error:
            self.logger.warning(
                "Can't write to %s any more, and nothing more is logged there: %s", self.path, one_line(error)
            )
            writer, self._writer = self._writer, None
            self._finalizer.detach()
            self._leave()
            if writer is not None:
                writer.abandon()

    def _tell_of_gap(self) -> None:
        if self._writer is not None and (gap := self._writer.gap) is not None:
            self.warn_once(
                "gap",
                f"{self.path} ends at iteration {gap.end}, and the run is resumed after iteration {gap.start}: what is "
                "between them is lost. Call flush() before each checkpoint is saved.",
            )

    def _follow(self, engine: Engine) -> None:
        if engine not in self._engines and self._writer is not None:
            self._engines.add(engine)
            engine.add_event_handler(Events.STARTED, self._start)
            # First of all, or an evaluation at the start of a training would not be known as one within it.
            put_first(engine, Events.STARTED)
            engine.add_event_handler(Events.ITERATION_STARTED, self._start_iteration)
            engine.add_event_handler(Events.COMPLETED, self._complete)

    def _start(self, engine: Engine) -> None:
        self._follow_run(self._clock.start, engine)

    def _start_iteration(self, engine: Engine) -> None:
        self._follow_run(self._clock.tick, engine)

    def _follow_run(self, clock: Callable[[Engine], int | None], engine: Engine) -> None:
        if self._writer is None or not self._writer.is_own:
            return
        with self._one_thread:
            start = clock(engine)
            if start is not None and self._writer is not None:
                self._attempt(self._writer.begin, start)
            if self._clock.is_time():
                self.flush()

    def _complete(self, engine: Engine) -> None:
        self._clock.complete(engine)
        self.flush()

    def _leave(self) -> None:
        own: dict[Events, Callable[..., None]] = {
            Events.STARTED: self._start,
            Events.ITERATION_STARTED: self._start_iteration,
            Events.COMPLETED: self._complete,
        }
        for engine in self._engines:
            for event, handler in own.items():
                if engine.has_event_handler(handler, event):
                    engine.remove_event_handler(handler, event)
        self._engines.clear()

    def _leave_out(self, name: str, value: Any) -> None:
        described = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"value type {type(value)}"
        self.warn_once(f"value {name}", f"HDF5Logger can not log metrics {described}: {name}")


def _open(path: Path, mode: str) -> Writer:
    import_h5py()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The directory of {path} is not there")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory")
    try:
        return Writer(path, mode)
    except FileExistsError:
        raise FileExistsError(f"{path} is there already; mode 'a' continues it, mode 'w' replaces it") from None
    except BlockingIOError:
        raise BlockingIOError(f"{path} is open in another program, or in another logger of this one") from None
    except OSError as error:
        raise type(error)(f"Can't write {path}: {one_line(error)}") from error


def _close(writer: Writer, logger: logging.Logger) -> None:
    try:
        writer.close()
    except TROUBLE as error:
        logger.warning("The last iterations could not be written to %s: %s", writer.path, one_line(error))
