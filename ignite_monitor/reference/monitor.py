"""Base of the monitors that compare the model with a reference."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.model._torch import eager
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.reference.passes import Comparison, ReferencePasses
from ignite_monitor.reference.reference import Reference


class ReferenceMonitor(Monitor):
    """Base of the monitors that publish a comparison with a reference, which is saved with them.

    A subclass calls :meth:`_compare`, and overrides :meth:`_compared`.
    """

    _state_dict_all_req_keys: tuple[str, ...] = ("reference",)

    def __init__(self, model: nn.Module, prefix: str, reference: Any, generators: Iterable[Any], group: Group) -> None:
        super().__init__(model, prefix, group=group)
        self._reference = Reference(model, reference, generators)

    @property
    def reference(self) -> nn.Module:
        """The reference."""
        return self._reference.module

    def state_dict(self) -> OrderedDict[str, Any]:
        """Weights of the reference; None with a module that was given."""
        return OrderedDict(reference=self._reference.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._reference.load_state_dict(state_dict["reference"])

    def _compare(self, names: Iterable[str], comparison: Comparison) -> None:
        """Compare the calls of modules in monitored iterations."""
        self._passes = ReferencePasses(self._reference, names, comparison, self.report)

    def _compared(self, incomplete: set[str]) -> None:
        """Publish the results of a train step that returned on every rank, without incomplete modules."""

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        return [eager(), self._passes.watched()]

    def on_run_end(self) -> None:
        self._passes.end_run()

    def reset_run_state(self) -> None:
        self._passes.comparison.clear()

    def _on_train_step_completed(self, engine: Any) -> None:
        if self._is_running:
            self._passes.resolve_wrapper(self.ranks)
            if self.ranks.all_present:
                self._compared(self._passes.incomplete)
            else:
                self.report("joined_ranks", "ranks may have run out of data under join(), so nothing is published")
            self._passes.comparison.clear()
