"""The layers of a model: what they are called, and what is known of them before they have exponents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm

from ignite_monitor.model._torch import parameters_in
from ignite_monitor.model.names import named_modules
from ignite_monitor.scaling.graph import PRESETS, Node
from ignite_monitor.scaling.module import Multiplier, ParametrizedModule, multiplier_of


class FoundLayer(NamedTuple):
    """A layer before it has exponents.

    Attributes:
        module: the module that holds its weights.
        layer_type: "embedding", "hidden", "readout" or "attention".
        width: n.
        a: the multiplier's exponent, as that of its type or its module's.
        b: the initial standard deviation's, likewise.
        c: the learning rate's, None to solve for it.
        hook: what multiplies the module's output, or only says what is known of it; None where no module has it.
        own: the exponent of the factor that the model itself multiplies the layer by.
        weights: the names of its weights in the module.
        biases: those of its other parameters.
        is_module: whether what the module gives is what the layer gives.
        multiplies: whether its hook multiplies; otherwise b and c have to do it.
        from_zero: whether the weights are set to zero at the start, unless a and b are given.
    """

    module: nn.Module
    layer_type: str
    width: int
    a: float
    b: float
    c: float | None
    hook: Multiplier | None
    own: float
    weights: tuple[str, ...]
    biases: tuple[str, ...]
    is_module: bool = True
    multiplies: bool = True
    from_zero: bool = False

    def node(self, name: str, ab: tuple[float, float] | None = None, c: float | None = None) -> Node:
        """A node without inputs, with exponents of its own or others."""
        a, b = (self.a, self.b) if ab is None else ab
        if not self.multiplies:
            a, b = 0.0 - self.own, a + b + self.own
        return Node(name, self.layer_type, (), a, b, self.c if c is None else c)


class FoundLayers(NamedTuple):
    """The layers of a model.

    Attributes:
        layers: by name.
        nodes: the nodes of their graph, whose exponents are not theirs yet.
    """

    layers: dict[str, FoundLayer]
    nodes: Iterable[Node]


def layer_name(modules: Mapping[str, nn.Module], name: str) -> str:
    """The name of the layer that a module is: its own, or that of the ParametrizedModule around it."""
    owner = name.rpartition(".")[0]
    return owner if name and isinstance(modules.get(owner), ParametrizedModule) else name


def layers_by_hand(model: nn.Module, frozen: bool = True) -> dict[str, FoundLayer]:
    """The layers that have a multiplier: ParametrizedModules, and what a parametrization has found before.

    Args:
        frozen: whether to have those, too, whose weights are all frozen.

    Raises:
        ValueError: if one is a part of another, or computes its weight from other parameters.
    """
    found: dict[str, FoundLayer] = {}
    inside: dict[int, str] = {}
    for name, module in named_modules(model):
        hook = multiplier_of(module)
        weights = [(key, each) for key, each in module.named_parameters() if each.ndim > 1]
        if hook is None or not (frozen or not weights or any(each.requires_grad for _, each in weights)):
            continue
        if id(module) in inside:
            raise ValueError(f"Layer {name} is a part of layer {inside[id(module)]}: no layer may hold another")
        if any(map(computes_weights, module.modules())):
            raise ValueError(
                f"Layer {name} computes its weight from other parameters, and it is not known how these should start: "
                "of all that do so only weight_norm can be parametrized"
            )
        inside |= dict.fromkeys(map(id, module.modules()), name)
        a, b = PRESETS["mup"][hook.layer_type]
        a, b = (a if hook.a is None else hook.a, b if hook.b is None else hook.b)
        norms = _norm_names(module)
        held = [key for key, _ in weights if key not in norms]
        others = [key for key, each in module.named_parameters() if each.ndim < 2 or key in norms]
        found[name] = FoundLayer(
            module, hook.layer_type, hook.width, a, b, hook.c, hook, 0.0, tuple(held), tuple(others)
        )
    return found


def computes_weights(module: nn.Module) -> bool:
    """Whether a module's weight is computed from other parameters, but by weight norm."""
    computed = getattr(module, "parametrizations", None)
    if isinstance(computed, nn.ModuleDict):
        return any(type(each) is not _WeightNorm for listed in computed.values() for each in listed.children())
    weight = vars(module).get("weight")  # where the older norms, which are hooks, leave it
    return (
        isinstance(weight, Tensor) and not isinstance(weight, nn.Parameter) and "weight_g" not in parameters_in(module)
    )


def _norm_names(module: nn.Module) -> set[str]:
    """The names of the norms that weight norm multiplies with."""
    found = set()
    for path, each in module.named_modules():
        computed = getattr(each, "parametrizations", None)
        if isinstance(computed, nn.ModuleDict):
            found |= {f"{path}.parametrizations.{key}.original0".lstrip(".") for key in computed}
        if "weight_g" in parameters_in(each):
            found.add(f"{path}.weight_g".lstrip("."))
    return found


def set_norm(module: nn.Module, key: str) -> None:
    """Where weight norm computes a weight, let the norm that it multiplies with be that of the weight.

    Args:
        key: the weight's name in the module.
    """
    owner, _, last = key.rpartition(".")
    other = {"weight_v": "weight_g", "original1": "original0"}.get(last)
    if other is None:
        return
    weight, norm = (module.get_parameter(f"{owner}.{each}".lstrip(".")) for each in (last, other))
    if norm.ndim == 0:
        norm.copy_(torch.linalg.vector_norm(weight))
        return
    dims = [dim for dim in range(weight.ndim) if norm.shape[dim] == 1 < weight.shape[dim]]
    norm.copy_(torch.linalg.vector_norm(weight, dim=dims, keepdim=True) if dims else weight.abs())
