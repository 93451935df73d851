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

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

ROLES = ("embedding", "hidden", "readout")

PRESETS: dict[str, dict[str, tuple[float, float]]] = {
    "mup": {"embedding": (-0.5, 0.5), "hidden": (0.0, 0.5), "readout": (0.5, 0.5)},
    "standard": {"embedding": (0.0, 0.0), "hidden": (0.0, 0.5), "readout": (0.0, 0.5)},
}
"""Exponents (a, b) per role."""


class Alignment(NamedTuple):
    """Growth of a layer's products with its fan-in n, as exponents of n."""

    alpha: float  # of the initial input and the weights' change
    omega: float  # of the input's change and the initial weights
    u: float  # of both changes


FULL = Alignment(1.0, 0.5, 1.0)
"""Full alignment, which is assumed without a measurement."""


@dataclass
class ParametrizedLayer:
    """One layer of a :class:`Parametrization`, of width n."""

    name: str  # its name in the model
    role: str  # "embedding", "hidden" or "readout"
    widths: tuple[int, int]  # n in the small and in the large model
    weight: str  # name of its parameter
    module: str | None = None  # name of the module whose output is the layer's output; None if there is none
    biases: tuple[str, ...] = ()  # names of its other parameters
    a: float = 0.0  # exponent of the output's multiplier
    b: float = 0.0  # exponent of the initial standard deviation
    c: float | None = None  # exponent of the learning rate: a given one, or as first solved for
    std: float | None = None  # standard deviation of the initial weights; None if they are kept
    multiplier: float = 1.0  # factor by which a forward hook multiplies the output; 1.0 without a hook
    log_factor: float | None = None  # logarithm of the ratio of the model's own factors between the widths
    is_relative: bool = False  # True if a norm or a zero weight takes the output
    has_few_outputs: bool = False  # True for a hidden layer whose number of outputs does not grow
    muon_update: float | None = None  # with Muon, the exponent of the output's change per step

    @property
    def width(self) -> int:
        """n: the fan-in, for an embedding the number of its outputs."""
        return self.widths[1]


class Node(NamedTuple):
    """One node of a graph: a use of a layer, a junction of branches, or a weight of a size that is fixed."""

    name: str
    inputs: tuple[str, ...] = ()  # names of earlier nodes whose values it takes; constant inputs are not listed
    layer: ParametrizedLayer | None = None
    is_fixed: bool = False


Graph = dict[str, Node]  # by name, in the order of the forward pass


class Solution(NamedTuple):
    """Exponents that solve a graph."""

    c: dict[str, float]  # layer -> exponent of its learning rate; with "{layer}.bias" for its biases
    r: dict[str, float]  # node -> exponent of the change of its output, n^-r
    g: dict[str, float]  # node of a layer -> exponent of the gradient that its update is proportional to, n^-g


def solve(
    graph: Graph, alignment: Mapping[str, Alignment], c_overrides: Mapping[str, float], *, sgd: bool = False
) -> Solution:
    """Maximize the learning rates such that no activation's change grows with width.

    Layers without an alignment are fully aligned; ``c_overrides`` are given c by weight. ValueError if one of them is
    too small, or, with SGD, if the gradient's size is not known.
    """
    layers = {node.layer.name: node.layer for node in graph.values() if node.layer is not None}
    gradients = _gradients(graph) if sgd else {}
    full, minima = (
        gradients | {("r", name): _changes(node, given, sgd) for name, node in graph.items()}
        for given in ({}, alignment)
    )
    slowest = _minimize(full, {layer.weight: (-math.inf, math.inf) for layer in layers.values()})
    bounds = {weight: (c_overrides.get(weight, -math.inf), c_overrides.get(weight, c)) for weight, c in slowest.items()}
    values: dict[Variable, float] = {("c", weight): c for weight, c in _minimize(minima, bounds).items()}
    for variable, terms in minima.items():
        values[variable] = min(constant + sum(values[part] for part in parts) for constant, parts in terms)
    c: dict[str, float] = {}
    g: dict[str, float] = {}
    for name, node in graph.items():
        layer = node.layer
        if layer is not None:
            g[name] = layer.a + values.get(("g", name), 0.0) if sgd else 0.0
        if layer is not None and layer.name not in c:
            c[layer.name], c[f"{layer.name}.bias"] = values["c", layer.weight], values["r", name] - layer.a - g[name]
    return Solution(c, {name: values["r", name] for name in graph}, g)


