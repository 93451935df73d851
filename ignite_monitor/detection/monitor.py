"""Base of the monitors that detect spikes: events, flag and log messages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.events.monitor_events import MonitorEvents, Spike, exposed_spike
from ignite_monitor.monitor.base import Monitor
from ignite_monitor.monitor.transfer import DeferredFlag


class DetectionMonitor(Monitor):
    """Reports spikes and resets of a threshold.

    Attributes:
        max_consecutive_spikes: number of consecutive spikes that reset the threshold.
    """

    max_consecutive_spikes: int
    _iteration = -1  # the last monitored one
    _known_spike: tuple[Tensor, bool] | None = None  # a flag read on the host

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._resets = DeferredFlag()

    def reset_run_state(self) -> None:
        self._known_spike = None
        self._report_reset(synchronize=True)

    def _is_known_spike(self, spike: Tensor) -> bool:
        """Read a flag on the host; the first call synchronizes."""
        if self._known_spike is None or self._known_spike[0] is not spike:
            self._known_spike = spike, torch.is_nonzero(spike)
        return self._known_spike[1]

    def _is_awaited(self, event: MonitorEvents) -> bool:
        return self._source is not None and self._source.is_awaited(event)

    def _fire(self, engine: Any, event: MonitorEvents, spike: Spike, first: Callable[[], Any] = lambda: None) -> None:
        """Call a function and fire an event while ``engine.state.spike`` describes a spike."""
        if self._source is not None:
            with exposed_spike(engine, spike):
                first()
                self._source.fire(event)

    def _fire_reset(self, engine: Any, detection: Any) -> None:
        awaited = self._is_awaited(MonitorEvents.THRESHOLD_RESET)
        if self._resets and self._report_reset(synchronize=awaited) and awaited:
            self._fire(engine, MonitorEvents.THRESHOLD_RESET, self._spike(detection))

    def _spike(self, detection: Any) -> Spike:
        raise NotImplementedError

    def _report_reset(self, synchronize: bool) -> bool:
        is_reset = self._resets.take(synchronize)
        if is_reset:
            self._log(
                logging.WARNING,
                f"iteration {self._iteration}: {self.max_consecutive_spikes} spikes in a short time; assuming a regime "
                "change, resetting threshold statistics.",
            )
        return is_reset

    def _log(self, level: int, text: str) -> None:
        self.logger.log(level, "%s (%s): %s", type(self).__name__, self.prefix, text)
