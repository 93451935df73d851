"""Distinction of backwards that accumulate from those that follow discarded gradients."""

from __future__ import annotations

import math
from collections.abc import Set
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.optim import Optimizer

from ignite_monitor.events.gradient_tracker import GradientTracker
from ignite_monitor.events.hooks import weak_method
from ignite_monitor.model._torch import backward_number
from ignite_monitor.model.dtensor import any_dtensor, local
from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.tensors import floating_tensors


class AccumulationProbe(ExitStack):
    """Detect whether the next backward in a context accumulates into gradients, or finds all of them None or zero."""

    def __init__(self, tracker: GradientTracker, optimizer: Optimizer | None) -> None:
        super().__init__()
        self.norm: Tensor | None = None  # maximum norm of this rank's gradients before the backward, 0-dim
        self.accumulates: Tensor | None = None  # whether it was not zero, 0-dim; None before a backward
        self._tracker, self._parameters = tracker, list(tracker.parameters_of(optimizer))
        self._measured: dict[int, Tensor] = {}  # by number of the backward, in order

    def __enter__(self) -> AccumulationProbe:
        leaves = [item for item in self._parameters if item.requires_grad and not item.is_inference()]
        if leaves:  # gradient hooks see the gradients before accumulation, and run in autograd.grad() too
            self.enter_context(register_multi_grad_hook(leaves, weak_method(self._measure), mode="any"))
        if any_dtensor(leaves):  # FSDP2 accumulates into other tensors; gradients of the outputs come first
            self.callback(self._tracker.model.register_forward_hook(weak_method(self._hook_outputs)).remove)
        self._tracker.observers.append(self)
        self.callback(self._tracker.observers.remove, self)
        self.callback(self._parameters.clear)
        self.callback(self._measured.clear)
        return self

    def backward_ended(self, numbers: Set[int], reached: Set[int]) -> None:
        """Take the first measurement of this backward, or of one inside of it, if it reached the parameters."""
        if self.accumulates is None and not reached.isdisjoint(map(id, self._parameters)):
            inside = [number for number in self._measured if number in numbers]
            if inside:
                self.norm = self._measured[inside[0]]
                self.accumulates = self.norm != 0
                self.close()

    def _measure(self, _: Tensor) -> None:
        number = backward_number()
        if number not in self._measured:
            gradients = [local(item.grad).detach() for item in self._parameters if item.grad is not None]
            zero = torch.zeros((), device=self._parameters[0].device)
            self._measured[number] = total_norm(gradients, math.inf) if gradients else zero

    def _hook_outputs(self, module: nn.Module, args: Any, output: Any) -> None:
        for _, tensor in floating_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(weak_method(self._measure))
