"""How long a train step takes, without waiting for the device; how much memory there is, and how many items."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor


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


def count_items(batch: Any) -> int | None:
    """The length of the first tensor in a batch: in a tensor, or nested in tuples, lists and mappings.

    Returns:
        None if there is no tensor with a dimension in it.
    """
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (tuple, list)) else ()
    return next((count for count in map(count_items, parts) if count is not None), None)
