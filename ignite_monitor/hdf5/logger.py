"""An Ignite logger that writes to an HDF5 file."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import ignite.distributed as idist
from ignite.engine import Engine
from ignite.engine.events import RemovableEventHandle
from ignite.handlers.base_logger import BaseLogger, BaseOptimizerParamsHandler, BaseOutputHandler

from ignite_monitor.checks import check_choice, check_count, check_type
from ignite_monitor.hdf5.layout import Name, one_line, printable
from ignite_monitor.hdf5.recorder import Recorder
from ignite_monitor.hdf5.values import flatten
from ignite_monitor.monitor.loggers import Report, Values


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
        trainer: the engine that trains; required with several engines and in mode ``"a"``, unless ``attach_monitors``
            is given the logger, which names it. Values of other engines, as of an evaluator, are placed at its
            iteration. A name belongs to the trainer or to other engines, whoever writes it first: values of the other
            kind are not recorded, with one warning.
        flush_every: number of iterations that are collected in memory before they are written.

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
        check_type("path", path, (str, os.PathLike), "str or os.PathLike")
        check_choice("mode", mode, "x", "w", "a")
        check_count("flush_every", flush_every, least=1)
        if trainer is not None:
            check_type("trainer", trainer, Engine, "ignite.engine.Engine")
        self.path = Path(os.path.realpath(os.fspath(path)))
        self.logger = logging.getLogger(f"{type(self).__module__}.{type(self).__name__}")
        self._trainer: weakref.ref[Engine] | None = None
        self._is_guessed = mode != "a"  # the first engine is taken as the trainer, and any other one refused
        self._logged: set[str] = set()
        self._recorder: Recorder | None = None  # of rank 0
        if idist.get_rank() == 0:
            self._recorder = Recorder(self.path, mode, flush_every, self.logger)
            # Also where a program or a child process ends without closing: atexit does not run in the child.
            self._finalizer = Finalize(self, self._recorder.close, exitpriority=10)
        if trainer is not None:
            self._admit(trainer, named=True)

    def attach(
        self, engine: Engine, log_handler: Callable[..., Any], event_name: Any, *args: Any, **kwargs: Any
    ) -> RemovableEventHandle:
        with self.admitted(engine):
            return super().attach(engine, log_handler, event_name, *args, **kwargs)

    @contextlib.contextmanager
    def admitted(self, engine: Engine, reports: list[Report] | None = None, *, named: bool = False) -> Iterator[None]:
        """Admit an engine, and write what its monitor reports; an error in the context undoes it.

        Args:
            engine: the engine that the monitor is attached to.
            reports: the list to which the monitor appends.
            named: True if the engine is known to train.
        """
        recorder = self._recorder
        with contextlib.ExitStack() as undo:
            undo.callback(vars(self).update, _trainer=self._trainer, _is_guessed=self._is_guessed)
            if recorder is not None:
                undo.callback(vars(recorder).update, sources=recorder.sources.copy())
                if self._trainer is None:
                    undo.callback(recorder.leave_trainer)
            trains = self._admit(engine, named=named)
            if recorder is not None and reports is not None:
                recorder.add_source(reports, trains=trains)
            yield
            undo.pop_all()

    def flush(self) -> None:
        """Write the values and reports that are in memory."""
        if self._recorder is not None:
            self._recorder.flush()

    def close(self) -> None:
        """Write the values that are in memory, and release the file. Later values are lost, with one warning."""
        if self._recorder is not None:
            self._finalizer()  # once, and not in a forked process

    def _create_output_handler(self, *args: Any, **kwargs: Any) -> OutputHandler:
        return OutputHandler(*args, **kwargs) if args else OutputHandler(**{"tag": None, **kwargs})

    def _create_opt_params_handler(self, *args: Any, **kwargs: Any) -> OptimizerParamsHandler:
        return OptimizerParamsHandler(*args, **kwargs)

    def _admit(self, engine: Engine, *, named: bool = False) -> bool:
        """Return True for the trainer, which is named or the first engine of a new file, and False for another one."""
        if self._trainer is None and (named or self._is_guessed):
            self._trainer = weakref.ref(engine)
            if self._recorder is not None:
                self._recorder.follow(engine)
        trains = self._trainer is not None and self._trainer() is engine
        if not trains and (self._trainer is None or named or self._is_guessed):
            raise ValueError(
                f"HDF5Logger ({printable(str(self.path))}) records one training. With several engines, and in mode "
                "'a', name the one that trains: HDF5Logger(path, trainer=trainer). A second training needs its own file"
            )
        self._is_guessed = self._is_guessed and not named
        return trains

    def _is_writing(self) -> bool:
        """Return False on ranks that do not write, in forked processes and, with a warning, after a close."""
        if self._recorder is None or not self._recorder.is_own:
            return False
        if self._recorder.is_closed:
            self._log_once("the logger is closed; nothing is written. Close it after the last run.")
        return not self._recorder.is_closed

    def _log_once(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            self.logger.warning("HDF5Logger (%s): %s", printable(str(self.path)), text)

    def _write(
        self,
        engine: Engine,
        step: Any,
        values: Mapping[Any, Any],
        tag: str | None = None,
        describe: Callable[[str], Name] = Name,
    ) -> None:
        """Append the values of an engine at a step; names have the tag, and a slash, before them."""
        if self._recorder is None or not self._is_writing():
            return
        try:
            number = int(step)
            if number != step or not -(2**63) <= number < 2**63:
                raise ValueError(f"global_step should be an integer of 64 bits, but given {type(step)}")
            named = flatten({tag: values} if tag else values, self._skip)
            trains = self._admit(engine)  # a handler may be attached to the engine without the logger
        except Exception as error:  # noqa: BLE001 - a mapping that holds itself, say: training goes on
            self._log_once(f"values of tag {tag!r} are not written: {one_line(error)}.")
            return
        if named and (taken := self._recorder.add_row(number, named, describe, trains=trains)) is not None:
            owner, other = ("another engine", "the trainer") if trains else ("the trainer", "another engine")
            self._log_once(
                f"{printable(taken)} is a name of {owner} in this file; values of {other} are not written under such "
                f"names. Give each engine a tag of its own."
            )

    def _skip(self, name: str, value: Any) -> None:
        kind = f"of shape {tuple(value.shape)}" if hasattr(value, "shape") else f"of type {type(value).__name__}"
        self._log_once(f"can't write {printable(name)}, a value {kind}.")


class OutputHandler(BaseOutputHandler):
    """Write an engine's metrics, output and state attributes, with the arguments of Ignite's output handlers."""

    def __call__(self, engine: Engine, logger: HDF5Logger, event_name: Any) -> None:
        if not logger._is_writing():  # and transforms nothing
            return
        metrics: dict[Any, Any] = engine.state.metrics
        names = metrics if self.metric_names == "all" else self.metric_names or ()
        for name in names:
            if name not in metrics:
                logger._log_once(f"metric {printable(str(name))} is not in engine.state.metrics: {list(metrics)}.")
        values = {name: metrics[name] for name in names if name in metrics}
        if self.output_transform is not None:
            output = self.output_transform(engine.state.output)
            values |= output if isinstance(output, dict) else {"output": output}
        values |= {name: getattr(engine.state, name, None) for name in self.state_attributes or ()}
        logger._write(engine, self.global_step_transform(engine, event_name), values, self.tag or None, self._describe)

    def _describe(self, name: str) -> Name:
        """Name the monitor whose ``log_to`` has made this handler."""
        made_by = self.output_transform
        if not isinstance(made_by, Values) or (monitor := made_by.monitor()) is None:
            return Name(name)
        key = f"{made_by.start}{name.removeprefix(f'{self.tag}/')}".removeprefix(f"{monitor.prefix}/")
        return Name(name, monitor.schema.kind, name.removesuffix(key).removesuffix("/"))


class OptimizerParamsHandler(BaseOptimizerParamsHandler):
    """Write a parameter of an optimizer's groups, as ``{tag}/{param_name}/group_{i}``."""

    def __call__(self, engine: Engine, logger: HDF5Logger, event_name: Any) -> None:
        groups = {f"group_{i}": group.get(self.param_name) for i, group in enumerate(self.optimizer.param_groups)}
        logger._write(engine, engine.state.get_event_attrib_value(event_name), {self.param_name: groups}, self.tag)
