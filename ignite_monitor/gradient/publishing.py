"""Published values of a gradient, and log lines of culprits and actions."""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from ignite_monitor.detection.monitor import DetectionMonitor
from ignite_monitor.detection.spikes import may_be_true
from ignite_monitor.gradient.action import SpikeAction
from ignite_monitor.gradient.detector import GradientDetection, GradientDetector
from ignite_monitor.gradient.spike_numbers import host_numbers, published_shares, read_numbers, spike_numbers
from ignite_monitor.monitor import transfer


class GradientPublisher:
    """Publishes the detection of an iteration, with the counts of a detector and an action.

    Attributes:
        scale: scale of the iteration's last backward, 0-dim; None for 1.
        stepped: whether the iteration made a step.
        is_published: on a device: whether there is anything to publish, a 0-dim bool tensor; None for True.
    """

    def __init__(self, detector: GradientDetector, action: SpikeAction) -> None:
        self._detector, self._action = detector, action
        self.reset()

    def reset(self) -> None:
        """Start another iteration."""
        self.scale: Tensor | None = None
        self.stepped: bool | Tensor = False
        self.is_published: Tensor | None = None
        self._spike: GradientDetection | None = None  # if only the device knows whether it is one

    def publish(self, monitor: DetectionMonitor, detection: GradientDetection, log: bool = False) -> None:
        """Publish a detection, and log the culprits of its spike."""
        self.publish_none(monitor)
        spikes, nonfinite, _ = self._detector.counts()
        values = detection.values() | self._action.counts | {"spike_count": spikes, "nonfinite_count": nonfinite}
        if self.scale is not None:
            values["scale"] = self.scale
        monitor.publish(**values, stepped=self.stepped)
        if detection.names and may_be_true(detection.spike):
            if transfer.is_on_host(detection.spike):
                monitor.publish(**_shares(monitor, spike_numbers(detection).tolist(), detection, log))
            else:
                self._spike = detection

    def publish_none(self, monitor: DetectionMonitor) -> None:
        """Publish nothing of this iteration's gradient but that no step was made with it."""
        monitor.clear_metrics()
        self._spike = self.is_published = None
        if self.stepped is False:
            monitor.publish(stepped=0.0)

    def deferred_tensors(self) -> list[Tensor]:
        """Return the tensors that :meth:`resolve` needs on the host."""
        tensors = [] if self._action.kind is None else [*self._action.counts.values()]
        tensors += [] if self.is_published is None else [self.is_published]
        return tensors + ([] if self._spike is None else [self._spike.spike, spike_numbers(self._spike)])

    def resolve(self, monitor: DetectionMonitor, extra: list[list[float]]) -> dict[str, float]:
        """Log actions and culprits, and return the culprits to publish."""
        numbers, detection = iter(extra), self._spike
        if self._action.kind is not None:
            self._log_action(monitor, [next(numbers)[0] for _ in self._action.counts])
        if self.is_published is not None and not next(numbers)[0]:
            self.publish_none(monitor)
            return {}
        if detection is None or not next(numbers)[0]:
            return {}
        return _shares(monitor, next(numbers), detection, log=True)

    def log_action(self, monitor: DetectionMonitor, detection: GradientDetection) -> None:
        """Log the action on a detection, if its numbers are on the host."""
        if self._action.kind is not None and transfer.is_on_host(detection.spike):
            cause = f"{host_numbers(detection)}; " if detection.spike else ""
            self._log_action(monitor, [float(count) for count in self._action.counts.values()], cause)

    def _log_action(self, monitor: DetectionMonitor, counts: list[float], cause: str = "") -> None:
        action = self._action.message(counts)
        if action is not None:
            monitor._log(logging.INFO, f"{cause}{action}")


def _shares(monitor: Any, numbers: list[float], detection: GradientDetection, log: bool) -> dict[str, float]:
    spike = read_numbers(numbers, detection.names)
    if log:
        monitor._log(logging.WARNING, f"{spike}.")
    return published_shares(spike.culprits, detection.names)
