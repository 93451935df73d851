"""The graph of a model's layers, with what each does to exponents of the width, as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ignite_monitor.checks import check_real

LAYER_TYPES = ("embedding", "hidden", "readout", "attention")
JUNCTIONS = ("sum", "product", "contraction", "fixed")

PRESETS: dict[str, dict[str, tuple[float, float]]] = {
    "mup": {"embedding": (-0.5, 0.5), "hidden": (0.0, 0.5), "readout": (0.5, 0.5), "attention": (1.0, 0.0)},
    "standard": {"embedding": (0.0, 0.0), "hidden": (0.0, 0.5), "readout": (0.0, 0.5)},
    "ntk": {"embedding": (0.0, 0.0), "hidden": (0.5, 0.0), "readout": (0.5, 0.0)},
    "mean_field": {"embedding": (0.0, 0.0), "hidden": (0.5, 0.0), "readout": (1.0, 0.0)},
}
"""Exponents (a, b) per layer type, as ``ab_overrides`` takes them."""


class Alignment(NamedTuple):
    r"""How a layer's products grow with its fan-in n, as n to the power of one of these.

    Attributes:
        alpha: of the initial input and the weights' change, :math:`z_0 \Delta W^\top`.
        omega: of the input's change and the initial weights, :math:`\Delta z W_0^\top`.
        u: of both changes, :math:`\Delta z \Delta W^\top`.
    """

    alpha: float
    omega: float
    u: float


ALIGNMENTS = {"full": Alignment(1.0, 0.5, 1.0), "no": Alignment(0.5, 0.5, 0.5)}


def as_alignment(name: str, value: object) -> Alignment:
    """An alignment, given by its name or as three numbers.

    Raises:
        TypeError: if it is neither a name nor three numbers.
        ValueError: if there is no alignment of that name, or a number is not finite.
    """
    if isinstance(value, str):
        if value not in ALIGNMENTS:
            raise ValueError(
                f"Argument {name} should be one of {list(ALIGNMENTS)} or three numbers, but given {value!r}"
            )
        return ALIGNMENTS[value]
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise TypeError(f"Argument {name} should be one of {list(ALIGNMENTS)} or three numbers, but given {value!r}")
    return Alignment(*(check_real(name, number) for number in value))


class Node(NamedTuple):
    r"""One node of a graph: a layer, or a junction of branches.

    Attributes:
        name: what it is called; of a layer, its name in the model.
        kind: a layer type ("embedding", "hidden", "readout", "attention"); "sum", "product" or "contraction"; or
            "fixed", a weight that is as large at any width, and learns at the same rate.
        inputs: names of the nodes whose values it takes; values that do not change while training have none.
        a: of a layer, its output multiplier's exponent.
        b: of a layer with weights, the exponent of their initial standard deviation.
        c: its learning rate's exponent where that is not to be solved for.
        shares: the layer whose weights it has, where they are not its own.
        few: of a hidden layer, whether it gives as many numbers at any width, as a readout does.
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    a: float = 0.0
    b: float = 0.0
    c: float | None = None
    shares: str | None = None
    few: bool = False

    @property
    def layer(self) -> str:
        """The layer whose weights it has: itself, or the one that it shares them with."""
        return self.name if self.shares is None else self.shares

    @property
    def has_weights(self) -> bool:
        """Whether it has a learning rate."""
        return self.kind in {"embedding", "hidden", "readout"}


