"""SetupCheck: find faults of the setup in the first iterations of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ignite_monitor.checks import check_count
from ignite_monitor.events.accumulation import AccumulationProbe
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.hooks import weak_method
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.model._torch import is_compiled_in_place, is_compilers_wrapper
from ignite_monitor.model.dtensor import reshard
from ignite_monitor.model.forward import before_forward
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.monitor.reports import Report
from ignite_monitor.setup_check.evidence import Evidence, Numbers, in_training_mode
from ignite_monitor.setup_check.findings import (
    MOST,
    Finding,
    evaluation_mode,
    find_all,
    idle_parameters,
    unused_parameters,
)

_MODE_EVERY = 50  # iterations, after the check


class SetupCheck(Monitor):
    """Check model, optimizer and batches in the first iterations of a run.

    The check ends after the first iterations with an optimizer step, at the latest after 100 iterations. After it one
    iteration in 50 is checked for evaluation mode. Each finding is reported with a kind of its own; the page of this
    monitor lists them. Only what is certain is reported. A run from iteration 1 is checked again. Nothing is published.
    Host and device are synchronized once, when the check ends.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: its optimizer.
        iterations: number of monitored iterations with a step to check; most faults are found from 3 on.
        group: the ranks whose optimizers step together, a ProcessGroup or DeviceMesh; no value is reduced over them.
        prefix: name of the check in the log.

    Attributes:
        findings: list of reports with ``kind``, ``severity``, ``text`` and ``names``; None until the check has ended.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if ``iterations`` is less than 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        iterations: int = 3,
        group: Group = None,
        prefix: str = "setup",
    ) -> None:
        super().__init__(model, prefix, group=group)
        check_optimizer(optimizer)
        self.optimizer, self.iterations = optimizer, check_count("iterations", iterations, least=1)
        self.findings: list[Report] | None = None
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
            (Events.ITERATION_STARTED, self._on_iteration_started),
            (Events.ITERATION_COMPLETED, self.on_host),
        ]

    def on_run_end(self) -> None:
        if self.findings is not None and self._evidence is not None:
            self._finish()

    def reset_run_state(self) -> None:
        self._evidence: Evidence | None = None
        self._probe: AccumulationProbe | None = None
        self._hooks, self._has_stepped = ExitStack(), False
        self._has_gradient = self._in_training = False  # in an iteration after the check

    @property
    def _is_over(self) -> bool:
        """True once the check has ended: after it only the mode is checked, which a validation may leave changed."""
        return self.findings is not None and self._evidence is None

    def _on_started(self, engine: Engine) -> None:
        if engine.state.iteration == 0:
            self.findings, self.is_finished = None, False

    def _on_iteration_started(self, engine: Engine) -> None:
        if self._is_over:
            self.is_finished = engine.state.iteration % _MODE_EVERY > 0

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        engine, source = self._attached_to(), self._source
        if engine is None or source is None:
            return []
        if self._is_over:
            self._has_gradient, self._in_training = False, in_training_mode(self.model)
            return []
        reshard(self.model)
        if self._evidence is None:
            self._evidence = Evidence(self.model, self.optimizer)
        self._evidence.start(engine.state.batch, self.iterations)
        self._hooks, self._has_stepped = ExitStack(), False
        if self.findings is None:  # else it waits for gradients only
            # No event announces the steps of an optimizer that holds no parameter of the model.
            hook = register_optimizer_step_post_hook(torch.compiler.disable(weak_method(self._on_step)))
            self._hooks.callback(hook.remove)
            self._hooks.enter_context(self._calls_noted(self._evidence.calls))
            self._probe = self._hooks.enter_context(AccumulationProbe(source.trackers[id(self.model)], self.optimizer))
        return [self._hooks]

    def _calls_noted(self, calls: list[bool]) -> AbstractContextManager[Any]:
        modules = [*self.model.modules()]
        if any(is_compilers_wrapper(module) or is_compiled_in_place(module) for module in modules):
            return nullcontext()
        wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
        note = lambda module, *_: calls.extend([module in wrappers] * torch.is_grad_enabled())  # noqa: E731
        return before_forward([*wrappers, *(wrapper.module for wrapper in wrappers)], note)

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        self._has_gradient, self._in_training = True, self._in_training or in_training_mode(self.model)
        if self._evidence is not None:
            if self._probe is not None and self._probe.norm is not None:
                self._evidence.note_backward(self._probe.norm)
                self._probe = self._hooks.enter_context(AccumulationProbe(backward.tracker, self.optimizer))
            self._evidence.note()

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        if self._evidence is not None and step.is_of(self.optimizer):
            self._evidence.note()
            if self.findings is None:
                self._evidence.note_step(step.loss_scale)

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._evidence is not None and self._is_running and optimizer.param_groups is self.optimizer.param_groups:
            self._has_stepped = True
            self._evidence.is_torch.append(f"{type(optimizer).__module__}.".startswith("torch.optim."))

    def _on_train_step_completed(self, engine: Engine) -> None:
        evidence = self._evidence
        if self._is_over and self._has_gradient and not (self._in_training or in_training_mode(self.model)):
            known = {finding.kind for finding in self.findings or ()}
            self._report(finding for finding in evaluation_mode(self.model) if finding.kind not in known)
        if evidence is None or not self._is_running:
            return
        reshard(self.model)
        evidence.note()
        evidence.stepped += self._has_stepped
        is_last = evidence.iterations >= max(MOST, self.iterations)
        if self.findings is None:
            # The numbers are brought to the host at the end of the iteration.
            self._is_resolved = not (is_last or evidence.stepped >= self.iterations)
        elif is_last or not idle_parameters(evidence):
            self._finish()

    def deferred_tensors(self) -> list[Tensor]:
        return [] if self._evidence is None else [self._evidence.end()]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        engine, evidence = self._attached_to(), self._evidence
        if engine is not None and evidence is not None:
            self.findings = []
            self._report(find_all(evidence, Numbers(*extra[0]), engine.state.epoch_length))
            if not idle_parameters(evidence):
                self._finish()
        return {}

    def _report(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.report(finding.kind, finding.text, severity=finding.severity, names=finding.names, once=False)
            self.findings = [*(self.findings or ()), self.reports[-1]]

    def _finish(self) -> None:
        if self._evidence is not None:
            self._report(unused_parameters(self._evidence))
            if not self.findings:
                self.logger.info("%s: no problems found in %d iterations", self._title, self._evidence.iterations)
        self.is_finished = True
        self.reset_run_state()
