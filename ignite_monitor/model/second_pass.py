"""The state before a train step, restored for a second pass, and comparison of the gradients of both."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ignite_monitor.model._torch import buffers_in, version
from ignite_monitor.model.devices import device_of, move, wide_dtype
from ignite_monitor.model.isolation import (
    isolated_pass,
    preserved_buffers,
    preserved_parameters,
    preserved_rng_state,
    rng_restorer,
)
from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.names import parameters_of
from ignite_monitor.model.samples import local
from ignite_monitor.model.tensors import bits_of, tensors_in

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class StartState:
    """State before a train step.

    Args:
        model: the model.
        attributes: attributes of the engine's state.
        random: devices and generators whose RNG state is captured.
        is_whole: copy gradients, and checksums of weights. Otherwise earlier gradients are NaN in the second pass.

    Attributes:
        changes: why the second pass may start from another state: text -> flag.
    """

    def __init__(self, model: nn.Module, attributes: Mapping[str, Any], random: Any, is_whole: bool) -> None:
        self.is_whole, self._model, self._random = is_whole, model, random
        self.changes: dict[str, Tensor | bool] = {}
        self._attributes = {**attributes, "metrics": dict(attributes["metrics"])}
        self._restore_rng = rng_restorer(*random)
        self._batch = [(tensor, version(tensor)) for _, tensor in tensors_in(attributes["batch"])]
        self._had_gradients = any(item.grad is not None for item in model.parameters())
        if is_whole:
            self._gradients = {item: item.grad.clone() for item in model.parameters() if item.grad is not None}
            self._checksums = self._sum_bits()

    @contextmanager
    def restored(self, attributes: dict[str, Any], optimizer: Optimizer, others: list[Any]) -> Iterator[None]:
        """Restore this state; on exit, restore the current one.

        Args:
            attributes: attributes of the engine's state.
            optimizer: the optimizer of the model.
            others: what :func:`trained_elsewhere` returned.
        """
        cached, now = torch.is_autocast_cache_enabled(), dict(attributes)
        self.changes["the train step changes its batch"] = any(version(item) != kept for item, kept in self._batch)
        if self.is_whole:
            self.changes["the weights change before the optimizer's step"] = (self._sum_bits() != self._checksums).any()
        own = dict.fromkeys([*self._model.parameters(), *parameters_of(optimizer)])
        replicas = [module for module in self._model.modules() if isinstance(module, DistributedDataParallel)]
        # Their gradients may be views of the buckets that the second pass reduces.
        views = [item.grad for item in own if replicas and item.grad is not None]
        alive = [item for reference in others if (item := reference()) is not None]
        modules = [item for item in alive if isinstance(item, nn.Module)]
        held = [item for other in alive if isinstance(other, Optimizer) for item in parameters_of(other)]
        with ExitStack() as stack:
            stack.enter_context(preserved_parameters([*own, *views], [item for item in held if item not in own]))
            stack.enter_context(preserved_rng_state(*self._random))
            stack.enter_context(isolated_pass(self._model))
            stack.enter_context(preserved_buffers(modules))
            stack.enter_context(torch.enable_grad())
            stack.callback(attributes.update, now)
            stack.callback(attributes.clear)
            for module in replicas:  # it would broadcast the buffers of the first rank to those of the others
                stack.callback(setattr, module, "broadcast_buffers", module.broadcast_buffers)
                module.broadcast_buffers = False
            torch.set_autocast_cache_enabled(cached)  # gradients of shared weights depend on it
            attributes.clear()
            attributes.update(self._attributes)
            for item in self._model.parameters():
                if self.is_whole:
                    item.grad = self._gradients.get(item)
                elif self._had_gradients and item.requires_grad and not item.is_meta:
                    item.grad = torch.full_like(item, torch.nan)
            self._restore_rng()
            # Their state is that after the first pass; that of batch norms in training does not matter.
            modules += [module for module in self._model.modules() if not isinstance(module, _BATCH_NORMS)]
            copies = {id(item) for item in _buffers_of(modules)}
            yield
            changed = [id(item) not in copies or version(item) for item in _buffers_of(modules)]
            self.changes["a forward pass changes buffers"] = any(changed)

    def _sum_bits(self) -> Tensor:
        device = device_of(self._model)
        weights = [item for item in map(local, self._model.parameters()) if is_plain(item)]
        sums = [move(bits_of(item).sum(dtype=torch.int64), device) for item in weights]
        return torch.stack(sums) if sums else torch.zeros(0, device=device)


def difference(first: Tensor | None, second: Tensor | None) -> Tensor:
    """Compare two gradients of one parameter bit by bit.

    Returns:
        Whether they differ, their largest difference, and the largest element of the second: a vector on their device.
    """
    if first is None or second is None or not first.numel():
        is_alone = (first is None) != (second is None)
        return torch.tensor([float(is_alone), torch.nan if is_alone else 0.0, 0.0], device="cpu")
    exact, largest = torch.promote_types(first.dtype, torch.float32), second.abs().amax()
    if first.is_cpu and torch.equal(bits_of(first), bits_of(second)):
        values = torch.zeros_like(largest), torch.zeros_like(largest), largest
    else:
        by = (second.to(exact) - first.to(exact)).abs().amax()
        values = (bits_of(first) != bits_of(second)).any(), by, largest
    return torch.stack([value.to(wide_dtype(first.device)) for value in values])


def trained_elsewhere(model: nn.Module) -> list[weakref.ref[Any]]:
    """All optimizers of this process, and its modules in training mode with buffers that are not a model's."""
    inside, objects = set(map(id, model.modules())), gc.get_objects()
    modules = [item for item in objects if issubclass(type(item), nn.Module) and getattr(item, "training", False)]
    others = [item for item in modules if id(item) not in inside and _buffers_of([item])]
    return [*map(weakref.ref, others + [item for item in objects if issubclass(type(item), Optimizer)])]


def _buffers_of(modules: list[nn.Module]) -> list[Tensor]:
    return [item for module in modules for item in buffers_in(module).values() if item is not None]
