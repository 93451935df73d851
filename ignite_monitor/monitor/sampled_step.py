"""The parameters that a train step was to move, and their sampled weights before and after it."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.devices import move, upload
from ignite_monitor.model.optimizers import held_by
from ignite_monitor.model.samples import NARROW, ParameterSamples, reshard

# In an optimizer's state: float32 copies of weights, and what rounding has taken of them.
_COPY = re.compile("master|fp32_?(param|weight|copy)", re.IGNORECASE)
_COMPENSATION = re.compile("kahan|compensation", re.IGNORECASE)


class SteppedParameters:
    """Collects the parameters that optimizer steps were to move.

    A step moves the parameters with ``requires_grad`` in groups with a learning rate other than 0, if its optimizer has
    a gradient of any of them, unless ``found_inf`` skips a fused step.
    """

    def __init__(self, indices: Mapping[int, int]) -> None:
        self.any = False  # True if a step was made, possibly with a learning rate of 0
        self._indices = indices  # id of a parameter -> its index
        self._certain: set[int] = set()
        self._conditional: list[tuple[list[int], list[Tensor]]] = []

    def __bool__(self) -> bool:
        return bool(self._certain or self._conditional)

    def started(self, optimizer: Optimizer) -> list[int]:
        """Note a step that is about to be made, once unused gradients are hidden; return its indices."""
        groups = [
            [item for item in group["params"] if id(item) in self._indices and item.requires_grad]
            for group in optimizer.param_groups
        ]
        if all(item.grad is None for members in groups for item in members):
            return []
        self.any = True
        found_inf = getattr(optimizer, "found_inf", None)
        indices = [[self._indices[id(item)] for item in members] for members in groups]
        for group, members in zip(optimizer.param_groups, indices, strict=True):
            conditions = [group.get("lr") != 0, found_inf == 0 if isinstance(found_inf, Tensor) else True]
            tensors = [item.reshape(()) for item in conditions if isinstance(item, Tensor) and members]
            if not all(isinstance(item, Tensor) or item for item in conditions):
                continue
            if tensors:
                self._conditional.append((members, tensors))
            else:
                self._certain.update(members)
        return [index for members in indices for index in members]

    def mask(self, size: int, device: torch.device) -> Tensor:
        """A bool tensor, True for each parameter that was to move."""
        mask = _mask(self._certain, size, device)
        for indices, conditions in self._conditional:
            moves = _mask(indices, size, device)
            for condition in conditions:
                moves = moves & move(condition, device)
            mask = mask | moves
        return mask


class SampledStep:
    """Samples the weights before and after each train step of a run.

    If an optimizer keeps a float32 copy of a low-precision weight in its state, the copy is measured in its place.
    Without an optimizer, the parameters of every optimizer count; ``own`` are the indices of those that count.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, optimizer: Optimizer | None) -> None:
        reshard(model)
        self.samples = ParameterSamples(model, sample_size)
        self._model, self._optimizer = model, optimizer
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet([] if optimizer is None else [optimizer])

    def fits(self) -> bool:
        """Return True if the model's parameters are still those that are sampled."""
        if self.samples.fits():
            return True
        reshard(self._model)
        return self.samples.fits()

    @torch.no_grad()
    def start(self) -> None:
        """Keep the samples of the weights, before a train step."""
        self.own = self.samples.measurable
        if self._optimizer is not None:
            held = held_by(self._optimizer)
            self.own = [index for index in self.own if id(self.samples.parameters[index]) in held]
        self.stepped = SteppedParameters({id(self.samples.parameters[index]): index for index in self.own})
        parts = [self.samples.take(index, self._weight(index)) for index in self.own]
        copies = torch.cat(parts).split(list(map(len, parts))) if parts else ()
        self._before: dict[int, Tensor] = dict(zip(self.own, copies, strict=True))

    @torch.no_grad()
    def step_started(self, optimizer: Optimizer) -> list[int]:
        """Note an optimizer's step that is about to be made; return the indices of its parameters."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            for index in self.own:
                copy = _state(optimizer, self.samples.parameters[index], _COPY)
                if copy is not None:
                    self._before[index] = self.samples.take(index, copy).clone()
        return self.stepped.started(optimizer)

    def before(self, indices: Sequence[int]) -> list[Tensor]:
        """The samples of each of some parameters when the iteration started."""
        return [self._before[index] for index in indices]

    def changes(self, indices: Sequence[int]) -> Tensor:
        """The changes of sampled weights since the iteration started, one parameter after the other."""
        after = self.samples.flat(indices, [self._weight(index) for index in indices])
        return after.sub_(torch.cat(self.before(indices)))

    def split(self, flat: Tensor, indices: Sequence[int]) -> Sequence[Tensor]:
        """Split samples of some parameters, one parameter after the other, by parameter."""
        parts: Sequence[Tensor] = flat.split([len(self._before[index]) for index in indices])
        return parts

    def is_rounded(self, index: int) -> bool:
        """Return True for a parameter of low precision without a float32 copy or a compensation of rounding."""
        parameter = self.samples.parameters[index]
        if parameter.dtype not in NARROW or self._weight(index) is not parameter:
            return False
        return all(_state(optimizer, parameter, _COMPENSATION) is None for optimizer in self._optimizers)

    def _weight(self, index: int) -> Tensor:
        parameter: Tensor = self.samples.parameters[index]
        copies = [_state(optimizer, parameter, _COPY) for optimizer in self._optimizers]
        return next((copy for copy in copies if copy is not None), parameter)


def _state(optimizer: Optimizer, parameter: Any, keys: re.Pattern[str]) -> Tensor | None:
    """The tensor of a low-precision parameter's shape in an optimizer's state whose key matches a pattern."""
    if parameter.dtype not in NARROW:
        return None
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or value.shape != parameter.shape or not keys.search(str(key)):
            continue
        if keys is _COMPENSATION or value.dtype not in NARROW:
            return value
    return None


def _mask(indices: Iterable[int], size: int, device: torch.device) -> Tensor:
    members = set(indices)
    return upload(torch.tensor([index in members for index in range(size)], dtype=torch.bool, device="cpu"), device)
