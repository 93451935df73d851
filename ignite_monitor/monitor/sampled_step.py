"""Sampled weights before and after a train step, and the parameters that it was to move."""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.optimizers import held_by
from ignite_monitor.model.samples import NARROW, ParameterSamples, reshard
from ignite_monitor.monitor.stepped import SteppedParameters

# In an optimizer's state: float32 copies of weights, and what rounding has taken of them.
_COPY = re.compile("master|fp32_?(param|weight|copy)", re.IGNORECASE)
_COMPENSATION = re.compile("kahan|compensation", re.IGNORECASE)


class SampledStep:
    """Follows the train steps of a run.

    Where an optimizer keeps a float32 copy of a low-precision weight in its state, the copy is measured in its place.

    Args:
        sample_size: see :class:`ParameterSamples`.
        optimizer: the optimizer whose parameters count; None for every optimizer.

    Attributes:
        samples: the sampled parameters.
        own: indices of the parameters that count.
        stepped: the parameters that this iteration's optimizer steps were to move.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, optimizer: Optimizer | None) -> None:
        reshard(model)
        self.samples = ParameterSamples(model, sample_size)
        self.own: list[int] = []
        self.stepped = SteppedParameters({})
        self._model, self._optimizer = model, optimizer
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet([] if optimizer is None else [optimizer])
        self._before: dict[int, Tensor] = {}

    def fits(self) -> bool:
        """Whether the model's parameters are still those that are sampled."""
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
        parts = [self.samples.take(index, self.weight(index)) for index in self.own]
        copies = torch.cat(parts).split(list(map(len, parts))) if parts else ()
        self._before = dict(zip(self.own, copies, strict=True))

    @torch.no_grad()
    def step_started(self, optimizer: Optimizer) -> list[int]:
        """Note an optimizer's step that is about to be made; the indices of its parameters."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            for index in self.own:
                copy = _state(optimizer, self.samples.parameters[index], _COPY)
                if copy is not None:
                    self._before[index] = self.samples.take(index, copy).clone()
        return self.stepped.started(optimizer)

    def weight(self, index: int) -> Tensor:
        """A parameter, or the float32 copy of it that an optimizer keeps."""
        parameter: Tensor = self.samples.parameters[index]
        copies = [_state(each, parameter, _COPY) for each in self._optimizers]
        return next((each for each in copies if each is not None), parameter)

    def is_rounded(self, index: int) -> bool:
        """Whether a parameter is of low precision without a float32 copy or a compensation in an optimizer's state."""
        parameter = self.samples.parameters[index]
        if parameter.dtype not in NARROW or self.weight(index) is not parameter:
            return False
        return all(_state(each, parameter, _COMPENSATION) is None for each in self._optimizers)

    def before(self, indices: Sequence[int]) -> Tensor:
        """The samples that :meth:`start` kept of some parameters, one parameter after the other."""
        return torch.cat([self._before[index] for index in indices])

    def after(self, indices: Sequence[int]) -> Tensor:
        """The samples of the weights now."""
        return self.samples.flat(indices, [self.weight(index) for index in indices])

    def per_parameter(self, flat: Tensor, indices: Sequence[int]) -> Sequence[Tensor]:
        """The samples of each of some parameters."""
        parts: Sequence[Tensor] = flat.split([len(self._before[index]) for index in indices])
        return parts


def _state(optimizer: Optimizer, parameter: Any, keys: re.Pattern[str]) -> Tensor | None:
    """What an optimizer keeps of a low-precision parameter, element by element, by names that match a pattern."""
    if parameter.dtype not in NARROW:
        return None
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, Tensor) or value.shape != parameter.shape or not keys.search(str(key)):
            continue
        if keys is _COMPENSATION or value.dtype not in NARROW:
            return value
    return None
