"""The effective weights of a model, and their layouts: how their values become matrices of shape (out, in)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ignite_monitor.model._torch import forward_pre_hooks, modules_in, parameters_in
from ignite_monitor.model.devices import device_of
from ignite_monitor.model.dtensor import whole_tensor
from ignite_monitor.model.isolation import preserved_buffers, preserved_rng_state
from ignite_monitor.model.linear_maps import CONVOLUTIONS, TRANSPOSED, is_conv1d
from ignite_monitor.model.names import named_modules
from ignite_monitor.model.sampling import is_measurable

_COMPUTING = (WeightNorm, SpectralNorm, BasePruningMethod)


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


class EffectiveWeight(NamedTuple):
    """A weight as its module uses it, computed of some parameters."""

    name: str
    parameters: tuple[Tensor, ...]
    shape: torch.Size
    value: Callable[[], Tensor]  # to be called under no_grad
    layout: Callable[[Tensor], Tensor] = _matrix


class Label(NamedTuple):
    """Label of a matrix (rows, columns); ``scale`` is sqrt(out / in), NaN if it is not known."""

    name: str
    weight: EffectiveWeight
    scale: float


def effective_weights(model: nn.Module) -> Iterator[EffectiveWeight]:
    """Yield all real weights that are matrices or hold some, once each."""
    modules = list(named_modules(model))
    computed = {path: list(_computed(module)) for path, module in modules}
    known = {id(parameter) for weights in computed.values() for weight in weights for parameter in weight.parameters}
    for path, module in modules:
        weights = computed[path]
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in known:
                known.add(id(parameter))
                weights.append(EffectiveWeight(name, (parameter,), parameter.shape, parameter.detach))
        for weight in weights:
            layout = _layout(module, weight)
            is_real = all(is_measurable(part) and not part.is_complex() for part in weight.parameters)
            if is_real and layout is not None:
                yield weight._replace(name=f"{path}.{weight.name}".lstrip("."), layout=layout)


def labelled_matrices(weight: EffectiveWeight, value: Tensor) -> Iterator[tuple[Label, Tensor]]:
    """Yield the matrix of the value of a weight, or of its change; of a stack all, called ``{name}/{i}``."""
    matrices = weight.layout(whole_tensor(value))
    rows, columns = matrices.shape[1:]
    scale = math.nan if weight.layout in (embedding, _stack) else math.sqrt(rows / columns)
    for i, matrix in enumerate(matrices):
        yield Label(f"{weight.name}/{i}" if weight.layout is _stack else weight.name, weight, scale), matrix


def _layout(module: nn.Module, weight: EffectiveWeight) -> Callable[[Tensor], Tensor] | None:
    """The layout of a weight; None if it holds no matrix."""
    shape, is_own = weight.shape, weight.name == "weight"
    if len(shape) < 2 or weight.name.endswith("bias"):  # stacked experts have a vector each
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


def _computed(module: nn.Module) -> Iterator[EffectiveWeight]:
    """Yield the weights that a module computes of its parameters, by their names in it."""
    parametrizations = modules_in(module).get("parametrizations")
    if isinstance(parametrizations, nn.ModuleDict):
        for name, recipe in parametrizations.items():
            make = partial(_parametrized, recipe)
            yield EffectiveWeight(name, tuple(recipe.parameters()), make().shape, make)
    if any(isinstance(hook, _COMPUTING) for hook in forward_pre_hooks(module).values()):
        parameters: Any = parameters_in(module)
        for name in [key.removesuffix(end) for key in parameters for end in ("_orig", "_v") if key.endswith(end)]:
            parts = tuple(parameters[f"{name}{end}"] for end in ("_orig", "_g", "_v") if f"{name}{end}" in parameters)
            yield EffectiveWeight(name, parts, parts[-1].shape, partial(_hooked, module, name))


def _hooked(module: nn.Module, name: str) -> Tensor:
    """Compute the weight as hooks before a forward pass do, in eval mode and for a copy of the module."""
    module_copy = copy.copy(module)
    module_copy.training = False
    for hook in forward_pre_hooks(module).values():
        if isinstance(hook, _COMPUTING):
            hook(module_copy, ())
    weight: Tensor = getattr(module_copy, name)
    return weight


def _parametrized(recipe: nn.Module) -> Tensor:
    """The weight of a parametrization in eval mode, with its buffers and the RNG state preserved."""
    with preserved_buffers(recipe.modules()), preserved_rng_state({device_of(recipe)}):
        for module in recipe.modules():
            module.training = False
        weight: Tensor = recipe()
    return weight
