"""State of Python that a train step and modules keep: what a second pass changed of it, which is then restored."""

from __future__ import annotations

import functools
import io
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model._torch import MODULE_ATTRIBUTES, version
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.tensors import bits_of

_MAX_DEPTH, _MAX_MEMBERS, _MAX_NUMEL = 4, 1000, 1 << 20  # larger containers and tensors hold data
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_SKIPPED = (nn.Module, nn.Parameter, Optimizer, type, ModuleType, io.IOBase)


class KeptState:
    """A copy of what a train step can keep from one call to the next.

    It holds attributes of modules, settings of optimizers, variables, globals and the object of the train step's
    function, and the attributes of the engine's state, with the lists, dictionaries, tensors and objects in them.
    Objects of installed packages are left alone, but for schedulers of torch; they may belong to other threads.

    Attributes:
        iterators: where there are iterators, which can't be copied.
    """

    def __init__(self, others: Iterable[Any], modules: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        self.iterators: list[str] = []
        # Label, container, former entries, and whether these are all.
        self._places: list[tuple[str, Any, dict[Any, Any], bool]] = []
        self._tensors: list[tuple[str, Tensor, Tensor | int]] = []  # with copies; of large ones with their versions
        self._seen: set[int] = set()
        for module in modules:
            own = {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
            self._save(f"attribute {{}} of {type(module).__name__}", vars(module), own, is_whole=False)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                settings = {name: value for name, value in group.items() if name != "params"}
                self._save(f"setting {{}} of {type(optimizer).__name__}", group, settings, is_whole=False)
        for value in others:
            self._visit("the engine's state" if isinstance(value, dict) else "the train step's object", value)

    @torch.no_grad()
    def restore(self) -> list[str]:
        """Restore everything, and return what had changed."""
        changed: dict[str, None] = {}
        for label, tensor, saved in self._tensors:
            if not _is_same(tensor if isinstance(saved, Tensor) else version(tensor), saved):
                changed[label] = None
                if isinstance(saved, Tensor):
                    tensor.data.copy_(saved)
        for label, container, entries, is_whole in self._places:
            now = _entries(container)
            new = now.keys() - entries.keys() if is_whole else set()
            other = [key for key in entries if key not in now or not _is_same(entries[key], now[key])]
            changed.update(dict.fromkeys(label.format(key) for key in (*other, *new)))
            if isinstance(container, CellType):
                for value in entries.values():  # none in a variable without a value
                    container.cell_contents = value
            elif isinstance(container, dict):
                for key in new:
                    del container[key]
                container.update(entries)
            else:
                container.clear()
                container.extend(entries.values())
        return list(changed)

    def _save(self, label: str, container: Any, entries: dict[Any, Any], depth: int = 0, is_whole: bool = True) -> None:
        self._places.append((label, container, entries, is_whole))
        for key, value in entries.items():
            self._visit(label.format(key), value, depth + 1)

    def _visit(self, label: str, value: Any, depth: int = 0) -> None:
        if id(value) in self._seen or depth > _MAX_DEPTH or isinstance(value, _SKIPPED):
            return
        self._seen.add(id(value))
        if isinstance(value, Tensor):
            if has_local_data(value):
                is_small = value.numel() <= _MAX_NUMEL
                self._tensors.append((label, value, value.detach().clone() if is_small else version(value)))
        elif isinstance(value, (dict, list, deque)):
            if len(value) <= _MAX_MEMBERS:
                self._save(label, value, _entries(value), depth)
        elif isinstance(value, (tuple, functools.partial, MethodType)):
            names = {functools.partial: ("func", "args", "keywords"), MethodType: ("__func__", "__self__")}
            for member in value if isinstance(value, tuple) else [getattr(value, name) for name in names[type(value)]]:
                self._visit(label, member, depth + 1)
        elif isinstance(value, Iterator):
            self.iterators.append(label)
        elif depth and not _is_users(value.__module__ if isinstance(value, FunctionType) else type(value).__module__):
            return
        elif isinstance(value, FunctionType):
            for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
                self._save(f"variable {name}", cell, _entries(cell), depth)
            used = {name: value.__globals__[name] for name in value.__code__.co_names if name in value.__globals__}
            self._save("global {}", value.__globals__, used, depth, is_whole=False)
        elif hasattr(value, "__dict__"):
            self._save(f"attribute {{}} of {type(value).__name__}", vars(value), dict(vars(value)), depth)


def _is_users(module: str) -> bool:
    """Return True for a module of the user's; schedulers of torch count too, since train steps call them."""
    if module == "__main__" or module.startswith("torch.optim.lr_scheduler"):
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not file.startswith(_LIBRARIES) and not module.startswith("ignite_monitor.")


def _entries(container: Any) -> dict[Any, Any]:
    if isinstance(container, CellType):
        return {} if container == CellType() else {0: container.cell_contents}
    return dict(container if isinstance(container, dict) else enumerate(container))


def _is_same(one: Any, other: Any, depth: int = 0) -> bool:
    """Return True if two values are the same, or equal bit by bit; what can't be compared counts as the same."""
    if one is other or depth > _MAX_DEPTH:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        if not (has_local_data(one) and has_local_data(other)):
            return True
        is_alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        return is_alike and torch.equal(bits_of(one), bits_of(other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key], depth + 1) for key in one)
    if isinstance(one, (tuple, list, deque)):
        return len(one) == len(other) and all(_is_same(*pair, depth + 1) for pair in zip(one, other, strict=True))
    if isinstance(one, (bool, int, float, complex, str, bytes)) or hasattr(one, "tobytes"):  # an array of NumPy
        return repr(one) == repr(other)
    return not hasattr(one, "__dict__") or _is_same(vars(one), vars(other), depth + 1)
