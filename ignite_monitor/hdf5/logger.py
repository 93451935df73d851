"""An Ignite logger that writes to an HDF5 file."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import ignite.distributed as idist
from ignite.engine import Engine, Events
from ignite.engine.events import RemovableEventHandle
from ignite.handlers.base_logger import BaseLogger, BaseOptimizerParamsHandler, BaseOutputHandler

from ignite_monitor.checks import check_choice, check_count, check_type
from ignite_monitor.events.hooks import remove_all
from ignite_monitor.events.source import EventSource
from ignite_monitor.hdf5.layout import Name, check_regular, import_h5py, one_line, printable
from ignite_monitor.hdf5.run_tracker import RunTracker
from ignite_monitor.hdf5.values import flatten
from ignite_monitor.hdf5.writer import Writer
from ignite_monitor.model._torch import put_first
from ignite_monitor.monitor.loggers import Values
from ignite_monitor.monitor.reports import Report

ATTACHED, MONITORED, NAMED = range(3)
"""How it is known which engine trains: it was attached, its monitors write, or the constructor was told."""


class HDF5Logger(BaseLogger):
    """Write metrics to one HDF5 file, which can be read at any time.

    The file is complete at every moment. A killed process loses at most the last ``flush_every`` iterations, in slow
    runs those of the last ten seconds. If a write fails (a full disk), the logger warns, training continues, and the
    values are written by the first flush that succeeds. Create the logger after the process group.
    :func:`~ignite_monitor.read_hdf5` returns the values by name, in float64.

    Args:
        path: the file, in an existing directory.
        mode: ``"x"`` creates a new file, ``"w"`` replaces an existing one, ``"a"`` continues it, or creates it. A run
            of the trainer that resumes from iteration n replaces what the file holds after n.
        trainer: the engine that trains; None for the engine of the first monitor whose ``log_to`` is given the logger
            or, in a new file, for the only engine to which the logger is attached. Give it if only engines of
            evaluations have monitors.
            Values of other engines, as of an evaluator, are placed at its iteration. A name belongs to the trainer or
            to other engines, whoever writes it first: values of the other kind are left out, with one warning.
        flush_every: number of iterations that are collected in memory before they are written; fewer at the beginning.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if ``mode`` is another, or the file to be continued is damaged or not HDF5Logger's; by ``log_to``
            and ``attach``, if it is not known which engine trains.
        FileExistsError: if the file is there already, in mode ``"x"``.
        FileNotFoundError: if its directory is not there.
        PermissionError: if the file can't be written.
        BlockingIOError: if another logger is writing it.
        ModuleNotFoundError: if h5py is not installed.

    Examples:
        .. code-block:: python

            with HDF5Logger("run.h5", mode="w") as logger:
                monitor.log_to(logger, trainer)
                logger.attach_output_handler(
                    trainer, Events.ITERATION_COMPLETED, tag="train", output_transform=lambda loss: {"loss": loss}
                )
                trainer.run(loader, max_epochs=5)

            steps, losses = read_hdf5("run.h5")["train/loss"]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        mode: str = "x",
        *,
        trainer: Engine | None = None,
        flush_every: int = 50,
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"Argument path should be of type str or os.PathLike, but given {type(path)}")
        check_choice("mode", mode, "x", "w", "a")
        check_count("flush_every", flush_every, least=1)
        if trainer is not None:
            check_type("trainer", trainer, Engine, "ignite.engine.Engine")
        self.path = Path(os.path.realpath(os.fspath(path)))
        self.logger = logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")
        self._continues = mode == "a"
        self._trainer: weakref.ref[Engine] | None = None
        self._knowledge = ATTACHED  # of the trainer
        self._handles: list[RemovableEventHandle] = []
        self._logged: set[str] = set()
        self._one_thread = threading.RLock()  # engines may run in several threads
        self._is_closed = False
        self._writer: Writer | None = None
        if idist.get_rank() == 0:
            self._writer = _open(self.path, mode, flush_every, self.logger)
            self._tracker = RunTracker(self._writer)
            # Also where a program or a child process ends without closing: atexit does not run in the child.
            self._finalizer = Finalize(self, _finish, (self._writer, self._tracker), exitpriority=10)
        if trainer is not None:
            self._admit(trainer, NAMED)

    def attach(
        self, engine: Engine, log_handler: Callable[..., Any], event_name: Any, *args: Any, **kwargs: Any
    ) -> RemovableEventHandle:
        self._admit(engine, ATTACHED)
        return super().attach(engine, log_handler, event_name, *args, **kwargs)

    def keep_reports(self, reports: list[Report], engine: Engine) -> None:
        """Write what a monitor reports, from before and after this call, each once; ``log_to`` calls it.

        Args:
            reports: the list to which the monitor appends.
            engine: the engine that the monitor is attached to.

        Raises:
            ValueError: if another engine may be the one that trains.
        """
        is_trainers = self._admit(engine, MONITORED)
        if self._writer is not None:
            with self._one_thread:
                self._tracker.add_source(reports, is_trainers=is_trainers)

    def flush(self) -> None:
        """Write the values and reports that are in memory."""
        if self._writer is not None and self._writer.is_own:  # a forked process may hold a lock of another thread
            with self._one_thread:
                self._tracker.take_reports()
                self._writer.flush()

    def close(self) -> None:
        """Write the values that are in memory, and release the file. Later values are lost, with one warning."""
        self._is_closed = True
        if self._writer is not None and self._writer.is_own:
            with self._one_thread:
                self._finalizer.cancel()
                remove_all(self._handles)
                _finish(self._writer, self._tracker)

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)

    def _admit(self, engine: Engine, knowledge: int) -> bool:
        """Take an engine as the trainer, if none is known, or as another one; return True if it is the trainer.

        Raises:
            ValueError: if another engine may be the one that trains.
        """
        if self._trainer is None and (knowledge or not self._continues):
            self._trainer = weakref.ref(engine)
            if self._writer is not None:
                self._tracker.trainer = self._trainer
                self._add_handlers(engine)
        if self._trainer is not None and self._trainer() is engine:
            self._knowledge = max(self._knowledge, knowledge)
            return True
        if self._trainer is None or self._knowledge <= knowledge:
            raise ValueError(
                f"HDF5Logger ({printable(str(self.path))}) records one training, and which engine trains is not known. "
                "Name it: HDF5Logger(path, trainer=trainer), or call log_to of its monitors first. A second training "
                "needs a file of its own"
            )
        return False

    def _is_writing(self) -> bool:
        """Return False on ranks that do not write, in forked processes and, with a warning, after a close."""
        if self._is_closed:
            self._log_once("the logger is closed; nothing is written. Close it after the last run.")
        return not self._is_closed and self._writer is not None and self._writer.is_own

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self.logger.warning("HDF5Logger (%s): %s", printable(str(self.path)), text)

    def _write(
        self,
        engine: Engine,
        step: Any,
        values: dict[Any, Any],
        tag: str | None = None,
        make_origin: Callable[[str], Name] = Name,
    ) -> None:
        """Append the values of an engine at a step; names have the tag, and a slash, before them."""
        if not isinstance(step, int) or not -(2**63) <= step < 2**63:
            raise TypeError(f"global_step must be int, got {step!r}. Please check the output of global_step_transform.")
        try:
            numbers = flatten(values, self._skip)
        except Exception as error:  # noqa: BLE001 - a mapping that holds itself, say: training goes on
            self._log_once(f"can't write what was given in this form: {one_line(error)}.")
            return
        try:
            trains = self._admit(engine, ATTACHED)  # a handler may be attached to the engine without the logger
        except ValueError as error:
            self._log_once(f"values of tag {tag!r} are not written: {one_line(error)}")
            return
        writer = self._writer
        if not numbers or writer is None:
            return
        with self._one_thread:
            if writer.add(step, self._tracker.position(), tag, numbers, make_origin, trains=trains):
                text = "the trainer and another engine write the same names; those of the second one are not written"
                self._log_once(f"{text} (tag {tag!r}): give each engine a tag of its own.")
            if not trains:
                writer.iterations += 1
            if writer.is_time():
                self.flush()

    def _skip(self, name: str, value: Any) -> None:
        kind = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"of type {type(value).__name__}"
        self._log_once(f"can't write {printable(name)}, a value {kind}.")

    def _add_handlers(self, trainer: Engine) -> None:
        for event, handler in (
            (Events.STARTED, self._start),
            (Events.ITERATION_STARTED, self._start_iteration),
            (Events.COMPLETED, self.flush),
            (Events.TERMINATE, self.flush),
        ):
            self._handles.append(trainer.add_event_handler(event, handler))
            if event in (Events.STARTED, Events.ITERATION_STARTED):
                put_first(trainer, event)  # or values of these events would belong to the run before

    def _start(self) -> None:
        with self._one_thread:
            self._tracker.start()

    def _start_iteration(self, trainer: Engine) -> None:
        with self._one_thread:
            if self._tracker.start_iteration(trainer):
                self.flush()


