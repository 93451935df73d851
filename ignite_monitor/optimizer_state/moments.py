"""What an optimizer keeps of each parameter, by the names that torch's optimizers and their kin give it."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
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
        indices: those that are looked at, by id.
        kinds: what :func:`kind_of` says of all parameters; None for those that are sharded.

    Attributes:
        momentum: for each parameter the mean of its gradients, or its momentum; None where there is none.
        square: for each parameter the mean of its gradient's squares, not corrected for its start; None where there is
            none.
        with_momentum: the indices of those that have the first.
        with_square: the indices of those that have the second.
        correction: what the root of that mean is to be multiplied by, for its start: of shape (parameters,).
        eps: what is added to the root, NaN where the parameter's group does not say; of the same shape.
    """

    def __init__(
        self, optimizer: Optimizer, samples: ParameterSamples, indices: Mapping[int, int], kinds: Sequence[Any]
    ) -> None:
        count = len(kinds)
        self.momentum: list[Tensor | None] = [None] * count
        self.square: list[Tensor | None] = [None] * count
        steps, decays, eps = ([math.nan] * count for _ in range(3))
        # By id, since to hash a tensor takes longer.
        states = {id(parameter): state for parameter, state in optimizer.state.items() if state}
        for group in optimizer.param_groups:
            betas = group.get("betas")
            decay = betas[1] if isinstance(betas, (tuple, list)) and len(betas) == 2 else math.nan
            own_eps, own_step = group.get("eps"), group.get("step", group.get("k"))
            for parameter in group["params"]:
                key = id(parameter)
                if key not in states or key not in indices:
                    continue
                index, state = indices[key], states[key]
                self.momentum[index] = _first(state, MOMENTUM, parameter, kinds[index])
                if _OTHER_BASIS.isdisjoint(state):
                    self.square[index] = _first(state, SQUARE, parameter, kinds[index])
                    steps[index], decays[index], eps[index] = state.get("step", own_step), decay, own_eps
        self.with_momentum = {index for index, each in enumerate(self.momentum) if each is not None}
        self.with_square = {index for index, each in enumerate(self.square) if each is not None}
        self.eps = _vector(eps, samples)
        # Where nobody knows the number of steps, or how they are weighted, the mean is taken as it is.
        self.correction = (1 - _vector(decays, samples) ** _vector(steps, samples)).rsqrt().nan_to_num(1.0, 1.0)

    def __bool__(self) -> bool:
        return bool(self.with_momentum or self.with_square)


kind_of = attrgetter("shape", "device", "layout")


def _first(state: Mapping[Any, Any], names: Sequence[str], parameter: Any, kind: Any) -> Tensor | None:
    """The first of an optimizer's tensors that is of the shape of a parameter, with one number per element."""
    for name in names:
        value: Any = state.get(name)
        if value is None:
            continue
        if type(value) is Tensor:
            if kind_of(value) == kind and value.dtype in _REAL:
                return value
        elif isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype in _REAL:
            # Both may be DTensors; what has no elements of its own, as packed ones, is left out.
            own = _local(value)
            if is_plain(own) and own.device == _local(parameter).device:
                return value
    return None


def _local(tensor: Any) -> Tensor:
    own: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return own


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor holds real numbers to compute with."""
    return is_measurable(tensor) and not tensor.is_complex()


def _vector(values: Sequence[Any], samples: ParameterSamples) -> Tensor:
    """Numbers and tensors with one element, one for each parameter, as one tensor, without waiting for a device.

    NaN for anything else.
    """
    numbers = [math.nan] * len(values)
    tensors: dict[torch.device, dict[int, Tensor]] = {}
    for index, value in enumerate(values):
        if isinstance(value, (float, int)):
            numbers[index] = float(value)
        elif isinstance(value, Tensor) and value.numel() == 1:
            tensors.setdefault(value.device, {})[index] = value if value.ndim == 0 else value.reshape(())
    vector = _uploaded(tuple(numbers), samples.dtype, samples.device)
    for own in tensors.values():
        at = _uploaded(tuple(own), torch.int64, samples.device)
        vector = vector.index_copy(0, at, move_like(torch.stack([*own.values()]), vector))
    return vector


@functools.lru_cache(32)
def _uploaded(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return upload(torch.tensor(numbers, dtype=dtype, device="cpu"), device)
