"""Copies that share nothing with what they are copied from."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.reference.functions import RebuiltFunctions
from ignite_monitor.reference.user_hooks import hooks_of_users, remove_hooks_of_users

T = TypeVar("T")


def detached_copy(value: T) -> T:
    """A deep copy, in which tensors that are parts of a graph are parts of none.

    Whatever holds the tensors is copied with them: containers, caches of keys and values, random number generators.
    A copy of a tensor requires gradients where the tensor does, since implementations are chosen by that.

    Args:
        value: anything that ``copy.deepcopy`` can copy, tensors that require gradients included.
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
    memo: dict[int, Any] = {id(hook): hook for module in model.modules() for _, _, hook in hooks_of_users(module)}
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
