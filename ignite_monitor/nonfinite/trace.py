"""Modules and operations that turn finite values into non-finite ones, in forward and in backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_monitor.model.forward import after_forward, before_forward
from ignite_monitor.model.modes import aside, is_plain
from ignite_monitor.model.tensors import tensors_in


@dataclass(eq=False)
class TracedCall:
    """One call of a module.

    Attributes:
        name: the module's name.
        module: the module.
        finite_inputs: whether all inputs are finite; masks may hold -inf.
        finite_outputs: the same of its outputs.
    """

    name: str
    module: nn.Module
    finite_inputs: bool
    finite_outputs: bool = True


class Operation(NamedTuple):
    """An operation of the autograd graph, and the module whose forward called it.

    Attributes:
        module: the module's name.
        name: the name of its node, as anomaly mode reports it.
        made: whether it made a non-finite gradient of a finite one; else a gradient hook on its output did.
    """

    module: str
    name: str
    made: bool


class Trace:
    """Follow the calls of a model's modules, and the backward pass of the operations in them.

    Args:
        modules: the modules by name.

    Attributes:
        calls: all calls, in the order in which they return.
        outermost: calls that were made in no other.
        outputs: floating-point outputs of these that require gradients.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._names = {module: name for name, module in modules.items()}
        self._open: list[TracedCall] = []
        self._owners: dict[Any, str] = {}  # node of the graph -> name of a module
        self.calls: list[TracedCall] = []
        self.outermost: list[TracedCall] = []
        self.outputs: list[Tensor] = []

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """Follow the forward passes inside of this context."""
        with before_forward(self._names, self._enter, first=True), after_forward(self._names, self._leave):
            yield

    @property
    def source(self) -> TracedCall | None:
        """The first call with finite inputs and non-finite outputs."""
        return next((call for call in self.calls if call.finite_inputs and not call.finite_outputs), None)

    def backward(self) -> Operation | None:
        """Back-propagate random gradients through all outputs, and return where the first non-finite gradient is made.

        Gradients are accumulated into the parameters.
        """
        operations: list[Operation] = []

        def hook_of(node: Any, module: str) -> Any:
            def hook(grad_inputs: Iterable[Any], grad_outputs: Iterable[Any]) -> None:
                received = not all(map(_is_finite, grad_outputs))
                if not operations and (received or not all(map(_is_finite, grad_inputs))):
                    operations.append(Operation(module, name, not received))

            name = node.name()
            return node.register_hook(hook)

        handles = [hook_of(node, module) for node, module in self._owners.items()]
        try:
            gradients = [torch.randn_like(item) / max(item.numel(), 1) ** 0.5 for item in self.outputs]
            torch.autograd.backward(self.outputs, gradients)
        finally:
            for handle in handles:
                handle.remove()
        return operations[0] if operations else None

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        # What is not claimed yet was computed by the module around.
        self._claim(tensors, self._open[-1].name if self._open else "")
        has_mask = len(tensors) > 1  # a mask is the mask of something
        finite = all(_is_finite(item, may_mask=has_mask, unknown=False) for item in tensors)
        self._open.append(TracedCall(self._names[module], module, finite))

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        call = self._open.pop()
        tensors = [tensor for _, tensor in tensors_in(output)]
        self._claim(tensors, call.name)
        call.finite_outputs = all(_is_finite(item, may_mask=True) for item in tensors)
        self.calls.append(call)
        if not self._open:
            self.outermost.append(call)
            self.outputs += [item for item in tensors if item.requires_grad]

    def _claim(self, tensors: Iterable[Tensor], name: str) -> None:
        """Assign the operations that computed tensors to a module, as far as they belong to none."""
        waiting = [tensor.grad_fn for tensor in tensors]
        while waiting:
            node = waiting.pop()
            if node is not None and node not in self._owners:
                self._owners[node] = name
                waiting += [following for following, _ in node.next_functions]


def non_finite(tensors: Mapping[str, Tensor | None]) -> set[str]:
    """Names of the tensors with non-finite values."""
    return {name for name, tensor in tensors.items() if not _is_finite(tensor)}


def _is_finite(tensor: Any, may_mask: bool = False, unknown: bool = True) -> bool:
    """Return whether a tensor is finite.

    Args:
        may_mask: whether -inf counts as finite in a tensor that requires no gradient.
        unknown: the answer for a tensor without values of its own, as a DTensor.
    """
    if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return True
    if not is_plain(tensor):
        return unknown
    with aside():
        finite = tensor.isfinite()
        if may_mask and not tensor.requires_grad and not tensor.is_complex():
            finite = finite | (tensor == -torch.inf)
        return bool(finite.all())
