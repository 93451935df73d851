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


def gradient_hook(source: Any, model: int) -> Callable[[Tensor], None]:
    """A post-accumulate-grad hook for all parameters of a model, which reports to an event source.

    Args:
        source: the :class:`EventSource`, referenced weakly.
        model: id of the model.
    """
    source_of = weakref.ref(source)
    start, last, add = out_of_compiler(_start), -1, set[int]().add
    untraced(_end_backward)  # the compiler would trace into what a compiled train step calls

    def hook(parameter: Tensor) -> None:
        nonlocal last, add
        number = backward_number()
        if number != last or number == -1:
            last, owner = number, source_of()
            reached = None if owner is None else start(owner, number, model)
            add = (set[int]() if reached is None else reached).add
        add(id(parameter))

    return untraced(hook)


def _start(source: Any, number: int, model: int) -> set[int] | None:
    """Begin to record a backward; None if it is not to be recorded."""
    if not source.running or model not in source.trackers:
        return None
    if number == -1:  # FSDP2 calls hooks outside of a backward where finalize_backward() reduces
        source.trackers[model].defer()
        return None
    if number not in source.reached:
        ranks = dist.is_available() and dist.is_initialized()
        _end_backward(weakref.ref(source), number, _HOPS_WITH_RANKS if ranks else _HOPS)
    reached: set[int] = source.reached.setdefault(number, {}).setdefault(model, set())
    return reached


def _end_backward(source_of: weakref.ref[Any], number: int, hops: int) -> None:
    source = source_of()
    if hops:
        queue_callback(functools.partial(_end_backward, source_of, number, hops - 1))
    elif source is not None:
        out_of_compiler(type(source).backward_ended)(source, number)
