"""Functions of an engine that are replaced during a run, and hooks of optimizers."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

from ignite.engine import Engine
from torch.optim import Optimizer


class Patch:
    """A replaced function of an engine.

    Args:
        replacement: a method, referenced weakly: it is called with the original function and the arguments. Without
            its object the original is called.
    """

    def __init__(self, engine: Engine, name: str, replacement: Callable[..., Any]) -> None:
        self._engine, self._name = weakref.ref(engine), name
        self._original = vars(engine).get(name)  # None for a method of its class
        original = weakly(getattr(engine, name)) if self._original is None else self._original
        method_of = weakref.WeakMethod(replacement)

        @functools.wraps(original)
        def patched(*args: Any) -> Any:
            method = method_of()
            return original(*args) if method is None else method(original, *args)

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


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls a method while its object exists."""
    method_of = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = method_of()
        return None if bound is None else bound(*args, **kwargs)

    return call


def remove_all(handles: list[Any]) -> None:
    """Remove the handles, last first."""
    while handles:
        handles.pop().remove()


def calling_after(closure: Callable[..., Any], report: Callable[[], None]) -> Callable[..., Any]:
    """A closure that calls a function after its first evaluation."""
    has_reported = False

    @functools.wraps(closure)
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_reported
        loss = closure(*args, **kwargs)
        if not has_reported:
            has_reported = True
            report()
        return loss

    return evaluate


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
