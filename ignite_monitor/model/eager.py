"""Runs compiled models eagerly, so that hooks on their modules are called."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Container
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import eager_where, frame_skipper

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """The function, which the compiler does not trace, but maybe what it calls: a hook in a compiled backward pass."""
    frame_skipper()(getattr(function, "__func__", function))
    return function


@functools.cache
def out_of_compiler(function: Function) -> Function:
    """The function, which the compiler does not trace, nor what it calls."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


class Eager(contextlib.ExitStack):
    """Run compiled functions that call some models eagerly; nothing is compiled again.

    Hooks registered after the first compiled call would not run otherwise. Eager are the models, their modules, and
    functions that refer to one of them, see :func:`refers_to`; without models all compiled functions.
    """

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self._models = models

    def __enter__(self) -> Eager:
        if "torch._dynamo" in sys.modules:  # nothing is compiled before this import, which takes seconds
            self._modules = {id(module) for model in self._models for module in model.modules()}
            self.enter_context(eager_where(self._is_eager))
        return self

    def _is_eager(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        values = [function, *args, *kwargs.values()]
        return not self._models or any(refers_to(value, self._modules) for value in values)


def refers_to(value: Any, modules: Container[int], depth: int = 2) -> bool:
    """Return True if a value is a module, contains it, or refers to it in so many steps.

    A function refers to its closure, defaults and the global names in its code; a method to its object; any other
    object to its attributes. Members of lists and dictionaries are not searched.

    Args:
        modules: ids of the modules.
    """
    value = getattr(value, "__self__", value)
    if isinstance(value, nn.Module):
        return any(id(module) in modules for module in value.modules())
    if not depth or isinstance(value, Tensor):
        return False
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        names = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        held = [*cells, *names, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    else:
        held = list(getattr(value, "__dict__", {}).values())
    return any(refers_to(other, modules, depth - 1) for other in held)


def _names(code: CodeType) -> set[str]:
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*nested)
