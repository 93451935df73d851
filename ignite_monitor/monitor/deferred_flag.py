"""Flags of a device that reach the host without synchronization."""

from __future__ import annotations

import torch
from torch import Tensor


class DeferredFlag:
    """Flag that the host knows at once on the CPU, and on CUDA as soon as its asynchronous copy has arrived.

    On other devices, whose copies can't be queried, only :meth:`take` with ``wait`` reads it.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._flag: Tensor | None = None  # on the device
        self._copy: tuple[Tensor, torch.cuda.Event] | None = None

    def __bool__(self) -> bool:
        """Return True if the flag may be set."""
        return self._is_set or self._flag is not None or self._copy is not None

    def set(self, flag: Tensor) -> None:
        """Set the flag if a 0-dim bool tensor is True."""
        if flag.is_cpu:
            self._is_set |= torch.is_nonzero(flag)
            return
        self._flag = flag if self._flag is None else self._flag | flag
        if flag.is_cuda and self._copy is None:
            copy = torch.empty((), dtype=torch.bool, device="cpu", pin_memory=True)
            copy.copy_(self._flag, non_blocking=True)
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(flag.device))
            self._copy, self._flag = (copy, event), None

    def take(self, wait: bool = False) -> bool:
        """Return and reset the flag, as far as the host knows it; with ``wait`` synchronize first."""
        if self._copy is not None and (wait or self._copy[1].query()):
            copy, event = self._copy
            event.synchronize()
            self._is_set |= torch.is_nonzero(copy)
            self._copy = None
        if wait and self._flag is not None:
            self._is_set |= torch.is_nonzero(self._flag)
            self._flag = None
        is_set, self._is_set = self._is_set, False
        return is_set
