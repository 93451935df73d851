"""The state before a train step, restored for a second pass, and comparison of the gradients of both."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ignite_monitor.model import isolation
from ignite_monitor.model._torch import backward_number, buffers_in, version
from ignite_monitor.model.devices import device_of, move
from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.names import named_parameters, parameters_of
from ignite_monitor.model.samples import local
from ignite_monitor.model.tensors import bits_of, tensors_in


class SecondPassEnded(BaseException):
    """Ends a second pass; no ``except Exception`` of a train step catches it."""


class FirstPass:
    """State before a train step, and gradients before its first optimizer step.

    Unless the iteration is monitored, earlier gradients are not copied, and weights are known by version counters only.
    """

    def __init__(self, model: nn.Module, state: Any, random: Any, is_monitored: bool) -> None:
        self.count, self._backward = 0, -1  # backward passes, to repeat; number of the one that gave the gradients
        self.gradients: dict[str, Tensor] = {}  # copies, by name
        self.rows: dict[str, Tensor] = {}  # their comparison with those of the second pass
        self._model, self._state, self._random = model, state, random
        self._attributes = {**vars(state), "metrics": dict(state.metrics)}
        self._restore_rng = isolation.rng_restorer(*random)
        copies = {item: item.clone() for item in model.buffers() if not is_lazy(item)}
        registries: list[dict[str, Any]] = list(map(buffers_in, model.modules()))
        self._buffers = [{key: copies.get(own) for key, own in item.items() if not is_lazy(own)} for item in registries]
        parameters = list(model.parameters())
        earlier = {item: item.grad for item in parameters if item.grad is not None}
        self._earlier = {key: item.clone() if is_monitored else item for key, item in earlier.items()}
        batch = [tensor for _, tensor in tensors_in(state.batch)]
        self._versions = [(item, version(item)) for item in (*batch, *parameters, *self._earlier.values())]
        self._sums = self._sum_bits() if is_monitored else []

    def copy_gradients(self) -> None:
        """Copy the gradients, once per backward: handlers of a spike may change them."""
        if backward_number() not in (-1, self._backward):
            self._backward, self.gradients = backward_number(), copied_gradients(self._model)

    def has_changed(self) -> Tensor:
        """Return whether the batch, weights or earlier gradients were changed in place, as far as known: 0-dim."""
        is_changed, device = any(version(item) != number for item, number in self._versions), device_of(self._model)
        flags = [move(before != now, device) for before, now in zip(self._sums, self._sum_bits(), strict=False)]
        return torch.stack([*flags, torch.full((), is_changed, device=device)]).any()

    @contextmanager
    def restored(self, others: Iterable[Any]) -> Iterator[None]:
        """Restore the state for a second pass; on exit, restore the current one, and that of ``others``."""
        others, cached, parameters = list(others), torch.is_autocast_cache_enabled(), list(self._model.parameters())
        modules = [item for item in others if isinstance(item, nn.Module) and getattr(item, "training", False)]
        held = [item for other in others if isinstance(other, Optimizer) for item in parameters_of(other)]
        # Gradients may be views of the buckets of DistributedDataParallel, which the second pass reduces.
        views = [item.grad for item in parameters if item.grad is not None]
        with ExitStack() as stack:
            stack.enter_context(isolation.preserved_parameters([*parameters, *views], held))
            stack.enter_context(isolation.preserved_rng_state(*self._random))
            stack.enter_context(isolation.isolated_pass(self._model))
            stack.enter_context(isolation.preserved_buffers(modules))
            stack.enter_context(torch.enable_grad())
            torch.set_autocast_cache_enabled(cached)  # gradients of shared weights depend on it
            stack.callback(setattr, self._state, "__dict__", vars(self._state))
            self._state.__dict__ = self._attributes
            for registry, buffers in zip(map(buffers_in, self._model.modules()), self._buffers, strict=True):
                registry.update(buffers)
            for item, gradient in self._earlier.items():
                item.grad = gradient.clone()
            self._restore_rng()
            yield

    def backward_ended(self) -> None:
        """Count a backward of the second pass; after the last one, compare gradients and end the pass."""
        if all(getattr(module, "require_backward_grad_sync", True) for module in self._model.modules()):
            self.count -= 1
            if not self.count:
                second = copied_gradients(self._model)
                if second.keys() == self.gradients.keys():
                    self.rows = {name: difference(self.gradients[name], item) for name, item in second.items()}
                raise SecondPassEnded

    def _sum_bits(self) -> list[Tensor]:
        return [bits_of(item).sum() for item in map(local, self._model.parameters()) if is_plain(item)]


def copied_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients of a model, by name."""
    gradients = {name: local(item.grad).detach() for name, item, _ in named_parameters(model) if item.grad is not None}
    return {name: item.to_dense().clone() for name, item in gradients.items() if item.numel()}


def difference(first: Tensor, second: Tensor) -> Tensor:
    """Return whether two gradients of one parameter differ in any bit, and their largest difference."""
    exact = torch.promote_types(first.dtype, torch.float32)
    largest = (second.to(exact) - first.to(exact)).abs().amax()
    return torch.stack([(bits_of(first) != bits_of(second)).any().float(), largest.float()])


def others_in_process(model: nn.Module) -> weakref.WeakSet[Any]:
    """All optimizers of this process, and its modules that are not a model's."""
    inside, objects = set(map(id, model.modules())), gc.get_objects()
    kinds = nn.Module, Optimizer
    return weakref.WeakSet(item for item in objects if issubclass(type(item), kinds) and id(item) not in inside)
