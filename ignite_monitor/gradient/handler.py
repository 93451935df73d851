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

from ignite_monitor.checks import check_choice, check_count, check_real, check_type
from ignite_monitor.detection.monitor import DetectionMonitor
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.detection.thresholds import Threshold, as_rule
from ignite_monitor.events.gradient_tracker import AccumulationProbe, GradientsReady, OptimizerStep
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.events.run_summary import RunSummary
from ignite_monitor.gradient.action import SpikeAction
from ignite_monitor.gradient.detector import GradientDetection, GradientDetector
from ignite_monitor.gradient.loss import NO_LOSS, LossSource
from ignite_monitor.gradient.missing_step import MissingStep
from ignite_monitor.gradient.window import GradientWindow
from ignite_monitor.keys import GRADIENT
from ignite_monitor.model.devices import move_like
from ignite_monitor.model.modes import in_backward, users_grad_mode
from ignite_monitor.model.optimizers import check_holds, check_optimizer
from ignite_monitor.monitor import transfer
from ignite_monitor.monitor.base import Handlers, check_flag
from ignite_monitor.monitor.ranks import world_size
from ignite_monitor.monitor.transfer import as_published
from ignite_monitor.nonfinite.locator import NonFiniteLocator

_NO_GRADIENT = (
    "iteration %d: no gradient of the model was seen, so nothing is published. Either no backward() reached the "
    "monitored parameters, and model or optimizer is not the one of the train step; or backward() is called in an "
    "event handler, which is not monitored; or the model is not trained in every iteration: then attach with a filter."
)


