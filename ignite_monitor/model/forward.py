"""Seeing the forward passes of a model's modules from outside."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from torch import nn

from ignite_monitor.model._torch import forward_hooks, in_backward, module_call


def before_forward(
    modules: Iterable[nn.Module], hook: Callable[..., Any], *, first: bool = False, key: object = None
) -> AbstractContextManager[None]:
    """While it lasts, calls a hook before each forward pass of the modules, with the inputs they are about to get.

    Args:
        hook: is given the module, its positional arguments and its keyword arguments; a :class:`ModuleHook` also of
            shallow copies of the modules.
        first: whether it comes before the user's hooks rather than after them.
        key: what modules keep it by; None for what nobody else has. The compiler knows numbers alone.
    """
    return _on(modules, hook, before=True, first=first, key=key)


def after_forward(
    modules: Iterable[nn.Module], hook: Callable[..., Any], *, first: bool = False
) -> AbstractContextManager[None]:
    """As :func:`before_forward`, after each pass: the hook is given the output too, the one that others get."""
    return _on(modules, hook, before=False, first=first)


def outputs_to(modules: Iterable[nn.Module], hook: ModuleHook) -> AbstractContextManager[None]:
    """As :func:`after_forward`, at half its cost: the hook is given no keyword arguments."""
    return _on(modules, hook, before=False, with_kwargs=False)


def is_recomputation() -> bool:
    """Whether a forward pass is one that activation checkpointing repeats in the middle of a backward pass."""
    return in_backward()


def running_module() -> nn.Module | None:
    """The innermost module whose forward pass is going on; None outside of any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is module_call:
            module: nn.Module = frame.f_locals["self"]
            return module
        frame = frame.f_back
    return None


class ModuleHook:
    """A hook in whose place there is one that does nothing in deep copies of its modules, and where they are saved.

    That one is Python's own, so that what is saved can be loaded without this package.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        return contextlib.nullcontext().__exit__

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _Hook(ModuleHook):
    def __init__(self, hook: Callable[..., Any], modules: Iterable[nn.Module]) -> None:
        self._hook = hook
        self._modules = {id(module) for module in modules}

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        # A shallow copy has the hooks of the module itself.
        return self._hook(module, *args) if id(module) in self._modules else None


# As ``register_forward_hook`` does it, for hundreds of modules at a tenth of the cost, which matters where hooks come
# and go with every monitored iteration. The last hook sees what those of the user have made of inputs and outputs.
@contextlib.contextmanager
def _on(
    modules: Iterable[nn.Module],
    hook: Any,
    *,
    before: bool,
    with_kwargs: bool = True,
    first: bool = False,
    key: object = None,
) -> Iterator[None]:
    modules = list(modules)
    hook = hook if isinstance(hook, ModuleHook) else _Hook(hook, modules)
    key = object() if key is None else key
    places = forward_hooks(modules, before, with_kwargs)
    try:
        for hooks, *given_kwargs in places:
            hooks[key] = hook
            for each in given_kwargs:
                each[key] = True
            if first:
                hooks.move_to_end(key, last=False)
        yield
    finally:
        for place in places:
            for each in place:
                each.pop(key, None)
