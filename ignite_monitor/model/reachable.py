"""What a function may come across when it is called: its closure, its globals, the attributes of its objects."""

from __future__ import annotations

import functools
import gc
from collections.abc import Container, Iterable
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

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
