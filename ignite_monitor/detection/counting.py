"""Base of the monitors that count spikes by a threshold."""

from __future__ import annotations

from torch import Tensor

from ignite_monitor.monitor.base import Monitor


class CountingMonitor(Monitor):
    """Has a threshold: handlers that react to spikes read its counts, and may reset it."""

    def counts(self) -> Tensor:
        """Return the numbers of spikes, non-finite values and resets so far."""
        raise NotImplementedError

    def reset_threshold(self) -> None:
        """Reset the running statistics of the threshold; counts are kept."""
        raise NotImplementedError
