"""Running compiled models as they are written, so that hooks on their modules are called."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from ignite_monitor.model._torch import eager_where
from ignite_monitor.model.reachable import reaches

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """The same function, which the compiler does not look into where compiled code calls it, but maybe what it calls.

    In a compiled function that makes a backward pass hooks are such code. It costs nothing at each call.
    """
    return torch.compiler.disable(function, recursive=False)  # type: ignore[no-any-return]


@functools.cache
def out_of_compiler(function: Function) -> Function:
    """A function that is called outside of the compiler, with all that it calls, wherever that is."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


class Eager(contextlib.AbstractContextManager["Eager"]):
    """While it lasts, what ``torch.compile`` has made of some models runs as it is written; nothing is compiled for it.

    Hooks that come after a model's first compiled call would not run otherwise. What else is compiled and holds none of
    their modules, a function of a library's or an optimizer's step, stays compiled and computes the same bits as ever.

    Args:
        models: the models; none for everything that is compiled.

    Attributes:
        others: names of what has run compiled.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._modules = {id(module) for model in models for module in model.modules()}
        self._known: dict[int, tuple[Any, bool]] = {}
        self._around = contextlib.ExitStack()
        self.others: set[str] = set()

    def __enter__(self) -> Eager:
        # Whoever compiles anything has imported it, which takes seconds.
        if "torch._dynamo" in sys.modules:
            self._around.enter_context(eager_where(self._is_to_be_eager))
        return self

    def __exit__(self, *error: object) -> None:
        self._around.close()

    def _is_to_be_eager(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self._modules:
            return True
        known = self._known.get(id(function))
        if known is None:
            known = self._known[id(function)] = function, reaches([function], self._modules)
        if known[1] or reaches([args, kwargs], self._modules):
            return True
        self.others.add(getattr(function, "__qualname__", type(function).__name__))
        return False
