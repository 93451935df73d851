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

from ignite_monitor.model.devices import move, upload
from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.samples import ParameterSamples, is_measurable, local

# Of the momentum and of the mean of squares; AMSGrad divides by the largest so far.
_NAMES = (("exp_avg", "momentum_buffer"), ("max_exp_avg_sq", "exp_avg_sq"))

_REAL = {torch.bfloat16, torch.float16, torch.float32, torch.float64}
# With these an optimizer keeps the mean of squares in a basis of its own (SOAP, GaLore): it is not of the gradient.
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
        eps: what is added to the root, 0 where the parameter's group does not say; of the same shape.
        with_eps: the indices of those whose group does.
    """

    def __init__(
        self, optimizer: Optimizer, samples: ParameterSamples, indices: Mapping[int, int], kinds: Sequence[Any]
    ) -> None:
        count = len(kinds)
        self.momentum: list[Tensor | None] = [None] * count
        self.square: list[Tensor | None] = [None] * count
        steps: list[Any] = [math.nan] * count
        decays: list[Any] = [math.nan] * count
        eps: list[Any] = [0.0] * count
        # By id, since to hash a tensor takes longer.
        states = {id(parameter): state for parameter, state in optimizer.state.items() if state}
        for group in optimizer.param_groups:
            betas, own_step = group.get("betas"), group.get("step", group.get("k"))
            decay = betas[1] if isinstance(betas, (tuple, list)) and len(betas) == 2 else math.nan
            members = [each for each in group["params"] if id(each) in states and id(each) in indices]
            of_group = [states[id(each)] for each in members]
            at = [indices[id(each)] for each in members]
            momenta, squares = (_fitting(of_group, names, members, [kinds[i] for i in at]) for names in _NAMES)
            for index, state, momentum, square in zip(at, of_group, momenta, squares, strict=True):
                self.momentum[index] = momentum
                if square is not None and _OTHER_BASIS.isdisjoint(state):
                    self.square[index] = square
                    steps[index], decays[index], eps[index] = state.get("step", own_step), decay, group.get("eps")
        self.with_momentum = {index for index, each in enumerate(self.momentum) if each is not None}
        self.with_square = {index for index, each in enumerate(self.square) if each is not None}
        self.with_eps = {index for index in self.with_square if isinstance(eps[index], (float, int, Tensor))}
        self.eps = _vector(eps, samples)
        # Where nobody knows the number of steps, or how they are weighted, the mean is taken as it is.
        decay_by_now = _vector(decays, samples) ** _vector(steps, samples)
        self.correction = (1 - decay_by_now).rsqrt().nan_to_num(1.0, 1.0)

    def __bool__(self) -> bool:
        return bool(self.with_momentum or self.with_square)


kind_of = attrgetter("shape", "device", "layout")


def _fitting(
    states: Sequence[Mapping[Any, Any]], names: Sequence[str], parameters: Sequence[Any], kinds: Sequence[Any]
) -> list[Tensor | None]:
    """Of each state the first of the tensors with these names that fits the parameter."""
    for name in names:  # by far the quickest, and all that most optimizers need
        values: list[Any] = [state.get(name) for state in states]
        plain = {*map(type, values)} == {Tensor} and {each.dtype for each in values} <= _REAL
        if plain and [*map(kind_of, values)] == kinds:
            return values
    return [_first(state, names, *of) for state, *of in zip(states, parameters, kinds, strict=True)]


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
            own = local(value)
            if is_plain(own) and own.device == local(parameter).device:
                return value
    return None


def is_real(tensor: Tensor) -> bool:
    """Whether a tensor holds real numbers to compute with."""
    return is_measurable(tensor) and not tensor.is_complex()


def _vector(values: Sequence[Any], samples: ParameterSamples) -> Tensor:
    """Numbers and tensors with one element, one for each parameter, as one tensor, without waiting for a device.

    NaN for anything else.
    """
    dtype, device = samples.dtype, samples.device
    tensors: dict[torch.device, dict[int, Tensor]] = {}
    for index, each in enumerate(values if {*map(type, values)} != {float} else ()):
        if isinstance(each, Tensor) and each.numel() == 1:
            tensors.setdefault(each.device, {})[index] = each if each.ndim == 0 else each.view(())
    if any(len(own) == len(values) for own in tensors.values()):
        return move(torch.stack([*tensors.popitem()[1].values()]).to(dtype), device)
    vector = _uploaded(
        tuple(float(each) if isinstance(each, (float, int)) else math.nan for each in values), dtype, device
    )
    for own in tensors.values():
        at = _uploaded(tuple(own), torch.int64, device)
        vector = vector.index_copy(0, at, move(torch.stack([*own.values()]).to(dtype), device))
    return vector


@functools.lru_cache(32)
def _uploaded(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return upload(torch.tensor(numbers, dtype=dtype, device="cpu"), device)
