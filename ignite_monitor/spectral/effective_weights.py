"""The effective weights of a model: as matrices, stacks of matrices or embeddings.

Embeddings are the parameters of ``nn.Embedding`` and ``nn.EmbeddingBag``, and parameters of shape (1, L, d). Other
parameters of three and more dimensions that belong to no convolution hold one matrix after the other (experts).
"""

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

MATRIX, STACK, EMBEDDING = "matrix", "stack", "embedding"

_COMPUTING = (WeightNorm, SpectralNorm, BasePruningMethod)


class EffectiveWeight(NamedTuple):
    """A weight as its module uses it, computed of some parameters."""

    name: str
    parameters: tuple[Tensor, ...]
    shape: torch.Size
    value: Callable[[], Tensor]  # to be called under no_grad
    kind: str = MATRIX  # or STACK along all dimensions but the last two, or EMBEDDING
    by_input: bool = False  # True if matrices are of shape (in, out)
    groups: int = 0  # their number if the shape is (in, out / groups, k…)


class Weight(NamedTuple):
    """One weight as a matrix (rows, columns); ``scale`` is sqrt(out / in), NaN if it is not known."""

    name: str
    matrix: Tensor
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
            yield from _described(path, module, weight)


def as_weights(weight: EffectiveWeight, value: Tensor) -> list[Weight]:
    """Matrices of the value of a weight, or of its change: one, or a stack, called ``{name}/{i}``; DTensors whole."""
    value = whole_tensor(value)
    if weight.groups:
        value = value.unflatten(0, (weight.groups, -1)).transpose(1, 2).flatten(0, 1)
    if weight.kind == STACK:
        stack = value.flatten(0, -3)
        names = [f"{weight.name}/{i}" for i in range(len(stack))]
    else:
        stack = (value.reshape(-1, value.shape[-1]) if weight.kind == EMBEDDING else value.flatten(1))[None]
        names = [weight.name]
    rows, columns = stack.shape[1:]
    ratio = columns / rows if weight.by_input else rows / columns
    ratio = ratio if weight.kind == MATRIX else math.nan  # stacks are of shape (n, out, in) or (n, in, out)
    return [Weight(name, matrix, math.sqrt(ratio)) for name, matrix in zip(names, stack, strict=True)]


def _described(path: str, module: nn.Module, weight: EffectiveWeight) -> Iterator[EffectiveWeight]:
    if not all(is_measurable(parameter) and not parameter.is_complex() for parameter in weight.parameters):
        return
    if weight.name.endswith("bias"):  # stacked experts have a vector each
        return
    shape, is_own = weight.shape, weight.name == "weight"
    kind, by_input, groups = MATRIX, False, 0
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        kind = EMBEDDING
    elif isinstance(module, TRANSPOSED) and is_own:
        groups = module.groups
    elif is_conv1d(module) and is_own:
        by_input = True
    elif not (isinstance(module, CONVOLUTIONS) and is_own):
        leading = next((i for i, size in enumerate(shape) if size != 1), len(shape)) if len(shape) > 2 else 0
        shape = shape[leading:]
        if leading:
            kind = EMBEDDING
        elif len(shape) > 2:
            kind = STACK
    if len(shape) >= 2 and shape.numel():
        name = f"{path}.{weight.name}".lstrip(".")
        yield weight._replace(name=name, kind=kind, by_input=by_input, groups=groups)


def _computed(module: nn.Module) -> Iterator[EffectiveWeight]:
    """Yield the weights that a module, unless it is scripted, computes of its parameters, by their names in it."""
    if isinstance(module, torch.jit.ScriptModule):
        return
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
