"""Copies of models that share nothing with the training run."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ignite_monitor.model._torch import known_forward_hooks, remove_backward_hooks, remove_forward_hook
from ignite_monitor.model.forward import before_forward
from ignite_monitor.model.isolation import Captured, is_reference_run, preserved_rng_state, reachable
from ignite_monitor.model.structure import first_difference
from ignite_monitor.reference.call import NotComparableError

T = TypeVar("T")


def detached_copy(value: T, memo: dict[int, Any] | None = None) -> T:
    """Deep copy in which tensors belong to no graph.

    Copied are containers, caches of keys and values, and generators too. A tensor's copy requires gradients if the
    tensor does: kernels are selected by that.

    Args:
        memo: as for ``copy.deepcopy``: id of an object -> its copy.
    """
    with _DetachedTensors():
        return copy.deepcopy(value, memo)


class _DetachedTensors(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                # The clone is no leaf, so that it can be changed in place.
                memo[id(tensor)] = tensor.detach().requires_grad_(tensor.requires_grad).clone()
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def separate_copy(model: nn.Module) -> nn.Module:
    """Deep copy of a model without the users' forward and backward hooks.

    Raises:
        ValueError: if the copy would share modules or parameters with the model, or can't be made.
    """
    _check_functions(model)
    memo = {id(hook): hook for _, own in user_forward_hooks(model.modules()) for hook in own.values()}
    try:
        with preserved_rng_state({item.device for item in model.parameters()}):
            separate = detached_copy(model, memo)
    except Exception as error:
        raise ValueError(f"it can't be copied ({type(error).__name__}: {error})") from error
    if first_difference(model, separate) is not None or _parts(model) & _parts(separate):
        raise ValueError("its __deepcopy__ returns the same modules, the same parameters, or another structure")
    for module, own in user_forward_hooks(separate.modules()):
        for key in own:
            remove_forward_hook(module, key)
    for module in separate.modules():
        remove_backward_hooks(module)
    return separate


def _check_functions(model: nn.Module) -> None:
    """Refuse functions over modules of the model, which ``copy.deepcopy`` shares: a copy would run the model's modules.

    Raises:
        ValueError: if a module keeps one.
    """
    modules = set(model.modules())
    for name, module in model.named_modules():
        for path, value in reachable(module):
            if isinstance(value, nn.Module) and value in modules and any(isinstance(key, Captured) for key in path):
                raise ValueError(
                    f"attribute {path[0]!r} of {name or 'the root module'} is, or holds, a function over a module of "
                    "the model, which a copy would share"
                )


def user_forward_hooks(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, dict[tuple[str, int], Any]]]:
    """Modules with forward hooks that users registered, and these hooks; without those of libraries and monitors."""
    hooked = []
    for module in modules:
        own = {key: hook for key, hook in known_forward_hooks([module])[0].items() if not _is_of_library(hook)}
        if own:
            hooked.append((module, own))
    return hooked


def _is_of_library(hook: Any) -> bool:
    package = getattr(hook, "__module__", None) or type(hook).__module__
    return package.partition(".")[0] in ("torch", "transformers", "ignite_monitor")


def _parts(model: nn.Module) -> set[int]:
    return {id(item) for item in (*model.modules(), *model.parameters())}


@contextlib.contextmanager
def guarded(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """Stop a second pass of another model before it calls a module of the training model.

    Raises:
        NotComparableError: on exit, if it was about to, even where the other model's own code caught the error.
    """
    own = set(other.modules())
    names = {module: name or "the root module" for name, module in model.named_modules() if module not in own}
    errors: list[NotComparableError] = []

    def stop(module: nn.Module, *_: Any) -> None:
        if is_reference_run():
            text = (
                f"the reference calls {names[module]} of the model that trains: give a module as the argument reference"
            )
            errors.append(NotComparableError(text))
            raise errors[0]

    with before_forward(names, stop, first=True):
        yield
    if errors:
        raise errors[0]
