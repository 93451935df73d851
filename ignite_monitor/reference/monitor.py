"""Base of the monitors that compare the model with a reference."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.events.hooks import weak_method
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.model.modes import eager
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.reference.passes import Comparison, ReferencePasses
from ignite_monitor.reference.reference import Reference


class ReferenceMonitor(Monitor):
    """Base of the monitors that compare the model with a reference.

    A subclass calls :meth:`_set_reference`, then :meth:`_compare`, and overrides :meth:`_compared`.
    """

    _state_dict_all_req_keys: tuple[str, ...] = ("reference",)
    _consequence = "nothing is measured"  # completes the warning that no forward pass was compared

    def __init__(self, model: nn.Module, prefix: str, families: Sequence[str] = (), *, group: Group = None) -> None:
        super().__init__(model, prefix, families, group=group)
        self._reference: Reference | None = None
        self._passes: ReferencePasses | None = None
        self._pauses: list[None] = []  # one element for each open paused()
        self._warned_subjects: set[str] = set()  # of all runs
        self._step_count = 0  # monitored iterations of this run

    def _compared(self, incomplete: set[str]) -> None:
        """Publish the results of a train step that returned on every rank, without incomplete modules."""

    def _set_reference(self, reference: Any) -> Reference:
        """Create the reference from the user's argument."""
        self._reference = Reference(self.model, reference)
        return self._reference

    def _compare(self, names: Iterable[str], comparison: Comparison) -> None:
        """Compare the calls of modules in monitored iterations."""
        if self._reference is not None:
            report = weak_method(self._report_excluded)
            warned, pauses = self._warned_subjects, self._pauses
            self._passes = ReferencePasses(self._reference, names, comparison, report, warned, pauses)

    def _report_excluded(self, text: str) -> None:
        self.report("not_compared", text, once=False)

    @property
    def reference(self) -> nn.Module | None:
        """The reference, a module; None without one."""
        return None if self._reference is None else self._reference.module

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which forward passes are not measured."""
        self._pauses.append(None)
        try:
            yield
        finally:
            self._pauses.pop()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Weights of the reference; None without a reference, or with a module that was given."""
        return OrderedDict(reference=None if self._reference is None else self._reference.state_dict())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self._reference is not None:
            self._reference.load_state_dict(state_dict["reference"])
        elif state_dict["reference"] is not None:
            raise ValueError("Argument state_dict holds a reference, but this handler has none")

    def handlers(self) -> Handlers:
        return [(MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed)]

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if self._passes is None:
            return []
        self._step_count += 1
        return [eager(), self._passes.watched()]

    def start_iteration(self, engine: Any) -> None:
        self._forget()

    def on_run_end(self) -> None:
        if self._passes is not None:
            if self._step_count and not self._passes.seen and not self._passes.incomplete:
                self.report(
                    "no_forward_pass",
                    f"none of {self._step_count} monitored iterations had a forward pass of the whole model in "
                    f"training mode, so {self._consequence}",
                )
            self._passes.seen = False
        self._step_count = 0

    def reset_run_state(self) -> None:
        self._forget()

    def _on_train_step_completed(self, engine: Any) -> None:
        if self._is_running and self._passes is not None:
            if self._all_ranks_present():
                self._compared(self._passes.incomplete)
            self._forget()

    def _all_ranks_present(self) -> bool:
        """Return whether all ranks take part, so that a collective is safe; warn if not."""
        # A parametrization's model may have a wrapper.
        wrapper = None if self._passes is None else self._passes.outermost()
        if isinstance(wrapper, DistributedDataParallel) and self.ranks.size == 1:
            self.ranks.resolve(wrapper)
        together = self.ranks.all_present
        if not together:
            self.report(
                "joined_ranks", "ranks may have run out of data under join(), so nothing is published of forward passes"
            )
        return together

    def _forget(self) -> None:
        if self._passes is not None:
            self._passes.comparison.clear()
