"""Objects that a module reaches by attributes, containers and closures: a copy may share functions over them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from ignite_monitor.model._torch import MODULE_ATTRIBUTES


class Captured(int):
    """A position in a path of :func:`reachable`, among the objects of a function's closure and defaults."""


_ATOMS = (int, float, str, bytes, type(None), Tensor, nn.Module, ModuleType, type)
_MAX_DEPTH = 5  # a trainer or a data set may be behind an attribute
_MAX_MEMBERS = 1000  # a larger container holds data


def reachable(module: nn.Module) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Paths and objects that a module reaches by attributes of its own, containers, objects and closures.

    Modules are returned, and not entered; nor are containers of more than 1,000 members.
    """
    seen: set[int] = set()
    waiting: deque[tuple[tuple[Any, ...], Any]]
    waiting = deque(((name,), item) for name, item in vars(module).items() if name not in MODULE_ATTRIBUTES)
    while waiting:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield path, value
        if len(path) <= _MAX_DEPTH and not isinstance(value, _ATOMS):
            waiting += [((*path, key), member) for key, member in _members(value)]


def _members(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (dict, list, tuple, deque)):
        members = value.items() if isinstance(value, dict) else enumerate(value)
        return [*members] if len(value) <= _MAX_MEMBERS else ()
    if isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
        return [(Captured(index), item) for index, item in enumerate(held)]
    if isinstance(value, MethodType):
        return enumerate([value.__func__, value.__self__])
    if isinstance(value, functools.partial):
        return enumerate([value.func, *value.args, *value.keywords.values()])
    return [*getattr(value, "__dict__", {}).items()]
