"""Inputs and RNG state of a model's calls since its last backward pass."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import in_backward, is_compiled_in_place, is_compilers_wrapper, version
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.forward import ModuleHook
from ignite_monitor.model.isolation import generator_state, generators_of, in_second_pass
from ignite_monitor.model.names import named_modules, unwrapped

MOST_CALLS = 64


class ModelCall(NamedTuple):
    """One call of a model.

    Attributes:
        args: positional arguments.
        kwargs: keyword arguments.
        versions: tensors among the arguments, and their versions.
        states: generators of devices, and their states when the model was called.
        own: place of :func:`generators_of` the model -> generator, and its state.
        autocast: device type -> dtype of autocast, and whether it was enabled.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[tuple[Tensor, int]]
    states: list[tuple[torch.Generator, Tensor]]
    own: dict[tuple[Any, ...], tuple[Any, Any]]
    autocast: dict[str, tuple[torch.dtype, bool]]


class ModelCalls(ModuleHook):
    """Note the calls of a model in a train step, as a context around it.

    Inputs are kept until the step returns. Calls without gradients are not noted.

    Attributes:
        device: the model's device; None to look it up at every call.
        calls: calls since the last backward pass but one ended; of more than :data:`MOST_CALLS`, the last ones.
    """

    def __init__(self, model: nn.Module) -> None:
        wrappers = [module for name, module in named_modules(model) if not name]
        # The module that is called eagerly: the user's model, or the compiler's wrapper.
        self._called = next(filter(is_compilers_wrapper, wrappers), wrappers[-1])
        self._handle: Any = None
        self._ended = False
        self.device: torch.device | None = None
        self._device: torch.device | None = None  # of the generators
        self._generators: list[torch.Generator] = []
        self._own: dict[tuple[Any, ...], Any] = {}
        self.calls: deque[ModelCall] = deque(maxlen=MOST_CALLS + 1)

    def __enter__(self) -> None:
        if not is_compiled_in_place(self._called):  # hooks would be compiled with it
            # Scripted modules refuse the bound method.
            register = nn.Module.register_forward_pre_hook
            self._handle = register(self._called, self, prepend=True, with_kwargs=True)

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the hook, and forget the calls."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self.calls.clear()
        self._ended = False

    def backward_ended(self) -> None:
        """Forget the calls at the next one; until then another backward pass may use them."""
        self._ended = True

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling() or module is not self._called:  # a shallow copy has the same hooks
            return
        if not torch.is_grad_enabled() or in_backward() or in_second_pass():
            return
        if self._ended:
            self.calls.clear()
            self._ended = False
        generators = self._find_generators()
        if not generators or (len(generators) > 1 and torch.cuda.is_current_stream_capturing()):
            return
        tensors = [(item, version(item)) for item in (*args, *kwargs.values()) if isinstance(item, Tensor)]
        states = [(item, item.get_state()) for item in generators]
        own = {place: (item, generator_state(item)) for place, item in self._own.items()}
        kinds = {item.device.type for item in generators}
        autocast = {kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds}
        self.calls.append(ModelCall(args, kwargs, tensors, states, own, autocast))

    def _find_generators(self) -> list[torch.Generator]:
        """Return the generators of devices; none if reading a state would synchronize."""
        device = self.device or device_of(self._called)
        if device != self._device:
            self._device = device
            try:
                self._own = generators_of(unwrapped(self._called))
            except Exception:  # noqa: BLE001 - a module may hold objects of any kind, and training continues
                self._generators = []
                return []
            devices = {
                item.device for item in (*self._called.parameters(), *self._own.values()) if hasattr(item, "device")
            }
            devices.discard(torch.device("cpu"))
            is_known = {item.type for item in devices} <= {"cuda"}
            self._generators = [torch.default_generator] if is_known else []
            self._generators += [torch.cuda.default_generators[item.index] for item in devices if is_known]
        return self._generators
