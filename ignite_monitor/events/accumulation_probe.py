"""Measures gradients before a backward pass accumulates into them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.events.hooks import weakly
from ignite_monitor.model._torch import backward_number
from ignite_monitor.model.norms import any_sharded, is_sharded, total_norm
from ignite_monitor.model.tensors import floating_tensors


class AccumulationProbe(AbstractContextManager["AccumulationProbe"]):
    """Detect whether the next backward accumulates into gradients, or finds all of them None or zero.

    A context manager around a train step. Gradient hooks see ``parameter.grad`` before accumulation. They run in
    ``autograd.grad`` too, so a measurement counts only after a backward that has reached one of the parameters. FSDP2
    accumulates into other tensors than those of the graph: there, gradients of the root module's outputs come first.

    Args:
        parameters: the parameters.
        observers: the model's observers of backward passes; the probe is one of them while it is entered.

    Attributes:
        accumulates: whether any gradient on this rank was not zero, a 0-dim bool tensor; None before a backward.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], observers: list[Any]) -> None:
        self.accumulates: Tensor | None = None
        self._model = model
        self._parameters = list(parameters)
        self._observers = observers
        self._measured: dict[int, Tensor] = {}  # by number of the backward, in order
        self._hooks = ExitStack()

    def __enter__(self) -> AccumulationProbe:
        measure = weakly(self._measure)
        leaves = [
            parameter for parameter in self._parameters if parameter.requires_grad and not parameter.is_inference()
        ]
        if leaves:
            handle = torch.autograd.graph.register_multi_grad_hook(leaves, measure, mode="any")
            self._hooks.callback(handle.remove)
        if any_sharded(leaves):
            self._hooks.callback(self._model.register_forward_hook(_on_outputs(measure)).remove)
        self._observers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._parameters = []
        self._measured.clear()
        if self in self._observers:
            self._observers.remove(self)

    def backward_ended(self, number: int, reached: Set[int], running: Set[int]) -> None:
        """Take the first measurement made in this backward, or in one around it, if it reached the parameters."""
        if self.accumulates is None and any(id(parameter) in reached for parameter in self._parameters):
            numbers = (backward for backward in self._measured if backward == number or backward in running)
            first = next(numbers, None)
            if first is not None:
                self.accumulates = self._measured[first]
                self._hooks.close()

    def _measure(self, _: Any) -> None:
        number = backward_number()
        if number in self._measured:
            return
        gradients: list[Any] = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if not gradients:
            self._measured[number] = torch.zeros((), dtype=torch.bool, device=self._parameters[0].device)
            return
        local = [gradient.to_local() if is_sharded(gradient) else gradient for gradient in gradients]
        self._measured[number] = total_norm((gradient.detach() for gradient in local), math.inf) != 0


def _on_outputs(hook: Callable[[Tensor], None]) -> Callable[..., None]:
    def register(module: nn.Module, args: Any, output: Any) -> None:
        for _, tensor in floating_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(hook)

    return register
