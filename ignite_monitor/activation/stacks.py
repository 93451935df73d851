"""Copies of small tensors, those of one shape next to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ignite_monitor.activation.statistics import is_float8
from ignite_monitor.model._torch import is_functorch_wrapped

# All stacks together take up at most so many bytes, and one at most so many. There is room for so many tensors of a
# shape at first, and for twice as many whenever it runs out.
_BYTES = 2**24
_STACK_BYTES = 2**22
_ROWS = 32

_strided = torch.strided


def stacked_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's copy."""
    if tensor.device.type == "cpu":
        return torch.float64
    return torch.float32 if is_float8(tensor) else tensor.dtype


class Stack:
    """Named copies of tensors of one shape, on the CPU in float64, which sums are taken in there.

    Args:
        like: a tensor of the shape, dtype and device.

    Attributes:
        tensor: the copies, of shape (room, ...).
        rows: the same, one by one.
        names: what the copies belong to, fewer than there are rows.
        bytes: what it takes up.
    """

    def __init__(self, like: Tensor, room: int) -> None:
        dtype = stacked_dtype(like)
        with torch.inference_mode(False):  # what is made in it can't be written to outside of it
            self.tensor = torch.empty(room, *like.shape, dtype=dtype, device=like.device)
            self.rows = self.tensor.unbind()
        self.names: list[str] = []
        self.room = room
        self.bytes = self.tensor.numel() * dtype.itemsize

    def take(self) -> tuple[list[str], Tensor]:
        """Names and tensors, of shape (names, ...), which stay as they are until the next one is added."""
        names, self.names = self.names, []
        return names, self.tensor[: len(names)]


class Stacks:
    """Stacks by shape, dtype and device; the memory is kept for the next tensors."""

    def __init__(self) -> None:
        self._stacks: dict[tuple[torch.Size, torch.dtype, torch.device], Stack] = {}

    @property
    def bytes(self) -> int:
        """What all stacks take up."""
        return sum(each.bytes for each in self._stacks.values())

    def add(self, name: str, tensor: Tensor) -> bool:
        """Copy a tensor, if there is room for it."""
        if tensor.is_nested or is_functorch_wrapped(tensor):
            return False
        stack = self._stacks.get((tensor.shape, tensor.dtype, tensor.device))
        if stack is None or (place := len(stack.names)) == stack.room or tensor.layout is not _strided:
            return False
        stack.rows[place].copy_(tensor)
        stack.names.append(name)
        return True

    def add_all(self, names: Sequence[str], tensors: Tensor) -> bool:
        """Copy several, if there is room for them.

        Args:
            names: what each belongs to.
            tensors: of shape (names, ...).
        """
        stack = self._stacks.get((tensors.shape[1:], tensors.dtype, tensors.device))
        if stack is None or (end := len(stack.names) + len(names)) > stack.room:
            return False
        stack.tensor[len(stack.names) : end].copy_(tensors)
        stack.names += names
        return True

    def grow(self, like: Tensor, rows: int) -> list[tuple[list[str], Tensor]]:
        """Make room for more tensors of a shape.

        Args:
            like: a tensor of the shape, dtype and device.
            rows: how many to have room for at least.

        Returns:
            What had to be taken out for it, as :meth:`take` gives it.
        """
        key = (like.shape, like.dtype, like.device)
        old = self._stacks.get(key)
        taken = [old.take()] if old is not None and old.names else []
        most = _STACK_BYTES // (like.numel() * stacked_dtype(like).itemsize)
        wanted = max(rows, min(most, _ROWS if old is None else 2 * old.room))
        if old is not None and old.room >= wanted:
            return taken
        stack = Stack(like, wanted)
        if stack.bytes + self.bytes > _BYTES:
            taken += self.take()
            self._stacks.clear()
        self._stacks[key] = stack
        return taken

    def take(self) -> Iterator[tuple[list[str], Tensor]]:
        """What has been added, by stack."""
        for stack in self._stacks.values():
            if stack.names:
                yield stack.take()
