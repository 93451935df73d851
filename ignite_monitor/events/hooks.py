"""Hooks on engines, backward passes and optimizer steps."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from traceback import walk_stack
from types import MethodType
from typing import Any

from torch.optim import Optimizer


class Patch:
    """A replaced function of an engine or optimizer: a method, held weakly, is called with the original first."""

    def __init__(self, owner: Any, name: str, replacement: Any, is_method: bool = False) -> None:
        self._owner, self._name = weakref.ref(owner), name
        self._original = vars(owner).get(name)  # None for a method of its class
        original = weak_method(getattr(owner, name)) if self._original is None else self._original
        owner_of, function = weakref.ref(replacement.__self__), replacement.__func__

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            owner = owner_of()
            return original(*args, **kwargs) if owner is None else function(owner, original, *args, **kwargs)

        self._patched: Any = patched
        if is_method:  # others take its function, or look at its arguments; it keeps its owner alive
            known = getattr(type(owner), name) if self._original is None else self._original
            self._patched = MethodType(
                functools.wraps(known)(lambda _, *args, **kwargs: patched(*args, **kwargs)), owner
            )
        setattr(owner, name, self._patched)

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


def is_nested(optimizer: Optimizer) -> bool:
    """Detect a step inside another one, of a wrapped optimizer or base class; else an earlier step raised an error."""
    hooked = getattr(type(optimizer).step, "__code__", None)  # torch's wrapper of every step, which calls its hooks
    return sum(frame.f_code is hooked for frame, _ in walk_stack(sys._getframe())) > 1
