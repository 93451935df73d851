"""Transfer of values and flags from a device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import move, wide_dtype

HOST = frozenset({"cpu"})  # types of devices whose values can be read without synchronization


class NamedValues(NamedTuple):
    """Names, with a number or a row of numbers for every name."""

    names: Sequence[str]
    values: Tensor

    def rows(self, index: Sequence[int]) -> NamedValues:
        """Select rows by index, in that order."""
        chosen = move(torch.tensor(index, dtype=torch.int64, device="cpu"), self.values.device)
        return NamedValues([self.names[i] for i in index], self.values[chosen])


def joined(parts: Sequence[NamedValues]) -> NamedValues:
    """Concatenate parts on the device of the first."""
    device = parts[0].values.device
    values = [part.to(device, wide_dtype(device), non_blocking=device.type != "cpu") for _, part in parts]
    return NamedValues([name for names, _ in parts for name in names], torch.cat(values))


def is_cpu(values: Tensor) -> bool:
    """Return True if the values are on the host."""
    return values.device.type in HOST


def as_published(value: Tensor) -> Any:
    """Convert a 0-dim tensor on the host to a Python number; return one on a device as it is."""
    return value.tolist() if is_cpu(value) else value


def transfer(groups: Sequence[Sequence[Tensor]]) -> list[list[list[float]]]:
    """Copy groups of tensors to the host in one transfer per device; every tensor becomes a flat list."""
    flat = [tensor.to(wide_dtype(tensor.device)).reshape(-1) for tensors in groups for tensor in tensors]
    numbers = {
        device: iter(torch.cat([tensor for tensor in flat if tensor.device == device]).tolist())
        for device in {tensor.device for tensor in flat}
    }
    return [[list(islice(numbers[tensor.device], tensor.numel())) for tensor in tensors] for tensors in groups]


def bring_to_host(monitors: Sequence[Any]) -> None:
    """Replace the published tensors of monitors by floats, in one transfer, and resolve their deferred values."""
    groups = [(monitor, monitor._guarded(_tensors_of, monitor)) for monitor in monitors if not monitor._is_resolved]
    groups = [(monitor, tensors) for monitor, tensors in groups if tensors is not None]  # of others after an error
    for (monitor, _), numbers in zip(groups, transfer([tensors for _, tensors in groups]), strict=True):
        waiting, monitor._waiting, monitor._is_resolved = monitor._waiting, [], True
        latest: dict[str, float] = {}
        for (names, _), values in zip(waiting, numbers, strict=False):
            latest.update(zip(names, values, strict=True))
        # A number that was published after a tensor of the same name stays.
        waits = [name for name in latest if isinstance(monitor.metrics.get(monitor._named(name)), Tensor)]
        monitor._put({name: latest[name] for name in waits})
        monitor._put(monitor._guarded(monitor.resolve_deferred, numbers[len(waiting) :]) or {})


def _tensors_of(monitor: Any) -> list[Tensor]:
    return [*(values for _, values in monitor._waiting), *monitor.deferred_tensors()]


class DeferredFlag:
    """Flag that the host reads without waiting for other work: on the CPU at once, on CUDA when a copy has arrived.

    On other devices only :meth:`take` with ``wait`` reads it.
    """

    def __init__(self) -> None:
        self._flag: Tensor | None = None
        self._copy: Tensor | None = None  # of a flag on CUDA: the latest that has arrived

    def set(self, flag: Tensor) -> None:
        """Set the flag if a 0-dim bool tensor is True."""
        self._flag = flag if self._flag is None else self._flag | move(flag, self._flag.device)
        if self._flag.is_cuda:
            if self._copy is None:
                self._copy = torch.zeros((), dtype=torch.bool, device="cpu", pin_memory=True)
            self._copy.copy_(self._flag, non_blocking=True)

    def take(self, wait: bool = False) -> bool:
        """Return and reset the flag if the host knows it, or with ``wait``; else return False."""
        flag = self._flag if wait or self._copy is None else self._copy
        is_set = flag is not None and (wait or flag.is_cpu) and torch.is_nonzero(flag)
        if is_set or wait:
            self._flag = self._copy = None
        return is_set
