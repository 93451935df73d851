"""GradMonitor: gradient norm and spike detection before the optimizer step."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from ignite.engine import Engine
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.checks import check_real, check_type
from ignite_monitor.detection.monitor import DetectionMonitor
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.detection.thresholds import Threshold, as_rule, loaded
from ignite_monitor.events.gradient_tracker import GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.events.run_summary import RunSummary
from ignite_monitor.events.step_owner import hides_gradients
from ignite_monitor.gradient.action import SpikeAction
from ignite_monitor.gradient.detector import GradientDetection, GradientDetector, SpikeNumbers, gradients_of
from ignite_monitor.gradient.loss import NO_LOSS, LossSource
from ignite_monitor.gradient.window import GradientWindow
from ignite_monitor.keys import GRADIENT
from ignite_monitor.model.modes import in_backward
from ignite_monitor.model.names import tags
from ignite_monitor.monitor.arguments import check_holds, check_optimizer
from ignite_monitor.monitor.base import Handlers
from ignite_monitor.monitor.transfer import as_published, bring_to_host, is_cpu
from ignite_monitor.nonfinite.locator import NonFiniteLocator

_NO_GRADIENT = (
    "iteration %d: no gradient of the model was seen, so nothing is published. Either model or optimizer is not that "
    "of the train step; or backward() is called in an event handler, where it is not monitored; or the model is not "
    "trained in every iteration: then attach with a filter."
)


class GradMonitor(DetectionMonitor, schema=GRADIENT):
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
        loss: criterion module, or function of the engine that returns the loss after a backward. A step is then also a
            spike if the logarithm of its loss is 4.5 standard deviations above its trend.
        per_parameter: compare the gradient of each parameter with its own threshold too, and name the parameters with
            the largest excess at a spike.
        on_spike: None; ``"skip"``: the optimizer's ``step()`` does nothing; ``"clip"``: gradients are multiplied by
            threshold / norm when the step starts; or a function ``(engine, norm)``.
        max_consecutive_spikes: number of consecutive spikes that reset the threshold statistics.
        norm_type: p of the norm: 1, 2 or ``math.inf``.
        reduction: ``"mean"`` if every rank has the same gradient (DDP): root mean square of the ranks' norms; ``"sum"``
            if each rank has another part. DTensors are exact in either.
        prefix: prefix of all names, and of ``engine.state.grad_norm``: ``{prefix}_norm``.
        flag: attribute of ``engine.state`` for the result: False until it is known, then a bool on the CPU, else a
            0-dim bool tensor.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value that is not allowed, or the optimizer cannot be skipped or clipped.

    Examples:
        .. code-block:: python

            # the train step may read engine.state.unhealthy_spike after backward()
            GradMonitor(model, optimizer).attach(trainer)
    """

    _state_dict_all_req_keys = ("detector", "counts", "skipped_count", "recurring")

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        scaler: GradScaler | None = None,
        threshold: Threshold = None,
        loss: LossSource | None = None,
        per_parameter: bool = False,
        on_spike: str | Callable[[Engine, float | Tensor], Any] | None = None,
        max_consecutive_spikes: int = 10,
        norm_type: float = 2.0,
        reduction: str = "mean",
        prefix: str = "grad",
        flag: str = "unhealthy_spike",
    ) -> None:
        super().__init__(model, prefix, flag, max_consecutive_spikes)
        if optimizer is not None:
            check_optimizer(optimizer, optional=True)
            check_holds(optimizer, model)
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        if norm_type != torch.inf and check_real("norm_type", norm_type) not in (1.0, 2.0):
            raise ValueError(f"Argument norm_type should be 1, 2 or math.inf, but given {norm_type}")
        self._action = SpikeAction(on_spike, optimizer)
        self.optimizer = optimizer
        # Others than torch's cannot be stopped inside of "clip", which allows for closures.
        if optimizer is not None and (on_spike == "skip" or (on_spike == "clip" and hides_gradients(optimizer))):
            self.acts_on = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.on_spike = on_spike
        self._norm_attribute = re.sub(r"\W", "_", prefix) + "_norm"
        if flag == self._norm_attribute:
            raise ValueError(f"Argument flag should not be {flag!r}, the attribute of the norm")
        self.attributes[self._norm_attribute] = None
        self._detector = GradientDetector(
            model,
            as_rule(threshold),
            loss=loss,
            per_parameter=per_parameter,
            norm_type=norm_type,
            reduction=reduction,
            max_consecutive_spikes=self.max_consecutive_spikes,
            overflow_is_spike=self.scaler is None,
        )
        self._window = GradientWindow()
        self._locator = NonFiniteLocator(model)
        self._forget_iteration()

    def counts(self) -> Tensor:
        return torch.stack([*self._detector.counts()])

    def run_totals(self) -> dict[str, float | Tensor]:
        counts = {name.removesuffix("_count"): count for name, count in self._action.counts.items()}
        return {"spikes": self._detector.counts()[0], **counts}

    def reset_threshold(self) -> None:
        self._detector.reset_threshold()

    def state_dict(self) -> OrderedDict[str, Any]:
        recurring = self._action.recurring.state_dict()
        return OrderedDict(**self._detector.state_dict(), **self._action.counts, recurring=recurring)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        own = self._action.counts
        counts = loaded(own, {name: state_dict.get(name, 0.0) for name in own})
        self._detector.load_state_dict(state_dict)
        self._action.load(counts)
        self._action.recurring.load_state_dict(state_dict["recurring"])

    # Events

    def handlers(self) -> Handlers:
        return [
            (MonitorEvents.GRADIENTS_READY, self._on_gradients_ready),
            (MonitorEvents.OPTIMIZER_STEP_STARTED, self._on_step_started),
            (MonitorEvents.OPTIMIZER_STEP_COMPLETED, self._on_step_completed),
            (MonitorEvents.TRAIN_STEP_COMPLETED, self._on_train_step_completed),
        ]

    def start_iteration(self, engine: Engine) -> None:
        iteration = engine.state.iteration
        self.run_summary = self.run_summary or RunSummary(self.run_totals())
        # Steps of iterations that are not monitored are not seen.
        unseen = iteration != self._iteration + 1
        self._window.iteration_started(unseen)
        if unseen:
            self._detector.losses.clear()
        self._iteration = iteration
        self._forget_iteration()

    def _forget_iteration(self) -> None:
        self._seen = False  # whether there was a gradient
        self._scale: Tensor | None = None  # of the last backward, 0-dim; None for 1
        self._stepped: bool | Tensor = False  # whether a step was made
        self._is_published: Tensor | None = None  # on a device: whether there is anything to publish; None for True
        self._possible_spike: GradientDetection | None = None  # if a spike is to be described
        self._is_logged = False

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if self._source is None:
            return []
        tracker = self._source.trackers[id(self.model)]
        if tracker.parameters:
            self._locator.calls.device = tracker.parameters[0].device
        contexts: list[AbstractContextManager[Any]] = [self._locator.calls, *self._detector.losses.contexts()]
        return contexts + self._detector.probe_contexts(tracker, self.optimizer)

    def reset_run_state(self) -> None:
        super().reset_run_state()
        self._locator.calls.release()
        self._action.start_run()
        # The gradients may still hold what has been accumulated.
        self._iteration = -1
        self._forget_iteration()
        self._window.close()
        self._detector.release()

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        parameters = backward.tracker.parameters_of(self.optimizer)
        gradients = gradients_of(parameters)
        if not gradients or backward.reached.isdisjoint(map(id, parameters)):  # it reached others of the model
            return
        if self._detector.pending is not None:
            accumulated = self._detector.resolve(self._detector.pending[0])
            if self._window.announced:  # which has synchronized already
                self._window.announced = bool(accumulated)
        self._detector.losses.backward_ended(engine)
        self._scale = None if self.scaler is None else backward.scale(self.scaler)
        self._seen = True
        detection = self._detector.detect(parameters, gradients, self._scale)
        announce = self._window.backward(detection, backward.shared)
        self._locate_nonfinite(engine, detection)
        self._show(engine, detection, announce)

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> None:
        tracker = step.tracker
        if not step.is_of(self.optimizer):
            if tracker.shares(step.optimizer):
                self._window.other_optimizer = type(step.optimizer).__name__
            if self._window.other_step_started():
                self._show_last(engine)
            return
        # Optimizers that step inside of backward never have a whole gradient.
        is_whole = tracker.reduced and not (self.optimizer is None and in_backward())
        parameters = tracker.parameters_of(self.optimizer)
        if not is_whole or all(parameter.grad is None for parameter in parameters):
            self._window.close()
            self._show_last(engine)
            return

        def detect() -> GradientDetection:
            self._seen = True
            self._detector.drop_pending()  # its gradient is the same, or a part of it
            return self._detector.detect(parameters, gradients_of(parameters), step.loss_scale)

        taken = self._window.step_started(detect)
        self._show(engine, taken.detection, announce=taken.updates)
        known = self._known_spike
        is_known = known[1] if known is not None and known[0] is taken.detection.spike else None
        norm = functools.partial(self._detector.norm, gradients_of(parameters), step.loss_scale)
        self._action.ask(step, taken, is_known, norm)

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> None:
        if not step.is_of(self.optimizer):
            return
        taken = self._window.step_completed()
        self._detector.losses.clear()
        if taken is not None:
            self._stepped = self._stepped | step.made
            if self.run_summary is not None:
                self.run_summary.step(step.optimizer, step.made)
            if taken.updates:
                self._detector.observe(taken.detection)
                self._resets.set(taken.detection.threshold_reset)

    def _on_train_step_completed(self, engine: Engine) -> None:
        if self._source is None:
            return
        if not self._seen:
            if self._source.trackers[id(self.model)].reduced:
                self._warn_once(_NO_GRADIENT, engine.state.iteration)
            return
        newest, taken = self._window.returned(), self._window.last
        published, is_published = None if taken is None else taken.detection, None
        if newest is not None:
            flag = newest.spike | newest.norm.nonfinite
            if may_be_true(flag):
                self._detector.pending = newest, flag
                self._detector.losses.postpone()
                self._resets.set(newest.threshold_reset & flag)
                if published is None:  # else the values are those of the last step
                    published, is_published = newest, None if is_cpu(flag) else flag
            self._announce(engine, newest)
        detection = published or newest
        if self._detector.losses.is_missing():
            self._warn_once(NO_LOSS, self._iteration)
        missing_step = self._window.missing_step(detection, self.optimizer)
        if missing_step is not None:
            self._log(logging.WARNING, missing_step)
        if published is None:
            self._publish_none()
        else:
            self._publish(published)
            self._is_published = is_published
            if self._possible_spike is not None and is_cpu(published.spike):
                bring_to_host([self])
        if detection is not None:
            self._fire_reset(engine, detection)

    # The state of the engine, and published values

    def _show(self, engine: Engine, detection: GradientDetection, announce: bool = False) -> None:
        """Set flag and norm in the engine's state."""
        setattr(engine.state, self.flag, as_published(detection.spike))
        setattr(engine.state, self._norm_attribute, as_published(detection.norm.value))
        if self._source is not None and self._source.listened:  # by handlers that may log values
            self._publish(detection)
        if announce and may_be_true(detection.spike):
            self._announce(engine, detection)

    def _show_last(self, engine: Engine) -> None:
        self.clear(engine)
        if self._window.last is not None:
            self._show(engine, self._window.last.detection)

    def _publish(self, detection: GradientDetection) -> None:
        self._publish_none()
        spikes, nonfinite, _ = self._detector.counts()
        values = detection.values() | self._action.counts | {"spike_count": spikes, "nonfinite_count": nonfinite}
        if self._scale is not None:
            values["scale"] = self._scale
        self.publish(**values, stepped=self._stepped)
        if (detection.names or self._action.kind is not None) and may_be_true(detection.spike):
            self._possible_spike = detection

    def _publish_none(self) -> None:
        """Publish nothing of this iteration's gradient but that no step was made with it."""
        self.clear_metrics()
        self._is_published = self._possible_spike = None
        if self._stepped is False:
            self.publish(stepped=0.0)

    def deferred_tensors(self) -> list[Tensor]:
        tensors = [] if self._is_published is None else [self._is_published]
        spike = self._possible_spike
        return tensors if spike is None else [*tensors, *self._action.counts.values(), spike.spike, spike.numbers()]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        if self._is_published is not None and not extra.pop(0)[0]:
            self._publish_none()
        if self._possible_spike is None:
            return {}
        *counts, (is_spike,), numbers = extra
        names = self._possible_spike.names
        spike = SpikeNumbers.from_host(numbers, names)
        if is_spike and spike.name == "norm" and spike.value < math.inf:
            recurring = self._action.recurring.observe(self._iteration, spike.value)
            if recurring and self._action.kind == "skip":
                at = ", ".join(map(str, recurring))
                text = f"isolated spikes of a similar size in iterations {at}; from now on such spikes are "
                text += "clipped to the largest of these, not skipped, since rare data cause them too"
                self.report("recurring_spikes", text, once=False)
        action = self._action.message([count for (count,) in counts])
        if action is not None:
            self._log(logging.INFO, f"{spike}; {action}")
        if not (is_spike and names):
            return {}
        if not self._is_logged:
            self._is_logged = True
            self._log(logging.WARNING, f"{spike}.")
        tag_of = dict(zip(names, tags(names), strict=True))
        return {f"culprit/{tag_of[name]}": share for name, share in spike.culprits.items()}

    # Events and log messages

    def _spike(self, detection: GradientDetection) -> Spike:
        spike = SpikeNumbers.from_host(detection.numbers().tolist(), detection.names)
        named = f"{self.prefix}/{spike.name}"
        return Spike(self, named, spike.value, spike.threshold, spike.culprits, self._locator.newest)

    def _announce(self, engine: Engine, detection: GradientDetection) -> None:
        if not self._window.announced and self._is_awaited_spike(detection.spike):
            self._window.announced = True
            self._fire_spike(engine, self._spike(detection), detection.norm.value)

    def _locate_nonfinite(self, engine: Engine, detection: GradientDetection) -> None:
        nonfinite = detection.norm.nonfinite
        if self._source is None or not (is_cpu(nonfinite) or self._is_awaited(MonitorEvents.SPIKE_DETECTED)):
            self._locator.calls.backward_ended()
            return
        # Without a scaler what is no spike is finite, and needs no further synchronization.
        known = self.scaler is not None or self._is_known_spike(detection.spike)
        is_nonfinite = known and torch.is_nonzero(nonfinite)
        text = self._locator.locate(not is_nonfinite, self.scaler is not None)
        self._source.nonfinite_source = self._locator.newest or self._source.nonfinite_source
        if text is not None:
            self._log(logging.WARNING, text)