def clipped(layer: ParametrizedLayer, alignment: Alignment) -> Alignment:
    """The alignment of a layer within the bounds of this module's docstring."""
    start = layer.a + layer.b
    if layer.role == "embedding":  # it sums over nothing
        return Alignment(0.0, start, 0.0)
    if layer.muon_update is not None:  # an orthogonal update: its effect does not depend on the alignment
        return Alignment(layer.muon_update, start, layer.muon_update)
    alpha, omega, u = alignment
    return Alignment(min(max(alpha, 0.5), 1.0), min(max(omega, 0.5), start), min(max(u, 0.5), 1.0))


Variable = tuple[str, str]  # ("c", weight), ("r", node), or ("g", node) for gamma
Term = tuple[float, tuple[Variable, ...]]  # the sum of a constant and variables
Minima = dict[Variable, list[Term]]  # each variable is the smallest of its terms, which have variables before it


def _changes(node: Node, alignment: Mapping[str, Alignment], sgd: bool) -> list[Term]:
    """The terms of a node's r."""
    inputs: list[Variable] = [("r", name) for name in node.inputs]
    layer = node.layer
    if layer is None:
        return [*([(0.0, ())] if node.is_fixed else []), *((0.0, (variable,)) for variable in inputs)]
    alpha, omega, u = clipped(layer, alignment.get(layer.name, FULL))
    rate_terms: tuple[Variable, ...] = (("c", layer.weight),)
    if sgd and layer.role != "readout":
        rate_terms = (*rate_terms, ("g", node.name))
    rate = (2 if sgd else 1) * layer.a
    terms: list[Term] = [(rate - alpha, rate_terms)]
    if layer.role != "embedding":
        terms += [(rate - u, (*rate_terms, variable)) for variable in inputs]
    return terms + [(layer.a + layer.b - omega, (variable,)) for variable in inputs]


def _gradients(graph: Graph) -> Minima:
    """The terms of each node's gamma, in backward order."""
    minima: Minima = {("g", name): [] for name in reversed([*graph])}
    for name, node in reversed(graph.items()):
        gradient: list[Term] = [(0.0, (("g", name),))] if minima["g", name] else []
        layer = node.layer
        if layer is not None and layer.role == "readout":
            gradient = [(layer.a + layer.b, ()), (2 * layer.a, (("c", layer.weight),))]
        is_unknown = layer is not None and (not gradient or (layer.role == "embedding" and bool(node.inputs)))
        for source in node.inputs if gradient else ():
            before = graph[source].layer
            is_unknown |= before is not None and (before.role == "readout" or before.has_few_outputs)
            minima["g", source] += gradient
        if is_unknown:
            raise ValueError(
                f"With SGD the gradients of {name} and its inputs follow no known power of the width, as it reaches no "
                "trained readout, or its number of inputs does not grow: train with Adam, AdamW or another optimizer "
                "whose updates do not depend on the gradient's size"
            )
    return {variable: terms for variable, terms in minima.items() if terms}


def _minimize(minima: Minima, bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The optimal c by weight. r is at most each of its terms, which is enough, as all terms grow with r and c."""
    try:
        from scipy import optimize, sparse  # type: ignore[import-untyped]
    except ImportError as error:
        raise ImportError("Width scaling needs SciPy: pip install 'ignite-monitor[scaling]'") from error
    columns = {variable: column for column, variable in enumerate([*(("c", weight) for weight in bounds), *minima])}
    rows = [(variable, term) for variable, terms in minima.items() for term in terms]
    matrix = sparse.lil_array((len(rows), len(columns)))
    for row, (variable, (_, parts)) in enumerate(rows):
        matrix[row, columns[variable]] += 1.0
        for part in parts:
            matrix[row, columns[part]] -= 1.0
    # Of equal sums, the earlier layers have the smaller c.
    costs = [1 + 1e-3 * math.exp(-i / len(bounds)) for i in range(len(bounds))] + [0.0] * len(minima)
    limits = [*bounds.values(), *((0.0 if kind == "r" else -math.inf, math.inf) for kind, _ in minima)]
    constants = [constant for _, (constant, _) in rows]
    result = optimize.linprog(costs, A_ub=matrix.tocsr(), b_ub=constants, bounds=limits, method="highs")
    if result.x is None:
        given = ", ".join(f"{low:g} for {name}" for name, (low, high) in bounds.items() if low == high)
        raise ValueError(
            f"Activations grow with width, as a given c is too small ({given}), and other layers can't be slower than "
            f"under full alignment: {result.message}"
        )
    return {weight: float(value) + 0.0 for weight, value in zip(bounds, result.x, strict=False)}
