"""Weights that hold matrices, and their layouts: how their values become matrices of shape (out, in)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ignite_monitor.model._torch import forward_pre_hooks
from ignite_monitor.model.dtensor import whole_tensor
from ignite_monitor.model.linear_maps import CONVOLUTIONS, TRANSPOSED, is_conv1d
from ignite_monitor.model.names import Selection, named_parameters
from ignite_monitor.model.sampling import is_measurable

_COMPUTING = (WeightNorm, SpectralNorm, BasePruningMethod)  # hooks that compute a weight
_SOURCES = ("_orig", "_g", "_v")  # from parameters whose names end so


class MatrixWeight(NamedTuple):
    """A parameter that holds matrices, and the module that owns it."""

    name: str
    parameter: nn.Parameter
    module: nn.Module


class Label(NamedTuple):
    """Label of a matrix (rows, columns); ``scale`` is sqrt(out / in), NaN if it is not known."""

    name: str
    weight: str  # the parameter's name
    scale: float


def matrix_weights(model: nn.Module, selection: Selection) -> tuple[list[MatrixWeight], list[str]]:
    """Return the selected parameters that hold matrices, once each, and the names of those that are special."""
    weights, special = [], []
    for name, parameter, module in named_parameters(model):
        if name not in selection:
            continue
        if _is_special(name, parameter, module):
            special.append(name)
        elif parameter.ndim > 1 and is_measurable(parameter) and not name.endswith("bias"):  # experts have one each
            weights.append(MatrixWeight(name, parameter, module))
    return weights, special


def _is_special(name: str, parameter: Tensor, module: nn.Module) -> bool:
    """Return True if a parameter is complex, or if its module computes the weight in use from it."""
    is_computing = any(isinstance(hook, _COMPUTING) for hook in forward_pre_hooks(module).values())
    is_source = is_computing and name.endswith(_SOURCES)
    return is_source or parameter.is_complex() or isinstance(module, ParametrizationList)


def labelled_matrices(weight: MatrixWeight, value: Tensor) -> Iterator[tuple[Label, Tensor]]:
    """Yield the matrix of the value of a weight, or of its change; of a stack all, called ``{name}/{i}``."""
    name, _, module = weight
    value, is_own = whole_tensor(value), name.rpartition(".")[2] == "weight"
    is_stack = value.ndim > 2 and not (is_own and isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)))
    if is_own and isinstance(module, TRANSPOSED):  # (in, out / groups, k...)
        value = value.unflatten(0, (module.groups, -1)).transpose(1, 2).flatten(0, 1)
    elif is_own and is_conv1d(module):  # (in, out)
        value = value.mT
    matrices = value.flatten(0, -3) if is_stack else value.flatten(1)[None]
    rows, columns = matrices.shape[1:]
    scale = math.nan if is_stack or isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else math.sqrt(rows / columns)
    for i, matrix in enumerate(matrices):
        yield Label(f"{name}/{i}" if is_stack else name, name, scale), matrix
