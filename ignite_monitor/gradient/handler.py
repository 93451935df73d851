"""GradMonitor: gradient norm and spike detection before the optimizer step."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.detection.monitor import DetectionMonitor
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.detection.thresholds import Threshold, as_rule
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.gradient.action import SpikeAction
from ignite_monitor.gradient.detector import GradientDetection, GradientDetector, has_gradients
from ignite_monitor.gradient.publication import IterationState, numbers_of, to_spike
from ignite_monitor.gradient.window import NO_GRADIENT, NO_STEP, GradientWindow
from ignite_monitor.keys import GRADIENT
from ignite_monitor.model._torch import in_backward
from ignite_monitor.monitor.arguments import check_generators, check_optimizer
from ignite_monitor.monitor.base import Handlers
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.monitor.scaler import ScaledMonitor
from ignite_monitor.monitor.transfer import as_published, bring_to_host, is_cpu
from ignite_monitor.nonfinite.locator import NonFiniteLocator


class GradMonitor(DetectionMonitor, ScaledMonitor, schema=GRADIENT):
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
        threshold: a threshold rule, a function ``(mean, std, count) -> threshold``, or a number. None for
            ``MeanStdThreshold()``. While a rule returns no positive number, there is no threshold.
        per_parameter: compare the gradient of each parameter with its own threshold too, and name the parameters with
            the largest excess at a spike.
        on_spike: None; ``"skip"``: the optimizer's ``step()`` does nothing; ``"clip"``: gradients are multiplied by
            threshold / norm when the step starts; or a function ``(engine, norm)``.
        max_consecutive_spikes: number of consecutive spikes that reset the threshold statistics.
        norm_type: p of the norm: 1, 2 or ``math.inf``.
        generators: random generators of the forward pass that its modules, their classes and files do not hold, for a
            second pass, which finds the source of a non-finite gradient, to restore.
        group: the ranks whose optimizers step together, a ``ProcessGroup`` or ``DeviceMesh``; None for those of the
            model's wrappers. Gradients of ranks that no wrapper joins are measured when the optimizer steps. Those that
            no wrapper reduces are parts of one gradient.
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

    _state_dict_all_req_keys = ("detector", "counts", "skipped_count", "recurring")
    _detector: GradientDetector

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
        self._action = SpikeAction(on_spike, optimizer)
        self.optimizer, self.acts_on, self.on_spike = optimizer, self._action.acts_on, on_spike
        self._window, self._now = GradientWindow(), IterationState()
        self._locator = NonFiniteLocator(model, check_generators(generators))
        options = {"max_consecutive_spikes": self.max_consecutive_spikes, "overflow_is_spike": self.scaler is None}
        rule = as_rule(threshold)
        self._detector = GradientDetector(model, self.ranks, rule, self._counts, per_parameter, norm_type, **options)
        self._statistics = self._detector.statistics

    def handlers(self) -> Handlers:
        return [
            *super().handlers(),
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def before_train_step(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        # Steps of iterations that are not monitored are not seen.
        self._window.iteration_started(unseen=iteration != self._now.number + 1)
        self._now = IterationState(iteration)

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if self._source is None:
            return []
        tracker = self._source.trackers[id(self.model)]
        if tracker.parameters:
            self._locator.calls.device = tracker.parameters[0].device
        return [self._locator.calls, *self._detector.contexts(tracker, self.optimizer)]

    def reset_run_state(self) -> None:
        self._locator.calls.release()
        # The gradients may still hold what has been accumulated.
        self._now = IterationState()
        self._window.close()
        self._detector.release()

    def state_dict(self) -> OrderedDict[str, Any]:
        return OrderedDict(super().state_dict(), **self._action.counts)

    def reset_threshold(self) -> None:
        super().reset_threshold()
        self._detector.provisional = None

    def restore_threshold(self, state: Mapping[str, Any]) -> None:
        super().restore_threshold(state)
        self._detector.provisional = None

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        given = state_dict if isinstance(state_dict, Mapping) else {}  # which is refused below
        counts = {name: float(given.get(name, 0.0)) for name in self._action.counts}
        super().load_state_dict(state_dict)
        self._action.counts = counts

    def deferred_tensors(self) -> list[Tensor]:
        return [*super().deferred_tensors(), *self._now.defer(self._detector.recurring)]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        super().resolve_deferred(extra)
        return self._now.resolve(self, extra)

    def _resets(self) -> Tensor:
        return self._detector.resets

    def _describe_spike(self, detection: GradientDetection) -> Spike:
        return to_spike(numbers_of(detection).tolist(), detection.names, self)

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        parameters = backward.tracker.parameters_of(self.optimizer)
        if not has_gradients(parameters) or backward.reached.isdisjoint(map(id, parameters)):
            return  # it reached others of the model
        self._now.seen = True
        if self._detector.provisional is not None:
            accumulated = self._detector.decide()
            if self._window.is_reported:  # which has synchronized already
                self._window.is_reported = torch.is_nonzero(accumulated)
        self._now.scale = None if self.scaler is None else backward.scale(self.scaler)
        if backward.shared or self.ranks.exceed_wrappers:  # no rank may wait for another one here
            self._window.is_mixed = True
            self._locator.calls.backward_ended()
            return
        detection = self._detector.detect(parameters, self._now.scale)
        if not backward.in_step:
            self._window.backward(detection)
        is_spike = self._known(detection.spike)
        self._now.locate(self, detection.norm.nonfinite, is_spike)
        self._set_flag(engine, detection, report=bool(is_spike) and not backward.in_step)

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        if not step.is_of(self.optimizer):
            return
        # Optimizers that step inside of backward never have a whole gradient.
        is_whole = step.tracker.reduced and not (self.optimizer is None and in_backward())
        parameters = step.tracker.parameters if self.optimizer is None else step.parameters
        if not (is_whole and (has_gradients(parameters) or self.ranks.exceed_wrappers)):
            self._window.close()
            self.clear(engine)
            if self._window.last_step is not None:
                self._set_flag(engine, self._window.last_step.detection)
            return

        def detect() -> GradientDetection:
            self._now.seen = True
            self._detector.revert()  # its gradient is that of this step, or a part of it
            return self._detector.detect(parameters, step.loss_scale)

        taken = self._window.step_started(detect)
        if not (taken.of_backward and taken.updates):  # else the backward has
            report = taken.updates and bool(self._known(taken.detection.spike))
            self._set_flag(engine, taken.detection, report)
        if self._action.kind is not None:
            self._now.actions |= self._action.ask(self, step, taken, parameters)

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        taken = self._window.step_completed() if step.is_of(self.optimizer) else None
        if taken is not None:
            self._now.stepped = self._now.stepped | step.made
            if taken.updates:
                self._detector.observe(taken.detection)

    def _on_train_step_completed(self, engine: Engine) -> None:
        if self._source is None:
            return
        if not self._now.seen:
            if self._window.is_unseen(self._source.trackers[id(self.model)].reduced):
                self.report("no_gradient", NO_GRADIENT, severity="note")
            return
        since_step, last_step = self._window.since_step, self._window.last_step
        published = None if last_step is None else last_step.detection
        if since_step is not None:
            flag = since_step.spike | since_step.norm.nonfinite
            if may_be_true(flag):
                when = None if is_cpu(flag) else flag
                self._detector.observe_provisionally(since_step, when)
                if published is None:  # else the values are those of the last step
                    published, self._now.is_published = since_step, when
        if self._window.is_stuck(published or since_step):
            self.report("no_step_at_spikes", NO_STEP, severity="problem", once=False)
        self._now.publish(self, published)
        if published is not None and is_cpu(published.spike) and torch.is_nonzero(published.spike):
            bring_to_host([self])
        if self._detector.reset_by is not None:
            self._fire_reset(engine, self._detector.reset_by)

    def _set_flag(self, engine: Engine, detection: GradientDetection, report: bool = False) -> None:
        setattr(engine.state, self.flag, as_published(detection.spike))
        setattr(engine.state, self._norm_attribute, as_published(detection.norm.value))
        if self._source is not None and self._source.listened:  # by handlers that may log values
            self._now.publish(self, detection)
        if report and not self._window.is_reported and self._is_awaited(MonitorEvents.SPIKE_DETECTED):
            self._window.is_reported = True
            self._fire_spike(engine, self._describe_spike(detection), detection.norm.value)
