"""Numbers with names, and their way from a device to the host."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload, wide_dtype


class NamedValues(NamedTuple):
    """Names, and what belongs to each.

    Attributes:
        names: the names.
        values: a number, or a row of numbers, for each name.
    """

    names: Sequence[str]
    values: Tensor

    def rows(self, index: Sequence[int]) -> NamedValues:
        """Some of them, in another order."""
        chosen = upload(torch.tensor(index, dtype=torch.int64, device="cpu"), self.values.device)
        return NamedValues([self.names[i] for i in index], self.values[chosen])


def joined(parts: Sequence[NamedValues]) -> NamedValues:
    """All of them on the device of the first, a name's last number in place of its earlier ones.

    Args:
        parts: at least one.
    """
    if len(parts) == 1:
        return parts[0]
    names = [name for part in parts for name in part.names]
    like = parts[0].values
    wide = wide_dtype(like.device)
    values = [each.to(like.device, wide, non_blocking=like.device.type != "cpu") for _, each in parts]
    together = NamedValues(names, torch.cat(values))
    last = {name: index for index, name in enumerate(names)}
    return together if len(last) == len(names) else together.rows([*last.values()])


def is_on_host(values: Tensor) -> bool:
    """Whether nobody has to wait to read the values."""
    return values.is_cpu


def as_published(value: Tensor) -> Any:
    """A 0-dim tensor as users get it: a Python number, or the tensor where they would have to wait for one."""
    return value.tolist() if is_on_host(value) else value


def transfer(groups: Sequence[Sequence[Tensor]]) -> list[list[list[float]]]:
    """The elements of groups of tensors, each flat, in one transfer per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensors in groups:
        for tensor in tensors:
            wide = tensor.to(wide_dtype(tensor.device))
            by_device.setdefault(tensor.device, []).append(wide.reshape(-1))
    numbers = {device: iter(torch.cat(tensors).tolist()) for device, tensors in by_device.items()}
    return [[list(islice(numbers[tensor.device], tensor.numel())) for tensor in tensors] for tensors in groups]
