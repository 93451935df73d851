"""The graph of a model's layers, their exponents, and their alignments, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ignite_monitor.checks import check_real

LAYER_TYPES = ("embedding", "hidden", "readout")

PRESETS: dict[str, dict[str, tuple[float, float]]] = {
    "mup": {"embedding": (-0.5, 0.5), "hidden": (0.0, 0.5), "readout": (0.5, 0.5)},
    "standard": {"embedding": (0.0, 0.0), "hidden": (0.0, 0.5), "readout": (0.0, 0.5)},
    "ntk": {"embedding": (0.0, 0.0), "hidden": (0.5, 0.0), "readout": (0.5, 0.0)},
    "mean_field": {"embedding": (0.0, 0.0), "hidden": (0.5, 0.0), "readout": (1.0, 0.0)},
}
"""Exponents (a, b) per layer type, as ``ab_overrides`` takes them."""


class Alignment(NamedTuple):
    r"""Growth of a layer's products with its fan-in n, as exponents of n.

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
    """Return an alignment that is given by its name or as three numbers.

    Raises:
        TypeError: if it is neither a name nor three numbers.
        ValueError: if the name is unknown, or a number is not finite.
    """
    if isinstance(value, str) and value in ALIGNMENTS:
        return ALIGNMENTS[value]
    message = f"Argument {name} should be one of {list(ALIGNMENTS)} or three numbers, but given {value!r}"
    if isinstance(value, str):
        raise ValueError(message)
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise TypeError(message)
    return Alignment(*(check_real(name, number) for number in value))


class Node(NamedTuple):
    """One node of a graph: a layer, or a junction of branches.

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
        if not node.has_weights and node.kind not in ("junction", "fixed"):
            raise ValueError(f"Node {node.name} is of the unknown kind {node.kind!r}")
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
