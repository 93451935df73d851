r"""Learning-rate exponents of a graph of layers, as the solution of a linear program.

A layer of width n multiplies its output by :math:`n^{-a}`, starts from weights of standard deviation :math:`n^{-b}` and
has the learning rate :math:`n^{-c}` (arXiv:2407.05872). Let the change of a node's output since initialization be of
size :math:`n^{-r}`, that of its input :math:`n^{-r_\text{in}}`, and the loss's gradient with respect to the output
:math:`n^{-\gamma}`. With alignment :math:`(\alpha, \omega, u)`, r is the smallest of

===========  ========================================================================  =============================
node         r                                                                         g with SGD (0 with Adam)
===========  ========================================================================  =============================
embedding    a + c + g, and r_in where it has an input                                 a + gamma
hidden       a + c + g - alpha, a + c + g + r_in - u, a + b + r_in - omega             a + gamma
readout      the same                                                                  a
junction     r of every input, as a product changes like a sum                         -
fixed        0, and r of every input                                                   -
===========  ========================================================================  =============================

gamma is the smallest over the nodes that take the output: a + b and 2a + c of a readout, gamma of any other. The
program minimizes the sum of c subject to r >= 0 everywhere. A measured alignment needs two bounds:

- **omega is at most a + b of its layer**, and alpha and u are in [1/2, 1]. The layer's own c does not pay for omega:
  all layers before it would pay for 0.51, once per block, although :math:`n^{0.01}` is a constant.
- **No layer is slower than under full alignment.** A gain of one layer is never paid for by another.

So there is always a solution, but for c that are given. For Adam it is c = max(alpha, u) - a (-a for embeddings)
wherever the inputs of all layers change, as they do behind an embedding.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ignite_monitor.checks import check_choice, check_real

LAYER_TYPES = ("embedding", "hidden", "readout")
OPTIMIZER_TYPES = ("adam", "sgd", "muon")

PRESETS: dict[str, dict[str, tuple[float, float]]] = {
    "mup": {"embedding": (-0.5, 0.5), "hidden": (0.0, 0.5), "readout": (0.5, 0.5)},
    "standard": {"embedding": (0.0, 0.0), "hidden": (0.0, 0.5), "readout": (0.0, 0.5)},
    "ntk": {"embedding": (0.0, 0.0), "hidden": (0.5, 0.0), "readout": (0.5, 0.0)},
    "mean_field": {"embedding": (0.0, 0.0), "hidden": (0.5, 0.0), "readout": (1.0, 0.0)},
}
"""Exponents (a, b) per layer type, as ``ab_overrides`` takes them."""


class InfeasibleError(ValueError):
    """No learning rates keep the changes of all activations bounded as the width grows."""


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


class Node(NamedTuple):
    """One node of a graph: a layer, or a junction of branches.

    ``kind`` is "embedding", "hidden" or "readout"; "junction" for a sum or product of its inputs; or "fixed" for a
    weight whose size does not depend on the width.
    """

    name: str  # unique; for a layer, its name in the model
    kind: str
    inputs: tuple[str, ...] = ()  # names of the nodes whose values it takes; constant inputs are not listed
    a: float = 0.0  # exponent of a layer's output multiplier
    b: float = 0.0  # exponent of a layer's initial standard deviation
    c: float | None = None  # a given exponent of the learning rate; None to solve for it
    shares: str | None = None  # the layer whose weights it uses, if they are not its own
    few: bool = False  # True for a hidden layer whose number of outputs does not grow
    update: float | None = None  # for a layer that Muon trains, the exponent of its output's change per step

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
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.nodes = tuple(nodes)
        self._by_name: dict[str, Node] = {}
        for node in self.nodes:
            self._check(node)
            self._by_name[node.name] = node
        self.layers = [node for node in self.nodes if node.has_weights and node.shares is None]

    def __getitem__(self, name: str) -> Node:
        return self._by_name[name]

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
        excess = node.a + node.b - (0.0 if node.kind == "embedding" else 0.5)
        is_readout = node.kind == "readout"
        if node.has_weights and (excess < -1e-9 or (excess > 1e-9 and not is_readout)):
            raise ValueError(
                f"Layer {node.name} should have a + b {'at least' if is_readout else 'equal to'} "
                f"{node.a + node.b - excess:g}, so that its outputs neither grow nor vanish with width at "
                f"initialization, but has {node.a:g} + {node.b:g}"
            )


@dataclass(frozen=True)
class Solution:
    """Exponents that solve a graph, by the name of the layer or node.

    Attributes:
        c: of learning rates of weights.
        r: with which the change of a node's output vanishes with width.
        bias_c: of learning rates of biases, which change the output at the layer's rate r.
    """

    c: dict[str, float]
    r: dict[str, float]
    bias_c: dict[str, float]


def solve(
    graph: LayerGraph,
    alignment: str | tuple[float, float, float] | Mapping[str, Any] = "full",
    *,
    optimizer_type: str = "adam",
) -> Solution:
    """Maximize the learning rates such that no activation's change grows with width.

    Args:
        graph: the layers, with their (a, b), and c where it is given.
        alignment: "full", "no" or (alpha, omega, u) for all layers, or a mapping from every layer's name to one.
        optimizer_type: "adam" for optimizers whose updates do not depend on the gradient's size; "muon" for the same
            in graphs with layers that Muon trains; or "sgd".

    Raises:
        ImportError: if SciPy is not installed.
        ValueError: if an argument or the graph is invalid, or a given c is too small (:class:`InfeasibleError`).

    Examples:
        .. code-block:: python

            graph = LayerGraph([Node("in", "embedding", (), -0.5, 0.5), Node("out", "readout", ("in",), 0.5, 0.5)])
            solve(graph, "full").c  # {"in": 0.5, "out": 0.5}
    """
    check_choice("optimizer_type", optimizer_type, *OPTIMIZER_TYPES)
    if not graph.layers:
        raise ValueError("Argument graph should have at least one layer with weights")
    sgd = optimizer_type == "sgd"
    gradients = _gradients(graph) if sgd else {}
    full, minima = (
        gradients | {("r", node.name): _changes(node, clipped_alignment(node, given), sgd) for node in graph.nodes}
        for given in ("full", alignment)
    )
    slowest = _minimize(full, {node.name: (-math.inf, math.inf) for node in graph.layers})
    given = {node.name: node.c for node in graph.layers if node.c is not None}
    bounds = {name: (given.get(name, -math.inf), given.get(name, largest)) for name, largest in slowest.items()}
    c = _minimize(minima, bounds)
    values: dict[Variable, float] = {("c", name): value for name, value in c.items()}
    for variable, terms in minima.items():
        values[variable] = min(constant + sum(values[part] for part in parts) for constant, parts in terms)
    r = {node.name: values["r", node.name] for node in graph.nodes}
    updates = {node.name: node.a + values.get(("g", node.name), 0.0) if sgd else 0.0 for node in graph.nodes}
    bias_c = {node.name: r[node.name] - node.a - updates[node.name] for node in graph.nodes if node.has_weights}
    return Solution(c, r, bias_c)


def as_alignment(name: str, value: object) -> Alignment:
    """An alignment that is given by its name or as three numbers, as the argument of this name."""
    if isinstance(value, str) and value in ALIGNMENTS:
        return ALIGNMENTS[value]
    message = f"Argument {name} should be one of {list(ALIGNMENTS)} or three numbers, but given {value!r}"
    if isinstance(value, str):
        raise ValueError(message)
    if not isinstance(value, (tuple, list)) or len(value) != 3:
        raise TypeError(message)
    return Alignment(*(check_real(name, number) for number in value))


def clipped_alignment(node: Node, alignment: Any) -> Alignment:
    """The alignment of a node within the bounds of this module's docstring, from what :func:`solve` takes."""
    if node.kind not in ("hidden", "readout"):
        return Alignment(0.0, node.a + node.b, 0.0)  # an embedding sums over nothing
    if isinstance(alignment, Mapping):
        key = node.name if node.name in alignment else node.layer
        if key not in alignment:
            raise ValueError(f"Argument alignment should have every layer, but lacks {key!r}")
        alignment = alignment[key]
    alpha, omega, u = as_alignment("alignment", alignment)
    if node.update is not None:  # an orthogonal update: its effect does not depend on the alignment
        return Alignment(node.update, node.a + node.b, node.update)
    return Alignment(min(max(alpha, 0.5), 1.0), min(max(omega, 0.5), node.a + node.b), min(max(u, 0.5), 1.0))


