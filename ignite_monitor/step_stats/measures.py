"""Duration of a train step without host-device synchronization, and memory of the process."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType

import torch


class StepClock:
    """Context manager that measures the duration of its block on a device.

    On CUDA it records two events in the current stream; the duration is known when the second has passed.

    Args:
        device: a CPU or a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def __enter__(self) -> StepClock:
        self._record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._record()

    def seconds(self) -> float | None:
        """Return the duration; None if it is not known yet."""
        if len(self._times) == 2:
            return self._times[1] - self._times[0]
        if len(self._events) == 2 and self._events[1].query():
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return None

    def _record(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())


class DataClock:
    """Time between an engine's request for a batch and the batch, on the host's clock."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._since: float | None = None

    def start(self) -> None:
        """Start at GET_BATCH_STARTED; a loader that is restarted in between is part of the wait."""
        self._since = self.now()

    def stop(self) -> None:
        """Stop at GET_BATCH_COMPLETED."""
        self.seconds, self._since = None if self._since is None else self.now() - self._since, None

    @staticmethod
    def now() -> float:
        """Return the time in seconds."""
        return time.perf_counter()


def peak_memory() -> float | None:
    """Return the peak resident memory of this process in MiB; None where the system does not report it."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (2**20 if sys.platform == "darwin" else 2**10)


def resident_memory() -> float | None:
    """Return the resident memory of this process in MiB; None where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
