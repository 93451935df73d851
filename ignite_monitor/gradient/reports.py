"""What GradMonitor reports of a detection: published values, events and log messages."""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ignite_monitor.detection.monitor import DetectionMonitor
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.gradient.action import SpikeAction
from ignite_monitor.gradient.detector import GradientDetection, GradientDetector, SpikeNumbers
from ignite_monitor.gradient.missing_step import MissingStep
from ignite_monitor.gradient.per_parameter import described
from ignite_monitor.gradient.window import GradientWindow
from ignite_monitor.model.devices import move_like
from ignite_monitor.model.modes import users_grad_mode
from ignite_monitor.monitor import transfer
from ignite_monitor.monitor.ranks import world_size
from ignite_monitor.monitor.transfer import as_published
from ignite_monitor.nonfinite.locator import NonFiniteLocator

_LOSS_PATIENCE = 20
_NO_LOSS = (
    "iteration %d: %d gradients, but no loss was seen, so losses are not compared and loss_spike is not reported. "
    "Likely cause: the train step computes its loss by another module, by a function, or inside a compiled one: give "
    "a function of the engine that returns the loss."
)


class GradientReports(DetectionMonitor):
    """Base of GradMonitor: publishes detections, fires events and logs."""

    on_spike: Any
    scaler: GradScaler | None
    per_parameter: bool
    _norm_attribute: str
    _action: SpikeAction
    _detector: GradientDetector
    _window: GradientWindow[GradientDetection]
    _locator: NonFiniteLocator
    _missing_step: MissingStep
    _scale: Tensor | None
    _stepped: bool | Tensor
    _without_loss = 0  # gradients, as long as there was no loss
    _shown: GradientDetection | None = None  # in the engine's state
    _suspect: GradientDetection | None = None  # published on a device: its culprits are read later
    _where: Tensor | None = None  # whether anything is published, if only the device knows

    def _show(self, engine: Any, detection: GradientDetection, announce: bool = False) -> None:
        """Set flag and norm in the engine's state."""
        if detection is not self._shown:
            setattr(engine.state, self.flag, as_published(detection.spike))
            setattr(engine.state, self._norm_attribute, as_published(detection.norm.value))
            self._shown = detection
        if self._source is not None and self._source.listened:  # by handlers that may log values
            self._publish_detection(detection, None)
        if announce and may_be_true(detection.spike):
            self._announce(engine, detection)

    def _show_last(self, engine: Any) -> None:
        """Set flag and norm of this iteration's last step, or those before any gradient."""
        self.clear(engine)
        self._shown = None
        if self._window.last is not None:
            self._show(engine, self._window.last.detection)

    def _publish_detection(self, detection: GradientDetection, where: Tensor | None, log: bool = False) -> None:
        norm, counts = detection.norm, self._detector.counts()
        values = {"norm": norm.value, "threshold": norm.threshold, "mean": norm.mean, "std": norm.std}
        values |= {"spike": detection.spike, "spike_count": counts[0], "nonfinite_count": counts[1]}
        values |= self._action.counts
        if detection.loss is not None:  # a loss without a logarithm is not compared
            of_loss = detection.loss.spike.to(norm.value.dtype)
            values["loss_spike"] = of_loss.masked_fill(detection.loss.value.isneginf(), math.nan)
        if self._scale is not None:
            values["scale"] = self._scale
        if isinstance(self._stepped, Tensor):
            values["stepped"] = self._stepped
        self.clear_metrics()
        self._where = self._suspect = None
        if where is not None and not where.is_cpu:
            table, self._where = torch.stack([move_like(value, norm.value) for value in values.values()]), where
            self.publish_table([*values], torch.where(where, table, math.nan))
        else:
            self.publish(**values)
        if not isinstance(self._stepped, Tensor):
            self.publish(stepped=self._stepped)
        if self.per_parameter and may_be_true(detection.spike):
            if detection.spike.is_cpu:
                spike = self._spike_numbers(detection)
                self.publish(**self._culprits(spike, log))
            else:
                self._suspect = detection

    def _publish_stepped_only(self) -> None:
        """Publish nothing of this iteration's gradient but that no step was made with it."""
        self.clear_metrics()
        self._where = self._suspect = None
        if self._stepped is False:
            self.publish(stepped=0.0)

    def _culprits(self, spike: SpikeNumbers, log: bool) -> dict[str, float]:
        if log:
            self._log(logging.WARNING, f"iteration {self._iteration}: {self._described(spike)}.")
        return {} if self._detector.parameters is None else self._detector.parameters.keys(spike.culprits)

    def deferred_tensors(self) -> list[Tensor]:
        tensors = [] if self._action.kind is None else [*self._action.counts.values()]
        tensors += [] if self._where is None else [self._where]
        if self._suspect is not None:
            tensors += [self._suspect.spike, self._detector.spike_numbers(self._suspect)]
        return tensors

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        numbers = iter(extra)
        if self._action.kind is not None:
            self._log_action([next(numbers)[0] for _ in self._action.counts])
        if self._where is not None and not next(numbers)[0]:
            self._publish_stepped_only()
        elif self._suspect is not None and next(numbers)[0]:
            return self._culprits(self._detector.read(next(numbers)), log=True)
        return {}

    # Events and log messages

    def _spike_numbers(self, detection: GradientDetection) -> SpikeNumbers:
        """Read the numbers of a spike on the host."""
        return self._detector.read(self._detector.spike_numbers(detection).tolist())

    def _spike(self, detection: GradientDetection) -> Spike:
        name, value, threshold, culprits = self._spike_numbers(detection)
        named = self._detector.named(culprits)
        return Spike(self, f"{self.prefix}/{name}", value, threshold, named, self._locator.found)

    def _described(self, spike: SpikeNumbers) -> str:
        what = "loss" if spike.name == "loss" else "gradient norm"
        return described(what, spike.value, spike.threshold, self._detector.named(spike.culprits))

    def _announce(self, engine: Any, detection: GradientDetection) -> None:
        def first() -> None:
            self._window.announced = True
            if callable(self.on_spike):
                with users_grad_mode():
                    self.on_spike(engine, as_published(detection.norm.value))

        awaited = callable(self.on_spike) or self._is_awaited(MonitorEvents.SPIKE_DETECTED)
        if awaited and not self._window.announced and self._is_known_spike(detection.spike):
            self._fire(engine, MonitorEvents.SPIKE_DETECTED, functools.partial(self._spike, detection), first)

    def _locate_nonfinite(self, engine: Any, detection: GradientDetection) -> None:
        if self._source is None:
            return
        nonfinite = as_published(detection.norm.nonfinite)
        if not isinstance(nonfinite, bool):
            if not callable(self.on_spike) and not self._is_awaited(MonitorEvents.SPIKE_DETECTED):
                self._locator.calls.backward_ended()
                return
            # Without a scaler what is no spike is finite, and needs no further synchronization.
            known = self.scaler is not None or self._is_known_spike(detection.spike)
            nonfinite = known and bool(detection.norm.nonfinite)
        text = self._locator.look(not nonfinite, self.scaler is not None, alone=nonfinite and world_size() == 1)
        self._source.nonfinite_source = self._locator.found or self._source.nonfinite_source
        if text is not None:
            self._log(logging.WARNING, f"iteration {engine.state.iteration}: {text}")

    def _report_action(self, detection: GradientDetection) -> None:
        """Log a skip or clip, if it is known on the host."""
        if self._action.kind is not None and transfer.is_on_host(detection.spike):
            self._log_action([float(count) for count in self._action.counts.values()], detection)

    def _log_action(self, counts: list[float], detection: GradientDetection | None = None) -> None:
        action = self._action.message(counts)
        if action is not None:
            cause = ""
            if detection is not None and detection.spike:
                cause = self._described(self._spike_numbers(detection)) + "; "
            self._log(logging.INFO, f"iteration {self._iteration}: {cause}{action}")

    def _report_missing_step(self, engine: Any) -> None:
        iteration, flag = engine.state.iteration, getattr(engine.state, self.flag)
        text = self._missing_step.note(iteration, self._stepped is False, flag is True, self.scaler is not None)
        if text is not None:
            self._log(logging.WARNING, f"iteration {iteration}: {text}")
        losses = self._detector.losses
        if losses.source is not None and not losses.seen:
            self._without_loss += 1
            if self._without_loss == _LOSS_PATIENCE:
                self._warn_once(_NO_LOSS, iteration, _LOSS_PATIENCE)
