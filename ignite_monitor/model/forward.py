"""Hooks on the forward passes of modules."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from traceback import walk_stack
from typing import Any

from torch import nn

from ignite_monitor.model._torch import module_call

Modules = Iterable[nn.Module]


def before_forward(modules: Modules, hook: Callable[..., Any], *, first: bool = False) -> AbstractContextManager[None]:
    """Call a hook with module, args and kwargs before forward passes; if ``first``, before the user's hooks."""
    return _registered(nn.Module.register_forward_pre_hook, modules, hook, with_kwargs=True, prepend=first)


def after_forward(
    modules: Modules, hook: Callable[..., Any], *, first: bool = False, always: bool = False
) -> AbstractContextManager[None]:
    """Call a hook with module, args and output after forward passes; ``always``: with None after an error."""
    return _registered(nn.Module.register_forward_hook, modules, hook, prepend=first, always_call=always)


def running_modules() -> Iterator[nn.Module]:
    """Modules whose forward pass is running, the innermost first."""
    return (frame.f_locals["self"] for frame, _ in walk_stack(sys._getframe(1)) if frame.f_code is module_call)


def running_module() -> nn.Module | None:
    """The innermost module whose forward pass is running."""
    return next(running_modules(), None)


class ModuleHook:
    """A hook that deep copies and saved files of modules replace by a function that does nothing.

    It is called for shallow copies of its modules too.

    Attributes:
        error: what its measuring has raised, for its monitor to raise after the train step.
    """

    error: Exception | None = None

    def raise_error(self) -> None:
        """Raise the error that a forward pass was not to see."""
        if self.error is not None:
            raise vars(self).pop("error")  # its traceback holds this hook

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")


class _Hook(ModuleHook):
    def __init__(self, hook: Callable[..., Any], modules: Modules) -> None:
        self._hook = hook
        self._modules = {id(module) for module in modules}

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        # Shallow copies share the hooks of their modules.
        return self._hook(module, *args) if id(module) in self._modules else None


@contextlib.contextmanager
def _registered(register: Callable[..., Any], modules: Modules, hook: Any, **options: bool) -> Iterator[None]:
    modules = list(modules)
    hook = hook if isinstance(hook, ModuleHook) else _Hook(hook, modules)
    with contextlib.ExitStack() as handles:
        for module in modules:
            handles.callback(register(module, hook, **options).remove)
        yield
