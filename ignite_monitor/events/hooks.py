"""Hooks on engines and optimizer steps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch.optim import Optimizer


def weak_method(method: Any) -> Callable[..., Any]:
    """A function that calls a method while its object exists."""
    owner_of, function = weakref.ref(method.__self__), method.__func__

    def call(*args: Any, **kwargs: Any) -> Any:
        owner = owner_of()
        return None if owner is None else function(owner, *args, **kwargs)

    return call


def remove_all(handles: list[Any]) -> None:
    """Remove the handles, last first; after an interrupt a further call removes the others."""
    while handles:
        handles[-1].remove()
        del handles[-1:]


def register_first(register: Callable[[Any], Any], hook: Callable[..., Any], handles: list[Any]) -> None:
    """Register a hook of optimizers before those of the user: the last in line may remove itself."""
    handles.append(register(hook))
    handles[-1].hooks_dict_ref().move_to_end(handles[-1].id, last=False)


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


class LastHook:
    """Takes the place of a step's last pre-hook: puts it back, calls it, then what starts the step.

    torch goes through the dictionary meanwhile: it bears a new value, but no new hook, and none that is removed, except
    for the last one.
    """

    def __init__(self, optimizer: Optimizer, hooks: dict[int, Any]) -> None:
        self._optimizer, self._hooks, self._key = optimizer, hooks, next(reversed(hooks))
        self._hook = hooks[self._key]
        self.starts: list[Callable[..., Any]] = []  # of the engines whose monitors follow the step
        hooks[self._key] = self

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if optimizer is not self._optimizer:  # its step is made by another hook of this step
            return self._hook(optimizer, args, kwargs)
        self.remove()
        given = self._hook(optimizer, args, kwargs)
        if given is not None:
            if not isinstance(given, tuple) or len(given) != 2:
                return given  # torch raises an error
            args, kwargs = given[0], kwargs if given[1] is kwargs else {**given[1]}
        for start in self.starts:
            args, kwargs = start(optimizer, args, kwargs) or (args, kwargs)
        return args, kwargs

    def remove(self) -> None:
        """Put the hook back."""
        if self._hooks.get(self._key) is self:
            self._hooks[self._key] = self._hook
