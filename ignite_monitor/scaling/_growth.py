"""What grows with the width in a model, found by comparing two of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils.parametrize import type_before_parametrizations

from ignite_monitor.checks import check_type
from ignite_monitor.model.linear_maps import TRANSPOSED
from ignite_monitor.model.names import named_modules
from ignite_monitor.scaling.module import multiplier_of

_OUT_FIRST = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_IN_FIRST = (nn.Embedding, nn.EmbeddingBag, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Grown(NamedTuple):
    """A module with weights that grow.

    Attributes:
        name: its name in the model.
        module: the module of the larger model.
        weights: by their names in the module, each with whether it grows, dimension by dimension.
    """

    name: str
    module: nn.Module
    weights: dict[str, tuple[nn.Parameter, tuple[bool, ...]]]


def growing_modules(small: nn.Module, large: nn.Module) -> list[Grown]:
    """The modules whose weights are larger in one of two models.

    Raises:
        TypeError: if one is no module.
        ValueError: if they differ in more than sizes, or can't be looked into, or nothing grows.
    """
    for made in (small, large):
        _check_made(made)
    modules = list(named_modules(small)), list(named_modules(large))
    kinds = [[(name, _kind(module)) for name, module in each] for each in modules]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "Argument make_model should make models that differ in sizes alone, but they have other modules"
        )
    found = []
    for (name, before), (_, after) in zip(*modules, strict=True):
        if multiplier_of(after) is not None:
            raise ValueError(f"Argument make_model should make a model without ParametrizedModules, but {name} is one")
        weights = {}
        ours, theirs = dict(before.named_parameters(recurse=False)), dict(after.named_parameters(recurse=False))
        if {key: each.ndim for key, each in ours.items()} != {key: each.ndim for key, each in theirs.items()}:
            raise ValueError(f"Argument make_model should make models that differ in sizes alone, but {name} differs")
        for key, parameter in theirs.items():
            if isinstance(after, (nn.Embedding, nn.EmbeddingBag)) and not parameter.requires_grad:
                continue  # a table that is no weight to learn, as of sinusoids
            sizes = _sizes(before, ours[key]), _sizes(after, parameter)
            grows = tuple(one != other for one, other in zip(*sizes, strict=True))
            if parameter.ndim > 1 and any(grows):
                weights[key] = (parameter, grows)
        if weights:
            found.append(Grown(name, after, weights))
    if not found:
        raise ValueError("Argument make_model should make a model whose weights grow with width, but none does")
    return found


def _check_made(model: nn.Module) -> None:
    check_type("make_model", model, nn.Module, "a function that returns a torch.nn.Module")
    for name, module in named_modules(model):
        lazy = any(isinstance(parameter, UninitializedParameter) for parameter in module.parameters(recurse=False))
        if lazy or isinstance(module, torch.jit.ScriptModule):
            raise ValueError(
                f"Argument make_model should make a model without {'lazy' if lazy else 'scripted'} modules, but "
                f"{name or 'all of it'} is one"
            )


def _kind(module: nn.Module) -> tuple[str, str]:
    # By name, since make_model may define the class; and each module with a parametrization of torch's has its own.
    kind = type_before_parametrizations(module)
    return kind.__module__, kind.__qualname__


def _sizes(module: nn.Module, parameter: nn.Parameter) -> tuple[int, ...]:
    """The shape of a weight, with as many inputs as are summed over and all outputs."""
    if isinstance(module, TRANSPOSED) and parameter.ndim > 1:
        return (parameter.shape[0] // module.groups, module.out_channels, *parameter.shape[2:])
    return tuple(parameter.shape)


def width_and_type(grown: Grown, seen: tuple[int, int] | None) -> tuple[int, str] | None:
    """Width and layer type of a module; None if it has no weight that activations are multiplied by.

    Args:
        seen: the last dimensions of what it takes and returns, None where it is no single tensor.

    Raises:
        ValueError: if it is not known how it uses its weights.
    """
    module = grown.module
    if set(grown.weights) != {"weight"}:
        matrices = [key for key, (_, grows) in grown.weights.items() if sum(grows) > 1]
        if matrices:
            _refuse(grown, matrices)
        return None
    weight, grows = grown.weights["weight"]
    if isinstance(module, _OUT_FIRST) or (weight.ndim == 2 and seen == (weight.shape[1], weight.shape[0])):
        output = 0
    elif isinstance(module, _IN_FIRST) or (weight.ndim == 2 and seen == (weight.shape[0], weight.shape[1])):
        output = 1
    else:
        if sum(grows) > 1:
            _refuse(grown, ["weight"])
        return None
    sizes = _sizes(module, weight)
    grows_in = any(grew for place, grew in enumerate(grows) if place != output)
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and grows_in:
        _refuse(grown, ["weight"])
    if grows_in:
        return math.prod(sizes) // sizes[output], "hidden" if grows[output] else "readout"
    return sizes[output], "embedding"


def _refuse(grown: Grown, keys: list[str]) -> None:
    raise ValueError(
        f"It is not known how {grown.name or 'the model'} ({type(grown.module).__name__}) uses what grows with width "
        f"in {', '.join(keys)}: wrap it in a ParametrizedModule by hand, or make it of Linear, Conv and Embedding"
    )
