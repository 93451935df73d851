"""Weights that hold matrices, and their layouts: how their values become matrices of shape (out, in)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ignite_monitor.model._torch import forward_pre_hooks, parameters_in
from ignite_monitor.model.dtensor import whole_tensor
from ignite_monitor.model.linear_maps import CONVOLUTIONS, TRANSPOSED, is_conv1d
from ignite_monitor.model.names import named_parameters
from ignite_monitor.model.sampling import is_measurable

_COMPUTING = (WeightNorm, SpectralNorm, BasePruningMethod)
_Layout = Callable[[Tensor], Tensor]


def _matrix(value: Tensor) -> Tensor:
    """A weight of shape (out, in, k…)."""
    return value.flatten(1)[None]


def embedding(value: Tensor) -> Tensor:
    """Parameters of ``nn.Embedding`` and ``nn.EmbeddingBag``, and those of shape (1, L, d)."""
    return value.reshape(1, -1, value.shape[-1])


def _stack(value: Tensor) -> Tensor:
    """One matrix after the other (experts), of shape (n…, out, in) or (n…, in, out)."""
    return value.flatten(0, -3)


def _transposed(value: Tensor, groups: int) -> Tensor:
    """A weight of shape (in, out / groups, k…)."""
    return _matrix(value.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1))


class MatrixWeight(NamedTuple):
    """A parameter that holds matrices."""

    name: str
    parameter: nn.Parameter
    layout: _Layout


class Label(NamedTuple):
    """Label of a matrix (rows, columns); ``scale`` is sqrt(out / in), NaN if it is not known."""

    name: str
    weight: MatrixWeight
    scale: float


def matrix_weights(model: nn.Module) -> Iterator[MatrixWeight]:
    """Yield all real parameters that are matrices or hold some, once each."""
    for name, parameter, module in named_parameters(model):
        layout = _layout(name.rpartition(".")[2], parameter, module)
        if layout is not None and is_measurable(parameter) and not is_special(parameter, module):
            yield MatrixWeight(name, parameter, layout)


def is_special(parameter: Tensor, module: nn.Module) -> bool:
    """Return True for a complex parameter, and for one of which its module computes the weight that it uses."""
    hooks = [hook for hook in forward_pre_hooks(module).values() if isinstance(hook, _COMPUTING)]
    computed = [getattr(hook, "name", None) or getattr(hook, "_tensor_name", "") for hook in hooks]
    own = [parameters_in(module).get(f"{name}_{end}") for name in computed for end in ("orig", "g", "v")]
    is_source = any(item is parameter for item in own)
    return parameter.is_complex() or is_source or isinstance(module, ParametrizationList)


def labelled_matrices(weight: MatrixWeight, value: Tensor) -> Iterator[tuple[Label, Tensor]]:
    """Yield the matrix of the value of a weight, or of its change; of a stack all, called ``{name}/{i}``."""
    matrices = weight.layout(whole_tensor(value))
    rows, columns = matrices.shape[1:]
    scale = math.nan if weight.layout in (embedding, _stack) else math.sqrt(rows / columns)
    for i, matrix in enumerate(matrices):
        yield Label(f"{weight.name}/{i}" if weight.layout is _stack else weight.name, weight, scale), matrix


def _layout(name: str, parameter: Tensor, module: nn.Module) -> _Layout | None:
    """The layout of a parameter, by its name in its module; None if it holds no matrix."""
    shape, is_own = parameter.shape, name == "weight"
    if len(shape) < 2 or name.endswith("bias"):  # stacked experts have a vector each
        return None
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return embedding
    if isinstance(module, TRANSPOSED) and is_own:
        return partial(_transposed, groups=module.groups)
    if is_conv1d(module) and is_own:
        return lambda value: value.mT[None]
    if len(shape) == 2 or (isinstance(module, CONVOLUTIONS) and is_own):
        return _matrix
    if shape[0] > 1:
        return _stack
    return embedding if any(size > 1 for size in shape[:-1]) else None