class LayerGraph:
    """Layers and junctions of a model, in the order of its forward pass.

    Args:
        nodes: the nodes, each after those it takes its inputs from.

    Raises:
        ValueError: if two nodes have one name, a kind or an input is not known, a junction has no input, or a layer
            has an (a, b) with which its activations would grow or vanish with width from the start.

    Examples:
        .. code-block:: python

            LayerGraph([
                Node("fc1", "embedding", a=-0.5, b=0.5),
                Node("fc2", "hidden", ("fc1",), b=0.5),
                Node("skip", "sum", ("fc1", "fc2")),
                Node("out", "readout", ("skip",), a=0.5, b=0.5),
            ])
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(nodes)
        self._by_name: dict[str, Node] = {}
        for node in self.nodes:
            self._check(node)
            self._by_name[node.name] = node

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

    @property
    def layers(self) -> list[Node]:
        """The nodes that have a learning rate of their own."""
        return [node for node in self.nodes if node.has_weights and node.shares is None]

    def _check(self, node: Node) -> None:
        if node.kind not in LAYER_TYPES + JUNCTIONS:
            raise ValueError(f"Node {node.name} should be of a kind in {LAYER_TYPES + JUNCTIONS}, but is {node.kind!r}")
        if node.name in self._by_name:
            raise ValueError(f"There are two nodes called {node.name}")
        unknown = [name for name in node.inputs if name not in self._by_name]
        if unknown:
            raise ValueError(f"Node {node.name} takes its input from {unknown}, which no node before it is called")
        if node.kind in JUNCTIONS[:3] and not node.inputs:
            raise ValueError(f"Node {node.name} is a {node.kind} without inputs")
        if node.shares is not None and node.shares not in self._by_name:
            raise ValueError(f"Node {node.name} shares the weights of {node.shares!r}, which is no layer before it")
        for exponent, value in (("a", node.a), ("b", node.b), ("c", 0.0 if node.c is None else node.c)):
            check_real(f"{exponent} of {node.name}", value)
        total = node.a + node.b
        wanted = {"embedding": 0.0, "hidden": 0.5, "readout": 0.5}.get(node.kind)
        if wanted is None or abs(total - wanted) < 1e-9 or (node.kind == "readout" and total > wanted):
            return
        relation = "at least" if node.kind == "readout" else "equal to"
        raise ValueError(
            f"Layer {node.name} should have a + b {relation} {wanted:g}, with which the outputs of {node.kind} layers "
            f"neither grow nor vanish with width from the start, but has {node.a:g} + {node.b:g}"
        )


def chain(nodes: Iterable[Node]) -> LayerGraph:
    """A graph in which each layer takes the output of the one before it.

    An embedding takes no input, and adds to what the layers before it give. Nothing takes a readout's output.

    Args:
        nodes: the layers in their order; inputs that they name are ignored.

    Raises:
        ValueError: if a name comes twice, or an (a, b) is not possible.
    """
    found: list[Node] = []
    current: tuple[str, ...] = ()
    for node in nodes:
        if node.kind == "embedding":
            found.append(node._replace(inputs=()))
            current = (*current, node.name)
            continue
        inputs = current
        if len(current) > 1:
            found.append(Node(f"{node.name}.input", "sum", current))
            inputs = current = (f"{node.name}.input",)
        found.append(node._replace(inputs=inputs))
        if node.kind != "readout":
            current = (node.name,)
    return LayerGraph(found)


def tied(graph: LayerGraph, parameters: Mapping[str, Iterable[object]]) -> LayerGraph:
    """The graph in which layers with the same weights have one learning rate.

    Args:
        parameters: the weights of each layer.

    Raises:
        ValueError: if layers share some of their weights and not all, or have different fixed c.
    """
    owners: dict[int, str] = {}
    primary: dict[str, str] = {}
    fixed: dict[str, set[float]] = {}
    for node in graph.layers:
        shared = {owners.setdefault(id(each), node.name) for each in parameters[node.name]}
        if len(shared) > 1:
            raise ValueError(f"Layers {', '.join(sorted(shared))} share some of their weights, but not all")
        owner = primary[node.name] = shared.pop() if shared else node.name
        given = fixed.setdefault(owner, set())
        given |= set() if node.c is None else {node.c}
        if len(given) > 1:
            raise ValueError(f"Layers {owner} and {node.name} share their weights, but have different c: {given}")

    def joined(node: Node) -> Node:
        owner = primary[node.layer]
        return node._replace(shares=None if owner == node.name else owner, c=next(iter(fixed[owner]), None))

    return LayerGraph(joined(node) if node.has_weights else node for node in graph.nodes)
