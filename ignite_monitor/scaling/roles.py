r"""Roles of weights: given ones, those of models that can't be exported, and the initialization that they need.

**Layers with a fixed number of outputs inside the network**, such as keys and values that all heads share, a router, or
the first matrix of LoRA, sum over n features like a readout, but other weights take their outputs. Their gradients with
respect to the input, :math:`W^\top g` with few elements g, change it along the rows of W. So :math:`\omega` is 1, and
a + b should be 1, as in a readout. By what takes the output:

- A linear operation: it would shrink with width, so the weight starts at zero, the limit for n to infinity.
- A function, such as a router's softmax: initialized like a readout. So is the second of two layers that are multiplied
  with each other, as both at zero would never learn.
- A norm, where only the relative change counts, or a zero weight (LoRA's B), as both at zero would never learn:
  initialized like a hidden layer, a + b = 1/2 (c = 1 for A and 0 for B, the ratio n of LoRA+, arXiv:2402.12354).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn

from ignite_monitor.checks import check_choice, check_type
from ignite_monitor.model.names import named_parameters
from ignite_monitor.scaling.graph import LAYER_TYPES, Node
from ignite_monitor.scaling.program import ExportError, TracingError

FLAT = 0.02
"""Tolerance for the logarithm of a factor's ratio between the widths."""

T = TypeVar("T")
_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_INSIDE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)


@dataclass
class LayerUse:
    """The use of one weight in a linear operation.

    Attributes:
        weight: the parameter's name.
        kind: "embedding", "hidden" or "readout".
        widths: n in both models.
        module: name of the module whose output is the layer's output; None if there is none.
        nodes: names of its nodes in the graph, one for every call.
        takers: kinds of operations that take the output: "linear", "norm", "nonlinear", or "zero" for a zero weight.
        own: growth of the model's own factor -> its place.
        partners: layers whose outputs are multiplied with the layer's output.
        few: True for a hidden layer whose number of outputs does not grow.
        from_zero: True if the weight should start at zero.
    """

    weight: str
    kind: str
    widths: tuple[int, int]
    module: str | None = None
    nodes: list[str] = field(default_factory=list)
    takers: set[str] = field(default_factory=set)
    own: dict[float, str] = field(default_factory=dict)
    partners: set[str] = field(default_factory=set)
    few: bool = False
    from_zero: bool = False

    def exponent(self, layer: str) -> float:
        """Exponent of the model's own factor.

        Raises:
            TracingError: if different uses have different factors.
        """
        own = self.own or {0.0: ""}
        if max(own) - min(own) > FLAT:
            raise TracingError(
                f"{layer} is used with different factors that depend on the width ({' and '.join(own.values())}): "
                "multiply inside its module, after a layer of its own, or by what does not depend on the width"
            )
        growth = next(iter(own))
        exponent = growth / math.log(self.widths[1] / self.widths[0])
        nearest = round(12 * exponent) / 12
        return 0.0 if abs(growth) <= FLAT else nearest if abs(exponent - nearest) < 1e-4 else exponent


def choose_initialization(uses: Mapping[str, LayerUse], nodes: Iterable[Node]) -> None:
    """Set kind, few and from_zero of layers with few outputs, by the operations that take these."""
    feeding: set[str] = set()
    for node in reversed(list(nodes)):
        if node.kind != "junction" or node.name in feeding:
            feeding.update(node.inputs)
    for use in uses.values():
        if use.kind != "readout" or feeding.isdisjoint(use.nodes):
            continue
        if use.takers & {"norm", "zero"}:
            use.kind, use.few = "hidden", True
        elif "linear" in use.takers:
            use.from_zero = not any(uses[partner].from_zero for partner in use.partners)


def role_by_fans(fans: Collection[tuple[int, int]], given: str | None) -> tuple[str, tuple[int, int]]:
    """Role of a weight, and n in both models, from its numbers of inputs and outputs in both."""
    small, large = fans
    grows = large[0] > small[0], large[1] > small[1]
    role = {(True, True): "hidden", (True, False): "readout", (False, True): "embedding"}.get(grows, "fixed")
    side = 1 if (given or role) == "embedding" else 0
    return given or role, (small[side], large[side])


