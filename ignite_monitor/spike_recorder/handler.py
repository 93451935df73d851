"""SpikeRecorder: what there was when a spike came, in files to look at and to make the step again from."""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_monitor.activation.record import recording
from ignite_monitor.checks import check_count, check_function, check_type
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.keys import SPIKE_RECORD
from ignite_monitor.model.modes import in_backward, users_grad_mode
from ignite_monitor.monitor.base import Handlers, Monitor, NoModel
from ignite_monitor.reference.isolation import is_reference_run
from ignite_monitor.spike_recorder.batch import CannotBeSavedError, KeptBatch, plain
from ignite_monitor.spike_recorder.random_state import RandomState, saved
from ignite_monitor.spike_recorder.record import ENDING, write

LOSSES = "losses"
"""What a train step records its samples' losses as."""


class SpikeRecorder(Monitor, schema=SPIKE_RECORD):
    """Keeps what there was when a monitor found a spike: a file for each, which :func:`load_spike` reads.

    A file holds the iteration and the epoch, the batch, or what identifies it, the loss of every sample, the norm, its
    threshold and the parameters that exceed it, where a value comes from that is not finite, the learning rates, and
    the state of torch's, Python's and NumPy's random number generators before the train step. With weights from before
    the step it can be made again with the same loss to the last bit. ``ignite-monitor spike DIR`` shows the files.

    The loss of every sample is known where the train step says it, as ``record("losses", losses)``; several calls in
    one train step follow each other. The rows with the three largest are named.

    Files are called ``{monitor's prefix}-{iteration}-rank{rank}.spike.pt``: one for each spike and rank. At most
    ``keep`` of a rank are there, of which the oldest goes when one more comes; a batch of more than ``largest_batch``
    bytes is left out. Of spikes in iterations that follow each other the first
    ``keep / 2`` are kept, at least one, so that a training that does not recover neither loses what came before nor
    goes on writing. A file that can't be written is one warning, and training goes on.

    Before a spike it keeps the batch, as Ignite does, and looks at the random number generators. On an accelerator the
    detection of every iteration is waited for, as it is for any handler of SPIKE_DETECTED.

    {keys}

    Args:
        monitor: the ``GradMonitor`` or ``SpikeMonitor`` whose spikes are kept, attached to the same engine.
        directory: where to write; it is made with the first file. Several recorders and ranks may share it.
        keep: how many files to keep, at least 1.
        ids: function of the batch that says which samples it has, in tensors, numbers, texts and containers of them.
        batch: whether to save the batch: tensors, numbers, texts, and containers of them. One with anything else in it,
            or that the train step has changed in place, is left out, with one warning.

    Attributes:
        largest_batch: how many bytes of tensors a batch may have to be saved, by default 256 MiB.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if ``keep`` is less than 1, or ``directory`` is a file.

    Examples:
        .. code-block:: python

            def train_step(engine, batch):
                optimizer.zero_grad()
                losses = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
                record("losses", losses)
                losses.mean().backward()
                optimizer.step()

            monitor = GradMonitor(model, optimizer)
            monitor.attach(trainer)
            SpikeRecorder(monitor, "spikes", ids=lambda batch: batch["id"]).attach(trainer)
    """

    _state_dict_all_req_keys = ("count", "row", "newest")

    largest_batch: int = 2**28

    def __init__(
        self,
        monitor: Monitor,
        directory: str | os.PathLike[str],
        *,
        keep: int = 20,
        ids: Callable[[Any], Any] | None = None,
        batch: bool = True,
    ) -> None:
        if not isinstance(monitor, Monitor) or not hasattr(monitor, "flag"):
            raise TypeError(f"Argument monitor should be a GradMonitor or a SpikeMonitor, but given {type(monitor)}")
        super().__init__(NoModel(), f"{monitor.prefix}_record")
        if not isinstance(directory, (str, os.PathLike)):
            raise TypeError(f"Argument directory should be a str or a path, but given {type(directory)}")
        if Path(directory).exists() and not Path(directory).is_dir():
            raise ValueError(f"Argument directory should be a directory, but {os.fspath(directory)!r} is a file")
        check_function("ids", ids, "the batch")
        check_type("batch", batch, bool, "bool")
        self.kept_on_rollback = self._state_dict_all_req_keys
        self.monitor = monitor
        self.directory = Path(directory)
        self.keep = check_count("keep", keep, least=1)
        self.ids = ids
        self.batch = batch
        self.count = 0
        self._row = self._newest = 0
        self._random = RandomState()
        self._state: dict[str, Any] | None = None  # of the random number generators before this train step
        self._kept: KeptBatch | None = None
        self._losses: list[Tensor] = []

    def state_dict(self) -> OrderedDict[str, Any]:
        """How many records were written, and how many spikes have come in a row up to which iteration."""
        return OrderedDict(count=self.count, row=self._row, newest=self._newest)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count, self._row, self._newest = (int(state_dict[each]) for each in self._state_dict_all_req_keys)

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [(Events.ITERATION_COMPLETED, self._forget)]

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.SPIKE_DETECTED, self._on_spike),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        engine = self._attached_to()
        if not self._is_running or engine is None:
            return []
        self._state = self._random.now()
        self._kept = KeptBatch(engine.state.batch) if self.batch else None
        return [recording(self._record)]

    def reset_run_state(self) -> None:
        self._forget()

    def _forget(self, engine: Engine | None = None) -> None:
        self._state = self._kept = None
        self._losses = []

    def _record(self, module: nn.Module | None, name: str, value: Any) -> None:
        known = isinstance(value, Tensor) and value.dim() > 0
        if known and name == LOSSES and not (in_backward() or is_reference_run()):
            self._losses.append(value.detach().clone())

    def _on_train_step_completed(self, engine: Engine) -> None:
        if self._is_running:
            self.publish(recorded_count=float(self.count))

    def _on_spike(self, engine: Engine) -> None:
        spike: Spike = getattr(engine.state, "spike")  # noqa: B009 - Ignite does not know it
        iteration = engine.state.iteration
        if spike.monitor is not self.monitor or self._state is None or iteration == self._newest:
            return
        self._row = self._row + 1 if iteration == self._newest + 1 else 1
        self._newest = iteration
        if self._row > max(1, self.keep // 2):
            return
        rank = idist.get_rank()
        start = re.sub(r"[^A-Za-z0-9_.]", "_", self.monitor.prefix)
        path = self.directory / f"{start}-{iteration:08d}-rank{rank}{ENDING}"
        try:
            write(path, self._values(engine, spike, rank))
            self.count += 1
            self._remove_oldest(re.compile(rf"{re.escape(start)}-\d{{8,}}-rank{rank}{re.escape(ENDING)}"))
        except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
            self._warn_once("%s can't be written: %s; said once", path, error)
        else:
            self.logger.info("%s: a spike in iteration %d is kept in %s", self.prefix, iteration, path)
        self.publish(recorded_count=float(self.count))

    def _values(self, engine: Engine, spike: Spike, rank: int) -> dict[str, Any]:
        optimizer = getattr(self.monitor, "optimizer", None)
        losses = [each.cpu() for each in self._losses]
        return {
            "iteration": engine.state.iteration,
            "epoch": engine.state.epoch,
            "rank": rank,
            "name": spike.name,
            "norm": spike.value,
            "threshold": spike.threshold,
            "culprits": {str(name): float(share) for name, share in spike.culprits.items()},
            "source": None if spike.source is None else spike.source._asdict(),
            "lr": None if optimizer is None else [float(group["lr"]) for group in optimizer.param_groups],
            "ids": self._saved("ids", lambda: self._ids_of(engine.state.batch)),
            "batch": self._saved("batch", lambda: None if self._kept is None else self._kept.save(self.largest_batch)),
            "losses": self._saved("losses", lambda: torch.cat(losses) if losses else None),
            "random_state": saved(self._state or {}),
        }

    def _ids_of(self, batch: Any) -> Any:
        if self.ids is None:
            return None
        with users_grad_mode():
            return plain(self.ids(batch))

    def _saved(self, what: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - a part of the record is better than none
            reason = error if isinstance(error, CannotBeSavedError) else f"{type(error).__name__}: {error}"
            self._warn_once(f"{what} of a spike left out: %s; said once", reason)
            return None

    def _remove_oldest(self, own: re.Pattern[str]) -> None:
        with os.scandir(self.directory) as entries:
            files = [(each.stat().st_mtime_ns, each.name) for each in entries if own.fullmatch(each.name)]
        for _, name in sorted(files)[: -self.keep]:
            (self.directory / name).unlink(missing_ok=True)
