"""Running a reference so that nothing of the training is changed by it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from torch import nn

from ignite_monitor.model.forward import before_forward
from ignite_monitor.model.isolation import is_reference_run as is_reference_run
from ignite_monitor.model.isolation import preserved_buffers
from ignite_monitor.model.isolation import reference_run as reference_run
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.reference.call import NotComparableError


class _Here:
    @property
    def running(self) -> bool:
        return is_reference_run()


here = _Here()


def put_back(modules: list[nn.Module], registries: list[dict[str, Any]]) -> contextlib.AbstractContextManager[None]:
    """Former name of ``preserved_buffers``."""
    return preserved_buffers(modules)


_REMEDY = "copy.deepcopy does not go into what holds it, so give a module of its own as the argument reference"


class TrainingModelUsedError(NotComparableError):
    """The reference was about to run a module, or has used a weight, of the model that is trained."""


class Fence:
    """Keeps a reference out of the model that is trained.

    A function that ``copy.deepcopy`` shares may call a module of the model, or use its weights. A module is stopped
    before it runs; a weight is found afterwards among what the outputs are computed from.

    Args:
        twins: modules of the reference -> modules of the model, unregistered ones included.
    """

    def __init__(self, model: nn.Module, reference: nn.Module, twins: Mapping[nn.Module, nn.Module]) -> None:
        own = set(reference.modules()) | twins.keys()
        names = dict.fromkeys(twins.values(), "a module that is not registered")
        names |= {module: name or "the root module" for name, module in model.named_modules()}
        unregistered = [each for each in twins.values() if each not in set(model.modules())]
        self._models = [model, *unregistered]
        self._references = [reference, *(copied for copied, each in twins.items() if each in unregistered)]
        self._modules = {module: name for module, name in names.items() if module not in own}
        self._broken: TrainingModelUsedError | None = None

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """While it lasts the whole reference runs; an error is raised where it leaves its own modules."""
        self._broken = None
        with before_forward(self._modules, self._stop, first=True):
            yield
        if self._broken is not None:  # and the model's own code lives with the error
            raise self._broken

    def check(self, outputs: Any) -> None:
        """Look for weights of the model that is trained among what outputs are computed from.

        Raises:
            TrainingModelUsedError: if there is one.
        """
        own = {id(each) for module in self._references for each in module.parameters()}
        named = [each for module in self._models for each in module.named_parameters()]
        weights = {id(each): name for name, each in named if id(each) not in own}
        nodes = {each.grad_fn for _, each in floating_tensors(outputs) if each.grad_fn is not None}
        found = list(nodes)
        while found:
            node = found.pop()
            weight = weights.get(id(getattr(node, "variable", None)))
            if weight is not None:
                raise TrainingModelUsedError(f"the reference uses {weight} of the model that trains: {_REMEDY}")
            new = {each for each, _ in node.next_functions if each is not None} - nodes
            nodes |= new
            found += new

    def _stop(self, module: nn.Module, *_: Any) -> None:
        if here.running:
            name = self._modules[module]
            self._broken = TrainingModelUsedError(
                f"the reference calls {name} of the model that trains, from {_caller()}: {_REMEDY}"
            )
            raise self._broken


def _caller() -> str:
    """The innermost function of the user's that is running, and the module and attribute that hold it."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_globals.get("__name__") or "").partition(".")[0] in (
        "torch",
        "ignite_monitor",
    ):
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
