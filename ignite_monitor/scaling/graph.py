"""The graph of a model's layers as plain data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from ignite_monitor.checks import check_real
from ignite_monitor.scaling.presets import LAYER_TYPES

KINDS = (*LAYER_TYPES, "junction", "fixed")


class Node(NamedTuple):
    r"""One node of a graph: a layer, or a junction of branches.

    Attributes:
        name: unique name; for a layer, its name in the model.
        kind: "embedding", "hidden" or "readout"; "junction" for a sum or product of its inputs; or "fixed" for a
            weight whose size does not depend on the width.
        inputs: names of the nodes whose values it takes; constant inputs are not listed.
        a: exponent of a layer's output multiplier.
        b: exponent of a layer's initial standard deviation.
        c: a given exponent of the learning rate; None to solve for it.
        shares: the layer whose weights it uses, if they are not its own.
        few: True for a hidden layer whose number of outputs does not grow.
        update: for a layer that Muon trains, the exponent of its output's change per step; else None.
    """

    name: str
    kind: str
    inputs: tuple[str, ...] = ()
    a: float = 0.0
    b: float = 0.0
    c: float | None = None
    shares: str | None = None
    few: bool = False
    update: float | None = None

    @property
    def layer(self) -> str:
        """The layer whose weights it uses: itself, or the one it shares them with."""
        return self.name if self.shares is None else self.shares

    @property
    def has_weights(self) -> bool:
        """True for nodes with a learning rate."""
        return self.kind in LAYER_TYPES


class LayerGraph:
    """Layers and junctions of a model, in the order of the forward pass.

    Args:
        nodes: the nodes, each after its inputs.

    Raises:
        ValueError: if names are not unique, a kind or an input is unknown, a junction has no input, or the activations
            of a layer would grow or vanish with width at initialization, by its (a, b).

    Examples:
        .. code-block:: python

            LayerGraph([
                Node("fc1", "embedding", a=-0.5, b=0.5),
                Node("fc2", "hidden", ("fc1",), b=0.5),
                Node("skip", "junction", ("fc1", "fc2")),
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
        if node.kind not in KINDS:
            raise ValueError(f"Node {node.name} should be of a kind in {KINDS}, but is {node.kind!r}")
        if node.name in self._by_name:
            raise ValueError(f"Two nodes are named {node.name}")
        for name in node.inputs if node.shares is None else (*node.inputs, node.shares):
            if name not in self._by_name:
                raise ValueError(f"Node {node.name} refers to {name!r}, which no earlier node is named")
        if node.kind == "junction" and not node.inputs:
            raise ValueError(f"Node {node.name} is a junction without inputs")
        for exponent, value in (("a", node.a), ("b", node.b), ("c", 0.0 if node.c is None else node.c)):
            check_real(f"{exponent} of {node.name}", value)
        total, expected = node.a + node.b, 0.0 if node.kind == "embedding" else 0.5
        if not node.has_weights or abs(total - expected) < 1e-9 or (node.kind == "readout" and total > expected):
            return
        relation = "at least" if node.kind == "readout" else "equal to"
        raise ValueError(
            f"Layer {node.name} should have a + b {relation} {expected:g}, so that its outputs neither grow nor vanish "
            f"with width at initialization, but has {node.a:g} + {node.b:g}"
        )


def tied(graph: LayerGraph, parameters: Mapping[str, object]) -> LayerGraph:
    """Return the graph in which layers with the same weight have one learning rate.

    Args:
        parameters: layer -> its weight.

    Raises:
        ValueError: if layers that share a weight are given different c.
    """
    owners: dict[int, str] = {}
    given: dict[str, set[float]] = {}
    owner_of = {node.name: owners.setdefault(id(parameters[node.name]), node.name) for node in graph.layers}
    for node in graph.layers:
        values = given.setdefault(owner_of[node.name], set())
        values |= set() if node.c is None else {node.c}
        if len(values) > 1:
            raise ValueError(f"{owner_of[node.name]} and {node.name} share a weight, but have different c: {values}")

    def joined(node: Node) -> Node:
        owner = owner_of[node.layer]
        return node._replace(shares=None if owner == node.name else owner, c=next(iter(given[owner]), None))

    return LayerGraph(joined(node) if node.has_weights else node for node in graph.nodes)
