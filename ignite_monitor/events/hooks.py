"""Hooks on engines, backward passes and optimizer steps."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model._torch import backward_number, queue_callback
from ignite_monitor.model.modes import out_of_compiler, untraced

# How often the callback at the end of a backward queues itself again, so that it runs after other callbacks.
# DistributedDataParallel reduces in one callback, with a static graph in one that queues another.
_HOPS, _HOPS_WITH_RANKS = 1, 3


class Patch:
    """A replaced function of an engine.

    Args:
        replacement: a method, referenced weakly; called with the original function and its arguments.
    """

    def __init__(self, engine: Engine, name: str, replacement: Any) -> None:
        self._engine, self._name = weakref.ref(engine), name
        self._original = vars(engine).get(name)  # None for a method of its class
        original = weakly(getattr(engine, name)) if self._original is None else self._original
        owner_of, function = weakref.ref(replacement.__self__), replacement.__func__

        @functools.wraps(original)
        def patched(*args: Any) -> Any:
            owner = owner_of()
            return original(*args) if owner is None else function(owner, original, *args)

        self._patched = patched
        setattr(engine, name, patched)

    def remove(self) -> None:
        """Restore the original, unless others have replaced the function since."""
        engine = self._engine()
        if engine is None or vars(engine).get(self._name) is not self._patched:
            return
        if self._original is None:
            delattr(engine, self._name)
        else:
            setattr(engine, self._name, self._original)


def weakly(method: Any) -> Callable[..., Any]:
    """A function that calls a method while its object exists."""
    owner_of, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any, **kwargs: Any) -> Any:
        owner = owner_of()
        return None if owner is None else function(owner, *args, **kwargs)

    return call


def remove_all(handles: list[Any]) -> None:
    """Remove the handles, last first."""
    while handles:
        handles.pop().remove()


def gradient_hook(source: Any, model: int, ranks: bool) -> Callable[[Tensor], None]:
    """A post-accumulate-grad hook for all parameters of a model, by its id; references its event source weakly.

    Args:
        ranks: whether there is a process group.
    """
    hops = _HOPS_WITH_RANKS if ranks else _HOPS
    source_of = weakref.ref(source)
    start, last, add = out_of_compiler(_start), -1, set[int]().add
    untraced(_end_backward)  # the compiler would trace into what a compiled train step calls

    def hook(parameter: Tensor) -> None:
        nonlocal last, add
        number = backward_number()
        if number != last or number == -1:
            last, owner = number, source_of()
            reached = None if owner is None else start(owner, number, model, hops)
            add = (set[int]() if reached is None else reached).add
        add(id(parameter))

    return untraced(hook)


def _start(source: Any, number: int, model: int, hops: int) -> set[int] | None:
    """Begin to record a backward; None if it is not to be recorded."""
    if not source.running or model not in source.trackers:
        return None
    if number == -1:  # FSDP2 calls hooks outside of a backward where finalize_backward() reduces
        source.trackers[model].defer()
        return None
    if number not in source.reached:
        _end_backward(weakref.ref(source), number, hops)
    reached: set[int] = source.reached.setdefault(number, {}).setdefault(model, set())
    return reached


def _end_backward(source_of: weakref.ref[Any], number: int, hops: int) -> None:
    source = source_of()
    if hops:
        queue_callback(functools.partial(_end_backward, source_of, number, hops - 1))
    elif source is not None:
        out_of_compiler(type(source).backward_ended)(source, number)


def is_nested(optimizer: Optimizer) -> bool:
    """Detect a step inside another step, as those of wrapped optimizers and base classes are.

    If it is not, an earlier step has raised an error that the train step caught.
    """
    hooked = getattr(type(optimizer).step, "__code__", None)  # torch's wrapper of every step, which calls its hooks
    frame, steps = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        steps += frame.f_code is hooked
    return steps > 1