def widths_by_size(role: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, int]:
    """N in both models: the size that grows, for hidden layers the last one, as PyTorch has inputs last."""
    pairs = [pair for pair in zip(*shapes, strict=True) if pair[0] < pair[1]]
    pairs = pairs[-1:] if role == "hidden" else pairs
    return math.prod(small for small, _ in pairs), math.prod(large for _, large in pairs)


def given_roles(kinds: Any, weights: Collection[str]) -> dict[str, str]:
    """Roles by the weights' names; in ``kinds`` a weight, its module, or the last part of either may be named."""
    owners = {weight: weight.removesuffix(".weight") for weight in weights}
    keys = {weight: (weight, owner, owner.rpartition(".")[2]) for weight, owner in owners.items()}
    return overridden("kinds", kinds, keys, _check_role)


def overridden(
    name: str, overrides: Any, keys: Mapping[str, Iterable[str]], check: Callable[[str, Any], T], known: Any = ()
) -> dict[str, T]:
    """Overrides of parts of a model, each by the first of its keys.

    Args:
        name: name of the argument.
        overrides: what the user gave.
        keys: part -> its keys.
        check: makes a value of (name, value), or raises.
        known: keys that need not fit any part.

    Raises:
        TypeError: if it is no mapping, or a value is of another type.
        ValueError: if a value is invalid, or a key fits no part.
    """
    check_type(name, {} if overrides is None else overrides, Mapping, "Mapping or None")
    checked = {key: check(f"{name}[{key!r}]", value) for key, value in (overrides or {}).items()}
    fitting = {part: [key for key in own if key in checked] for part, own in keys.items()}
    unknown = set(checked).difference(known, *fitting.values())
    if unknown:
        raise ValueError(
            f"Argument {name} should name layers or weights that grow with width, but given {sorted(map(str, unknown))}"
        )
    return {part: checked[own[0]] for part, own in fitting.items() if own}


def _check_role(name: str, role: str) -> str:
    check_choice(name, role, *LAYER_TYPES, "vector")
    return role


def uses_by_size(
    models: tuple[nn.Module, nn.Module], roles: Mapping[str, str], growing: Collection[str]
) -> tuple[dict[str, LayerUse], list[Node]]:
    """Uses and a graph for a model that can't be exported.

    All layers take the output of the first embedding, with which each has the exponents of its own alignment. The model
    must not multiply by a power of its width.

    Raises:
        ExportError: if a weight's role is neither given nor that of a known module.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter, _ in named_parameters(models[0])}
    uses: dict[str, LayerUse] = {}
    for name, weight, module in named_parameters(models[1]):
        if name not in growing or not weight.requires_grad or roles.get(name) == "vector":
            continue
        pair = shapes[name], tuple(weight.shape)
        role = roles.get(name, "embedding" if isinstance(module, nn.Embedding) else None)
        widths = None if role is None else widths_by_size(role, pair)
        if isinstance(module, (*_LINEAR, *_INSIDE)):
            role, widths = role_by_fans([(math.prod(shape[1:]), shape[0]) for shape in pair], role)
        if role is None or widths is None:
            raise ExportError(f"Argument kinds should give the role of {name}, too, as the model can't be read")
        layer = name.removesuffix(".weight")
        is_module = layer != name and isinstance(module, (*_LINEAR, nn.Embedding))
        uses[layer] = LayerUse(name, role, widths, layer if is_module else None, [layer])
    first = next((name for name, use in uses.items() if use.kind == "embedding"), None)
    inputs = () if first is None else (first,)
    nodes = [Node(name, use.kind, () if use.kind == "embedding" else inputs) for name, use in uses.items()]
    return uses, sorted(nodes, key=lambda node: node.name != first)
