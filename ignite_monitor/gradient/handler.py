"""GradMonitor: gradient norm and spike detection before the optimizer step."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.checks import check_real
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.detection.thresholds import Threshold, as_rule
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.gradient.action import SpikeAction
from ignite_monitor.gradient.detection import GradientDetection
from ignite_monitor.gradient.detector import GradientDetector, PendingSpike, has_gradients
from ignite_monitor.gradient.publisher import GradientPublisher
from ignite_monitor.gradient.window import GradientWindow, Iteration
from ignite_monitor.keys import GRADIENT
from ignite_monitor.model.modes import in_backward
from ignite_monitor.monitor.arguments import check_generators, check_optimizer
from ignite_monitor.monitor.base import Handlers
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.monitor.transfer import bring_to_host, is_cpu
from ignite_monitor.nonfinite.locator import NonFiniteLocator

_NOT_SKIPPED = (
    "the steps are those of %s, which holds the parameter groups of the given optimizer: none is skipped. Give this "
    "optimizer instead, or skip the step in the train step, if engine.state.unhealthy_spike is True after backward."
)


class GradMonitor(GradientPublisher, schema=GRADIENT):
    r"""Detect gradient spikes before the optimizer step.

    After each ``backward()``, the norm of the unscaled, unclipped gradient, reduced over ranks, is compared with a
    threshold estimated from previous norms (default: exponentially weighted mean + 6 standard deviations). The result
    is in ``engine.state.unhealthy_spike``, the norm in ``engine.state.grad_norm``. With gradient accumulation they
    describe what has been accumulated.

    One norm per optimizer step updates the statistics, and one per spike whose step the train step skips. The source of
    the first non-finite gradient is logged.

    {keys}

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: the optimizer whose steps and parameters count. None for every optimizer of the model's parameters.
        scaler: the GradScaler of the train step. Overflows are then counted, but are no spikes.
        threshold: a threshold rule (copied), a function ``(mean, std, count) -> threshold``, or a number. None for
            ``MeanStdThreshold()``.
        per_parameter: compare the gradient of each parameter with its own threshold too, and name the parameters with
            the largest excess at a spike.
        on_spike: None; ``"skip"``: the optimizer's ``step()`` does nothing; ``"clip"``: gradients are multiplied by
            threshold / norm when the step starts; or a function ``(engine, norm)``.
        max_consecutive_spikes: number of consecutive spikes that reset the threshold statistics.
        norm_type: p of the norm: 1, 2 or ``math.inf``.
        reduction: for gradients that no wrapper reduces: ``"mean"`` for the power mean of the ranks' norms, ``"sum"``
            if each rank has another part of the gradient. None for ``"sum"`` with ``group``, else ``"mean"``.
        generators: random generators of the forward pass that its modules, their classes and files do not hold, for a
            second pass, which finds the source of a non-finite gradient, to restore.
        group: the ranks whose optimizers step together, a ``ProcessGroup`` or ``DeviceMesh``; None for those of the
            model's wrappers. Gradients of ranks that no wrapper joins are measured when the optimizer steps.
        prefix: prefix of all names, and of ``engine.state.grad_norm``: ``{prefix}_norm``.
        flag: attribute of ``engine.state`` for the result: False until it is known, then a bool on the CPU, else a
            0-dim bool tensor.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if an argument has a value that is not allowed, or the optimizer cannot be skipped or clipped.

    Examples:
        .. code-block:: python

            # the train step may read engine.state.unhealthy_spike after backward()
            GradMonitor(model, optimizer).attach(trainer)
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scaler: GradScaler | None = None,
        threshold: Threshold = None,
        per_parameter: bool = False,
        on_spike: str | Callable[[Engine, float | Tensor], Any] | None = None,
        max_consecutive_spikes: int = 10,
        norm_type: float = 2.0,
        reduction: str | None = None,
        generators: Iterable[Any] = (),
        group: Group = None,
        prefix: str = "grad",
        flag: str = "unhealthy_spike",
    ) -> None:
        super().__init__(model, prefix, flag, max_consecutive_spikes, group)
        self._norm_attribute = re.sub(r"\W", "_", prefix) + "_norm"
        if flag == self._norm_attribute:
            raise ValueError(f"Argument flag should not be {flag!r}, the attribute of the norm")
        self.attributes[self._norm_attribute] = None
        check_optimizer(optimizer, model, optional=True)
        self.set_scaler(scaler)
        if norm_type != torch.inf and check_real("norm_type", norm_type) not in (1.0, 2.0):
            raise ValueError(f"Argument norm_type should be 1, 2 or math.inf, but given {norm_type}")
        self._action = SpikeAction(on_spike, optimizer)
        self.optimizer = optimizer
        self.acts_on = self._action.acts_on
        self.on_spike = on_spike
        self._window, self._now = GradientWindow(), Iteration()
        self._locator = NonFiniteLocator(model, check_generators(generators))
        self._detector = GradientDetector(
            model,
            self.ranks,
            as_rule(threshold, positive=True),
            per_parameter=per_parameter,
            norm_type=norm_type,
            reduction=reduction,
            max_consecutive_spikes=self.max_consecutive_spikes,
            overflow_is_spike=self.scaler is None,
        )

    def handlers(self) -> Handlers:
        return [
            *super().handlers(),
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def start_iteration(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        super().start_iteration(engine)
        # Steps of iterations that are not monitored are not seen.
        self._window.iteration_started(unseen=iteration != self._iteration + 1)
        self._iteration, self._now = iteration, Iteration()

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if self._source is None:
            return []
        tracker = self._source.trackers[id(self.model)]
        if tracker.parameters:
            self._locator.calls.device = tracker.parameters[0].device
        return [self._locator.calls, *self._detector.contexts(tracker, self.optimizer)]

    def reset_run_state(self) -> None:
        super().reset_run_state()
        self._locator.calls.release()
        # The gradients may still hold what has been accumulated.
        self._iteration, self._now = -1, Iteration()
        self._window.close()
        self._detector.release()

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        parameters = backward.tracker.parameters_of(self.optimizer)
        if not has_gradients(parameters) or backward.reached.isdisjoint(map(id, parameters)):
            return  # it reached others of the model
        self._now.seen = True
        if self._detector.pending is not None:
            discarded = self._detector.decide(self._detector.pending)
            if self._window.is_reported:  # which has synchronized already
                self._window.is_reported = not discarded
        self._now.scale = None if self.scaler is None else backward.scale(self.scaler)
        if backward.shared or self.ranks.exceed_wrappers:  # no rank may wait for another one here
            self._window.is_mixed = True
            self._locator.calls.backward_ended()
            return
        detection = self._detector.detect(parameters, self._now.scale)
        if not backward.in_step:
            self._window.backward(detection)
        self._locate_nonfinite(detection, self.scaler is not None)
        self._set_flag(engine, detection, report=not backward.in_step)

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        if not step.is_of(self.optimizer):
            return
        # Optimizers that step inside of backward never have a whole gradient.
        is_whole = step.tracker.reduced and not (self.optimizer is None and in_backward())
        parameters = step.tracker.parameters if self.optimizer is None else step.parameters
        if not (is_whole and (self.ranks.exceed_wrappers or has_gradients(parameters))):
            self._window.close()
            self.clear(engine)
            if self._window.last_step is not None:
                self._set_flag(engine, self._window.last_step.detection)
            return

        def detect() -> GradientDetection:
            self._now.seen = True
            self._detector.pending = None  # its gradient is that of this step, or a part of it
            return self._detector.detect(parameters, step.loss_scale)

        taken = self._window.step_started(detect)
        if not (taken.of_backward and taken.updates):  # else the backward has
            self._set_flag(engine, taken.detection, report=taken.updates)
        if self._action.kind == "skip" and not step.requests.may_skip:  # it runs within the step of another optimizer
            self.report("not_skipped", _NOT_SKIPPED % type(step.optimizer).__name__, severity="problem")
        elif self._action.kind is not None:
            norm = lambda: self._detector.norm(parameters, step.loss_scale).value  # noqa: E731
            self._action.ask(step, taken, norm, self._iteration, self._detector.of_norm.was_normal)

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        if not step.is_of(self.optimizer):
            return
        taken = self._window.step_completed()
        if taken is None:
            return
        self._now.stepped = self._now.stepped | (made := step.made)
        self._steps = self._steps + made
        if taken.updates:
            self._detector.observe(taken.detection)

    def _on_train_step_completed(self, engine: Engine) -> None:
        if self._source is None:
            return
        if not self._now.seen:
            self._count_unseen(self._source.trackers[id(self.model)])
            return
        self._unseen = 0
        since_step, last_step = self._window.since_step, self._window.last_step
        published, is_published = None if last_step is None else last_step.detection, None
        if since_step is not None:
            flag = since_step.spike | since_step.norm.nonfinite
            if may_be_true(flag):
                self._detector.pending = PendingSpike(since_step, flag)
                if published is None:  # else the values are those of the last step
                    published, is_published = since_step, None if is_cpu(flag) else flag
        self._warn(published or since_step)
        if published is None:
            self._publish_none()
        else:
            self._publish(published)
            self._now.is_published = is_published
            if is_cpu(published.spike) and torch.is_nonzero(published.spike):
                bring_to_host([self])
        if self._detector.reset_by is not None:
            self._fire_reset(engine, self._detector.reset_by)
