"""How long a train step takes, without waiting for the device; and how much memory there is."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import TracebackType

import torch


class StepClock:
    """A context that measures how long what runs in it takes on a device.

    On a CUDA device events are put into the current stream, and the time is known once the second has passed there.

    Args:
        device: a CPU or a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def __enter__(self) -> StepClock:
        self._note()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._note()

    def seconds(self) -> float | None:
        """How long it took; None if that is not known yet."""
        if len(self._times) == 2:
            return self._times[1] - self._times[0]
        if len(self._events) == 2 and self._events[1].query():
            return float(self._events[0].elapsed_time(self._events[1])) / 1e3
        return None

    def _note(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            self._events.append(event)
        else:
            self._times.append(time.perf_counter())


class DataClock:
    """How long an engine has waited for its last batch: between two events, on the host's clock."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._since: float | None = None

    def start(self) -> None:
        """The engine asks for a batch; the loader may be started anew before there is one."""
        self._since = self.now()

    def stop(self) -> None:
        """It has the batch."""
        self.seconds, self._since = None if self._since is None else self.now() - self._since, None

    @staticmethod
    def now() -> float:
        """The time in seconds, from any moment on."""
        return time.perf_counter()


def peak_memory() -> float | None:
    """The most memory that this process ever had resident, in MiB; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (2**20 if sys.platform == "darwin" else 2**10)


def resident_memory() -> float | None:
    """The memory that this process has resident now, in MiB; None where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
