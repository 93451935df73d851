"""SetupCheck: find faults of the setup in the first iterations of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from ignite.engine import Engine, Events
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ignite_monitor.checks import check_count
from ignite_monitor.events.gradient_tracker import AccumulationProbe, GradientsReady, OptimizerStep
from ignite_monitor.events.hooks import weak_method
from ignite_monitor.events.monitor_events import MonitorEvents, Phase
from ignite_monitor.model._torch import is_compiled_in_place, is_compilers_wrapper
from ignite_monitor.model.forward import before_forward
from ignite_monitor.model.norms import any_dtensor, total_norm
from ignite_monitor.model.samples import NARROW, reshard
from ignite_monitor.model.tensors import loss_in
from ignite_monitor.monitor.arguments import check_optimizer
from ignite_monitor.monitor.base import Handlers, Monitor
from ignite_monitor.setup_check.evidence import Evidence, Finding
from ignite_monitor.weight_update.train_step import MeasuredStep


class SetupCheck(Monitor):
    """Check model, optimizer, batches and loss in the first iterations of a run.

    Then the log has one block: "no problems found", or a list of findings. Only what is certain is reported. A run from
    iteration 1 is checked again. Nothing is published. Host and device are synchronized once, when the check ends.

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: its optimizer.
        iterations: number of monitored iterations to check; most faults are found from 2 on.
        prefix: name of the check in the log.

    Attributes:
        findings: list of objects with ``kind`` and ``text``; None until the check has ended.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if ``iterations`` is less than 1.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, iterations: int = 3, prefix: str = "setup") -> None:
        super().__init__(model, prefix)
        check_optimizer(optimizer)
        self.optimizer, self.iterations = optimizer, check_count("iterations", iterations, least=1)
        self.findings: list[Finding] | None = None
        self.reset_run_state()

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (Phase.STEP_DECIDED, self._on_step_decided),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def engine_handlers(self) -> list[tuple[Events, Callable[..., Any]]]:
        return [(Events.STARTED, self._on_started), (Events.ITERATION_COMPLETED, self.on_host)]

    def reset_run_state(self) -> None:
        self._evidence: Evidence | None = None
        self._probe: AccumulationProbe | None = None
        self._measured: MeasuredStep | None = None  # of weights in bfloat16 or float16

    def _on_started(self, engine: Engine) -> None:
        if engine.state.iteration == 0:
            self.findings, self.is_finished = None, False

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        engine, source = self._attached_to(), self._source
        if engine is None or source is None:
            return []
        reshard(self.model)
        tracker, state, modules = source.trackers[id(self.model)], engine.state, [*self.model.modules()]
        evidence = self._evidence = self._evidence or Evidence(self.model, self.optimizer, tracker.parameters, state)
        evidence.start(state.batch)
        if any(item.dtype in NARROW for item in evidence.held):
            self._measured = MeasuredStep(self.model, 1024, self.optimizer)
            self._measured.start()
        self._probe, hooks = AccumulationProbe(tracker, self.optimizer), ExitStack()
        # No event announces the steps of an optimizer that the model's monitors were not given.
        hooks.callback(register_optimizer_step_post_hook(torch.compiler.disable(weak_method(self._on_step))).remove)
        if not any(is_compilers_wrapper(module) or is_compiled_in_place(module) for module in modules):
            wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
            pairs, note = [*wrappers, *(wrapper.module for wrapper in wrappers)], evidence.values["call"].append
            hooks.enter_context(before_forward(pairs, lambda m, *_: note((m in wrappers, torch.is_grad_enabled()))))
        return [hooks, self._probe]

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        if self._evidence is not None:
            self._evidence.values["backward"][-1] += 1
            self._evidence.seen |= backward.reached & {id(item) for item in self._evidence.held}
            self._evidence.note()

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        evidence = self._evidence
        if evidence is None or not step.is_of(self.optimizer):
            return
        evidence.note()
        rates = [group.get("lr") for group in self.optimizer.param_groups]
        evidence.values["rate"] += [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]
        gradients = [item.grad for item in evidence.held if item.grad is not None]
        is_whole = gradients and not any_dtensor(gradients)
        evidence.values["norm"].append(total_norm(gradients, math.inf) if is_whole else math.nan)

    def _on_step_decided(self, engine: Engine, step: OptimizerStep) -> None:
        if self._measured is not None and step.is_of(self.optimizer):
            self._measured.measured_step_started(step)

    def _on_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._evidence is not None and self._is_running:
            self._evidence.values["optimizer"].append(optimizer)
            self._evidence.values["step"][-1] += optimizer.param_groups is self.optimizer.param_groups

    def _on_train_step_completed(self, engine: Engine) -> None:
        evidence = self._evidence
        if evidence is None or self._probe is None or not self._is_running:
            return
        reshard(self.model)
        evidence.note()
        evidence.values["loss"].append(loss_in(engine.state.output))
        evidence.values["before"].append(self._probe.norm)
        result = None if self._measured is None else self._measured.completed()
        evidence.values["lost"] += [] if result is None or result.lost is None else [result.lost]
        if len(evidence.values["step"]) == self.iterations:
            evidence.values["unchanged"].append(total_norm(evidence.others) == evidence.norm)
            self._is_resolved = False  # until the tensors have been brought to the host

    def deferred_tensors(self) -> list[Tensor]:
        values = {} if self._evidence is None else self._evidence.values
        return [value for members in values.values() for value in members if isinstance(value, Tensor)]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        engine, source, evidence, numbers = self._attached_to(), self._source, self._evidence, iter(extra)
        if engine is None or source is None or evidence is None:
            return {}
        unscaled = [item._title for item in source.monitors if item.model is self.model and item.lacks_scaler]
        evidence.values["unscaled"] += sorted(unscaled)
        for members in evidence.values.values():
            members[:] = [next(numbers)[0] if isinstance(value, Tensor) else value for value in members]
        self.findings, self.is_finished = evidence.findings(engine.state.epoch_length), True
        text = "".join(f"\n  {kind}: {text}" for kind, text in self.findings)
        text = f"problems found ({len(self.findings)}):{text}" if text else "no problems found"
        log = self.logger.warning if self.findings else self.logger.info
        log("%s: iterations %d to %d: %s", self._title, evidence.first, engine.state.iteration, text)
        self.reset_run_state()
        return {}
