r"""Learning-rate exponents as the solution of a linear program.

A layer of width n multiplies its output by :math:`n^{-a}`, starts from weights of standard deviation :math:`n^{-b}` and
has the learning rate :math:`n^{-c}` (arXiv:2407.05872). Let the change of a node's output since initialization be of
size :math:`n^{-r}`, that of its input :math:`n^{-r_\text{in}}`, and the loss's gradient with respect to the output
:math:`n^{-\gamma}`. With alignment :math:`(\alpha, \omega, u)`, r is the smallest of

===========  ========================================================================  =============================
node         r                                                                         g with SGD (0 with Adam)
===========  ========================================================================  =============================
embedding    a + c + g, and r_in where it has an input                                 a + gamma
hidden       a + c + g - alpha, a + c + g + r_in - u, a + b + r_in - omega             a + gamma
readout      a + c + g - alpha, a + c + g + r_in - u, a + b + r_in - omega             a
junction     r of every input
fixed        0, and r of every input
===========  ========================================================================  =============================

gamma is the smallest over the nodes that take the output: a + b and 2a + c of a readout, gamma of any other.
A product x y changes like a sum: with r >= 0, :math:`\Delta x\,\Delta y` is no larger than :math:`\Delta x\,y`.

The program minimizes the sum of c subject to r >= 0 everywhere, with two bounds that a measured alignment needs:

- **omega is at most a + b of its layer**, and alpha and u are in [1/2, 1]. The term a + b + r_in - omega does not
  contain c of its layer: an omega of 0.51 would be paid for by all layers before it, once per block, although
  :math:`n^{0.01}` is a constant.
- **No layer is slower than under full alignment.** A gain of one layer is never paid for by another.

So there is always a solution, but for c that are given, and for Adam it is c = max(alpha, u) - a (-a for embeddings)
wherever the inputs of all layers change, as they do behind an embedding.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ignite_monitor.checks import check_choice
from ignite_monitor.scaling.graph import Alignment, LayerGraph, Node, as_alignment

OPTIMIZER_TYPES = ("adam", "sgd", "muon")
TOLERANCE = 1e-6
EARLIER = 1e-3  # extra weight of earlier layers: among equal sums, they have the smaller c
ADAM = "train with Adam, AdamW or another optimizer whose updates do not depend on the gradient's size"

Variable = tuple[str, str]  # ("c", layer), ("r", node), or ("g", node) for gamma
Term = tuple[float, tuple[Variable, ...]]  # the sum of a constant and variables
Minima = dict[Variable, list[Term]]  # each variable is the smallest of its terms, which have variables before it


class InfeasibleError(ValueError):
    """No learning rates keep the changes of all activations bounded as the width grows."""


@dataclass(frozen=True)
class Solution:
    """Exponents that solve a graph.

    Attributes:
        c: the learning-rate exponent of every layer, by name.
        r: the exponent with which the change of every node's output vanishes with width, by name.
        bias_c: the learning-rate exponent of biases, by the layer's name: they change the output at the layer's rate r.
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
    slowest = _minimize(graph, full, dict.fromkeys((node.name for node in graph.layers), (-math.inf, math.inf)))
    pins = {node.name: node.c for node in graph.layers if node.c is not None}
    _check_pins(graph, minima, pins, slowest)
    c = _minimize(graph, minima, {name: (pins.get(name, -math.inf), pins.get(name, slowest[name])) for name in slowest})
    values = _evaluate(minima, c)
    r = {node.name: values["r", node.name] for node in graph.nodes}
    updates = {node.name: node.a + values.get(("g", node.name), 0.0) if sgd else 0.0 for node in graph.nodes}
    bias_c = {node.name: r[node.name] - node.a - updates[node.name] for node in graph.nodes if node.has_weights}
    return Solution(c, r, bias_c)


