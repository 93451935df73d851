"""GradMonitor: gradient norm and spike detection before the optimizer step."""

from __future__ import annotations

import functools
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from ignite.engine import Engine
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ignite_monitor.checks import check_choice, check_count, check_real, check_type
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.detection.thresholds import Threshold, as_rule
from ignite_monitor.events.gradient_tracker import AccumulationProbe, GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents
from ignite_monitor.events.run_summary import RunSummary
from ignite_monitor.gradient.action import SpikeAction
from ignite_monitor.gradient.detector import GradientDetection, GradientDetector
from ignite_monitor.gradient.loss import LossSource
from ignite_monitor.gradient.missing_step import MissingStep
from ignite_monitor.gradient.reports import GradientReports
from ignite_monitor.gradient.window import GradientWindow
from ignite_monitor.keys import GRADIENT
from ignite_monitor.model.modes import in_backward
from ignite_monitor.model.optimizers import check_holds, check_optimizer
from ignite_monitor.monitor.base import Handlers, check_flag
from ignite_monitor.nonfinite.locator import NonFiniteLocator

_NO_GRADIENT = (
    "iteration %d: no gradient of the model was seen, so nothing is published. Either no backward() reached the "
    "monitored parameters, and model or optimizer is not the one of the train step; or backward() is called in an "
    "event handler, which is not monitored; or the model is not trained in every iteration: then attach with a filter."
)