Variable = tuple[str, str]  # ("c", layer), ("r", node), or ("g", node) for gamma
Term = tuple[float, tuple[Variable, ...]]  # the sum of a constant and variables
Minima = dict[Variable, list[Term]]  # each variable is the smallest of its terms, which have variables before it


def _changes(node: Node, alignment: Alignment, sgd: bool) -> list[Term]:
    """The terms of a node's r."""
    inputs: list[Variable] = [("r", name) for name in node.inputs]
    if not node.has_weights:
        return [*([(0.0, ())] if node.kind == "fixed" else []), *((0.0, (variable,)) for variable in inputs)]
    own: tuple[Variable, ...] = (("c", node.layer),)
    if sgd and node.kind != "readout":
        own = (*own, ("g", node.name))
    rate = (2 if sgd else 1) * node.a
    terms: list[Term] = [(rate - alignment.alpha, own)]
    if node.kind != "embedding":
        terms += [(rate - alignment.u, (*own, variable)) for variable in inputs]
    return terms + [(node.a + node.b - alignment.omega, (variable,)) for variable in inputs]


def _gradients(graph: LayerGraph) -> Minima:
    """The terms of each node's gamma, in backward order."""
    adam = "train with Adam, AdamW or another optimizer whose updates do not depend on the gradient's size"
    minima: Minima = {("g", node.name): [] for node in reversed(graph.nodes)}
    for node in reversed(graph.nodes):
        gradient: list[Term] = [(0.0, (("g", node.name),))] if minima["g", node.name] else []
        if node.kind == "readout":
            gradient = [(node.a + node.b, ()), (2 * node.a, (("c", node.layer),))]
        elif node.has_weights and not gradient:
            raise ValueError(
                f"Layer {node.name} reaches no trained readout, so its gradient with SGD is not known: {adam}"
            )
        for name in node.inputs if gradient else ():
            if node.kind == "embedding" or graph[name].kind == "readout" or graph[name].few:
                raise ValueError(
                    f"The number of outputs of {name} does not grow, so the gradient it gets from {node.name} with SGD "
                    f"follows no power of the width: {adam}"
                )
            minima["g", name] += gradient
    return {variable: terms for variable, terms in minima.items() if terms}


