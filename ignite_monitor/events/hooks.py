"""Hooks on engines, backward passes and optimizer steps."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from traceback import walk_stack
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model._torch import GradientHook, backward_number, calling_node, queue_callback, untraced


class Patch:
    """A replaced function of an engine or optimizer.

    Args:
        replacement: a method, referenced weakly; called with the original function and its arguments.
    """

    def __init__(self, owner: Any, name: str, replacement: Any) -> None:
        self._owner, self._name = weakref.ref(owner), name
        self._original = vars(owner).get(name)  # None for a method of its class
        original = weak_method(getattr(owner, name)) if self._original is None else self._original
        owner_of, function = weakref.ref(replacement.__self__), replacement.__func__

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            owner = owner_of()
            return original(*args, **kwargs) if owner is None else function(owner, original, *args, **kwargs)

        self._patched = patched
        setattr(owner, name, patched)

    def remove(self) -> None:
        """Restore the original, unless others have replaced the function since."""
        owner = self._owner()
        if owner is not None and vars(owner).get(self._name) is self._patched:
            delattr(owner, self._name)
            vars(owner).update({} if self._original is None else {self._name: self._original})


def weak_method(method: Any) -> Callable[..., Any]:
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


def gradient_hook(start: Callable[[int], set[int]]) -> Callable[[Tensor], None]:
    """A post-accumulate-grad hook for all parameters of a model.

    Args:
        start: called with the number of each backward; returns a set to which the ids of reached parameters are added.
    """
    last, add = -1, set[int]().add
    untraced(after_backward)  # the compiler would trace into what a compiled train step calls

    def hook(parameter: Tensor) -> None:
        nonlocal last, add
        number = backward_number()
        if number != last or number == -1:
            last, add = number, start(number).add
        add(id(parameter))

    return untraced(hook)


def after_backward(function: Callable[[], None], callback_depth: int) -> None:
    """Call a function at the end of the running backward, after a callback that queues so many others."""
    if callback_depth:
        queue_callback(functools.partial(after_backward, function, callback_depth - 1))
    else:
        function()


def in_outermost_backward(function: Callable[[], None]) -> None:
    """Call a function now, or if another backward has called the running one, as soon as that continues.

    Reentrant checkpoints call a backward within a backward, and gradients are whole when the outer one ends.
    """
    node = calling_node()
    if node is None:
        function()
        return
    handles: list[Any] = []

    def resumed(_: Any) -> None:
        if handles:
            remove_all(handles)
            in_outermost_backward(function)

    handles += [following.register_prehook(untraced(resumed)) for following, _ in node.next_functions if following]


@contextmanager
def after_each_backward(parameters: Iterable[Tensor], function: Callable[[], None]) -> Iterator[None]:
    """Call a function at the end of every backward that reaches parameters, after it has reduced gradients."""
    hook, awaited = GradientHook(), set[int]()

    def await_end() -> None:
        if backward_number() not in awaited:
            awaited.add(backward_number())
            after_backward(function, 3)

    def start(number: int) -> set[int]:
        if number != -1:  # FSDP2 calls hooks outside of a backward
            in_outermost_backward(await_end)
        return set()

    try:
        hook.register(parameters, gradient_hook(start))
        yield
    finally:
        hook.remove()


def is_nested(optimizer: Optimizer) -> bool:
    """Detect a step inside another one, of a wrapped optimizer or base class; else an earlier step raised an error."""
    hooked = getattr(type(optimizer).step, "__code__", None)  # torch's wrapper of every step, which calls its hooks
    return sum(frame.f_code is hooked for frame, _ in walk_stack(sys._getframe())) > 1
