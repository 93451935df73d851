"""An Ignite logger that writes to an HDF5 file."""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from itertools import chain
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import ignite.distributed as idist
from ignite.engine import Engine, Events
from ignite.engine.events import RemovableEventHandle
from ignite.handlers.base_logger import BaseLogger, BaseOptimizerParamsHandler, BaseOutputHandler

from ignite_monitor.checks import check_choice, check_count, check_type
from ignite_monitor.events.source import EventSource
from ignite_monitor.hdf5.layout import Name, check_regular, import_h5py, one_line, printable
from ignite_monitor.hdf5.run_tracker import RunTracker
from ignite_monitor.hdf5.values import flatten
from ignite_monitor.hdf5.writer import Writer
from ignite_monitor.model._torch import put_first
from ignite_monitor.monitor.loggers import Values
from ignite_monitor.monitor.reports import Report


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
        trainer: the engine that trains; None for the engine of the first monitor whose ``log_to`` is given the logger,
            which is right if no engine of an evaluation has monitors.
            Values of other engines, as of an evaluator, are placed at its iteration, and not written under its names.
            Without a trainer, values are placed at the iteration of the engine within whose run they are written, else
            of their own engine, and a resumed run replaces none.
        flush_every: number of iterations that are collected in memory before they are written; fewer at the beginning.
        ranks: ``"first"``: rank 0 writes. ``"all"``: each rank writes a file of its own, rank 1 ``run.rank1.h5`` beside
            ``run.h5``, and so on.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if ``mode`` or ``ranks`` is another, or the file to be continued is damaged or not HDF5Logger's; by
            ``log_to``, if a second engine has monitors and ``trainer`` does not say which one trains.
        FileExistsError: if the file is there already, in mode ``"x"``.
        FileNotFoundError: if its directory is not there.
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
        ranks: str = "first",
    ) -> None:
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"Argument path should be of type str or os.PathLike, but given {type(path)}")
        check_choice("mode", mode, "x", "w", "a")
        check_choice("ranks", ranks, "first", "all")
        check_count("flush_every", flush_every, least=1)
        if trainer is not None:
            check_type("trainer", trainer, Engine, "ignite.engine.Engine")
        self.path, self._rank = Path(os.path.realpath(os.fspath(path))), idist.get_rank()
        if self._rank and ranks == "all":
            self.path = self.path.with_stem(f"{self.path.stem}.rank{self._rank}")
        self.logger = logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")
        self._is_named = trainer is not None
        self._engines: weakref.WeakKeyDictionary[Engine, list[RemovableEventHandle]] = weakref.WeakKeyDictionary()
        self._logged: set[str] = set()
        self._one_thread = threading.RLock()  # engines may run in several threads
        self._is_closed = False
        self._writer: Writer | None = None
        if self._rank == 0 or ranks == "all":
            self._writer = _open(self.path, mode, flush_every, self.logger)
            self._tracker = RunTracker(self._writer)
            # Also where a program or a child process ends without closing: atexit does not run in the child.
            self._finalizer = Finalize(self, _finish, (self._writer, self._tracker), exitpriority=10)
            if trainer is not None:
                self._tracker.set_trainer(trainer)
                self._add_handlers(trainer)

    def attach(
        self, engine: Engine, log_handler: Callable[..., Any], event_name: Any, *args: Any, **kwargs: Any
    ) -> RemovableEventHandle:
        self._add_handlers(engine)
        return super().attach(engine, log_handler, event_name, *args, **kwargs)

    def keep_reports(self, reports: list[Report], engine: Engine) -> None:
        """Write what a monitor reports, from before and after this call, each once; ``log_to`` calls it.

        Args:
            reports: the list to which the monitor appends.
            engine: the engine that the monitor is attached to.

        Raises:
            ValueError: if another engine has monitors, and the logger's ``trainer`` does not say which one trains.
        """
        if self._writer is None:
            return
        with self._one_thread:
            if not self._tracker.knows_trainer:
                self._tracker.set_trainer(engine)
            elif not self._is_named and not self._tracker.trains(engine):
                raise ValueError(
                    f"HDF5Logger ({printable(str(self.path))}) records one training, and has the monitors of another "
                    "engine. For a second training make a logger with another path; if this engine runs within a "
                    "training, name the one that trains: HDF5Logger(path, trainer=trainer)"
                )
            self._add_handlers(engine)
            self._tracker.add_source(reports, is_trainers=self._tracker.trains(engine))

    def flush(self) -> None:
        """Write the values and reports that are in memory."""
        if self._writer is None or not self._writer.is_own:  # a forked process may hold a lock of another thread
            return
        with self._one_thread:
            if self._writer is not None:
                self._tracker.take_reports()
                self._writer.flush()

    def close(self) -> None:
        """Write the values that are in memory, and release the file. Later values are lost, with one warning."""
        self._is_closed = True
        if self._writer is None or not self._writer.is_own:
            return
        with self._one_thread:
            writer, self._writer = self._writer, None
            if writer is not None:
                self._finalizer.cancel()
                for handle in chain.from_iterable(self._engines.values()):
                    handle.remove()
                self._engines.clear()
                _finish(writer, self._tracker)

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs)

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)

    def _is_writing(self) -> bool:
        """Return False on ranks that do not write, in forked processes and, with a warning, after a close."""
        if self._is_closed:
            self._log_once("the logger is closed; nothing is written. Close it after the last run.")
        return self._writer is not None and self._writer.is_own

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
        with self._one_thread:
            if numbers and self._writer is not None:
                self._add_handlers(engine)
                if self._writer.last and not self._tracker.knows_trainer:
                    text = "a run that resumes replaces no values, since no trainer is known: "
                    self._log_once(text + "HDF5Logger(path, 'a', trainer=trainer).")
                trains = self._tracker.trains(engine)
                numbered, shared = self._writer.numbered(engine, tag, numbers, make_origin, trains=trains)
                if shared and trains and self._tracker.keep_apart(engine):
                    text = "a second engine trains and writes the same names; its iterations follow the first one's: "
                    self._log_once(text + "give each training a file of its own, or name the trainer.")
                elif shared and self._tracker.knows_trainer and not trains:
                    numbered = {number: value for number, value in numbered.items() if number not in shared}
                    text = f"values of another engine are not written under names of the trainer (tag {tag!r}): "
                    self._log_once(text + "give each training a file of its own, and each engine a tag of its own.")
                self._writer.add(step, numbered, self._tracker.position(engine))
                if self._writer.is_time():
                    self.flush()

    def _skip(self, name: str, value: Any) -> None:
        kind = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"of type {type(value).__name__}"
        self._log_once(f"can't write {printable(name)}, a value {kind}.")

    def _add_handlers(self, engine: Engine) -> None:
        if engine not in self._engines and self._writer is not None:
            handles = self._engines[engine] = []
            for event, handler in (
                (Events.STARTED, self._start),
                (Events.ITERATION_STARTED, self._start_iteration),
                (Events.COMPLETED, self._complete),
                (Events.TERMINATE, self._complete),
            ):
                handles.append(engine.add_event_handler(event, handler))
                if event in (Events.STARTED, Events.ITERATION_STARTED):
                    put_first(engine, event)  # or values of these events would belong to the run before

    def _start(self, engine: Engine) -> None:
        with self._one_thread:
            if self._writer is not None and self._tracker.start(engine):
                text = "engines run in turn, and each counts iterations of its own, since no trainer is known: "
                self._log_once(text + "HDF5Logger(path, trainer=trainer).")

    def _complete(self, engine: Engine) -> None:
        with self._one_thread:
            if self._writer is not None:
                self._tracker.leave(engine)
        self.flush()

    def _start_iteration(self, engine: Engine) -> None:
        with self._one_thread:
            if self._writer is not None:
                self._writer.iterations += 1
                self._tracker.start_iteration(engine)
                if self._tracker.take_reports() or self._writer.is_time():
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
