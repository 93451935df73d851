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
        kinds: what :func:`kind_of` says of all parameters.

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
        self.with_momentum: set[int] = set()
        self.with_square: set[int] = set()
        steps, decays, eps = ([math.nan] * count for _ in range(3))
        state_of = optimizer.state.get
        for group in optimizer.param_groups:
            betas, own_eps = group.get("betas"), _as_number(group.get("eps"))
            decay = _as_number(betas[1]) if isinstance(betas, (tuple, list)) and len(betas) == 2 else math.nan
            steps_of_group = group.get("step", group.get("k"))
            for parameter in group["params"]:
                index = indices.get(id(parameter))
                state = state_of(parameter)
                if index is None or not state:
                    continue
                kind = kinds[index]
                momentum = _first(state, MOMENTUM, parameter, kind)
                if momentum is not None:
                    self.momentum[index] = momentum
                    self.with_momentum.add(index)
                square = _first(state, SQUARE, parameter, kind)
                if square is not None and _OTHER_BASIS.isdisjoint(state):
                    self.square[index] = square
                    self.with_square.add(index)
                    steps[index] = _as_number(state.get("step", steps_of_group))
                    decays[index], eps[index] = decay, own_eps
        self.eps = _vector(eps, samples)
        # Where nobody knows the number of steps, or how they are weighted, the mean is taken as it is.
        self.correction = (1 - _vector(decays, samples) ** _vector(steps, samples)).rsqrt().nan_to_num(1.0, 1.0)

    def __bool__(self) -> bool:
        return bool(self.with_momentum or self.with_square)


kind_of = attrgetter("shape", "device", "layout")


def _first(state: Mapping[Any, Any], names: Sequence[str], parameter: Any, kind: Any) -> Tensor | None:
    """The first of an optimizer's tensors that is of the shape of a parameter, with one number per element.

    Args:
        kind: what :func:`kind_of` says of the parameter.
    """
    for name in names:
        value: Any = state.get(name)
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


def _as_number(value: Any) -> Any:
    """A float, or a tensor with one element; NaN for anything else."""
    if isinstance(value, Tensor):
        return value if value.numel() == 1 else math.nan
    return float(value) if isinstance(value, (int, float)) else math.nan


def _vector(values: Sequence[Any], samples: ParameterSamples) -> Tensor:
    """Floats and tensors with one element, one for each parameter, as one tensor, without waiting for a device."""
    tensors = {index: each for index, each in enumerate(values) if type(each) is not float}
    numbers = tuple(each if type(each) is float else math.nan for each in values) if tensors else tuple(values)
    vector = _uploaded(numbers, samples.dtype, samples.device)
    for device in {each.device for each in tensors.values()}:
        own = {
            index: each.reshape(()) if each.ndim else each for index, each in tensors.items() if each.device == device
        }
        stacked = move_like(torch.stack([*own.values()]), vector)
        at = _uploaded(tuple(own), torch.int64, samples.device)
        vector = stacked if len(own) == len(vector) else vector.index_copy(0, at, stacked)
    return vector


@functools.lru_cache(32)
def _uploaded(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return upload(torch.tensor(numbers, dtype=dtype, device="cpu"), device)
