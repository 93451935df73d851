"""Moments in the state of an optimizer, by the names that torch's optimizers and their relatives use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model.devices import move, upload
from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.norms import is_sharded
from ignite_monitor.model.samples import local

_MOMENTUM = ("exp_avg", "momentum_buffer")
# AMSGrad divides by the largest so far.
_SQUARE = ("max_exp_avg_sq", "exp_avg_sq")

_REAL = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# With these an optimizer keeps the second moment in a basis of its own (SOAP, GaLore).
_OTHER_BASIS = frozenset({"Q", "GG", "projector", "ortho_matrix"})


class Moments:
    """The moments of some parameters as an optimizer's state holds them now.

    Args:
        dtype: of the numbers.
        device: of the numbers.

    Attributes:
        momentum: of each parameter, the running mean of its gradient, or its momentum; None where there is none.
        square: of each parameter, the running mean of the squared gradient, not bias-corrected; None where there is
            none.
        correction: factor of the root of that mean for its bias: (parameters,). NaN where there is no such mean, 1
            where the number of steps or its decay is not known.
        eps: what the optimizer adds to that root; NaN where it does not say.
    """

    def __init__(
        self, optimizer: Optimizer, parameters: Sequence[Tensor], dtype: torch.dtype, device: torch.device
    ) -> None:
        groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        self.momentum = [_moment(state, _MOMENTUM, own) for state, own in zip(states, parameters, strict=True)]
        self.square = [
            _moment(state, _SQUARE, own) if _OTHER_BASIS.isdisjoint(state) else None
            for state, own in zip(states, parameters, strict=True)
        ]
        steps, decays, eps = [], [], []
        for state, parameter in zip(states, parameters, strict=True):
            group = groups.get(id(parameter), {})
            betas = group.get("betas")
            steps.append(state.get("step", group.get("step", group.get("k"))))
            decays.append(betas[1] if isinstance(betas, (tuple, list)) and len(betas) == 2 else None)
            eps.append(group.get("eps"))
        self.eps = _vector(eps, dtype, device)
        decay = _vector(decays, dtype, device) ** _vector(steps, dtype, device)
        known = _vector([math.nan if each is None else 0.0 for each in self.square], dtype, device)
        self.correction = (1 - decay).rsqrt().nan_to_num(1.0, 1.0) + known

    def __bool__(self) -> bool:
        return any(each is not None for each in (*self.momentum, *self.square))


def _moment(state: Mapping[Any, Any], names: Sequence[str], parameter: Tensor) -> Tensor | None:
    """The first of an optimizer's tensors by these names with one real number for each element of a parameter."""
    for name in names:
        value = state.get(name)
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.dtype in _REAL:
            own = local(value)
            if is_sharded(value) == is_sharded(parameter) and is_plain(own) and own.device == local(parameter).device:
                return value
    return None


def _vector(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers and tensors with one element as one tensor, without synchronization; NaN for anything else."""
    tensors = [each.detach().reshape(()) if isinstance(each, Tensor) and each.numel() == 1 else None for each in values]
    numbers = [float(each) if isinstance(each, (float, int)) else math.nan for each in values]
    if all(each is None for each in tensors):
        return upload(torch.tensor(numbers, dtype=dtype, device="cpu"), device)
    scalars = [
        torch.tensor(number, device="cpu") if tensor is None else tensor
        for tensor, number in zip(tensors, numbers, strict=True)
    ]
    if len({each.device for each in scalars}) > 1:
        scalars = [move(each, device) for each in scalars]
    return move(torch.stack([each.to(dtype) for each in scalars]), device)