class GradMonitor(DetectionMonitor, schema=GRADIENT):
    r"""Detect gradient spikes before the optimizer step.

    After each ``backward()``, the norm of the unscaled, unclipped gradient, reduced over ranks, is compared with a
    threshold estimated from previous norms (default: exponentially weighted mean + 6 standard deviations). The result
    is in ``engine.state.unhealthy_spike`` and ``engine.state.grad_norm`` when ``backward()`` returns; ``on_spike`` acts
    on it. With gradient accumulation they describe what has been accumulated.

    One norm per optimizer step updates the statistics, and one per spike whose step the train step skips. Changes of
    the gradient after backward, as by clipping, make no difference. The source of the first non-finite gradient is
    logged.

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
        ValueError: if an argument has a value that is not allowed, or the optimizer cannot be skipped or clipped.

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
            GradMonitor(model, optimizer).attach(trainer)
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
        self._missing_step = MissingStep("an optimizer" if optimizer is None else type(optimizer).__name__)
        self._scale: Tensor | None = None  # of this iteration's last backward
        self._seen = False  # whether this iteration had a gradient
        self._stepped: bool | Tensor = False  # whether a step was made
        self._shown: GradientDetection | None = None  # in the engine's state
        self._published: list[GradientDetection] = []  # on a device: of the first spike, culprits are read later
        self._where: Tensor | None = None  # whether anything is published, if only the device knows

    def counts(self) -> Tensor:
        return torch.stack([*self._detector.counts()])

    def run_totals(self) -> dict[str, float | Tensor]:
        counts = {name.removesuffix("_count"): count for name, count in self._action.counts.items()}
        return {"spikes": self._detector.counts()[0], **counts}

    def reset_threshold(self) -> None:
        self._detector.reset_threshold()

    def state_dict(self) -> OrderedDict[str, Any]:
        return OrderedDict(**self._detector.state_dict(), **self._action.counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        counts = self._action.saved_counts(state_dict)
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
            self._detector.losses.clear()
        self._iteration = iteration
        self._seen = self._stepped = False
        self._scale = self._shown = None

    def train_step_contexts(self) -> list[AbstractContextManager[Any]]:
        if self._source is None:
            return []
        contexts: list[AbstractContextManager[Any]] = [self._locator.calls, *self._detector.losses.contexts()]
        contexts += self._action.contexts(self._source.step_completed)
        # It may have measured already, in a backward under no_sync().
        if self._detector.pending is not None and (self._probe is None or self._probe.accumulates is None):
            self._probe = self._source.tracker(self.model).accumulation_probe(self.optimizer)
            contexts.append(self._probe)
        return contexts

    def detach(self) -> None:
        super().detach()
        self._detector.settle()
        self._window, self._probe = GradientWindow(), None

    def reset_run_state(self) -> None:
        self._locator.calls.release()
        self._action.start_run()
        # The gradients may still hold what has been accumulated.
        self._iteration = -1
        self._stepped, self._shown, self._published, self._where = False, None, [], None
        self._window.close()
        self._action.restore()
        self._detector.release()
        super().reset_run_state()

    def _on_gradients_ready(self, engine: Engine, backward: GradientsReady) -> None:
        parameters = backward.tracker.parameters_of(self.optimizer)
        gradients = _gradients(parameters)
        if not gradients or not backward.reaches(self.optimizer):  # it reached others of the model
            return
        if self._detector.pending is not None:
            probe, self._probe = self._probe, None
            accumulated = self._detector.resolve(None if probe is None else probe.accumulates, gradients[0].device)
            # Read it only if the announcement of the spike has synchronized already.
            if (accumulated.is_cpu or self._window.announced) and not bool(accumulated):
                self._window.announced = False
        self._detector.losses.backward_ended(engine)
        self._scale = None if self.scaler is None else backward.scale(self.scaler)
        self._seen = True
        detection = self._detector.detect(parameters, gradients, self._scale)
        announce = self._window.backward(detection, backward.shared)
        self._locate_nonfinite(engine, detection)
        self._show(engine, detection, announce)

    def _on_step_started(self, engine: Engine, step: OptimizerStep) -> Callable[[], None] | None:
        self._action.restore()  # from a step that raised an error
        tracker = step.tracker
        if not step.is_of(self.optimizer):
            if tracker.shares(step.optimizer):
                self._missing_step.other = type(step.optimizer).__name__
            if self._window.other_step_started():
                self._show_last(engine)
            return None
        # Optimizers that step inside of backward never have a whole gradient.
        is_whole = tracker.reduced and not (self.optimizer is None and in_backward())
        parameters = tracker.parameters_of(self.optimizer) if is_whole else []
        gradients = _gradients(parameters)
        if not gradients:
            self._window.close()
            self._show_last(engine)
            return None

        def detect() -> GradientDetection:
            self._detector.pending, self._seen = None, True  # the pending gradient is the same, or a part of it
            return self._detector.detect(parameters, gradients, step.scale)

        taken = self._window.step_started(detect)
        self._show(engine, taken.detection, announce=taken.updates)
        if self._action.kind is None:
            return None
        read = functools.partial(self._is_known_spike, taken.detection.spike)
        return lambda: self._action.start(step.optimizer, gradients, taken.detection, taken.updates, read)

    def _on_step_completed(self, engine: Engine, step: OptimizerStep) -> Callable[[], None] | None:
        if not step.is_of(self.optimizer):
            return None
        taken = self._window.step_completed()
        self._detector.losses.clear()
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
        self._report_missing(engine)
        newest, last = self._window.returned(), self._window.last
        of_step, flag = None if last is None else last.detection, None
        if newest is not None:
            # The gradient of a step is published, unless a later one is a spike.
            flag = newest.spike if of_step is not None else newest.spike | newest.norm.nonfinite
            if may_be_true(flag):
                self._detector.pending = newest, flag
                self._detector.losses.postpone()
                self._resets.set(newest.threshold_reset & flag)
            self._announce(engine, newest)
        either = flag is not None and not flag.is_cpu  # only the device knows which is published
        published = None if either else newest if flag is not None and may_be_true(flag) else of_step
        if newest is not None and flag is not None and either:
            self._publish_either(engine, flag, newest, of_step)
        elif published is not None:
            self._show(engine, published)
            self._publish_detection(published, log=True)
        else:
            self._publish_stepped_only()
        detection = published or newest
        if detection is not None:
            if self._action.kind is not None and transfer.is_on_host(detection.spike):
                self._log_action([float(count) for count in self._action.counts.values()], detection)
            self._fire_reset(engine, detection)

    # The state of the engine, and published values

    def _show(self, engine: Engine, detection: GradientDetection, announce: bool = False) -> None:
        """Set flag and norm in the engine's state."""
        if detection is not self._shown:
            setattr(engine.state, self.flag, as_published(detection.spike))
            setattr(engine.state, self._norm_attribute, as_published(detection.norm.value))
            self._shown = detection
        if self._source is not None and self._source.listened:  # by handlers that may log values
            self._publish_detection(detection)
        if announce and may_be_true(detection.spike):
            self._announce(engine, detection)

    def _show_last(self, engine: Engine) -> None:
        self.clear(engine)
        self._shown = None
        if self._window.last is not None:
            self._show(engine, self._window.last.detection)

    def _values(self, detection: GradientDetection) -> dict[str, Any]:
        norm, (spikes, nonfinite, _) = detection.norm, self._detector.counts()
        values = {"norm": norm.value, "threshold": norm.threshold, "mean": norm.mean, "std": norm.std}
        values |= {"spike": detection.spike, "spike_count": spikes, "nonfinite_count": nonfinite}
        values |= self._action.counts
        if detection.loss is not None:  # a loss without a logarithm is not compared
            of_loss = detection.loss.spike.to(norm.value.dtype)
            values["loss_spike"] = of_loss.masked_fill(detection.loss.value.isneginf(), math.nan)
        if self._scale is not None:
            values["scale"] = self._scale
        return values

    def _publish_detection(self, detection: GradientDetection, log: bool = False) -> None:
        self._publish_stepped_only()
        self.publish(**self._values(detection), stepped=self._stepped)
        if self.per_parameter and may_be_true(detection.spike):
            if detection.spike.is_cpu:
                numbers = self._detector.spike_numbers(detection).tolist()
                self.publish(**self._shares(numbers, log))
            else:
                self._published = [detection]

    def _publish_either(self, engine: Engine, flag: Tensor, newest: GradientDetection, last: Any) -> None:
        """Publish ``newest`` where a device has True as the flag, else the gradient of the last step, if any."""
        detections = [newest] if last is None else [newest, last]
        tables = []
        for detection in detections:
            values = self._values(detection)
            tables.append(torch.stack([move_like(value, newest.norm.value) for value in values.values()]))
        self._publish_stepped_only()
        if last is None:
            self._where = flag
        else:
            setattr(engine.state, self.flag, newest.spike | last.spike)
            setattr(engine.state, self._norm_attribute, torch.where(flag, newest.norm.value, last.norm.value))
        self.publish_table([*values], torch.where(flag, tables[0], math.nan if last is None else tables[1]))
        self.publish(stepped=self._stepped)
        self._published = detections if self.per_parameter else []

    def _publish_stepped_only(self) -> None:
        """Publish nothing of this iteration's gradient but that no step was made with it."""
        self.clear_metrics()
        self._published, self._where = [], None
        if self._stepped is False:
            self.publish(stepped=0.0)

    def deferred_tensors(self) -> list[Tensor]:
        tensors = [] if self._action.kind is None else [*self._action.counts.values()]
        tensors += [] if self._where is None else [self._where]
        for detection in self._published:
            tensors += [detection.spike, self._detector.spike_numbers(detection)]
        return tensors

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        numbers = iter(extra)
        if self._action.kind is not None:
            self._log_action([next(numbers)[0] for _ in self._action.counts])
        if self._where is not None and not next(numbers)[0]:
            self._publish_stepped_only()
            return {}
        spikes = [values for spike, values in zip(numbers, numbers, strict=True) if spike[0]]
        return self._shares(spikes[0], log=True) if spikes else {}

    def _shares(self, numbers: list[float], log: bool) -> dict[str, float]:
        spike = self._detector.read(numbers)
        if log:
            self._log(logging.WARNING, f"iteration {self._iteration}: {spike}.")
        return spike.keys

    # Events and log messages

    def _spike(self, detection: GradientDetection) -> Spike:
        spike = self._detector.read(self._detector.spike_numbers(detection).tolist())
        named = f"{self.prefix}/{spike.name}"
        return Spike(self, named, spike.value, spike.threshold, spike.culprits, self._locator.found)

    def _announce(self, engine: Engine, detection: GradientDetection) -> None:
        def first() -> None:
            self._window.announced = True
            if callable(self.on_spike):
                with users_grad_mode():
                    self.on_spike(engine, as_published(detection.norm.value))

        if self._is_spike_awaited() and not self._window.announced and self._is_known_spike(detection.spike):
            self._fire(engine, MonitorEvents.SPIKE_DETECTED, self._spike(detection), first)

    def _is_spike_awaited(self) -> bool:
        return callable(self.on_spike) or self._is_awaited(MonitorEvents.SPIKE_DETECTED)

    def _locate_nonfinite(self, engine: Engine, detection: GradientDetection) -> None:
        nonfinite = detection.norm.nonfinite
        if self._source is None:
            return
        if not (transfer.is_on_host(nonfinite) or self._is_spike_awaited()):
            self._locator.calls.backward_ended()
            return
        # Without a scaler what is no spike is finite, and needs no further synchronization.
        known = self.scaler is not None or self._is_known_spike(detection.spike)
        is_nonfinite = known and torch.is_nonzero(nonfinite)
        alone = is_nonfinite and world_size() == 1
        text = self._locator.look(not is_nonfinite, self.scaler is not None, alone=alone)
        self._source.nonfinite_source = self._locator.found or self._source.nonfinite_source
        if text is not None:
            self._log(logging.WARNING, f"iteration {engine.state.iteration}: {text}")

    def _log_action(self, counts: list[float], detection: GradientDetection | None = None) -> None:
        action = self._action.message(counts)
        if action is not None:
            cause = ""
            if detection is not None and detection.spike:
                cause = f"{self._detector.read(self._detector.spike_numbers(detection).tolist())}; "
            self._log(logging.INFO, f"iteration {self._iteration}: {cause}{action}")

    def _report_missing(self, engine: Engine) -> None:
        is_spike = getattr(engine.state, self.flag) is True
        iteration, losses = engine.state.iteration, self._detector.losses
        text = self._missing_step.note(iteration, self._stepped is False, is_spike, self.scaler is not None)
        if text is not None:
            self._log(logging.WARNING, f"iteration {iteration}: {text}")
        if losses.is_missing():
            self._warn_once(NO_LOSS, iteration)


def _gradients(parameters: list[nn.Parameter]) -> list[Tensor]:
    return [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
