"""What a model has been called with since its last backward, so that it can be called so once more."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import in_backward, is_compiled_in_place, is_compilers_wrapper, version
from ignite_monitor.model.forward import ModuleHook, before_forward
from ignite_monitor.model.names import named_modules
from ignite_monitor.reference.isolation import is_reference_run

_MOST = 64


class ModelCall(NamedTuple):
    """One call of a model."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[tuple[Tensor, int]]  # of the tensors among them
    generators: list[tuple[torch.Generator, Tensor]]  # with their states when the model was called
    autocast: dict[str, tuple[bool, torch.dtype]]  # by type of device, whether it was on, and its dtype

    @property
    def is_changed(self) -> bool:
        """Whether an argument has been changed in place since."""
        return any(version(tensor) != then for tensor, then in self.versions)


class ModelCalls:
    """Notes the calls of a model, a context to have around a train step.

    What the model is given in it is the train step's own already, and is forgotten when that returns. Calls without
    gradients are left out: a train step may make thousands of them, and keeps nothing of each.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        wrappers = [module for _, module in takewhile(lambda named: not named[0], named_modules(model))]
        # What is called without being compiled: the user's model, or what the compiler has put around it.
        self._called = next(filter(is_compilers_wrapper, wrappers), wrappers[-1])
        self._hook = _Note(self, self._called)
        self._around = ExitStack()
        self._ended = False
        self._device: torch.device | None = None
        self._generators: list[torch.Generator] = []
        self.calls: list[ModelCall] = []  # those since the first one after the last backward but one
        self.complete = True  # whether these are all of them

    def __enter__(self) -> None:
        if not is_compiled_in_place(self._called):  # hooks would be compiled with it
            around = before_forward([self._called], self._hook, first=True, key=id(self._hook))
            self._around.enter_context(around)

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Leave the model as it was."""
        self._around.close()
        self.clear()

    def backward_ended(self) -> None:
        """The next call is the first of another backward; one more of the same calls may come before it."""
        self._ended = True

    def clear(self) -> None:
        """Forget them."""
        self.calls = []
        self._ended, self.complete = False, True

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call that begins."""
        if not torch.is_grad_enabled() or in_backward() or is_reference_run():
            return
        if self._ended:
            self.clear()
        if self._device != self._parameters[0].device:
            self._find_generators()
        generators = self._generators
        if not generators or (len(generators) > 1 and torch.cuda.is_current_stream_capturing()):
            return
        if len(self.calls) == _MOST:
            self.complete = False
            return
        tensors = [(each, version(each)) for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        states = [(each, each.get_state()) for each in generators]
        kinds = {each.device.type for each in generators}
        autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self.calls.append(ModelCall(args, kwargs, tensors, states, autocast))

    def _find_generators(self) -> None:
        """Those of the devices that the model lies on; none where there is one whose states would be waited for."""
        self._device = self._parameters[0].device
        devices = {each.device for each in self._parameters} - {torch.device("cpu")}
        self._generators = []
        if {each.type for each in devices} <= {"cuda"}:
            self._generators = [torch.default_generator]
            self._generators += [torch.cuda.default_generators[each.index] for each in devices]


class _Note(ModuleHook):
    def __init__(self, calls: ModelCalls, module: nn.Module) -> None:
        self._calls = weakref.ref(calls)
        self._module = weakref.ref(module)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or module is not self._module():
            return
        calls = self._calls()
        if calls is not None:
            calls.note(args, kwargs)
