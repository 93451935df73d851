r"""How fast the changes of activations and gradients vanish with width, for given learning-rate exponents.

A layer of width n multiplies its output by :math:`n^{-a}`, starts from weights of standard deviation :math:`n^{-b}`
and has the learning rate :math:`n^{-c}` (arXiv:2407.05872). Write :math:`n^{-r}` for the size of the change of a node's
output since the start, and :math:`n^{-\gamma}` for that of the loss's gradient with respect to it; :math:`r_\text{in}`
is that of the layer's input, and infinite where its input does not change. With alignment :math:`(\alpha, \omega, u)`
the three terms of the change,

.. math::

    n^{-a} (z_0 \Delta W^\top + \Delta z W_0^\top + \Delta z \Delta W^\top), \qquad
    \Delta W = n^{-c - g},

have the exponents below, of which the smallest is r. g is 0 for Adam, whose updates do not depend on the gradient's
size; for SGD it is the exponent of the gradient with respect to the weights.

===========  ========================================================================  =============================
node         r, the smallest of                                                        g of SGD
===========  ========================================================================  =============================
embedding    a + c + g, and r_in where it has an input                                 a + gamma
hidden       a + c + g - alpha, a + c + g + r_in - u, a + b + r_in - omega             a + gamma
readout      a + c + g - alpha, a + c + g + r_in - u, a + b + r_in - omega             a
attention    r_in + a - alpha
junction     r of every input
fixed        0, and r of every input
===========  ========================================================================  =============================

gamma is the smallest over what takes the node's output: a + b and 2a + c of a readout (its weights' start and change),
gamma + a - alpha of an attention node, gamma of any other. Where layers take an output whose size does not grow, as the
keys and values that all heads share, SGD is refused: there the gradients of n numbers add up, at first as random ones
do, by the root of n, and once the model has learned by n. Exponents for the one are wrong for the other (measured:
values start as n^-0.6 with the latter; keys grow as n^0.3 without either).

**Junctions.** With x and y of size 1, :math:`\Delta(x y) = \Delta x\, y + x\, \Delta y + \Delta x\, \Delta y`, of which
the last is no larger than the others as long as r >= 0. So a product changes as the faster of its factors does, like a
sum, and not by the sum of their exponents.

**Attention.** Of :math:`s = n^{-a} q \cdot k` the change is :math:`n^{-a}(\Delta q \cdot k + q \cdot \Delta k + \Delta
q \cdot \Delta k)`, sums over n, the head's dimension: :math:`n^{-a - r_\text{in} + \alpha}`, with :math:`\alpha` 1 for
full alignment and 1/2 for none. So a division by n (a = 1) keeps a change of fully aligned queries and keys as it is,
one by the root of n does not. Softmax keeps the exponent, and the weighted sum of values runs over positions, so it is
a product like any other. A "contraction" is a sum of products that is scaled so that its change is as large as its
inputs' change, or whose length does not depend on the width: an attention node with a = alpha.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ignite_monitor.scaling.graph import Alignment, LayerGraph, Node

ADAM = "train with Adam, AdamW or another optimizer whose updates do not depend on the gradient's size"

Variable = tuple[str, str]
"""("c", layer), ("r", node) or ("g", node), the last for gamma."""


class Term(NamedTuple):
    """A sum of variables and a constant."""

    constant: float
    variables: tuple[Variable, ...] = ()

    def plus(self, constant: float, *variables: Variable) -> Term:
        """With more added to it."""
        return Term(self.constant + constant, self.variables + variables)


def terms(graph: LayerGraph, alignment: Mapping[str, Alignment], optimizer_type: str) -> dict[Variable, list[Term]]:
    """What r of every node, and with SGD gamma of every node, is the smallest of.

    They stand in an order in which each can be evaluated: gammas backwards, then r forwards.

    Raises:
        ValueError: with SGD, if a layer reaches no readout, or a layer takes outputs of a fixed size.
    """
    sgd = optimizer_type == "sgd"
    changes: dict[Variable, list[Term]] = {("r", node.name): _changes(node, alignment, sgd) for node in graph.nodes}
    return (_gradients(graph, alignment) if sgd else {}) | changes


def evaluate(minima: Mapping[Variable, list[Term]], c: Mapping[str, float]) -> dict[Variable, float]:
    """The value of every r and gamma."""
    values = {("c", name): value for name, value in c.items()}
    for variable, candidates in minima.items():
        sums = (term.constant + sum(values[each] for each in term.variables) for term in candidates)
        values[variable] = min(sums, default=math.inf)
    return {variable: values[variable] for variable in minima}


def _changes(node: Node, alignment: Mapping[str, Alignment], sgd: bool) -> list[Term]:
    inputs = [Term(0.0, (("r", name),)) for name in node.inputs]
    if not node.has_weights:
        shift = node.a - alignment[node.name].alpha if node.kind == "attention" else 0.0
        return [*([Term(0.0)] if node.kind == "fixed" else []), *(term.plus(shift) for term in inputs)]
    own = Term(node.a, (("c", node.layer),))
    if sgd:
        own = own.plus(node.a) if node.kind == "readout" else own.plus(node.a, ("g", node.name))
    if node.kind == "embedding":
        return [own, *inputs]
    alpha, omega, u = alignment[node.name]
    # An input's own exponent stands in each, instead of a variable for the smallest of them.
    return [
        own.plus(-alpha),
        *(own.plus(term.constant - u, *term.variables) for term in inputs),
        *(term.plus(node.a + node.b - omega) for term in inputs),
    ]


def _gradients(graph: LayerGraph, alignment: Mapping[str, Alignment]) -> dict[Variable, list[Term]]:
    found: dict[Variable, list[Term]] = {("g", node.name): [] for node in reversed(graph.nodes)}
    reaching = set()
    for node in reversed(graph.nodes):
        if node.kind == "readout":
            reaching.add(node.name)
            gradient = [Term(node.a + node.b), Term(2 * node.a, (("c", node.layer),))]
        elif node.name not in reaching:
            if node.has_weights:
                raise ValueError(
                    f"Layer {node.name} reaches no trained readout, so its gradient with SGD is not known: {ADAM}"
                )
            continue
        elif node.kind == "attention":
            gradient = [Term(node.a - alignment[node.name].alpha, (("g", node.name),))]
        else:
            gradient = [Term(0.0, (("g", node.name),))]
        for name in node.inputs:
            if node.kind == "embedding" or graph[name].kind == "readout" or graph[name].few:
                raise ValueError(
                    f"The gradient that {node.name} hands back to {name} with SGD follows no power of the width, since "
                    f"{name} gives as many numbers at any width: {ADAM}"
                )
            reaching.add(name)
            found["g", name] += gradient
    return {variable: candidates for variable, candidates in found.items() if candidates}
