"""Copies that share nothing with what they are copied from."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.model._torch import known_forward_hooks, remove_forward_hook

T = TypeVar("T")


def detached_copy(value: T, shared: Iterable[Any] = ()) -> T:
    """A deep copy, in which tensors that are parts of a graph are parts of none.

    Whatever holds the tensors is copied with them: containers, caches of keys and values, random number generators.
    A copy of a tensor requires gradients where the tensor does, since implementations are chosen by that.

    Args:
        value: anything that ``copy.deepcopy`` can copy, tensors that require gradients included.
        shared: objects that are not copied.
    """
    with _DetachedTensors():
        return copy.deepcopy(value, {id(each): each for each in shared})


def separate_copy(model: nn.Module) -> tuple[nn.Module, list[str]]:
    """A copy of a model that nothing else notices, and the names of the modules that have lost forward hooks by it.

    Functions that a user has registered as forward hooks are left out: they would be called for the copy as well, and
    may well keep for the training what they see. Those of torch and transformers, and the multipliers of a
    parametrization, are part of how a module works.

    Raises:
        ValueError: if it can't be copied.
    """
    own = [hook for module in model.modules() for hook in known_forward_hooks(module).values() if not _of_library(hook)]
    try:
        separate = detached_copy(model, own)
    except Exception as error:
        raise ValueError(
            f"Argument reference should be a module, since model, a {type(model).__name__}, can't be copied: {error}"
        ) from error
    stripped = []
    for name, module in separate.named_modules():
        lost = [known for known, hook in known_forward_hooks(module).items() if not _of_library(hook)]
        for known in lost:
            remove_forward_hook(module, known)
        if lost:
            stripped.append(name or "the root module")
    return separate, stripped


def _of_library(hook: Any) -> bool:
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return where.partition(".")[0] in ("torch", "transformers") or where.startswith("ignite_monitor.scaling.")


class _DetachedTensors(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                # Not a leaf: it may be changed in place.
                memo[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad).clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))
