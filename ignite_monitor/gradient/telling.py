"""What GradMonitor shows, publishes and says of a detection."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from ignite_monitor.detection.judge import Known
from ignite_monitor.detection.monitor import JudgingMonitor
from ignite_monitor.detection.spikes import Detection, may_be_true
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.gradient.judge import GradientJudge
from ignite_monitor.gradient.per_parameter import described
from ignite_monitor.gradient.reaction import Reaction
from ignite_monitor.gradient.window import GradientWindow
from ignite_monitor.model.modes import users_grad_mode
from ignite_monitor.monitor import publisher
from ignite_monitor.monitor.publisher import as_published
from ignite_monitor.monitor.ranks import world_size
from ignite_monitor.nonfinite.locator import NonFiniteLocator


class GradientTelling(JudgingMonitor[GradientJudge]):
    """Tells of detections on the gradient; which one that is, a subclass decides."""

    scaler: GradScaler | None
    on_spike: str | Callable[[Any, float | Tensor], Any] | None
    _norm_attribute: str
    _window: GradientWindow[Detection, Known]
    _reaction: Reaction
    _origins: NonFiniteLocator
    _iteration = -1  # the last one that was monitored
    _scale: Tensor | None = None  # of this iteration's last backward
    _stepped: bool | Tensor = False  # whether a step was made
    _shown: Detection | None = None  # in the engine's state
    _is_calm = False  # it is known on the host to be no spike
    _suspect: Detection | None = None  # what is published and lies on a device, to name culprits in
    _where: Tensor | None = None  # whether what is published is there, where only the device knows
    _missing_reported = False

    def _judged(self, engine: Any, detection: Detection, announce: bool) -> None:
        """A backward has ended; whether to announce it now if it is a spike."""
        self._look_for_origin(engine, detection)
        self._show(engine, detection, announce)

    def _show(self, engine: Any, detection: Detection, announce: bool = False) -> None:
        if detection is not self._shown:
            spike = as_published(detection.spike)
            setattr(engine.state, self.flag, spike)
            setattr(engine.state, self._norm_attribute, as_published(detection.norm))
            self._shown, self._is_calm = detection, spike is False
        if self._source is not None and self._source.listened:  # by handlers which may write values
            self._publish_detection(detection, None)
        if announce and not self._is_calm:
            self._announce(engine, detection)

    def _show_last(self, engine: Any) -> None:
        """Speak of the last step of this iteration; of none if there was none."""
        self.clear(engine)
        self._shown = None
        if self._window.last is not None:
            self._show(engine, self._window.last.detection)

    # What is published

    def _conclude(self, engine: Any, detection: Detection, where: Tensor | None) -> None:
        """The train step has returned: speak of a detection, of none where ``where`` is False."""
        self._show(engine, detection)
        if where is None or may_be_true(where):
            self._publish_detection(detection, where, log=True)
        else:
            self._publish_unstepped()
        if self._reaction.kind is not None and publisher.is_on_host(detection.norm):
            self._log_action([float(count) for count in self._reaction.counts.values()], detection)
        if self._judge.restarts:
            self._tell_of_new_level(engine, detection)

    def _publish_detection(self, detection: Detection, where: Tensor | None, log: bool = False) -> None:
        """Publish what there is to say of a detection, and log what it is a spike of if that is asked for.

        Args:
            where: 0-dim bool: whether there is anything to say; None is true.
        """
        stepped = self._stepped
        values = self._judge.statistics(detection) | {
            "stepped": float(stepped) if isinstance(stepped, bool) else stepped.to(detection.norm.dtype),
            **self._reaction.counts,
        }
        if self._judge.losses.source is not None:
            values["loss_spike"] = detection.others[0].spike.to(detection.norm.dtype)
        if self._scale is not None:
            values["scale"] = self._scale.to(detection.norm.dtype)
        self.clear_metrics()
        self._where = self._suspect = None
        if where is not None and where.device.type != "cpu":
            # That no step was made is known.
            values = {n: v if n == "stepped" else torch.where(where, v, math.nan) for n, v in values.items()}
            self._where = where
        self.publish(**values)
        if self._judge.tensors is None or not may_be_true(detection.spike):
            self._is_complete = not self._waiting
        elif not detection.spike.is_cpu:
            self._suspect = detection
        else:
            numbers = self._judge.of_spike(detection).tolist()
            self.publish(**self._keys(numbers))
            if log:
                self._log_spike(numbers)

    def _publish_unstepped(self) -> None:
        """There is nothing to tell of this iteration's gradient but that no step was made with it."""
        self.clear_metrics()
        self._where = self._suspect = None
        if self._stepped is False:
            self.publish(stepped=0.0)

    def deferred_tensors(self) -> list[Tensor]:
        extra = [] if self._reaction.kind is None else [torch.stack([*self._reaction.counts.values()])]
        extra += [] if self._where is None else [self._where]
        if self._suspect is not None:
            extra += [self._suspect.spike, self._judge.of_spike(self._suspect)]
        return extra

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        numbers = iter(extra)
        if self._reaction.kind is not None:
            self._log_action(next(numbers))
        if self._where is not None and not next(numbers)[0]:
            self._publish_unstepped()
        elif self._suspect is not None and next(numbers)[0]:
            [of_spike] = numbers
            self._log_spike(of_spike)
            return self._keys(of_spike)
        return {}

    def _keys(self, numbers: list[float]) -> dict[str, float]:
        *_, culprits = self._judge.told(numbers)
        return {} if self._judge.tensors is None else self._judge.tensors.keys(culprits)

    # What is said

    def _log_action(self, counts: list[float], detection: Detection | None = None) -> None:
        action = self._reaction.message(counts)
        if action is None:
            return
        cause = ""
        if detection is not None and detection.spike:
            cause = described("gradient norm", float(detection.norm), float(detection.threshold), {}) + "; "
        self.logger.info(
            "%s (%s): iteration %d: %s%s", type(self).__name__, self.prefix, self._iteration, cause, action
        )

    def _log_spike(self, numbers: list[float]) -> None:
        name, value, threshold, culprits = self._judge.told(numbers)
        text = described({"norm": "gradient norm"}.get(name, name), value, threshold, self._judge.named(culprits))
        self.logger.warning("%s: iteration %d: %s", self.prefix, self._iteration, text)

    def _announce(self, engine: Any, detection: Detection) -> None:
        def first() -> None:
            self._window.announced = True
            if callable(self.on_spike):
                with users_grad_mode():
                    self.on_spike(engine, as_published(detection.norm))

        awaited = callable(self.on_spike) or self._is_awaited(MonitorEvents.SPIKE_DETECTED)
        if awaited and not self._window.announced and self._is_known_spike(detection):
            self._tell(engine, MonitorEvents.SPIKE_DETECTED, detection, first)

    def _spike(self, detection: Detection) -> Spike:
        name, value, threshold, culprits = self._judge.told(self._judge.of_spike(detection).tolist())
        return Spike(self, f"{self.prefix}/{name}", value, threshold, self._judge.named(culprits), self._origins.found)

    def _look_for_origin(self, engine: Any, detection: Detection) -> None:
        if self._source is None:
            return
        nonfinite = as_published(detection.nonfinite)
        if not isinstance(nonfinite, bool):
            if not callable(self.on_spike) and not self._is_awaited(MonitorEvents.SPIKE_DETECTED):  # nobody waits
                self._origins.calls.backward_ended()
                return
            # Without a scaler one that is no spike is finite, and nobody has to wait once more.
            nonfinite = (self.scaler is not None or self._is_known_spike(detection)) and bool(detection.nonfinite)
        text = self._origins.look(not nonfinite, self.scaler is not None, alone=nonfinite and world_size() == 1)
        self._source.nonfinite_source = self._origins.found or self._source.nonfinite_source
        if text is not None:
            self.logger.warning("%s: iteration %d: %s", self.prefix, engine.state.iteration, text)

    def _report_missing(self, engine: Any) -> None:
        if self._missing_reported:
            return
        self._missing_reported = True
        self.logger.warning(
            "%s: no gradient of the model was seen in iteration %d, so nothing is published. Either no backward() "
            "reached the parameters that are watched, and model or optimizer is not the one that the train step "
            "uses; or backward() is made in a handler of an event, which is not seen; or the model is not trained in "
            "every iteration: then attach with a filter.",
            self.prefix,
            engine.state.iteration,
        )