def _finish(writer: Writer, tracker: RunTracker) -> None:
    if writer.is_own:
        tracker.take_reports(at_end=True)
    writer.close()


def _open(path: Path, mode: str, flush_every: int, logger: logging.Logger) -> Writer:
    import_h5py()
    shown = printable(str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"The directory of {shown} does not exist")
    check_regular(path)  # a device must not be replaced
    try:
        return Writer(path, mode, flush_every, logger)
    except OSError as error:
        raise type(error)(f"Can't write {shown}: {one_line(error)}") from error


class OutputHandler(BaseOutputHandler):
    """Write an engine's metrics, output and state attributes, with the arguments of Ignite's output handlers."""

    def __init__(self, tag: str | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(tag or "", *args, **kwargs)

    def __call__(self, engine: Engine, logger: HDF5Logger, event_name: Any) -> None:
        if not logger._is_writing():
            return
        metrics: dict[Any, Any] = engine.state.metrics
        values = {name: getattr(engine.state, name, None) for name in self.state_attributes or ()}
        names = metrics if self.metric_names == "all" else self.metric_names or ()
        for name in names:
            if name not in metrics:
                logger._log_once(f"metric {printable(str(name))} is not in engine.state.metrics: {list(metrics)}.")
        published = {name: metrics[name] for name in names if name in metrics}
        if self.output_transform is not None:
            output = self.output_transform(engine.state.output)
            values = (output if isinstance(output, dict) else {"output": output}) | values
        step = self.global_step_transform(engine, event_name)
        make_origin = functools.partial(self._make_origin, engine, published.keys() - values.keys())
        logger._write(engine, step, published | values, self.tag or None, make_origin)

    def _make_origin(self, engine: Engine, published: set[str], name: str) -> Name:
        """The monitor that published a value: one of the engine's metrics, or the values of a monitor's ``log_to``."""
        full = f"{self.tag}/{name}" if self.tag else name
        source = EventSource.on(engine)
        monitors = source.monitors if source is not None and name in published else ()
        names = [name]
        if isinstance(self.output_transform, Values) and (monitor := self.output_transform.monitor()) is not None:
            monitors, names = [monitor], [name, full]  # without a tag of the user's, log_to makes one of the prefix
        for monitor in monitors:
            for key in names:
                if key in monitor.metrics:
                    key = key.removeprefix(f"{monitor.prefix}/")
                    return Name(full, monitor.schema.kind, full.removesuffix(key).removesuffix("/"))
        return Name(full)


class OptimizerParamsHandler(BaseOptimizerParamsHandler):
    """Write a parameter of an optimizer's groups, as ``{tag}/{param_name}/group_{i}``."""

    def __call__(self, engine: Engine, logger: HDF5Logger, event_name: Any) -> None:
        if logger._is_writing():
            groups = {f"group_{i}": group.get(self.param_name) for i, group in enumerate(self.optimizer.param_groups)}
            logger._write(engine, engine.state.get_event_attrib_value(event_name), {self.param_name: groups}, self.tag)
