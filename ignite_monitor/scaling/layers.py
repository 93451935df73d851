"""The layers of a model that has ParametrizedModules, and what is known of each layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_monitor.model.names import named_modules
from ignite_monitor.scaling.graph import PRESETS, Node, chain
from ignite_monitor.scaling.module import Multiplier, check_weights, draw_weights, multiplier_of, norm_of
from ignite_monitor.scaling.tracing import trace_graph


@dataclass(frozen=True)
class ParametrizedLayer:
    """What is known of one layer of a :class:`Parametrization`.

    Attributes:
        name: its name in the model.
        module: the module, a :class:`ParametrizedModule` or one that :func:`parametrize` found.
        layer_type: "embedding", "hidden", "readout" or "attention".
        fan_in: n, the width that exponents are of.
        a: the multiplier's exponent.
        b: the initial standard deviation's exponent.
        c: the learning rate's exponent as it was solved for when the parametrization was made; None without weights.
        weight_names: the weights' names in the module.
        bias_names: those of its other parameters.
        std: the initial weights' standard deviation.
        seeds: of the initial weights, by their name in the module; weights that were frozen or zero have none.
        is_module: whether what the module gives is what the layer gives.
        own: the exponent of the factor that the model itself multiplies the layer by.
        hook: multiplies the module's output, or only says what is known of it; None without a module.
        multiplies: whether the hook multiplies; otherwise b and c do it.
        from_zero: whether the weights start at zero.
        few: whether it gives as many numbers at any width, though it is a hidden layer.
        drift: the largest exponent with which inputs that drift may change its output.
    """

    name: str
    module: nn.Module
    layer_type: str
    fan_in: int
    a: float
    b: float
    c: float | None
    weight_names: tuple[str, ...]
    bias_names: tuple[str, ...]
    std: float = 0.0
    seeds: dict[str, int] = field(default_factory=dict)
    is_module: bool = True
    own: float = 0.0
    hook: Multiplier | None = None
    multiplies: bool = True
    from_zero: bool = False
    few: bool = False
    drift: float = 0.0

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The weights that the module has now, by their name in it."""
        return {key: self.module.get_parameter(key) for key in self.weight_names}

    @property
    def biases(self) -> dict[str, nn.Parameter]:
        """The layer's other parameters that the module has now, by their name in it."""
        return {key: self.module.get_parameter(key) for key in self.bias_names}

    @property
    def zeroed_biases(self) -> dict[str, nn.Parameter]:
        """Those of them that start at zero."""
        return {
            key: each for key, each in self.biases.items() if "bias" in key.rpartition(".")[2] and each.requires_grad
        }

    def initial_weight(self, name: str) -> Tensor:
        """The initial value of one of the weights, drawn once more from its seed; or what it has kept since.

        Args:
            name: one of the names in ``weights``.
        """
        weight = self.weights[name]
        if name not in self.seeds:
            return torch.zeros_like(weight) if weight.requires_grad else weight.detach().clone()
        owner = self.module.get_submodule(name.rpartition(".")[0])
        return draw_weights(weight, self.std, self.seeds[name], getattr(owner, "padding_idx", None))


class FoundLayers(NamedTuple):
    """Layers by name, with a and b as they are made and c where it is given; and the nodes of their graph."""

    layers: dict[str, ParametrizedLayer]
    nodes: Iterable[Node]


def as_node(layer: ParametrizedLayer, place: Node | None = None) -> Node:
    """A layer's node, with its exponents and, where its place in the graph is known, its inputs."""
    place = place or Node(layer.name, layer.layer_type)
    a, b = (layer.a, layer.b) if layer.multiplies else (0.0 - layer.own, layer.a + layer.b + layer.own)
    return place._replace(kind=layer.layer_type, a=a, b=b, c=layer.c, few=layer.few)


def layers_by_hand(model: nn.Module, frozen: bool = True) -> dict[str, ParametrizedLayer]:
    """The layers that have a multiplier: ParametrizedModules, and what a parametrization has found before.

    Args:
        frozen: whether to have those, too, whose weights are all frozen.

    Raises:
        ValueError: if one is a part of another, or computes its weight from other parameters.
    """
    layers: dict[str, ParametrizedLayer] = {}
    inside: dict[int, str] = {}
    for name, module in named_modules(model):
        hook = multiplier_of(module)
        parameters = dict(module.named_parameters())
        norms = {norm_of(parameters, key) for key in parameters}
        weights = tuple(key for key, each in parameters.items() if each.ndim > 1 and key not in norms)
        if hook is None or not (frozen or not weights or any(parameters[key].requires_grad for key in weights)):
            continue
        if id(module) in inside:
            raise ValueError(f"Layer {name} is a part of layer {inside[id(module)]}: no layer may hold another")
        for inner in module.modules():
            check_weights(f"Layer {name}", inner)
        inside |= dict.fromkeys(map(id, module.modules()), name)
        a, b = PRESETS["mup"][hook.layer_type]
        a, b = (a if hook.a is None else hook.a, b if hook.b is None else hook.b)
        biases = tuple(key for key in parameters if key not in weights)
        width, kind = hook.width, hook.layer_type
        layers[name] = ParametrizedLayer(name, module, kind, width, a, b, hook.c, weights, biases, hook=hook)
    return layers


def found_by_hand(model: nn.Module, sample_input: Any) -> FoundLayers:
    """The layers of a model, and their graph.

    Raises:
        ValueError: if there are none.
    """
    layers = layers_by_hand(model)
    if not layers:
        raise ValueError("Argument model should have at least one ParametrizedModule, but has none")
    nodes = [(layer.module, as_node(layer)) for layer in layers.values()]
    graph = chain(node for _, node in nodes) if sample_input is None else trace_graph(model, nodes, sample_input)
    return FoundLayers(layers, graph.nodes)
