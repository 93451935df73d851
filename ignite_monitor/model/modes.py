"""Modes to compute in: eager, hidden from the user's modes, at full precision, or with gradients enabled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import (
    eager_where,
    frame_skipper,
    is_functorch_wrapped,
    unseen_by_dispatch,
    unseen_by_functions,
)
from ignite_monitor.model._torch import in_backward as in_backward

_strided = torch.strided

Function = TypeVar("Function", bound=Callable[..., object])


@contextmanager
def aside() -> Iterator[None]:
    """Compute without a graph, hidden from the user's modes: selective checkpointing, counters of operations."""
    with unseen_by_functions(), unseen_by_dispatch(), torch.no_grad():  # in this order modes are not asked about it
        yield


def is_plain(tensor: Tensor) -> bool:
    """Return True for data on one device: no DTensor, nested, meta or fake tensor, and none under ``vmap``."""
    return (
        (type(tensor) is Tensor or type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__)
        and tensor.layout is _strided
        and not (tensor.is_nested or tensor.is_meta or is_functorch_wrapped(tensor))
    )


def users_grad_mode() -> AbstractContextManager[Any]:
    """Call a user's function with gradients enabled, which autograd disables in a backward pass."""
    return torch.enable_grad() if in_backward() else nullcontext()


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Compute products of float32 in float32, neither in TF32 nor in bfloat16, without autocast."""
    mkldnn = torch.backends.mkldnn
    backends: list[Any] = [torch.backends.cuda.matmul, getattr(mkldnn, "matmul", mkldnn)]
    with torch.no_grad(), torch.autocast(device.type, enabled=False), ExitStack() as before:
        if all(hasattr(backend, "fp32_precision") for backend in backends):
            for backend in backends:
                before.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
                backend.fp32_precision = "ieee"
        else:
            before.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
        yield


def untraced(function: Function) -> Function:
    """The function, which the compiler does not trace, but maybe what it calls: a hook in a compiled backward pass."""
    frame_skipper()(getattr(function, "__func__", function))
    return function


@functools.cache
def out_of_compiler(function: Function) -> Function:
    """The function, which the compiler does not trace, nor what it calls."""
    return torch.compiler.disable(function)  # type: ignore[no-any-return]


class Eager(ExitStack):
    """Run compiled functions that call some models eagerly; nothing is compiled again.

    Hooks registered after the first compiled call would not run otherwise. Eager are the models, their modules, and
    functions that refer to one of them, as compiled train steps do, see :func:`refers_to`; without models all compiled
    functions.
    """

    def __init__(self, *models: nn.Module) -> None:
        super().__init__()
        self._models = models

    def __enter__(self) -> Eager:
        if "torch._dynamo" in sys.modules:  # nothing is compiled before this import, which takes seconds
            self.enter_context(eager_where(self._is_eager))
        return self

    def _is_eager(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        values = [function, *args, *kwargs.values()]
        return not self._models or any(refers_to(value, self._modules) for value in values)

    @functools.cached_property
    def _modules(self) -> set[int]:
        return {id(module) for model in self._models for module in model.modules()}


def refers_to(value: Any, modules: Container[int], depth: int = 2) -> bool:
    """Return True if a value is a module, contains it, or refers to it in so many steps.

    A function refers to its closure, defaults and the global names in its code; a method to its object; any other
    object to its attributes. Members of lists and dictionaries are not searched.

    Args:
        modules: ids of the modules.
    """
    value = getattr(value, "__self__", value)
    if isinstance(value, nn.Module):
        return any(id(module) in modules for module in value.modules())
    if not depth or isinstance(value, Tensor):
        return False
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        names = [value.__globals__[name] for name in _names(value.__code__) if name in value.__globals__]
        held = [*cells, *names, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    else:
        held = list(getattr(value, "__dict__", {}).values())
    return any(refers_to(other, modules, depth - 1) for other in held)


def _names(code: CodeType) -> set[str]:
    nested = (_names(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*nested)
