"""Inputs and RNG state of a model's calls since its last backward pass."""

from __future__ import annotations

import weakref
from contextlib import ExitStack
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import in_backward, is_compiled_in_place, is_compilers_wrapper, version
from ignite_monitor.model.forward import ModuleHook, before_forward
from ignite_monitor.model.isolation import is_reference_run
from ignite_monitor.model.names import named_modules

_MOST_CALLS = 64


class ModelCall(NamedTuple):
    """One call of a model.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        versions: tensors among them, and their versions.
        generators: generators and their states when the model was called.
        autocast: device type -> whether autocast was enabled, and its dtype.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[tuple[Tensor, int]]
    generators: list[tuple[torch.Generator, Tensor]]
    autocast: dict[str, tuple[bool, torch.dtype]]

    @property
    def is_changed(self) -> bool:
        """Whether an argument has been changed in place since."""
        return any(version(tensor) != before for tensor, before in self.versions)


class ModelCalls:
    """Note the calls of a model in a train step, as a context around it.

    Inputs are kept until the step returns. Calls without gradients are not noted.

    Attributes:
        calls: calls since the last backward pass but one ended.
        complete: whether these are all of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        wrappers = [module for _, module in takewhile(lambda named: not named[0], named_modules(model))]
        # The module that is called eagerly: the user's model, or the compiler's wrapper.
        self._called = next(filter(is_compilers_wrapper, wrappers), wrappers[-1])
        self._hook = _Note(self, self._called)
        self._hooks = ExitStack()
        self._ended = False
        self._device: torch.device | None = None
        self._generators: list[torch.Generator] = []
        self.calls: list[ModelCall] = []
        self.complete = True

    def __enter__(self) -> None:
        if not is_compiled_in_place(self._called):  # hooks would be compiled with it
            hook = before_forward([self._called], self._hook, first=True)
            self._hooks.enter_context(hook)

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the hook, and forget the calls."""
        self._hooks.close()
        self.clear()

    def backward_ended(self) -> None:
        """Forget the calls at the next one; until then another backward pass may use them."""
        self._ended = True

    def clear(self) -> None:
        """Forget the calls."""
        self.calls = []
        self._ended, self.complete = False, True

    def note(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the start of a call."""
        if not torch.is_grad_enabled() or in_backward() or is_reference_run():
            return
        if self._ended:
            self.clear()
        if self._device != self._parameters[0].device:
            self._find_generators()
        generators = self._generators
        if not generators or (len(generators) > 1 and torch.cuda.is_current_stream_capturing()):
            return
        if len(self.calls) == _MOST_CALLS:
            self.complete = False
            return
        tensors = [(item, version(item)) for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
        states = [(item, item.get_state()) for item in generators]
        kinds = {item.device.type for item in generators}
        autocast = {kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds}
        self.calls.append(ModelCall(args, kwargs, tensors, states, autocast))

    def _find_generators(self) -> None:
        """Find the generators of the model's devices; none if reading a state would synchronize."""
        self._device = self._parameters[0].device
        devices = {item.device for item in self._parameters} - {torch.device("cpu")}
        self._generators = []
        if {item.type for item in devices} <= {"cuda"}:
            self._generators = [torch.default_generator]
            self._generators += [torch.cuda.default_generators[item.index] for item in devices]


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
