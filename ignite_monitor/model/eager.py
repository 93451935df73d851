"""Running compiled models as they are written, so that hooks on their modules are called."""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Container, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import eager_where, frame_skipper

Function = TypeVar("Function", bound=Callable[..., object])


def untraced(function: Function) -> Function:
    """The same function, which the compiler does not look into where compiled code calls it, but maybe what it calls.

    In a compiled function that makes a backward pass hooks are such code. Without a private name each call takes twice
    as long.
    """
    pass_over = frame_skipper()
    if pass_over is None:
        return torch.compiler.disable(function, recursive=False)  # type: ignore[no-any-return]
    pass_over(getattr(function, "__func__", function))
    return function


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
        self._models = models
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

    @functools.cached_property
    def _modules(self) -> set[int]:
        return {id(module) for model in self._models for module in model.modules()}

    def _is_to_be_eager(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if not self._models:
            return True
        known = self._known.get(id(function))
        if known is None:
            known = self._known[id(function)] = function, reaches([function], self._modules)
        if known[1] or reaches([args, kwargs], self._modules):
            return True
        self.others.add(getattr(function, "__qualname__", type(function).__name__))
        return False


_MOST = 20_000


def reaches(starts: Iterable[Any], wanted: Container[int]) -> bool:
    """Whether modules can be got at from functions, methods and objects; where that takes too long to say, yes.

    Not followed are torch's own functions into their globals, and tensors into their graphs.

    Args:
        wanted: ids of the modules.
    """
    waiting = list(starts)
    met: dict[int, Any] = {}  # which keeps what is made on the way, and with that its id
    while waiting:
        each = waiting.pop()
        if id(each) in wanted:
            return True
        if id(each) in met or isinstance(each, (Tensor, type, ModuleType)) or not gc.is_tracked(each):
            continue
        if len(met) == _MOST:
            return True
        met[id(each)] = each
        waiting += _parts(each)
    return False


def _parts(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return [*_held(value), *_globals(value)]
    if isinstance(value, nn.Module):
        return [*value.children(), *(each for name, each in vars(value).items() if name[0] != "_")]
    return gc.get_referents(value)


def _held(function: FunctionType) -> list[Any]:
    return [function.__closure__, function.__defaults__, function.__kwdefaults__, vars(function)]


def _globals(function: FunctionType) -> list[Any]:
    here = function.__globals__
    if _is_torch(here.get("__name__")):
        return []
    names = _names(function.__code__)
    found = [here[name] for name in names if name in here]
    for module in [each for each in found if isinstance(each, ModuleType) and not _is_torch(each.__name__)]:
        found += [vars(module)[name] for name in names if name in vars(module)]
    return found


def _is_torch(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] == "torch"


@functools.lru_cache(1024)
def _names(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes that code uses, that in it included."""
    within = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(code.co_names).union(*within)
