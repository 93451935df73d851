"""Roles of weights that are given, and of weights of which only sizes are known."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ignite_monitor.checks import check_choice, check_type
from ignite_monitor.model.names import named_parameters
from ignite_monitor.scaling.exported import LayerUse, widths_by_size
from ignite_monitor.scaling.graph import Node
from ignite_monitor.scaling.presets import LAYER_TYPES
from ignite_monitor.scaling.program import ExportError

_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_INSIDE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


def given_roles(kinds: object, weights: Collection[str]) -> dict[str, str]:
    """Roles by the weights' names; in ``kinds`` a weight, its module, or the last part of either may be named.

    Raises:
        TypeError: if it is no mapping of strings.
        ValueError: if a role is unknown, or a name fits no weight that grows.
    """
    if kinds is None:
        return {}
    check_type("kinds", kinds, Mapping, "Mapping or None")
    given: Mapping[Any, Any] = kinds  # type: ignore[assignment]
    for name, role in given.items():
        check_choice(f"kinds[{name!r}]", role, *LAYER_TYPES, "vector")
    roles: dict[str, str] = {}
    used = set()
    for weight in weights:
        owner = weight.removesuffix(".weight")
        keys = [key for key in (weight, owner, owner.rpartition(".")[2]) if key in given]
        used.update(keys)
        if keys:
            roles[weight] = given[keys[0]]
    if unknown := sorted(map(str, set(given) - used)):
        raise ValueError(f"Argument kinds should name weights or modules that grow with width, but given {unknown}")
    return roles


def uses_by_size(
    models: tuple[nn.Module, nn.Module], roles: Mapping[str, str], growing: Collection[str]
) -> tuple[dict[str, LayerUse], list[Node]]:
    """Uses and a graph for a model that can't be exported.

    All layers take the output of the first embedding, with which each has the exponents of its own alignment. The model
    must not multiply by a power of its width.

    Raises:
        ExportError: if a weight's role is neither given nor that of a known module.
    """
    shapes = {name: tuple(each.shape) for name, each, _ in named_parameters(models[0])}
    uses: dict[str, LayerUse] = {}
    unknown = []
    for name, weight, module in named_parameters(models[1]):
        if name not in growing or not weight.requires_grad or roles.get(name) == "vector":
            continue
        pair = shapes[name], tuple(weight.shape)
        role = roles.get(name)
        if role is None and isinstance(module, nn.Embedding):
            role = "embedding"
        elif role is None and isinstance(module, (*_LINEAR, *_INSIDE)):
            more_inputs, more_outputs = math.prod(pair[1][1:]) > math.prod(pair[0][1:]), pair[1][0] > pair[0][0]
            role = "hidden" if more_inputs and more_outputs else "readout" if more_inputs else "embedding"
        if role is None:
            unknown.append(name)
            continue
        layer = name.removesuffix(".weight")
        is_module = layer != name and isinstance(module, (*_LINEAR, nn.Embedding))
        widths = widths_by_size(role, pair)
        if isinstance(module, _LINEAR) and role != "embedding":
            widths = math.prod(pair[0][1:]), math.prod(pair[1][1:])
        uses[layer] = LayerUse(name, role, widths, layer if is_module else None)
    if unknown:
        raise ExportError(
            f"Argument kinds should give the roles of {', '.join(unknown)}, too, as the model can't be read"
        )
    first = next((name for name, use in uses.items() if use.kind == "embedding"), None)
    inputs = () if first is None else (first,)
    nodes = [Node(name, use.kind, () if use.kind == "embedding" else inputs) for name, use in uses.items()]
    return uses, sorted(nodes, key=lambda node: node.name != first)
