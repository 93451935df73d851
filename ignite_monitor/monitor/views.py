"""Many numbers as 0-dim tensors by name, for less than it takes to make as many tensors."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model._torch import storage_owners


class NamedViews:
    """Shows the elements of a tensor as 0-dim tensors by name.

    On the CPU the tensors are those of the last time, filled anew, if it is certain that nobody would see them change:
    if the names are the same, and neither one of the tensors nor anything that shares their memory is held by anyone
    else. That are variables and containers, graphs that a value takes part in, views and detached tensors, NumPy arrays
    and other processes. Otherwise, and on other devices, they are new.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Let go of the tensors."""
        self._names: list[str] = []
        self._values = torch.empty(0)
        self._views: dict[str, Tensor] = {}
        self._unshared: Any = None

    def show(self, names: list[str], values: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The elements by name.

        Args:
            names: the names, each once.

        Returns:
            Values, which stay as they are for as long as anyone has use for them, and name -> 0-dim view of them.
        """
        if values.device.type != "cpu" or not _counts_all_owners():
            return values, dict(zip(names, values.unbind(), strict=True))
        if names == self._names and values.dtype == self._values.dtype and self._owners() == self._unshared:
            self._values.copy_(values)
        else:
            with torch.inference_mode(False):  # what is made in it can't be written to outside of it
                self._values = values.clone()
                self._views = dict(zip(names, self._values.unbind(), strict=True))
            self._names = list(names)
            self._unshared = self._owners()
        return self._values, self._views

    def _owners(self) -> tuple[Any, ...]:
        """How many hold one of the views, what they are views of, and the memory of all.

        In this order: another thread gets from a view to what shares its memory, and not back.
        """
        of_views = set(map(sys.getrefcount, self._views.values()))
        of_values = sys.getrefcount(self._values)
        memory = self._values.untyped_storage()
        of_memory = sys.getrefcount(memory), storage_owners(memory)
        return of_views, of_values, of_memory, memory.is_shared()


@functools.cache
def _counts_all_owners() -> bool:
    """Whether Python's count of a tensor's references tells of owners in C++ too, such as graphs."""
    with torch.inference_mode(False), torch.enable_grad():
        value = torch.zeros((), device="cpu")
        alone = sys.getrefcount(value)
        graph = torch.ones((), device="cpu", requires_grad=True) * value
        counts = graph.requires_grad and sys.getrefcount(value) > alone
        return counts and storage_owners(value.untyped_storage()) is not None
