"""What monitors share that run a reference beside the model."""

from __future__ import annotations

import functools
import logging
import os
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.model.eager import Eager
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import all_take_part
from ignite_monitor.reference.call import Comparison
from ignite_monitor.reference.passes import ReferencePasses
from ignite_monitor.reference.reference import Reference


class ReferenceMonitor(Monitor):
    """Base of the monitors that compare the model with a reference.

    A monitor calls :meth:`_set_reference`, then :meth:`_compare`, and overrides :meth:`_compared`.
    """

    _state_dict_all_req_keys: tuple[str, ...] = ("reference",)
    _lacking = "nothing is measured"  # where there was nothing to compare

    def __init__(self, model: nn.Module, prefix: str, families: Sequence[str] = ()) -> None:
        super().__init__(model, prefix, families)
        self._reference: Reference | None = None
        self._comparison: Comparison | None = None
        self._passes: ReferencePasses | None = None
        self._compared_count = 0  # train steps of this run
        # Each reason once. Contexts of a train step hold it, and must not hold the monitor.
        self._warn = functools.partial(_warn_once, self.logger, "" if families else prefix, set())

    def _compared(self, incomplete: set[str]) -> None:
        """A train step has returned on every rank: publish what its passes have come to.

        Args:
            incomplete: names of modules that are to be left out, since a call of theirs could not be compared.
        """

    def _set_reference(self, reference: str | os.PathLike[str] | nn.Module) -> Reference:
        """Make the reference, what a user gives as the argument."""
        self._reference = Reference(self.model, reference)
        return self._reference

    def _compare(self, names: Iterable[str], comparison: Comparison, *, offload: bool = False) -> None:
        """Have the calls of modules compared in monitored iterations."""
        if self._reference is not None:
            self._comparison = comparison
            self._passes = ReferencePasses(self._reference, names, comparison, self._warn, offload=offload)

    # What users call

    @property
    def reference(self) -> nn.Module | None:
        """The reference."""
        return None if self._reference is None else self._reference.module

    def paused(self) -> AbstractContextManager[None]:
        """A context in which forward passes are not seen."""
        return nullcontext() if self._passes is None else self._passes.paused()

    def state_dict(self) -> OrderedDict[str, Any]:
        """The weights of the reference; None where there is none, or it was given as a module or a path."""
        return OrderedDict(reference=None if self._reference is None else self._reference.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Compare with the reference of a saved run from now on.

        Args:
            state_dict: what :meth:`state_dict` returned.

        Raises:
            TypeError: if it is no mapping.
            ValueError: if it was saved by a monitor of another kind, or with a reference of another kind or structure.
        """
        super().load_state_dict(state_dict)
        saved = state_dict["reference"]
        if self._reference is not None:
            self._reference.load_state_dict(saved)
        elif saved is not None:
            raise ValueError("Argument state_dict holds a reference, but this handler has none")

    # What it listens to

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if not self._is_running or self._passes is None:
            return []
        self._compared_count += 1
        return [self._eager(), self._passes.watched()]

    def _eager(self) -> Eager:
        """Runs the model, and the reference, as they are written."""
        return Eager(self.model, *([] if self._reference is None else [self._reference.module]))

    def start_iteration(self, engine: Any) -> None:
        self._forget()

    def on_run_end(self) -> None:
        if self._passes is not None:
            if self._compared_count and not self._passes.seen and not self._passes.warned:
                self._warn(
                    f"none of {self._compared_count} monitored iterations had a forward pass of the whole model in "
                    f"training mode, so {self._lacking}"
                )
            self._passes.seen = False
        self._compared_count = 0

    def reset_run_state(self) -> None:
        self._forget()

    def _on_train_step_completed(self, engine: Any) -> None:
        if self._is_running and self._passes is not None:
            if self._may_add():
                self._compared(self._passes.incomplete)
            self._forget()

    def _may_add(self) -> bool:
        """Whether all ranks are here; warns if not."""
        # A wrapper may be around a parametrization's model.
        around = None if self._passes is None else self._passes.outermost()
        together = all_take_part(self.model) and (around is None or all_take_part(around))
        if not together:
            self._warn("ranks may have run out of data under join(), so nothing is published of forward passes")
        return together

    def _forget(self) -> None:
        if self._comparison is not None:
            self._comparison.clear()


def _warn_once(logger: logging.Logger, prefix: str, told: set[str], reason: str) -> None:
    if reason not in told:
        told.add(reason)
        logger.warning("%s", f"{prefix}: {reason}" if prefix else reason)
