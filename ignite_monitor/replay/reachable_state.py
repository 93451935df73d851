"""State of Python that a train step can reach, and keep from one call to the next."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model._torch import MODULE_ATTRIBUTES, buffers_in, modules_in, parameters_in, version

_MAX_DEPTH, _MAX_MEMBERS, _MAX_BYTES = 4, 1000, 1 << 22  # larger containers and arrays hold data
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SEQUENCES = (list, tuple, set, frozenset, deque)

Place = tuple[str, int]  # name, and id of the owner


def is_value(value: Any) -> bool:
    """Return True for a tensor, a number, a text or None: as an attribute, a train step often sets it anew."""
    return isinstance(value, (*_PLAIN, Tensor))


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that a module has of a class that is not torch's."""
    if type(module).__module__.startswith("torch."):  # DistributedDataParallel lists buffers
        return {}
    return {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}


def reachable_state(roots: Iterable[tuple[str, Any]]) -> dict[Place, list[Any]]:
    """Return what can be compared of named objects, without synchronization: of tensors their versions.

    Read are containers, modules, settings of optimizers, functions with their variables and globals, and objects of the
    user's classes. Objects of installed packages are not read, since other threads may use them, but for schedulers of
    torch. Attributes of modules for which :func:`is_value` is True are left out.
    """
    state: dict[Place, list[Any]] = {}
    waiting, seen = [(name, root, 0) for name, root in roots], set[int]()
    for name, root, _ in waiting:
        state.setdefault((name, 0), []).append(_comparable(root))
    while waiting:
        name, owner, depth = waiting.pop()
        if id(owner) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(owner))
        is_container = isinstance(owner, (dict, *_SEQUENCES))
        for key, value in _members(owner).items():
            place = name if is_container else f"{name}.{key}"
            state.setdefault((place, id(owner)), []).append((key, _comparable(value)))
            if not (is_value(value) or isinstance(value, (nn.Module, Optimizer, type))):
                is_named = isinstance(value, (dict, *_SEQUENCES, functools.partial, MethodType))
                own_name = place if is_named else getattr(value, "__name__", type(value).__name__)
                waiting.append((own_name, value, depth + 1))
    return state


def changed_names(before: Mapping[Place, Any], now: Mapping[Place, Any]) -> list[str]:
    """Return the names of what differs."""
    places = dict.fromkeys((*before, *now))
    return list(dict.fromkeys(place[0] for place in places if before.get(place) != now.get(place)))


def _comparable(value: Any) -> Any:
    if isinstance(value, (*_PLAIN, type)):
        return repr(value)
    if isinstance(value, Tensor):
        return id(value), version(value)
    if isinstance(value, Iterator):
        return object()  # a second pass may draw from it
    if getattr(value, "nbytes", _MAX_BYTES) < _MAX_BYTES and hasattr(value, "tobytes"):  # an array of NumPy
        return value.tobytes()
    return len(value) if isinstance(value, (dict, *_SEQUENCES)) else type(value)


def _members(value: Any) -> dict[Any, Any]:
    if isinstance(value, nn.Module):
        own = {key: item for key, item in attributes_of(value).items() if not is_value(item)}
        if isinstance(value, torch.jit.ScriptModule):
            return own
        members = {key: id(item) for key, item in (parameters_in(value) | modules_in(value)).items()}
        return own | {"modules, parameters or buffers": repr([members, *buffers_in(value)])}
    if isinstance(value, Optimizer):
        groups = enumerate(value.param_groups)
        return {f"{key} of group {i}": item for i, group in groups for key, item in group.items() if key != "params"}
    if isinstance(value, (dict, *_SEQUENCES)):
        if len(value) > _MAX_MEMBERS:
            return {}
        return value if isinstance(value, dict) else dict[Any, Any](enumerate(value))
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, MethodType):
        return {"function": value.__func__, "self": value.__self__}
    if not _is_users(value.__module__ if isinstance(value, FunctionType) else type(value).__module__):
        return {}
    if isinstance(value, FunctionType):
        used = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return used | {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    return dict(getattr(value, "__dict__", {}))


def _is_users(module: str) -> bool:
    if module == "__main__" or module.startswith("torch.optim.lr_scheduler"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not file.startswith(_LIBRARIES) and not module.startswith("ignite_monitor.")
