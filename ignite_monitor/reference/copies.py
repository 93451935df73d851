"""Copies that share nothing with what they are copied from."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Iterable
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.reference.user_hooks import hooks_of_users, remove_hooks_of_users

T = TypeVar("T")


def detached_copy(value: T) -> T:
    """A deep copy, in which tensors that are parts of a graph are parts of none.

    Whatever holds the tensors is copied with them: containers, caches of keys and values, random number generators.
    A copy of a tensor requires gradients where the tensor does, since implementations are chosen by that.
    """
    with _DetachedTensors():
        return copy.deepcopy(value)


class SeparateCopy(NamedTuple):
    """A copy of a model that nothing else notices.

    Attributes:
        model: the copy.
        twins: the copy of every module -> the module; also of modules that are held without being registered.
        stripped: names of the modules that have lost hooks of the user's, which would be called for the copy as well.
    """

    model: nn.Module
    twins: dict[nn.Module, nn.Module]
    stripped: list[str]


def separate_copy(model: nn.Module) -> SeparateCopy:
    """A copy whose functions are its own, and which is without the forward hooks of the user's.

    Raises:
        ValueError: if it can't be made.
    """
    memo: dict[int, Any] = {id(hook): hook for *_, hook in hooks_of_users(model.modules())}
    try:
        with _DetachedTensors():
            separate = copy.deepcopy(model, memo)
            stripped = remove_hooks_of_users(separate)
            RebuiltFunctions(memo).within(separate)
    except Exception as error:
        raise ValueError(
            f"Argument reference should be a module, since model, a {type(model).__name__}, can't be copied: {error}"
        ) from error
    originals: Iterable[Any] = memo[id(memo)]  # deepcopy keeps them alive there
    twins = {memo[id(each)]: each for each in originals if isinstance(each, nn.Module) and id(each) in memo}
    return SeparateCopy(separate, twins, stripped)


class _DetachedTensors(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                # Not a leaf: it may be changed in place.
                memo[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad).clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


_DATA = (nn.Module, Tensor, torch.Generator, random.Random, list, dict, tuple, set)


class RebuiltFunctions:
    """Has the functions of a copy point into the copy.

    ``copy.deepcopy`` shares functions. One that a module keeps, as ``lambda x: m.drop(m.project(x))``, in a list, in a
    ``functools.partial`` or as its ``forward``, would have the copy run modules of the original. So what such a
    function refers to by its closure and its defaults is copied as the rest of the model is. Not rebuilt are functions
    of torch, and those that refer to something that can't be copied; what a function reaches by names of its file stays
    what it is.

    Args:
        memo: that of ``copy.deepcopy``: id of an original -> its copy, or itself where it is shared.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._cells: dict[int, CellType] = {}  # two functions may share a variable
        self._rebuilt: dict[int, Any] = {}
        self._seen: set[int] = set()
        self._copies: set[int] = set()
        self._known = 0

    def within(self, value: Any) -> Any:
        """What a copy is to hold in place of what it holds; copies that can be changed are, in place."""
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            function = self.within(value.__func__)
            return value if function is value.__func__ else MethodType(function, value.__self__)
        if isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            new = list(map(self.within, parts))
            end = 1 + len(value.args)
            rebuilt = functools.partial(new[0], *new[1:end], **dict(zip(value.keywords, new[end:], strict=True)))
            return value if all(map(is_, parts, new)) else rebuilt
        if isinstance(value, tuple):
            new = list(map(self.within, value))
            return value if all(map(is_, value, new)) else getattr(value, "_make", tuple)(new)
        # What is no copy belongs to the training.
        if id(value) not in self._seen and not isinstance(value, (Tensor, type)) and self._is_copy(value):
            self._seen.add(id(value))
            if isinstance(value, list):
                value[:] = map(self.within, value)
            members = value if isinstance(value, dict) else getattr(value, "__dict__", {})
            for key, member in [*members.items()]:
                new_member = self.within(member)
                if new_member is not member:
                    members[key] = new_member
        return value

    def _is_copy(self, value: Any) -> bool:
        if self._known != len(self._memo):
            self._known = len(self._memo)
            self._copies = {id(each) for original, each in self._memo.items() if id(each) != original}
        return id(value) in self._copies

    def _function(self, function: FunctionType) -> FunctionType:
        if id(function) in self._rebuilt:
            known: FunctionType = self._rebuilt[id(function)]
            return known
        self._rebuilt[id(function)] = function
        old_cells, name = function.__closure__ or (), function.__globals__.get("__name__") or ""
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        has_state = old_cells or any(isinstance(each, (*_DATA, MethodType, FunctionType)) for each in defaults)
        if name.partition(".")[0] == "torch" or not has_state:
            return function
        cells = tuple(self._cells.setdefault(id(cell), CellType()) for cell in old_cells)
        rebuilt = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
        # Before its contents, which it may be among.
        self._rebuilt[id(function)] = self._rebuilt[id(rebuilt)] = rebuilt
        try:
            rebuilt.__defaults__ = self._copy(function.__defaults__)
            rebuilt.__kwdefaults__ = self._copy(function.__kwdefaults__)
            for new, old in zip(cells, old_cells, strict=True):
                if is_full(old) and not is_full(new):
                    new.cell_contents = self._copy(old.cell_contents)
        except Exception:  # noqa: BLE001 - it can't be copied: what it then runs is noticed
            self._rebuilt[id(function)] = function
            return function
        functools.update_wrapper(rebuilt, function)
        return rebuilt

    def _copy(self, value: Any) -> Any:
        if id(value) not in self._memo and isinstance(value, MethodType):
            return MethodType(self.within(value.__func__), self._copy(value.__self__))
        if id(value) not in self._memo and isinstance(value, _DATA):
            return self.within(copy.deepcopy(value, self._memo))
        # Of objects that the model does not hold, only these: others may be a trainer, or a file.
        return self.within(self._memo.get(id(value), value))


def is_full(cell: CellType) -> bool:
    """Whether the variable of a closure has been set."""
    try:
        cell.cell_contents  # noqa: B018 - raises where the variable has not been set
    except ValueError:
        return False
    return True
