"""Running a reference so that nothing of the training is changed by it."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.forward import before_forward
from ignite_monitor.reference.call import NotComparableError


class _Here(threading.local):
    running = False


here = _Here()
"""Whether a forward pass of this thread is one of a reference, and none of the model that is trained."""


def is_reference_run() -> bool:
    """What ``here.running`` says."""
    return here.running


class TrainingModelUsedError(NotComparableError):
    """The reference was about to run a module, or has used a weight, of the model that is trained."""


class Fence:
    """Keeps a reference out of the model that is trained.

    A function that ``copy.deepcopy`` shares may call a module of the model, or use its weights. A module is stopped
    before it runs; a weight is met when autograd saves it for a backward pass.

    Attributes:
        broken: why the run can't be used; None as long as it can. The user's own ``except`` may have the error.
    """

    def __init__(self, model: nn.Module, reference: nn.Module, twins: Mapping[nn.Module, nn.Module]) -> None:
        own = set(reference.modules()) | twins.keys()
        names = dict.fromkeys(twins.values(), "a module that is not registered")
        names |= {module: name or "the root module" for name, module in model.named_modules()}
        self._modules = {module: name for module, name in names.items() if module not in own}
        self._own = own
        self._weights: set[int] = set()
        self.saves = False
        self.broken: TrainingModelUsedError | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """While it lasts the whole reference runs; an error is raised where it leaves its own modules."""
        self.broken = None
        self._weights = set(_parameters(self._modules)) - set(_parameters(self._own))
        try:
            with before_forward(self._modules, self._stop, first=True), self.nothing_saved():
                yield
        finally:
            self._weights.clear()
        if self.broken is not None:
            raise self.broken

    def nothing_saved(self) -> contextlib.AbstractContextManager[Any]:
        """No backward pass of the reference will want what autograd saves, unless the forward pass has one in it."""
        if self.saves:
            return contextlib.nullcontext()
        weak = weakref.ref(self)

        def pack(tensor: Tensor) -> None:
            owner = weak()
            if owner is not None and id(tensor if tensor._base is None else tensor._base) in owner._weights:
                owner._refuse("uses a weight of the model that trains")

        def unpack(_: None) -> Tensor:
            owner = weak()
            if owner is not None:
                owner.saves = True
            raise RuntimeError("the reference makes a backward pass of its own")

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def _stop(self, module: nn.Module, *_: Any) -> None:
        if here.running:
            self._refuse(f"calls {self._modules[module]} of the model that trains")

    def _refuse(self, what: str) -> None:
        self.broken = TrainingModelUsedError(
            f"the reference {what}, from {_caller()}: copy.deepcopy does not go into what holds it, so give a module "
            "of its own as the argument reference"
        )
        raise self.broken


def _parameters(modules: Any) -> Iterator[int]:
    return (id(each) for module in modules for each in module._parameters.values() if each is not None)


def _caller() -> str:
    """The innermost function of the user's that is running, and the module and attribute that hold it."""
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    if frame is None:
        return "a function of torch"
    code = frame.f_code
    where = f"{getattr(code, 'co_qualname', code.co_name)} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
    while frame is not None:
        holder = frame.f_locals.get("self")
        for attribute, value in vars(holder).items() if isinstance(holder, nn.Module) else ():
            function: Any = getattr(value, "func", value)
            if getattr(getattr(function, "__func__", function), "__code__", None) is code:
                return f"{where}, the attribute {attribute} of a {type(holder).__name__}"
        frame = frame.f_back
    return where


@contextlib.contextmanager
def put_back(modules: list[nn.Module]) -> Iterator[None]:
    """Training flags and buffers of modules are the same afterwards; buffers are copies while it lasts."""
    modes = [module.training for module in modules]
    buffers = [(module._buffers, dict(module._buffers)) for module in modules if module._buffers]
    try:
        for registry, saved in buffers:
            registry.update((name, None if each is None else each.clone()) for name, each in saved.items())
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            if module.training != mode:
                module.training = mode
        for registry, saved in buffers:
            registry.clear()
            registry.update(saved)


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """While it lasts, this thread runs a reference."""
    outer, cached = here.running, torch.is_autocast_cache_enabled()
    try:
        # What is cast without gradients here would be found in the cache by those who want gradients.
        torch.set_autocast_cache_enabled(False)
        here.running = True
        yield
    finally:
        here.running = outer
        torch.set_autocast_cache_enabled(cached)
