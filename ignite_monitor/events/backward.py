"""Detects the end of backward passes, and which parameters they reach."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ignite_monitor.model._torch import backward_number, queue_callback
from ignite_monitor.model.eager import out_of_compiler, untraced

# How often the callback at the end of a backward queues itself again, so that it runs after other callbacks.
# DistributedDataParallel reduces in one callback, with a static graph in one that queues another.
_HOPS, _HOPS_WITH_RANKS = 1, 3


class BackwardPasses:
    """The backward passes that are running, each with the parameters whose gradients it has accumulated.

    Args:
        source: the :class:`EventSource`, referenced weakly. It gets the ids of reached parameters by id of the model.
    """

    def __init__(self, source: Any) -> None:
        self._source = weakref.ref(source)
        self.reached: dict[int, dict[int, set[int]]] = {}  # by number of the backward
        untraced(_end_backward)  # the compiler would trace into what a compiled train step calls

    def gradient_hook(self, model: int) -> Callable[[Tensor], None]:
        """A post-accumulate-grad hook for all parameters of a model, given by its id."""
        passes = weakref.ref(self)
        current, start = backward_number, out_of_compiler(BackwardPasses._start)
        last, add = -1, set[int]().add

        def hook(parameter: Tensor) -> None:
            nonlocal last, add
            number = current()
            if number != last or number == -1:
                last, owner = number, passes()
                add = set[int]().add if owner is None else start(owner, number, model)
            add(id(parameter))

        return untraced(hook)

    def _start(self, number: int, model: int) -> Callable[[int], None]:
        source = self._source()
        if source is None or not source.running:
            return set[int]().add
        if number == -1:  # FSDP2 calls hooks outside of a backward where finalize_backward() reduces
            source.gradients_finalized(model)
            return set[int]().add
        if number not in self.reached:
            ranks = dist.is_available() and dist.is_initialized()
            _end_backward(weakref.ref(self), number, _HOPS_WITH_RANKS if ranks else _HOPS)
        return self.reached.setdefault(number, {}).setdefault(model, set()).add

    def _end(self, number: int) -> None:
        source, reached = self._source(), self.reached.pop(number, {})
        if source is not None:
            source.backward_ended(number, reached)


def _end_backward(passes: weakref.ref[BackwardPasses], number: int, hops: int) -> None:
    owner = passes()
    if hops:
        queue_callback(functools.partial(_end_backward, passes, number, hops - 1))
    elif owner is not None:
        out_of_compiler(BackwardPasses._end)(owner, number)