def _minimize(minima: Minima, bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The optimal c by layer. r is at most each of its terms, which is enough, as all terms grow with r and c."""
    try:
        optimize: Any = importlib.import_module("scipy.optimize")
        sparse: Any = importlib.import_module("scipy.sparse")
    except ImportError as error:
        raise ImportError("Width scaling needs SciPy: pip install 'ignite-monitor[scaling]'") from error
    variables: list[Variable] = [*(("c", name) for name in bounds), *minima]
    columns = {variable: column for column, variable in enumerate(variables)}
    rows = [(variable, term) for variable, terms in minima.items() for term in terms]
    matrix = sparse.lil_array((len(rows), len(columns)))
    for row, (variable, (_, parts)) in enumerate(rows):
        matrix[row, columns[variable]] += 1.0
        for part in parts:
            matrix[row, columns[part]] -= 1.0
    layers = len(bounds)
    # Of equal sums, the earlier layers have the smaller c.
    costs = [1 + 1e-3 * math.exp(-i / layers) for i in range(layers)] + [0.0] * len(minima)
    limits = [*bounds.values(), *((0.0 if kind == "r" else -math.inf, math.inf) for kind, _ in minima)]
    constants = [constant for _, (constant, _) in rows]
    result = optimize.linprog(costs, A_ub=matrix.tocsr(), b_ub=constants, bounds=limits, method="highs")
    if result.x is None:
        given = ", ".join(f"{low:g} for {name}" for name, (low, high) in bounds.items() if low == high)
        raise InfeasibleError(
            f"Activations grow with width, as a given c is too small ({given}), and other layers can't be slower than "
            f"under full alignment: {result.message}"
        )
    return {name: float(value) + 0.0 for name, value in zip(bounds, result.x, strict=False)}
