"""Modules and operations that turn finite values into non-finite ones, in forward and in backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model.modes import aside, is_plain
from ignite_monitor.model.tensors import tensors_in


class Trace:
    """Follow the calls of a model's modules, and the backward pass of the operations in them.

    Masks among inputs and outputs may hold -inf.

    Args:
        names: the modules and their names.

    Attributes:
        source: the first module that returned with finite inputs and non-finite outputs.
        outputs: outputs of the model, the module that no other called.
    """

    def __init__(self, names: Mapping[nn.Module, str]) -> None:
        self.names = names
        self._open: list[tuple[nn.Module, bool]] = []  # calls in progress, and whether their inputs are finite
        self._owners: dict[Any, str] = {}  # node of the graph -> name of a module
        self.source: nn.Module | None = None
        self.outputs: list[Tensor] = []

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the start of a call, as a hook."""
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        # What is not claimed yet was computed by the module around.
        self._claim(tensors, self.names[self._open[-1][0]] if self._open else "")
        has_mask = len(tensors) > 1  # a mask is the mask of something
        self._open.append((module, all(is_plain(item) and is_finite(item, has_mask) for item in tensors)))

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """Note the end of a call, as a hook."""
        _, finite_inputs = self._open.pop()
        tensors = [tensor for _, tensor in tensors_in(output)]
        self._claim(tensors, self.names[module])
        if finite_inputs and self.source is None and not all(is_finite(item, may_mask=True) for item in tensors):
            self.source = module
        if not self._open:
            self.outputs += tensors

    def backward(self) -> tuple[str, str] | None:
        """Back-propagate random gradients through all outputs; gradients are accumulated into the parameters.

        Returns:
            The first operation that makes a non-finite gradient: name of the module whose forward called it, and the
            operation's description with its name in anomaly mode; None if there is none.
        """
        operations: list[tuple[str, str]] = []

        def hook_of(node: Any, module: str) -> Any:
            def hook(grad_inputs: Iterable[Any], grad_outputs: Iterable[Any]) -> None:
                received = not all(map(is_finite, grad_outputs))
                if not operations and (received or not all(map(is_finite, grad_inputs))):
                    operations.append((module, f"a gradient hook on the output of {name}" if received else name))

            name = node.name()
            return node.register_hook(hook)

        outputs = [item for item in self.outputs if item.requires_grad]
        handles = [hook_of(node, module) for node, module in self._owners.items()]
        try:
            gradients = [torch.randn_like(item) / max(item.numel(), 1) ** 0.5 for item in outputs]
            torch.autograd.backward(outputs, gradients)
        finally:
            for handle in handles:
                handle.remove()
        return operations[0] if operations else None

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
    return {name for name, tensor in tensors.items() if not is_finite(tensor)}


def is_finite(tensor: Any, may_mask: bool = False) -> bool:
    """Return whether a tensor is finite; with ``may_mask`` -inf counts as finite in one that requires no gradient."""
    if not isinstance(tensor, Tensor) or not is_plain(tensor):
        return True
    with aside():
        finite = tensor.isfinite()
        if may_mask and not tensor.requires_grad and not tensor.is_complex():
            finite = finite | (tensor == -torch.inf)
        return bool(finite.all())
