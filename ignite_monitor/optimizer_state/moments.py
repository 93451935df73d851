"""What an optimizer keeps of each parameter, by the names that torch's optimizers and their kin give it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model.devices import move_like, upload
from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.norms import is_sharded
from ignite_monitor.model.samples import ParameterSamples, is_measurable

MOMENTUM = ("exp_avg", "momentum_buffer")
SQUARE = ("max_exp_avg_sq", "exp_avg_sq")  # AMSGrad divides by the largest so far

# With these an optimizer keeps the mean of squares in a basis of its own (SOAP, GaLore): it is not of the gradient.
_REAL = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_OTHER_BASIS = frozenset({"Q", "GG", "projector", "ortho_matrix"})


class Moments:
    """The moments that an optimizer's state holds now, of the parameters that it holds.

    Args:
        samples: the parameters.
        places: those that are looked at, by id.

    Attributes:
        momentum: for each parameter the mean of its gradients, or its momentum; None where there is none.
        square: for each parameter the mean of its gradient's squares, not corrected for its start; None where there is
            none.
        with_momentum: the places of those that have the first.
        with_square: the places of those that have the second.
        correction: what the root of that mean is to be multiplied by, for its start: of shape (parameters,).
        eps: what is added to the root, NaN where the parameter's group does not say; of the same shape.
    """

    def __init__(self, optimizer: Optimizer, samples: ParameterSamples, places: Mapping[int, int]) -> None:
        count = len(samples.parameters)
        self.momentum: list[Tensor | None] = [None] * count
        self.square: list[Tensor | None] = [None] * count
        steps, decays, eps = ([math.nan] * count for _ in range(3))
        for group in optimizer.param_groups:
            betas, own_eps = group.get("betas"), _as_number(group.get("eps"))
            decay = _as_number(betas[1]) if isinstance(betas, (tuple, list)) and len(betas) == 2 else math.nan
            for parameter in group["params"]:
                place = places.get(id(parameter))
                state = optimizer.state.get(parameter)
                if place is None or not state:
                    continue
                self.momentum[place] = _first(state, MOMENTUM, parameter)
                if _OTHER_BASIS.isdisjoint(state):
                    self.square[place] = _first(state, SQUARE, parameter)
                if self.square[place] is not None:
                    steps[place] = _as_number(state.get("step", group.get("step", group.get("k"))))
                    decays[place], eps[place] = decay, own_eps
        self.eps = _vector(eps, samples)
        # Where nobody knows the number of steps, or how they are weighted, the mean is taken as it is.
        self.correction = (1 - _vector(decays, samples) ** _vector(steps, samples)).rsqrt().nan_to_num(1.0, 1.0)

        self.with_momentum, self.with_square = (
            {place for place, each in enumerate(own) if each is not None} for own in (self.momentum, self.square)
        )

    def __bool__(self) -> bool:
        return bool(self.with_momentum or self.with_square)


def _first(state: Mapping[Any, Any], names: Sequence[str], parameter: Any) -> Tensor | None:
    """The first of an optimizer's tensors that is of the shape of a parameter, with one number per element."""
    for name in names:
        value: Any = state.get(name)
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            continue
        if value.shape == parameter.shape and value.dtype in _REAL:
            # Both may be DTensors; what has no elements of its own, as packed ones, is left out.
            own = (value, parameter) if type(value) is Tensor else (_local(value), _local(parameter))
            if own[0].device == own[1].device and (type(value) is Tensor or is_plain(own[0])):
                return value
    return None


def _local(tensor: Any) -> Tensor:
    own: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return own


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor holds real numbers to compute with."""
    return is_measurable(tensor) and not tensor.is_complex()


def _as_number(value: Any) -> Any:
    """A number, or a tensor with one element; NaN for anything else."""
    if isinstance(value, Tensor):
        return value if value.numel() == 1 else math.nan
    return value if isinstance(value, (int, float)) else math.nan


def _vector(values: Sequence[Any], samples: ParameterSamples) -> Tensor:
    """Numbers and tensors with one element, one for each parameter, as one tensor, without waiting for a device."""
    numbers = tuple(math.nan if isinstance(each, Tensor) else each for each in values)
    vector = _uploaded(numbers, samples.dtype, samples.device)
    by_device: dict[torch.device, list[int]] = {}
    for place, each in enumerate(values):
        if isinstance(each, Tensor):
            by_device.setdefault(each.device, []).append(place)
    for own in by_device.values():
        stacked = torch.stack([each if (each := values[place]).ndim == 0 else each.reshape(()) for place in own])
        stacked = move_like(stacked, vector)
        index = _uploaded(tuple(own), torch.int64, samples.device)
        vector = stacked if len(own) == len(vector) else vector.index_copy(0, index, stacked)
    return vector


@functools.lru_cache(32)
def _uploaded(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return upload(torch.tensor(numbers, dtype=dtype, device="cpu"), device)
