"""Bases of the monitors with a threshold, and of those that report spikes: events, flag and log messages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.checks import check_count
from ignite_monitor.events.monitor_events import MonitorEvents, Spike, exposed_spike
from ignite_monitor.monitor.base import Monitor, check_flag
from ignite_monitor.monitor.ranks import Group
from ignite_monitor.monitor.transfer import as_published, is_cpu


class CountingMonitor(Monitor):
    """Has a threshold: handlers that react to spikes read its counts, and may reset it."""

    def counts(self) -> Tensor:
        """Return the numbers of spikes, non-finite values and resets so far."""
        raise NotImplementedError

    def reset_threshold(self) -> None:
        """Reset the running statistics of the threshold; counts are kept."""
        raise NotImplementedError

    def threshold_state(self) -> Mapping[str, Any]:
        """Return the running statistics of the threshold."""
        raise NotImplementedError

    def restore_threshold(self, state: Mapping[str, Any]) -> None:
        """Continue from earlier statistics of the threshold; counts are kept.

        Args:
            state: what :meth:`threshold_state` returned.
        """


class DetectionMonitor(CountingMonitor):
    """Reports spikes and resets of a threshold."""

    on_spike: Callable[[Any, Any], Any] | str | None = None  # called at a spike, if it is a function
    _iteration = -1  # the last monitored one
    _known_spike: tuple[Tensor, bool] | None = None  # a flag read on the host
    _reported_resets = 0.0

    def __init__(
        self, model: nn.Module, prefix: str, flag: str, max_consecutive_spikes: int, group: Group = None
    ) -> None:
        super().__init__(model, prefix, group=group)
        check_flag(flag)
        self.flag = flag
        self.attributes = {flag: False}
        self.max_consecutive_spikes = check_count("max_consecutive_spikes", max_consecutive_spikes, least=1)

    def reset_run_state(self) -> None:
        self._known_spike = None

    def on_run_completed(self) -> None:
        super().on_run_completed()
        self._report_resets(float(self._reset_count()))

    def deferred_tensors(self) -> list[Tensor]:
        resets = self._reset_count()
        return [] if is_cpu(resets) else [resets]

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        if not is_cpu(self._reset_count()):
            self._report_resets(*extra.pop(0))
        return {}

    def _reset_count(self) -> Tensor:
        """The number of resets of the threshold so far, 0-dim."""
        raise NotImplementedError

    def _is_known_spike(self, spike: Tensor) -> bool:
        """Read a flag on the host; the first call synchronizes."""
        if self._known_spike is None or self._known_spike[0] is not spike:
            self._known_spike = spike, torch.is_nonzero(spike)
        return self._known_spike[1]

    def _is_awaited(self, event: MonitorEvents) -> bool:
        if event is MonitorEvents.SPIKE_DETECTED and callable(self.on_spike):
            return True
        return self._source is not None and self._source.is_awaited(event)

    def _is_awaited_spike(self, spike: Tensor) -> bool:
        return self._is_awaited(MonitorEvents.SPIKE_DETECTED) and self._is_known_spike(spike)

    def _fire_spike(self, engine: Any, spike: Spike, value: Tensor) -> None:
        """Call ``on_spike`` and fire SPIKE_DETECTED while ``engine.state.spike`` describes the spike."""
        source = self._source  # on_spike may detach the monitor
        if source is not None:
            with exposed_spike(engine, spike):
                if callable(self.on_spike):
                    with source.users_code():
                        self.on_spike(engine, as_published(value))
                source.fire(MonitorEvents.SPIKE_DETECTED)

    def _fire_reset(self, engine: Any, detection: Any) -> None:
        """Report a reset of the threshold, if that takes no synchronization or handlers await it."""
        awaited = self._is_awaited(MonitorEvents.THRESHOLD_RESET)
        resets = self._reset_count()
        if (awaited or is_cpu(resets)) and self._report_resets(float(resets)) and awaited and self._source is not None:
            with exposed_spike(engine, self._describe_spike(detection)):
                self._source.fire(MonitorEvents.THRESHOLD_RESET)

    def _describe_spike(self, detection: Any) -> Spike:
        raise NotImplementedError

    def _report_resets(self, count: float) -> bool:
        """Log resets of the threshold that have not been logged, from their number."""
        is_new = count > self._reported_resets
        self._reported_resets = count
        if is_new:
            self._log(
                logging.WARNING,
                f"{self.max_consecutive_spikes} spikes in a short time; assuming a regime change, resetting threshold "
                "statistics.",
            )
        return is_new

    def _log(self, level: int, text: str) -> None:
        self.logger.log(level, "%s (%s): iteration %d: %s", type(self).__name__, self.prefix, self._iteration, text)
