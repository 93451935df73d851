"""A second pass of a train step, and what it changes."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.model import isolation
from ignite_monitor.model._torch import has_communication_hook, in_backward
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.dtensor import local, reshard
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import listed, named_parameters
from ignite_monitor.model.tensors import bits_of
from ignite_monitor.replay.reachable_state import ReachableState, values_of

Flags = dict[str, bool | Tensor]


class SecondPassEnded(BaseException):
    """Ends a second pass; no ``except Exception`` of a train step catches it."""


class SecondPass:
    """State before a train step, its gradients, and those of a second pass.

    ``objects`` are all modules and optimizers of the process, ``owned`` the attributes of the engine's state that are
    not the train step's, ``named`` further random generators.
    """

    def __init__(
        self, model: nn.Module, train_step: partial[Any], objects: list[Any], owned: list[str], named: Iterable[Any]
    ) -> None:
        self.is_replayed = False
        self.passes = self._left = 0  # backward passes of the first pass, and of the second one still to come
        self.gradients, self._second = dict[str, Tensor](), dict[str, Tensor]()  # after the last backward, by name
        self._model, self._train_step, self._objects, self._owned = model, train_step, objects, owned
        self._modules = [item for item in objects if isinstance(item, nn.Module)]
        self.error = ""
        with self.errors_noted():
            self._state = self._read_state()
            devices = {item.device for item in (*model.parameters(), *model.buffers())}
            self._random = devices, [*self._state.generators, *isolation.generators_of(model, named).values()]
            self._restore_rng = isolation.rng_restorer(*self._random)
            self._buffers = isolation.copied_buffers(self._modules)
            self._earlier = {item: item.grad.clone() for item in model.parameters() if item.grad is not None}

    @contextmanager
    def errors_noted(self) -> Iterator[None]:
        """Note an error of the user's objects or of memory, after which training continues."""
        try:
            yield
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            self.error = self.error or f"{type(error).__name__}: {error}"

    def _read_state(self) -> ReachableState:
        state = self._train_step.args[0].state
        own = {name: item for name, item in vars(state).items() if name not in {*self._owned, *values_of(state)}}
        roots = [("engine.state", own), ("the train step", (self._train_step.func,))]
        return ReachableState([*roots, *((type(item).__name__, item) for item in self._objects)])

    def backward_ended(self) -> None:
        """Copy the gradients; end a second pass after as many backward passes as in the first one."""
        if not self.is_replayed:
            self.passes += 1
            with self.errors_noted():
                self.gradients = copied_gradients(self._model)
        elif self._left:
            self._left -= 1
            if not self._left:
                self._second = copied_gradients(self._model)
                raise SecondPassEnded

    def obstacle(self) -> str:
        """Return why the train step can't be run again now."""
        changed: list[str] = []
        if not self.error:
            with self.errors_noted():
                changed = self._state.changes_to(self._read_state())
        if self.error:
            return f"the state of the train step can't be read: {self.error}"
        # An autocast can't be entered again before it is left.
        if in_backward() or any(map(torch.is_autocast_enabled, {"cpu", device_of(self._model).type})):
            return "the first optimizer step is made inside of backward or autocast"
        if not self.gradients:
            return "the first optimizer step is made before a backward reaches the model"
        if any(
            isinstance(item, DistributedDataParallel) and has_communication_hook(item) for item in self._model.modules()
        ):
            return "a communication hook of DistributedDataParallel may keep state, as PowerSGD does"
        return f"the train step keeps state: {listed(changed, 4)}" if changed else ""

    def run(self) -> tuple[Flags, Flags]:
        """Run the train step again, and restore everything.

        Return whether the gradients of each parameter differ, and whether tensors have changed.

        Raises:
            RuntimeError: if it made fewer backward passes.
        """
        saved, cached = self._saved(), torch.is_autocast_cache_enabled()
        self._left = self.passes
        try:
            with (
                suppress(SecondPassEnded),
                isolation.preserved_gradients(item for _, item in self._state.tensors.values() if item.is_leaf),
                isolation.isolated_pass(self._model, *self._random),
                isolation.preserved_buffers(self._modules, self._buffers),
                torch.enable_grad(),
            ):
                torch.set_autocast_cache_enabled(cached)  # gradients of shared weights depend on it
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
                with self.errors_noted():
                    kept[name] = differ(holder.get(key), copy) | kept.get(name, False)
                holder[key] = value
                if isinstance(copy, Tensor):
                    value.data.copy_(copy)  # no version counter changes
        if not self._second:
            raise RuntimeError("it ended before the last backward")
        names = self.gradients | self._second
        return {name: differ(self.gradients.get(name), self._second.get(name)) for name in names}, kept

    def _saved(self) -> list[tuple[str, dict[Any, Any], Any, Any, Any]]:
        """Return name, dictionary, key, value and copy of tensors, and of other attributes."""
        owners = [(type(module).__name__, module) for module in self._modules]
        owners += [("engine.state", self._train_step.args[0].state)]
        places: list[tuple[str, dict[Any, Any], Any]] = []
        places += [(name, {0: tensor}, 0) for name, tensor in self._state.tensors.values()]
        places += [(f"{name}.{key}", vars(owner), key) for name, owner in owners for key in values_of(owner)]
        return [
            (name, holder, key, value, value.detach().clone() if isinstance(value, Tensor) else value)
            for name, holder, key in places
            if not isinstance(value := holder[key], Tensor) or is_restorable(value)
        ]


def is_restorable(tensor: Tensor) -> bool:
    """Return True if the data of a tensor can be copied into it."""
    return has_local_data(tensor) and not (tensor.is_quantized or tensor.is_inference())


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


def is_from_signal_handler(error: BaseException) -> bool:
    """Return True if a handler of a signal raised an error, which is not one of the code that it interrupted."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in walk_tb(error.__traceback__))
