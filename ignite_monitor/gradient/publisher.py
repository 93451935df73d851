"""The state of a GradMonitor, and what it publishes, sets in the engine's state and logs of a detection."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.detection.monitor import DetectionMonitor
from ignite_monitor.detection.run_summary import SummarizedMonitor
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.events.gradient_tracker import GradientTracker
from ignite_monitor.events.monitor_events import MonitorEvents, Spike
from ignite_monitor.gradient.action import SpikeAction
from ignite_monitor.gradient.detection import GradientDetection, describe
from ignite_monitor.gradient.detector import GradientDetector
from ignite_monitor.gradient.window import PATIENCE, GradientWindow, Iteration
from ignite_monitor.model.names import tags
from ignite_monitor.monitor.scaler import ScaledMonitor
from ignite_monitor.monitor.transfer import as_published, is_cpu
from ignite_monitor.nonfinite.locator import NonFiniteLocator

_UNSEEN = 20  # consecutive iterations without a gradient
_NO_GRADIENT = (
    f"{_UNSEEN} iterations had no gradient of the model, so nothing is published. Check that GradMonitor has the train "
    "step's model and optimizer, and that backward() is called in the train step; attach with a filter if the model is "
    "not trained in every iteration."
)
_NO_STEP = (
    "%d consecutive spikes, and %s made no step during them. If the train step returns at a spike, call "
    "optimizer.zero_grad() before that return: gradients that stay make all later ones spikes too."
)
_NOT_LOCATED = (
    "the gradient is not finite; its source could not be located: on a device it is looked for if SPIKE_DETECTED has a "
    "handler, or on_spike is a function"
)
_NOT_POSITIVE = (
    "the function given as threshold returned a number that is not positive, which is no threshold of a norm: such "
    "norms are not compared."
)


class GradientPublisher(DetectionMonitor, SummarizedMonitor, ScaledMonitor):
    """Base of GradMonitor: state, flag, norm, metrics, events and log lines."""

    _state_dict_all_req_keys = ("detector", "counts", "skipped_count", "recurring")
    _detector: GradientDetector
    _action: SpikeAction
    _window: GradientWindow
    _now: Iteration
    _locator: NonFiniteLocator
    _norm_attribute: str  # of the engine's state
    _unseen = 0  # consecutive iterations without a gradient

    def counts(self) -> Tensor:
        return torch.stack([*self._detector.counts])

    def run_totals(self) -> dict[str, float | Tensor]:
        counts = {name.removesuffix("_count"): count for name, count in self._action.counts.items()}
        return {"spikes": self._detector.counts[0], **counts}

    def reset_threshold(self) -> None:
        self._detector.reset_threshold()

    def threshold_state(self) -> Mapping[str, Any]:
        return self._detector.threshold_state() | {"recurring": self._action.recurring.state_dict()}

    def restore_threshold(self, state: Mapping[str, Any]) -> None:
        self._detector.restore_threshold(state)
        self._action.recurring.load_state_dict(state["recurring"])

    def state_dict(self) -> OrderedDict[str, Any]:
        recurring = self._action.recurring.state_dict()
        return OrderedDict(**self._detector.state_dict(), **self._action.counts, recurring=recurring)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        super().load_state_dict(state_dict)
        before = self.run_totals()
        self._detector.load_state_dict(state_dict)
        self._action.load(state_dict)
        self._totals_loaded(before)
        self._reported_resets = float(self._reset_count())

    def _reset_count(self) -> Tensor:
        return self._detector.resets

    def _set_flag(self, engine: Any, detection: GradientDetection, report: bool = False) -> None:
        setattr(engine.state, self.flag, as_published(detection.spike))
        setattr(engine.state, self._norm_attribute, as_published(detection.norm.value))
        if self._source is not None and self._source.listened:  # by handlers that may log values
            self._publish(detection)
        if not report or self._window.is_reported or not may_be_true(detection.spike):
            return
        if self._is_awaited_spike(detection.spike):
            self._window.is_reported = True
            self._fire_spike(engine, self._describe_spike(detection), detection.norm.value)

    def _describe_spike(self, detection: GradientDetection) -> Spike:
        return detection.to_spike(detection.numbers().tolist(), self, self._locator.source)

    def _publish(self, detection: GradientDetection) -> None:
        if self.metrics:  # of an earlier gradient of this iteration
            self.clear_metrics()
        self._now.published = detection
        norm, counts = detection.norm, self._detector.counts
        values = self._action.counts | {"spike_count": counts[0], "nonfinite_count": counts[1]}
        values |= {"norm": norm.value, "threshold": norm.applied_threshold, "mean": norm.mean, "std": norm.std}
        if self._now.scale is not None:
            values["scale"] = self._now.scale
        self.publish(**values, spike=detection.spike, stepped=self._now.stepped)

    def _possible_spike(self) -> GradientDetection | None:
        """The published detection, if it may be a spike with more to say than its values."""
        detection = self._now.published
        if detection is None or not (detection.names or self._action.kind is not None):
            return None
        return detection if may_be_true(detection.spike) else None

    def _publish_none(self) -> None:
        """Publish nothing of this iteration's gradient but that no step was made with it."""
        self.clear_metrics()
        self._now.is_published = self._now.published = None
        if self._now.stepped is False:
            self.publish(stepped=0.0)

    def deferred_tensors(self) -> list[Tensor]:
        tensors = super().deferred_tensors()
        if self._now.is_published is not None:
            tensors.append(self._now.is_published)
        if self._now.unlocated is not None:
            tensors.append(self._now.unlocated)
        if (spike := self._possible_spike()) is not None:
            counts = map(torch.as_tensor, self._action.counts.values())
            recurring = self._action.recurring.iterations(self._iteration)
            tensors += [recurring, *counts, spike.spike, spike.numbers()]
        return tensors

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        super().resolve_deferred(extra)
        if self._now.is_published is not None and not extra.pop(0)[0]:
            self._publish_none()
        if self._now.unlocated is not None and extra.pop(0)[0]:
            self.report("nonfinite_not_located", _NOT_LOCATED)
        detection = self._possible_spike()
        if detection is None:
            return {}
        recurring, *counts, (is_spike,), numbers = extra
        spike = detection.to_spike(numbers, self, self._locator.source)
        if iterations := ", ".join(f"{at:.0f}" for at in sorted(at for at in recurring if at == at)):
            text = f"isolated spikes of a similar size in iterations {iterations}; from now on such spikes are not "
            self.report("recurring_spikes", text + "skipped, since rare data cause them too")
        action = self._action.message([count for (count,) in counts])
        if action is not None:
            which = describe(spike) if is_spike else "spikes since values were last read"  # on a device
            self._log(logging.INFO, f"{which}; {action}")
        if not (is_spike and detection.names):
            return {}
        if not self._now.is_described:
            self._now.is_described = True
            self._log(logging.WARNING, f"{describe(spike)}.")
        tag_of = dict(zip(detection.names, tags(detection.names), strict=True))
        return {f"culprit/{tag_of[name]}": share for name, share in spike.culprits.items()}

    def _locate_nonfinite(self, detection: GradientDetection, handles_overflow: bool) -> None:
        """Locate the source of a backward's non-finite gradient, if that costs no synchronization."""
        nonfinite = detection.norm.nonfinite
        if self._source is None or not (is_cpu(nonfinite) or self._is_awaited(MonitorEvents.SPIKE_DETECTED)):
            self._locator.calls.backward_ended()
            if not handles_overflow:
                self._now.unlocated = nonfinite if self._now.unlocated is None else self._now.unlocated | nonfinite
            return
        # Without a scaler what is no spike is finite, and needs no further synchronization.
        known = handles_overflow or self._is_known_spike(detection.spike)
        text = self._locator.locate(not (known and torch.is_nonzero(nonfinite)), handles_overflow)
        self._source.nonfinite_source = self._locator.source or self._source.nonfinite_source
        if text is not None:
            source = self._locator.source
            kind, names = ("not_located", ()) if source is None else (source.kind, (source.name,))
            self.report(f"nonfinite_{kind}", text, names=names, once=False)

    def _count_unseen(self, tracker: GradientTracker) -> None:
        # A replay buffer that fills, or a loss that is not finite, leaves out single iterations.
        self._unseen += tracker.reduced
        if self._unseen == _UNSEEN:
            self.report("no_gradient", _NO_GRADIENT, severity="note")

    def _warn(self, detection: GradientDetection | None) -> None:
        if self._detector.of_norm.rule.is_refused:
            self.report("threshold_not_positive", _NOT_POSITIVE, severity="problem")
        if self._window.is_stuck(detection):
            name = "an optimizer" if self.optimizer is None else type(self.optimizer).__name__
            self.report("no_step_at_spikes", _NO_STEP % (PATIENCE, name), severity="problem", once=False)
