"""SetupCheck: find faults of the setup in the first iterations of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ignite_monitor.events.accumulation import AccumulationProbe
from ignite_monitor.events.gradient_tracker import GradientsReady, GradientTracker, OptimizerStep
from ignite_monitor.events.hooks import register_first, remove_all, weak_method
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.model._torch import is_compiled_in_place, is_compilers_wrapper
from ignite_monitor.model.dtensor import reshard
from ignite_monitor.model.forward import before_forward
from ignite_monitor.model.modes import hidden_from_user_modes
from ignite_monitor.model.names import unwrapped
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.loggers import Report
from ignite_monitor.setup_check.evidence import Evidence
from ignite_monitor.setup_check.findings import FINDINGS, ITERATIONS, MOST, evaluation_mode, idle_parameters

_MODE_EVERY = 50  # iterations, after the check


class SetupCheck(Monitor):
    """Check model, optimizer and batches in the first iterations of a run.

    From its first iteration on it monitors every one, whatever the filter of the event. The check ends after three
    iterations with an optimizer step, once the parameters of the optimizer have had gradients. At the latest it ends
    after 100 iterations, or with the run. After it one iteration in 50 is checked for evaluation mode. Each finding is
    reported with a kind of its own; the page of this monitor lists them. Only what is certain is reported. A run from
    iteration 1 is checked again. Nothing is published. Host and device are synchronized once, when the check ends.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: its optimizer.
        prefix: name of the check in the log.

    Attributes:
        findings: list of reports with ``kind``, ``severity``, ``text`` and ``names``; None until the check has ended.

    Raises:
        TypeError: if an argument has the wrong type.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        prefix: str = "setup",
    ) -> None:
        super().__init__(model, prefix)
        check_optimizer(optimizer)
        self.optimizer = optimizer
        self.findings: list[Report] | None = None
        self._hooks = ExitStack()  # of a train step, until it ends: within a step torch goes through all hooks
        self.reset_run_state()

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [
            (Events.STARTED, self._on_started),
            (Events.ITERATION_COMPLETED, lambda engine: self.on_host()),
        ]

    def on_run_end(self) -> None:
        if self._evidence is not None and len(self._evidence.stepped) >= ITERATIONS:
            self._is_resolved = False
            self.on_host()

    def reset_run_state(self) -> None:
        self._evidence: Evidence | None = None  # until the check ends
        self._probe: AccumulationProbe | None = None
        # In the check, and in each iteration after it: a backward was seen, and a module in training mode at any event.
        self._has_gradient = self._is_training = False

    def _on_started(self, engine: Engine) -> None:
        if engine.state.iteration == 0:
            self.findings = None

    def before_train_step(self, engine: Engine) -> None:
        if self.findings is not None:
            self._has_gradient = self._is_training = False
        else:
            reshard(self.model)
            self._evidence = self._evidence or Evidence(self.model, self.optimizer)
            self._evidence.iterations += 1
            if engine.state.epoch_length != 1:
                self._evidence.note_batch(engine.state.batch)
        self._note()

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if self._evidence is not None and self._source is not None:
            # No event announces the steps of an optimizer that holds no parameter of the model.
            handles: list[Any] = []
            with ExitStack() as undo:
                undo.push(self._hooks)
                self._hooks.callback(remove_all, handles)
                register_first(
                    register_optimizer_step_post_hook, torch.compiler.disable(weak_method(self._on_step)), handles
                )
                self._note_calls(self._evidence.calls)
                self._start_probe(self._source.trackers[id(self.model)])
                undo.pop_all()
        return [self._hooks]

    def _start_probe(self, tracker: GradientTracker) -> None:
        self._probe = self._hooks.enter_context(AccumulationProbe(tracker, self.optimizer))

    def _note_calls(self, calls: list[bool]) -> None:
        modules = [*self.model.modules()]
        if not any(is_compilers_wrapper(module) or is_compiled_in_place(module) for module in modules):
            wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
            note = lambda module, *_: calls.extend([module in wrappers] * torch.is_grad_enabled())  # noqa: E731
            self._hooks.enter_context(before_forward([*wrappers, *(wrapper.module for wrapper in wrappers)], note))

    def _note(self) -> None:
        self._is_training |= any(module.training for module in unwrapped(self.model).modules())
        if self._evidence is not None:
            self._evidence.note_gradients()

    def _start(self, engine: Engine) -> None:
        super()._start(engine)
        # A check compares steps with what follows them at once; after it a validation may leave the mode changed.
        self._monitored &= self.findings is None or engine.state.iteration % _MODE_EVERY == 0
        self._monitored |= self._evidence is not None

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        self._has_gradient = True
        self._note()
        if self._evidence is not None:
            self._evidence.found = self._evidence.largest_gradient()
            if self._probe is not None and self._probe.norm is not None:
                self._evidence.initial_norms[-1].append(self._probe.norm)
                self._start_probe(backward.tracker)

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        if self._evidence is not None and step.is_of(self.optimizer):
            self._evidence.note_use()

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._evidence is None:
            return
        if optimizer.param_groups is not self.optimizer.param_groups:
            self._evidence.others_stepped = True
        else:
            with hidden_from_user_modes():
                self._note()
                self._guarded(self._evidence.note_step, optimizer)

    def _on_train_step_completed(self, engine: Engine) -> None:
        if not self._is_running:
            return
        reshard(self.model)
        self._note()
        evidence = self._evidence
        if evidence is None:
            self._check_mode()
        else:  # one transfer brings the numbers to the host with the values of all monitors
            waits = bool(len(evidence.stepped) < ITERATIONS or idle_parameters(evidence))
            self._is_resolved = waits and evidence.iterations < MOST

    def deferred_tensors(self) -> list[Tensor]:
        return [] if self._evidence is None else self._evidence.numbers()

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        if self._evidence is not None:
            self.findings = []
            self._evidence.read(extra)
            for find in FINDINGS:
                find(self._evidence, self._report)
            self._check_mode()
            count = len(self._evidence.stepped)
            if not self.findings and count >= ITERATIONS:  # too little was seen in fewer
                self.logger.info("%s: no problems found in %d iterations with a step", self._title, count)
            self.reset_run_state()
        return {}

    def _check_mode(self) -> None:
        is_reported = any(finding.kind == "evaluation_mode" for finding in self.findings or ())
        if self._has_gradient and not self._is_training and not is_reported:
            evaluation_mode(self.model, self._report)

    def _report(self, kind: str, text: str, severity: str = "problem", names: Sequence[str] = ()) -> None:
        self.report(kind, text, severity=severity, names=names, once=False)
        self.findings = [*(self.findings or ()), self.reports[-1]]