def clipped_alignment(node: Node, alignment: Any) -> Alignment:
    """The alignment of a node within the bounds of this module's docstring.

    Args:
        alignment: as for :func:`solve`.

    Raises:
        ValueError: if the node's layer is lacking.
    """
    if node.kind not in ("hidden", "readout"):
        return Alignment(0.0, node.a + node.b, 0.0)  # an embedding sums over nothing
    if isinstance(alignment, Mapping):
        key = node.name if node.name in alignment else node.layer
        if key not in alignment:
            raise ValueError(f"Argument alignment should have every layer, but lacks {key!r}")
        alignment = alignment[key]
    alpha, omega, u = as_alignment("alignment", alignment)
    omega = min(max(omega, 0.5), node.a + node.b)
    if node.update is not None:  # an orthogonal update: its effect does not depend on the alignment
        return Alignment(node.update, node.a + node.b, node.update)
    return Alignment(min(max(alpha, 0.5), 1.0), omega, min(max(u, 0.5), 1.0))


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
    minima: Minima = {("g", node.name): [] for node in reversed(graph.nodes)}
    for node in reversed(graph.nodes):
        if node.kind == "readout":
            gradient: list[Term] = [(node.a + node.b, ()), (2 * node.a, (("c", node.layer),))]
        elif minima["g", node.name]:
            gradient = [(0.0, (("g", node.name),))]
        elif node.has_weights:
            raise ValueError(
                f"Layer {node.name} reaches no trained readout, so its gradient with SGD is not known: {ADAM}"
            )
        else:
            continue
        for name in node.inputs:
            if node.kind == "embedding" or graph[name].kind == "readout" or graph[name].few:
                raise ValueError(
                    f"The number of outputs of {name} does not grow, so the gradient it gets from {node.name} with SGD "
                    f"follows no power of the width: {ADAM}"
                )
            minima["g", name] += gradient
    return {variable: terms for variable, terms in minima.items() if terms}


def _evaluate(minima: Minima, c: Mapping[str, float]) -> dict[Variable, float]:
    """The values of all variables."""
    values: dict[Variable, float] = {("c", name): value for name, value in c.items()}
    for variable, terms in minima.items():
        sums = (constant + sum(values[part] for part in parts) for constant, parts in terms)
        values[variable] = min(sums, default=math.inf)
    return values


def _check_pins(graph: LayerGraph, minima: Minima, pins: Mapping[str, float], slowest: Mapping[str, float]) -> None:
    values = _evaluate(minima, {**slowest, **pins})  # every r grows with every c
    for node in graph.nodes:
        r = values["r", node.name]
        if r < -TOLERANCE:
            given = ", ".join(f"{c:g} for {name}" for name, c in pins.items() if c < slowest[name] - TOLERANCE)
            raise InfeasibleError(
                f"With c given as {given}, the change of the output of {node.name} grows as width to the power of "
                f"{-r:g}, and the other layers can't be slower than under full alignment"
            )


def _minimize(graph: LayerGraph, minima: Minima, bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The optimal c by layer. r is at most each of its terms, which is enough, as all terms grow with r and c."""
    try:
        optimize: Any = importlib.import_module("scipy.optimize")
        sparse: Any = importlib.import_module("scipy.sparse")
    except ImportError as error:
        raise ImportError("Width scaling needs SciPy: pip install 'ignite-monitor[scaling]'") from error
    layers = [node.name for node in graph.layers]
    free = [variable for variable, terms in minima.items() if terms]  # without terms it is infinite
    columns: dict[Variable, int] = {
        variable: i for i, variable in enumerate([*(("c", name) for name in layers), *free])
    }
    rows: list[tuple[Variable, Term]] = [
        (variable, term) for variable in free for term in minima[variable] if all(part in columns for part in term[1])
    ]
    matrix = sparse.lil_array((len(rows), len(columns)))
    for row, (variable, (_, parts)) in enumerate(rows):
        for sign, part in ((1.0, variable), *((-1.0, part) for part in parts)):
            matrix[row, columns[part]] += sign
    result = optimize.linprog(
        [1 + EARLIER * math.exp(-i / len(layers)) for i in range(len(layers))] + [0.0] * len(free),
        A_ub=matrix.tocsr(),
        b_ub=[constant for _, (constant, _) in rows],
        bounds=[
            *(bounds[name] for name in layers),
            *((0.0 if kind == "r" else -math.inf, math.inf) for kind, _ in free),
        ],
        method="highs",
    )
    if result.x is None:
        raise InfeasibleError(f"The linear program for the learning rates has no solution: {result.message}")
    return {name: float(value) + 0.0 for name, value in zip(layers, result.x, strict=False)}