class GradMonitor(GradientReports, schema=GRADIENT):
    r"""Detect gradient spikes before the optimizer step.

    After each ``backward()``, the norm of the unscaled, unclipped gradient, reduced over ranks, is compared with a
    threshold estimated from previous norms (default: exponentially weighted mean + 6 standard deviations). The result
    is in ``engine.state.unhealthy_spike`` and ``engine.state.grad_norm`` when ``backward()`` returns; ``on_spike`` acts
    on it. With gradient accumulation they describe what has been accumulated.

    One norm per optimizer step updates the statistics, and one per spike whose step the train step skips. A spike
    updates them clipped to its threshold, a non-finite norm or one of 0 not at all. Changes of the gradient after
    backward, as by clipping, make no difference. The source of the first non-finite gradient is logged.

    {keys}

    Args:
        model: the model, as the train step uses it (wrapped, if it is wrapped).
        optimizer: the optimizer whose steps and parameters count. None for every optimizer of the model's parameters.
        scaler: the GradScaler of the train step. Overflows are then counted, but are no spikes.
        threshold: a threshold rule (copied), a function ``(mean, std, count) -> threshold``, or a number. None for
            ``MeanStdThreshold()``.
        loss: criterion module, or function of the engine that returns the loss after a backward. A step is then also a
            spike if the logarithm of its mean loss is 4.5 standard deviations above its trend.
        per_parameter: compare the gradient of each parameter with its own threshold too, and name the parameters with
            the largest excess at a spike.
        on_spike: None to report only. ``"skip"``: the optimizer's ``step()`` does nothing. ``"clip"``: gradients are
            multiplied by threshold / norm when the step starts. Or a function ``(engine, norm)``.
        max_consecutive_spikes: number of consecutive spikes that reset the threshold statistics.
        norm_type: p of the norm: 1, 2 or ``math.inf``.
        reduction: ``"mean"`` if every rank has the same gradient (DDP): root mean square of the ranks' norms. ``"sum"``
            if each rank has another part. DTensors (FSDP2, tensor parallel) are exact in either.
        prefix: prefix of all names, and of ``engine.state.grad_norm``: ``{prefix}_norm``.
        flag: attribute of ``engine.state`` for the result: False until it is known, then a bool on the CPU, else a
            0-dim bool tensor.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if an argument has a value that is not allowed, the optimizer holds no parameter of the model, its
            step cannot be skipped or clipped, or ``reduction`` is not that of the model's wrapper.

    Examples:
        .. code-block:: python

            def train_step(engine, batch):
                optimizer.zero_grad()
                loss = criterion(model(batch[0]), batch[1])
                loss.backward()
                if engine.state.unhealthy_spike:
                    return loss.item()  # skips the step
                optimizer.step()
                return loss.item()

            trainer = Engine(train_step)
            monitor = GradMonitor(model, optimizer)
            monitor.attach(trainer)
            monitor.log_to(tensorboard_logger, trainer)
    """

    _state_dict_all_req_keys = ("detector", "counts", "skipped_count")

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
        super().__init__(model, prefix)
        if optimizer is not None:
            check_optimizer(optimizer, optional=True)
            check_holds(optimizer, model)
        if scaler is not None:
            check_type("scaler", scaler, GradScaler, "torch.amp.GradScaler or None")
        self._action = SpikeAction(on_spike, optimizer)
        if norm_type != math.inf and check_real("norm_type", norm_type) not in (1.0, 2.0):
            raise ValueError(f"Argument norm_type should be 1, 2 or math.inf, but given {norm_type}")
        check_choice("reduction", reduction, "mean", "sum")
        check_flag(flag)

        self.optimizer = optimizer
        self.scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self.on_spike = on_spike
        self.norm_type = float(norm_type)
        self.reduction = reduction
        self.flag = flag
        self._norm_attribute = re.sub(r"\W", "_", prefix) + "_norm"
        if flag == self._norm_attribute:
            raise ValueError(f"Argument flag should not be {flag!r}, the attribute of the norm")
        self.attributes = {flag: False, self._norm_attribute: None}
        self.max_consecutive_spikes = check_count("max_consecutive_spikes", max_consecutive_spikes, least=1)
        self.per_parameter = per_parameter
        self._detector = GradientDetector(
            model,
            as_rule(threshold),
            loss=loss,
            per_parameter=per_parameter,
            norm_type=self.norm_type,
            reduction=reduction,
            max_consecutive_spikes=self.max_consecutive_spikes,
            overflow_is_spike=self.scaler is None,
        )
        self._window: GradientWindow[GradientDetection] = GradientWindow()
        self._probe: AccumulationProbe | None = None  # decides on the pending detection
        self._locator = NonFiniteLocator(model)
        self._missing_step = MissingStep(type(optimizer).__name__ if optimizer is not None else "an optimizer")
        self._scale: Tensor | None = None  # of this iteration's last backward
        self._seen = False  # whether this iteration had a gradient
        self._stepped: bool | Tensor = False  # whether a step was made

    def counts(self) -> Tensor:
        return self._detector.counts()

    def run_totals(self) -> dict[str, float | Tensor]:
        counts = {name.removesuffix("_count"): count for name, count in self._action.counts.items()}
        return {"spikes": self._detector.counts()[0], **counts}

    def reset_threshold(self) -> None:
        self._detector.reset_threshold()

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return statistics and counts: tensors, and dicts of tensors."""
        return OrderedDict(**self._detector.state_dict(), **self._action.counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Args:
            state_dict: the :meth:`state_dict` of a monitor with the same kind of threshold rule.

        Raises:
            TypeError: if it is no mapping.
            ValueError: if it is of something else; nothing has changed then.
        """
        super().load_state_dict(state_dict)
        counts = self._action.counts_of(state_dict)
        self._detector.load_state_dict(state_dict)
        self._action.load(counts)

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
            self._detector.losses.forget()
        self._iteration = iteration
        self._seen = self._stepped = False
        self._scale = self._shown = None

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if self._source is None:
            return []
        contexts: list[AbstractContextManager[Any]] = [self._locator.calls]
        contexts += self._action.contexts(self._source.step_completed)
        if self._detector.losses.source is not None:
            contexts.append(self._detector.losses.listening())
        # It may have measured already, in a backward under no_sync().
        if self._detector.pending is not None and (self._probe is None or self._probe.accumulates is None):
            self._probe = self._source.tracker(self.model).accumulation_probe(self.optimizer)
            contexts.append(self._probe)
        return contexts

    def detach(self) -> None:
        """Undo ``attach`` and ``log_to``; statistics and counts stay."""
        super().detach()
        self._detector.settle()
        self._window, self._probe = GradientWindow(), None

    def reset_run_state(self) -> None:
        self._locator.calls.release()
        self._action.new_run()
        # The gradients may still hold what has been accumulated.
        self._iteration = -1
        self._stepped, self._shown, self._where, self._suspect = False, None, None, None
        self._window.close()
        self._action.restore()
        self._detector.forget()
        super().reset_run_state()

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        parameters = backward.tracker.parameters_of(self.optimizer)
        gradients = _gradients(parameters)
        is_all = parameters is backward.tracker.parameters
        if not gradients or not (is_all or backward.reaches(self.optimizer)):  # it reached others of the model
            return
        if self._detector.pending is not None:
            probe, self._probe = self._probe, None
            accumulated = self._detector.resolve(None if probe is None else probe.accumulates, gradients[0].device)
            # Read it only if the announcement of the spike has synchronized already.
            if (accumulated.is_cpu or self._window.announced) and not bool(accumulated):
                self._window.announced = False
        if self._detector.losses.source is not None:
            self._detector.losses.backward_ended(engine)
        self._scale = None if self.scaler is None else backward.scale(self.scaler)
        self._seen = True
        detection = self._detector.detect(parameters, gradients, self._scale)
        announce = self._window.backward(detection, backward.shared)
        self._locate_nonfinite(engine, detection)
        self._show(engine, detection, announce)

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> Callable[[], None] | None:
        self._action.restore()  # from a step that raised an error
        if not step.is_of(self.optimizer):
            if step.tracker.shares(step.optimizer):
                self._missing_step.other = type(step.optimizer).__name__
            if self._window.other_step_started():
                self._show_last(engine)
            return None
        tracker = step.tracker
        # Optimizers that step inside of backward never have a whole gradient.
        is_whole = tracker.reduced and not (self.optimizer is None and in_backward())
        parameters = tracker.parameters_of(self.optimizer) if is_whole else []
        gradients = _gradients(parameters)
        if not gradients:
            self._window.close()
            self._show_last(engine)
            return None
        taken = self._window.step_started(lambda: self._detect_by_hand(parameters, gradients, step.scale))
        detection = taken.detection
        self._show(engine, detection, announce=taken.updates)
        if self._action.kind is None:
            return None
        read = functools.partial(self._is_known_spike, detection.spike)
        return lambda: self._action.start(step.optimizer, gradients, detection, taken.updates, read)

    def _detect_by_hand(
        self, parameters: list[nn.Parameter], gradients: list[Tensor], scale: Tensor | None
    ) -> GradientDetection:
        self._detector.pending = None  # the same gradient, or a part of it
        self._seen = True
        return self._detector.detect(parameters, gradients, scale)

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> Callable[[], None] | None:
        if not step.is_of(self.optimizer):
            return None
        taken = self._window.step_completed()
        self._detector.losses.forget()
        if taken is not None:
            made = self._action.made(step.optimizer, taken.detection.spike)
            self._stepped = made if self._stepped is False else self._stepped | made
            if self.run_summary is not None:
                self.run_summary.step(step.optimizer, made)
            if taken.updates:
                self._detector.observe(taken.detection)
                self._resets.set(taken.detection.threshold_reset)
        return None if self._action.kind is None else self._action.restore

    def _on_train_step_completed(self, engine: Engine) -> None:
        if self._source is None:
            return
        if not self._seen:
            if self._source.tracker(self.model).reduced:
                self._warn_once(_NO_GRADIENT, engine.state.iteration)
            return
        self._report_missing_step(engine)
        newest, last = self._window.returned(), self._window.last
        detection = newest if last is None else last.detection
        where: Tensor | None = None  # whether there is anything to publish
        if newest is not None:
            flagged = newest.spike
            if last is None:
                where = flagged = flagged | newest.norm.nonfinite
            else:
                detection = newest.where(flagged, last.detection)
            if may_be_true(flagged):
                self._detector.pending = newest, flagged
                self._detector.losses.set_aside()
                self._resets.set(newest.threshold_reset & flagged)
            self._announce(engine, newest)
        if detection is None:
            self._publish_stepped_only()
            return
        self._show(engine, detection)
        if where is None or may_be_true(where):
            self._publish_detection(detection, where, log=True)
        else:
            self._publish_stepped_only()
        self._report_action(detection)
        if self._resets:
            self._fire_reset(engine, functools.partial(self._spike, detection))


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
