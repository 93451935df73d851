"""A second pass of a train step, and what it changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model import isolation
from ignite_monitor.model._torch import in_backward, registries_of_buffers
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.dtensor import local, reshard
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import listed, named_parameters, parameters_of
from ignite_monitor.model.tensors import bits_of
from ignite_monitor.replay.reachable_state import attributes_of, changed_names, is_value, reachable_state

Flags = dict[str, bool | Tensor]


class SecondPassEnded(BaseException):
    """Ends a second pass; no ``except Exception`` of a train step catches it."""


class SecondPass:
    """State before a train step, the gradients of it, and of a second pass.

    Args:
        model: the model.
        train_step: a partial of the user's function, with its arguments.
        objects: all modules and optimizers of the process.
        owned: names of attributes of the engine's state that are not the train step's.

    Attributes:
        is_replayed: True once the first pass has ended.
        passes: backward passes of the first pass.
        gradients: copies of the gradients after its last backward, by name.
    """

    def __init__(
        self, model: nn.Module, train_step: partial[Any], objects: Iterable[Any], owned: Iterable[str]
    ) -> None:
        self.is_replayed = False
        self.passes = self._left = 0
        self.gradients: dict[str, Tensor] = {}
        self._second: dict[str, Tensor] = {}
        self._model, self._train_step, self._objects, self._owned = model, train_step, list(objects), set(owned)
        self._modules = [item for item in self._objects if isinstance(item, nn.Module)]
        devices = {item.device for item in (*model.parameters(), *model.buffers())}
        self._random = devices, isolation.generators_used_by(train_step.func, model)
        self._restore_rng = isolation.rng_restorer(*self._random)
        copies: dict[Any, Tensor] = {item: item.clone() for item in model.buffers() if not nn.parameter.is_lazy(item)}
        registries = registries_of_buffers(model.modules())
        self._buffers = [{name: copies.get(item, item) for name, item in own.items()} for own in registries]
        self._earlier = {item: item.grad.clone() for item in model.parameters() if item.grad is not None}
        self._state = self._read_state()

    def _read_state(self) -> Any:
        roots = [(f"engine.state.{name}", value) for name, value in self._attributes() if not is_value(value)]
        roots += [(type(item).__name__, item) for item in self._objects]
        return reachable_state([*roots, ("the train step", self._train_step.func)])

    def _attributes(self) -> list[tuple[str, Any]]:
        return [pair for pair in vars(self._train_step.args[0].state).items() if pair[0] not in self._owned]

    def backward_ended(self) -> None:
        """Copy the gradients; end a second pass after as many backward passes as in the first one."""
        if not self.is_replayed:
            self.passes += 1
            self.gradients = copied_gradients(self._model)
        elif self._left:
            self._left -= 1
            if not self._left:
                self._second = copied_gradients(self._model)
                raise SecondPassEnded

    def obstacle(self) -> str:
        """Return why the train step can't be run again now."""
        # An autocast can't be entered again before it is left.
        if in_backward() or any(map(torch.is_autocast_enabled, {"cpu", device_of(self._model).type})):
            return "the first optimizer step is made inside of backward or autocast"
        if not self.gradients:
            return "the first optimizer step is made before any backward"
        changed = changed_names(self._state, self._read_state())
        return f"the train step keeps state: {listed(changed, 4)}" if changed else ""

    def run(self) -> tuple[Flags, Flags]:
        """Run the train step again, and restore everything.

        Returns:
            Whether the gradients of each parameter differ; whether the pass has changed a parameter or an attribute.

        Raises:
            RuntimeError: if it made fewer backward passes.
        """
        held = chain.from_iterable(parameters_of(item) for item in self._objects if isinstance(item, Optimizer))
        parameters = [(type(module).__name__, item) for module in self._modules for item in module.parameters(False)]
        saved = [*self._saved(parameters)]
        cached = torch.is_autocast_cache_enabled()
        self._left = self.passes
        try:
            with (
                suppress(SecondPassEnded),
                isolation.preserved_gradients(dict.fromkeys((*(item for _, item in parameters), *held))),
                isolation.isolated_pass(self._model, *self._random),
                isolation.preserved_buffers(module for module in self._modules if module.training),
                torch.enable_grad(),
            ):
                torch.set_autocast_cache_enabled(cached)  # gradients of shared weights depend on it
                for registry, buffers in zip(registries_of_buffers(self._model.modules()), self._buffers, strict=True):
                    registry.update(buffers)
                for item, gradient in self._earlier.items():
                    item.grad = gradient.clone()
                self._restore_rng()
                try:
                    self._train_step()
                finally:
                    reshard(self._model)
        finally:
            self._left, kept = 0, Flags()
            for name, holder, key, value, copy in saved:
                kept[name] = differ(holder.get(key), copy) | kept.get(name, False)
                holder[key] = value
                if isinstance(value, Tensor):
                    value.data.copy_(copy)  # no version counter changes
        if not self._second:
            raise RuntimeError("it ended before the last backward")
        names = self.gradients | self._second
        return {name: differ(self.gradients.get(name), self._second.get(name)) for name in names}, kept

    def _saved(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, dict[Any, Any], Any, Any, Any]]:
        """Yield name, dictionary, key, value and copy of parameters, and of attributes of modules and the state."""
        places: list[Any] = [(f"parameters of {kind}", {0: item}, 0) for kind, item in parameters]
        for module in self._modules:
            kind = type(module).__name__
            places += [(f"{kind}.{name}", vars(module), name) for name in attributes_of(module)]
        state = vars(self._train_step.args[0].state)
        places += [(f"engine.state.{name}", state, name) for name, _ in self._attributes()]
        for name, holder, key in places:
            value = holder[key]
            if not isinstance(value, Tensor) and is_value(value):
                yield name, holder, key, value, value
            elif isinstance(value, Tensor) and has_local_data(value) and not value.is_quantized:
                yield name, holder, key, value, value.detach().clone()


def copied_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copy the gradients of a model, by name."""
    gradients = {name: item.grad for name, item, _ in named_parameters(model) if item.grad is not None}
    return {name: local(item).detach().to_dense().clone() for name, item in gradients.items()}


def differ(first: Any, second: Any) -> bool | Tensor:
    """Return whether two tensors differ in any bit, or two other values."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return first is not second and repr(first) != repr(second)
    if (first.shape, first.dtype, first.device) != (second.shape, second.dtype, second.device):
        return True
    return (bits_of(first) != bits_of(second)).any()
