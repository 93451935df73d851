"""Calls of a model since its last backward pass: inputs, RNG state, outputs, and the gradients that these received."""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import (
    changes_gradients,
    current_node,
    in_backward,
    is_compiled_in_place,
    is_compilers_wrapper,
    unseen_by_dispatch,
    unseen_by_functions,
    version,
)
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.forward import ModuleHook
from ignite_monitor.model.isolation import generator_state, generators_of, in_second_pass
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import named_modules, unwrapped
from ignite_monitor.model.tensors import tensors_in

MOST_CALLS = 64


class ModelCall(NamedTuple):
    """One call of a model."""

    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    versions: list[tuple[Tensor, int]]  # of tensors among the arguments, nested ones too
    states: list[tuple[Any, Any]]  # generators of devices and of the model, and their states
    autocast: dict[str, tuple[torch.dtype, bool]]  # device type -> dtype, and whether it was enabled


class UsedOutput(NamedTuple):
    """An output of a call that received a gradient."""

    call: int  # its number
    place: str
    sample: Tensor | None  # of its elements, as :func:`sample` returned it
    is_hooked: bool  # whether its hooks may have changed the gradient
    node: Any  # of the graph: the operation that computed it
    gradient: Sequence[Tensor]  # extremes; none if they are not known


class ModelCalls(ModuleHook):
    """Note the calls of a model in a train step, as a context around it, and which of their outputs are used.

    Inputs are kept until the step returns. Calls without gradients are not noted.

    Attributes:
        device: the model's device; None to look it up at every call.
        calls: calls since the last backward pass but one ended; of more than :data:`MOST_CALLS`, the last ones.
        used: :class:`UsedOutput` of those that have received a gradient since the last backward pass ended, as tuples.
    """

    def __init__(self, model: nn.Module, generators: Collection[Any]) -> None:
        wrappers = [module for name, module in named_modules(model) if not name]
        # The module that is called eagerly: the user's model, or the compiler's wrapper.
        self._called = next(filter(is_compilers_wrapper, wrappers), wrappers[-1])
        self._handles: list[Any] = []
        self._running: ModelCall | None = None
        self._count = 0  # of all calls
        self._ended = False
        self.device: torch.device | None = None
        self._device: torch.device | None = None  # of the generators
        self._generators: list[Any] = []
        self._named = generators
        self.calls: deque[ModelCall] = deque(maxlen=MOST_CALLS)
        self.used: list[tuple[Any, ...]] = []

    def __enter__(self) -> None:
        if not is_compiled_in_place(self._called):  # hooks would be compiled with it
            self._handles.append(self._called.register_forward_pre_hook(self, prepend=True, with_kwargs=True))
            self._handles.append(self._called.register_forward_hook(self, with_kwargs=True))

    def __exit__(self, *error: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove all hooks, and forget the calls."""
        while self._handles:
            self._handles.pop().remove()
        self.calls.clear()
        self.used.clear()
        self._running = None
        self._ended = False

    def backward_ended(self) -> None:
        """Forget the calls at the next one; until then another backward pass may use them."""
        self._ended = True
        self.used.clear()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any = None, *output: Any) -> None:
        """Handle the start of a call, or the end of one, with its output."""
        if torch.compiler.is_compiling() or module is not self._called:  # a shallow copy has the same hooks
            return
        if not self._handles:  # removed by another hook of this call: torch calls it once more, without kwargs
            return
        if output:
            call, self._running = self._running, None
            if call is not None:
                for place, tensor in [("", output[0])] if type(output[0]) is Tensor else tensors_in(output[0]):
                    if tensor.grad_fn is not None:  # the hook goes with the graph
                        facts = call.number, place, sample(tensor), changes_gradients(tensor)
                        note = functools.partial(_note_gradient, self.used, facts, tensor.output_nr)
                        tensor.grad_fn.register_prehook(note)
        elif torch.is_grad_enabled() and not in_backward() and not in_second_pass():
            self._running = self._note_call(args, kwargs)

    def _note_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelCall | None:
        if self._ended:
            self.calls.clear()
            self._ended = False
        generators = self._find_generators()
        if not generators or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            return None
        tensors = [(item, version(item)) for value in (*args, *kwargs.values()) for _, item in tensors_in(value)]
        states = [(item, generator_state(item)) for item in generators]
        kinds = {item.device.type for item in generators if isinstance(item, torch.Generator)}
        autocast = {kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds}
        self._count += 1
        self.calls.append(ModelCall(self._count, args, kwargs, tensors, states, autocast))
        return self.calls[-1]

    def _find_generators(self) -> list[Any]:
        """Return the generators of devices and of the model; none if reading a state would synchronize."""
        device = self.device or device_of(self._called)
        if device != self._device:
            self._device, self._generators = device, []
            with contextlib.suppress(Exception):  # a module may hold objects of any kind, and training continues
                generators = generators_of(unwrapped(self._called), self._named)
                devices = {item.device for item in (*self._called.parameters(), *generators) if hasattr(item, "device")}
                devices.discard(torch.device("cpu"))
                if {item.type for item in devices} <= {"cuda"}:
                    on_devices = [torch.cuda.default_generators[item.index] for item in devices]
                    self._generators = [torch.default_generator, *on_devices, *generators]
        return self._generators


def sample(output: Tensor) -> Tensor | None:
    """Return a few hundred elements, evenly spaced; None without elements, or if the data are elsewhere."""
    with unseen_by_functions(), unseen_by_dispatch():
        output = output.detach()
        if not (has_local_data(output) and output.numel()):
            return None
        most = int(512 ** (1 / max(output.ndim, 1)))  # along each dimension
        for size in output.shape:
            output = output[:: -(-size // most)].movedim(0, -1)
        return output.clone()


def _note_gradient(
    used: list[tuple[Any, ...]], facts: tuple[int, str, Any, bool], index: int, gradients: tuple[Tensor | None, ...]
) -> None:
    gradient = gradients[index]
    if gradient is not None:
        with unseen_by_functions(), unseen_by_dispatch():
            gradient = gradient.detach()
            is_known = has_local_data(gradient) and gradient.numel()
            real = torch.view_as_real(gradient) if gradient.is_complex() else gradient
            used.append((*facts, current_node(), torch.aminmax(real) if is_known else ()))
