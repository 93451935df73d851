"""Measures gradients before a backward pass accumulates into them."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.events.hooks import weakly
from ignite_monitor.model._torch import backward_number
from ignite_monitor.model.norms import any_sharded, total_norm
from ignite_monitor.model.tensors import floating_tensors


class AccumulationProbe(AbstractContextManager["AccumulationProbe"]):
    """Detect whether the next backward accumulates into gradients, or finds all of them None or zero.

    A context manager around a train step. Gradient hooks see ``parameter.grad`` before accumulation. They run in
    ``autograd.grad`` too, so a measurement counts only after a backward that has reached one of the parameters.

    Args:
        observers: the model's observers of backward passes; the probe is one of them while it is entered.

    Attributes:
        accumulates: whether any gradient on this rank was not zero, a 0-dim bool tensor; None before a backward.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], observers: list[Any]) -> None:
        self.accumulates: Tensor | None = None
        self._model, self._parameters, self._observers = model, list(parameters), observers
        self._measured: dict[int, Tensor] = {}  # by number of the backward, in order
        self._hooks = ExitStack()

    def __enter__(self) -> AccumulationProbe:
        leaves = [
            parameter for parameter in self._parameters if parameter.requires_grad and not parameter.is_inference()
        ]
        if leaves:
            handle = torch.autograd.graph.register_multi_grad_hook(leaves, weakly(self._measure), mode="any")
            self._hooks.callback(handle.remove)
        if any_sharded(leaves):  # FSDP2 accumulates into other tensors; gradients of the outputs come first
            self._hooks.callback(self._model.register_forward_hook(weakly(self._hook_outputs)).remove)
        self._observers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.close()
        self._parameters = []
        self._measured.clear()
        self._observers.remove(self)

    def backward_ended(self, number: int, reached: Set[int], running: Set[int]) -> None:
        """Take the first measurement made in this backward, or in one around it, if it reached the parameters."""
        if self.accumulates is None and not reached.isdisjoint(map(id, self._parameters)):
            numbers = (backward for backward in self._measured if backward == number or backward in running)
            first = next(numbers, None)
            if first is not None:
                self.accumulates = self._measured[first]
                self._hooks.close()

    def _measure(self, _: Tensor) -> None:
        number = backward_number()
        if number not in self._measured:
            gradients = [parameter.grad.detach() for parameter in self._parameters if parameter.grad is not None]
            norm = total_norm(gradients, math.inf) if gradients else torch.zeros((), device=self._parameters[0].device)
            self._measured[number] = norm != 0

    def _hook_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        for _, tensor in floating_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(weakly(self._measure))
