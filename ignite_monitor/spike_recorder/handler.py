"""SpikeRecorder: record the batch, its losses and the RNG state of every spike."""

from __future__ import annotations

import os
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn

from ignite_monitor.activation.record import recording
from ignite_monitor.checks import check_count, check_type
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.keys import SPIKE_RECORD
from ignite_monitor.model._torch import in_backward
from ignite_monitor.model.isolation import capture_rng_state, in_second_pass
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import learning_rates
from ignite_monitor.monitor.base import Handlers, Monitor, NoModel
from ignite_monitor.spike_recorder.record import KeptBatch, write


class SpikeRecorder(Monitor, schema=SPIKE_RECORD):
    """Write a file at every spike of a monitor, which :func:`load_spike` reads and ``ignite-monitor spike`` shows.

    A file holds the fields of a :class:`SpikeRecord`. With the weights from before the step, the loss can be reproduced
    to the last bit. The train step gives the losses by ``record("losses", losses)``; several calls are concatenated.
    Of several spikes in an iteration the first one is recorded.

    Files are named ``{monitor's prefix}-{iteration}-rank{rank}.spike.pt``. Existing files are never overwritten: a
    number is added to the name. If a recorder has written more than ``keep`` files, its oldest one is deleted. On an
    accelerator every detection is synchronized, as for any handler of SPIKE_DETECTED.

    {keys}

    Args:
        monitor: ``GradMonitor`` or ``SpikeMonitor``, attached to the same engine.
        directory: directory of the files, created with the first one. Recorders, ranks and runs may share it.
        keep: largest number of files of this recorder, at least 1.
        batch: whether to save the batch: tensors, numbers, strings, and containers of them. A batch with other types,
            that the train step changes in place, or of more than 256 MiB, is not saved, with one warning.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if ``keep`` is less than 1, or ``directory`` is a file.

    Examples:
        .. code-block:: python

            monitor = GradMonitor(model, optimizer)
            monitor.attach(trainer)
            SpikeRecorder(monitor, "spikes").attach(trainer)
    """

    _state_dict_all_req_keys = ("count",)

    def __init__(
        self,
        monitor: Monitor,
        directory: str | os.PathLike[str],
        *,
        keep: int = 20,
        batch: bool = True,
    ) -> None:
        if not isinstance(monitor, Monitor) or not hasattr(monitor, "flag"):
            raise TypeError(f"Argument monitor should be a GradMonitor or a SpikeMonitor, but given {type(monitor)}")
        super().__init__(NoModel(), f"{monitor.prefix}_record")
        check_type("directory", directory, (str, os.PathLike), "str or path")
        if Path(directory).exists() and not Path(directory).is_dir():
            raise ValueError(f"Argument directory should be a directory, but {os.fspath(directory)!r} is a file")
        check_type("batch", batch, bool, "bool")
        self.monitor = monitor
        self.directory = Path(directory)
        self.keep = check_count("keep", keep, least=1)
        self.batch = batch
        self.count = 0
        self._files: deque[Path] = deque()  # of this recorder, oldest first
        self._rng_state: dict[str, Any] | None = None  # before this train step; None once its spike is recorded
        self._batch: KeptBatch | None = None
        self._losses: list[Tensor] = []

    def state_dict(self) -> OrderedDict[str, Any]:
        """Number of files written."""
        return OrderedDict(count=self.count)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.count = int(state_dict["count"])

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [(Events.ITERATION_COMPLETED, lambda engine: self.reset_run_state())]

    def handlers(self) -> Handlers:
        return [(MonitorEvents.SPIKE_DETECTED, self._on_spike)]

    def before_train_step(self, engine: Engine) -> None:
        self.publish(recorded_count=float(self.count))
        self._rng_state = capture_rng_state()
        self._batch = self._saved("batch", lambda: KeptBatch(engine.state.batch)) if self.batch else None

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        return [recording(self._record)]

    def reset_run_state(self) -> None:
        self._rng_state = self._batch = None
        self._losses = []

    def _record(self, module: nn.Module | None, name: str, value: Any) -> None:
        if name == "losses" and isinstance(value, Tensor) and value.dim() and not (in_backward() or in_second_pass()):
            self._losses.append(value.detach().clone())

    def _on_spike(self, engine: Engine) -> None:
        spike: Spike = getattr(engine.state, "spike")  # noqa: B009 - unknown to Ignite
        if spike.monitor is not self.monitor or self._rng_state is None:
            return
        iteration, rank = engine.state.iteration, idist.get_rank()
        prefix = re.sub(r"[^A-Za-z0-9_.]", "_", self.monitor.prefix)
        try:
            path = write(self.directory, f"{prefix}-{iteration:08d}-rank{rank}", self._values(engine, spike, rank))
            self.count += 1
            self._files.append(path)
            while len(self._files) > self.keep:
                self._files.popleft().unlink(missing_ok=True)
        except Exception as error:  # noqa: BLE001 - disk, pickling, device: training continues
            self.report("not_recorded", f"spikes can't be recorded in {self.directory}: {error}; reported once")
        else:
            self.logger.info("%s: iteration %d: spike recorded in %s", self._title, iteration, path)
        self.reset_run_state()
        self.publish(recorded_count=float(self.count))

    def _values(self, engine: Engine, spike: Spike, rank: int) -> dict[str, Any]:
        optimizer = getattr(self.monitor, "optimizer", None)
        rates: list[Any] = [] if optimizer is None else learning_rates(optimizer)
        return {
            "iteration": engine.state.iteration,
            "epoch": engine.state.epoch,
            "rank": rank,
            "name": spike.name,
            "norm": float(spike.value),
            "threshold": float(spike.threshold),
            "culprits": {str(name): float(share) for name, share in spike.culprits.items()},
            "source": None if spike.source is None else spike.source._asdict(),
            "lr": None if not rates or None in rates else [*map(float, rates)],
            "batch": self._saved("batch", lambda: self._batch and self._batch.save()),
            "losses": self._saved("losses", self._joined_losses),
            "random_state": self._rng_state,
        }

    def _joined_losses(self) -> Tensor | None:
        if any(losses.is_complex() or not has_local_data(losses) for losses in self._losses):
            raise ValueError("they are no dense real tensors")
        return torch.cat(self._losses).as_subclass(Tensor).cpu() if self._losses else None

    def _saved(self, name: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:  # noqa: BLE001 - a user's objects may fail in any way; other fields are recorded
            text = f"the {name} of a spike can't be recorded: {type(error).__name__}: {error}; reported once"
            self.report(f"{name}_not_recorded", text)
            return None
