"""State of Python that a train step can reach, and keep from one call to the next."""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from threading import Thread
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model._torch import MODULE_ATTRIBUTES, version
from ignite_monitor.model.isolation import generator_kinds

_MAX_DEPTH, _MAX_MEMBERS, _MAX_SIZE = 6, 1000, 1 << 20  # larger containers, tensors and arrays hold data
_LIBRARIES = {"torch", "ignite", "ignite_monitor", *sys.stdlib_module_names}  # other threads may use their objects
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SEQUENCES = (list, tuple, set, frozenset, deque, partial, MethodType, staticmethod, classmethod)


def values_of(owner: Any) -> dict[str, Any]:
    """Return the attributes that are tensors or plain values, of a module or of the engine's state."""
    return {name: item for name, item in _attributes_of(owner).items() if isinstance(item, (*_PLAIN, Tensor))}


def _attributes_of(owner: Any) -> dict[str, Any]:
    if type(owner).__module__.startswith("torch."):  # DistributedDataParallel lists buffers
        return {}
    return {name: item for name, item in vars(owner).items() if name not in MODULE_ATTRIBUTES}


class ReachableState:
    """Members of named objects, except :func:`values_of` modules, compared without synchronization.

    Versions of tensors are compared. Objects of torch, Ignite and the standard library are not read, except modules,
    optimizers and schedulers. Hooks are not read either.
    """

    def __init__(self, roots: Iterable[tuple[str, Any]]) -> None:
        self.generators: list[Any] = []  # random generators, which are not compared
        self.tensors: dict[int, tuple[str, Tensor]] = {}  # by id, parameters and others that are not large
        self._state: dict[tuple[str, int], list[Any]] = {}  # by name, and id of the owner unless it is a root
        self._alive: dict[int, Any] = {}  # owners and what they hold, so that no id is used twice
        waiting = [(name, root, 0) for name, root in roots]
        while waiting:
            name, owner, depth = waiting.pop()
            if id(owner) in self._alive:
                continue
            members = _members(owner)
            members = members if len(members) <= _MAX_MEMBERS else {"length": len(members)}
            self._alive[id(owner)] = owner, members
            for key, value in members.items():
                place = f"{name}.{key}" if isinstance(key, str) else name
                if isinstance(value, generator_kinds()):
                    self.generators.append(value)
                    continue
                if isinstance(value, Tensor) and (isinstance(value, nn.Parameter) or value.numel() < _MAX_SIZE):
                    self.tensors.setdefault(id(value), (place, value))
                self._state.setdefault((place, id(owner) if depth else 0), []).append(_comparable(value))
                if depth < _MAX_DEPTH:
                    waiting.append((_name_of(value, place), value, depth + 1))

    def changes_to(self, later: ReachableState) -> list[str]:
        """Return the names of what differs in a later state."""
        places = dict.fromkeys((*self._state, *later._state))
        return list(dict.fromkeys(place[0] for place in places if self._state.get(place) != later._state.get(place)))


def _name_of(value: Any, place: str) -> str:
    if isinstance(value, (dict, *_SEQUENCES)):
        return place
    return value.__name__ if isinstance(value, (FunctionType, type)) else type(value).__name__


def _comparable(value: Any) -> Any:
    if isinstance(value, Tensor):
        return id(value), version(value)
    if isinstance(value, (*_PLAIN, type)):
        return repr(value)
    if isinstance(value, Iterator):
        return object()  # a second pass may draw from it
    if type(value).__module__ == "numpy" and getattr(value, "size", _MAX_SIZE) < _MAX_SIZE:  # an array
        return value.tobytes()
    return type(value)


def _members(value: Any) -> dict[Any, Any]:
    """Return what an object holds, by name or number."""
    if isinstance(value, (*_PLAIN, Tensor, ModuleType, Thread)):  # another thread changes itself
        return {}
    if isinstance(value, type):
        return {
            name: item for kind in value.__mro__[::-1] if _is_read(kind.__module__) for name, item in vars(kind).items()
        }
    if type(value) is dict:
        return value.copy()
    if isinstance(value, (dict, *_SEQUENCES)):  # of which a subclass may do anything when it is asked for a member
        return _numbered(value)
    if isinstance(value, Optimizer):
        return {"param_groups": value.param_groups}
    if isinstance(value, FunctionType):
        return _variables_of(value) if _is_read(value.__module__) else {}
    members: dict[Any, Any] = {"class": type(value)}
    if isinstance(value, nn.Module):
        members |= {name: item for name, item in _attributes_of(value).items() if name not in values_of(value)}
        members |= dict(value.named_parameters(recurse=False))
        members |= {name: "buffer" for name, _ in value.named_buffers(recurse=False)}
        members |= {name: id(module) for name, module in value.named_children()}
    elif _is_read(type(value).__module__):
        members |= vars(value) if hasattr(value, "__dict__") else _numbered(value)
    return members


def _numbered(value: Any) -> dict[Any, Any]:
    return dict(enumerate(gc.get_referents(value)))


def _variables_of(function: FunctionType) -> dict[str, Any]:
    names, scope = {*_names_in(function.__code__)}, function.__globals__
    variables = {name: scope[name] for name in names if name in scope}
    for module in [item for item in variables.values() if isinstance(item, ModuleType) and _is_read(item.__name__)]:
        variables |= {name: item for name, item in vars(module).items() if name in names}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    variables |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    return variables | vars(function) | {"defaults": function.__defaults__, "keywords": function.__kwdefaults__}


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_read(module: str) -> bool:
    return str(module).partition(".")[0] not in _LIBRARIES or module == "torch.optim.lr_scheduler"
