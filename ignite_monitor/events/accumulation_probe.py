"""A look at gradients before the next backward accumulates into them: whether it adds to them or starts anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.events.hooks import weakly
from ignite_monitor.model._torch import backward_number
from ignite_monitor.model.norms import any_sharded, is_sharded, total_norm
from ignite_monitor.model.tensors import floating_tensors


class Look:
    """Finds out whether the next backward adds to gradients, None or zero for those that it does not.

    A context to have around a train step; left, it looks no more. Hooks on what accumulates gradients see them before
    that. ``autograd.grad`` runs them too, so what they see counts only once a backward has ended that has reached one
    of the parameters. FSDP2 accumulates into other tensors than those that the loss depends on: there it is the
    gradients of the root's outputs that come first.

    Args:
        parameters: the parameters.
        waiting: the looks of this model that wait for a backward; it is one of them while it is entered.

    Attributes:
        grows: whether any gradient was other than zero, a 0-dim bool tensor, on this rank; None as long as there was
            no backward.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter], waiting: list[Any]) -> None:
        self.grows: Tensor | None = None
        self._model = model
        self._parameters = list(parameters)
        self._waiting = waiting
        self._seen: dict[int, Tensor] = {}  # by number of the backward, in order
        self._hooks = ExitStack()

    def __enter__(self) -> None:
        look = weakly(self._look)
        leaves = [each for each in self._parameters if each.requires_grad and not each.is_inference()]
        if leaves:
            seen = torch.autograd.graph.register_multi_grad_hook(leaves, look, mode="any")
            self._hooks.callback(seen.remove)
        if any_sharded(leaves):
            self._hooks.callback(self._model.register_forward_hook(_on_outputs(look)).remove)
        self._waiting.append(self)

    def __exit__(self, *_: Any) -> None:
        self._hooks.close()
        self._parameters = []
        self._seen.clear()
        if self in self._waiting:
            self._waiting.remove(self)

    def backward_ended(self, task: int, reached: Set[int], running: Set[int]) -> None:
        """A backward has ended that may have been it; those around it were there first."""
        if self.grows is None and any(id(parameter) in reached for parameter in self._parameters):
            found = next((grows for each, grows in self._seen.items() if each == task or each in running), None)
            if found is not None:
                self.grows = found
                self._hooks.close()

    def _look(self, _: Any) -> None:
        task = backward_number()
        if task in self._seen:
            return
        gradients: list[Any] = [each.grad for each in self._parameters if each.grad is not None]
        if not gradients:
            self._seen[task] = torch.zeros((), dtype=torch.bool, device=self._parameters[0].device)
            return
        local = [each.to_local() if is_sharded(each) else each for each in gradients]
        self._seen[task] = total_norm((each.detach() for each in local), math.inf) != 0


def _on_outputs(look: Callable[[Tensor], None]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        for _, tensor in floating_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(look)

    return hook
