"""Duration of a train step without host-device synchronization, and memory of the process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch


class StepClock:
    """Context manager that measures the duration of its block on a CPU or, by two events in its stream, on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._end = None

    def __enter__(self) -> None:
        self._start = self._now()

    def __exit__(self, *exception: object) -> None:
        self._end = self._now()

    def seconds(self) -> float | None:
        """Return the duration; None if it is not known yet."""
        if self._start is None or self._end is None:
            return None
        if self._device.type == "cuda":
            return self._start.elapsed_time(self._end) / 1e3 if self._end.query() else None
        return float(self._end - self._start)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def resident_memory() -> float | None:
    """Return the resident memory of this process in MiB; None where the system does not report it."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
