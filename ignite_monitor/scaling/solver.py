r"""Learning-rate exponents as the solution of a linear program.

The largest learning rates with which no activation's change grows with width: minimise :math:`\sum_l c_l` over all
layers, such that :math:`r \ge 0` at every node, where each r is the smallest of several terms that are linear in c and
in other r (:mod:`ignite_monitor.scaling.exponents`).

**Why a linear program is enough.** The program has r as variables that are *at most* each of their terms. Every term
grows with r and c. So if (c, r) is feasible, then r can be raised, from the inputs on, to the smallest of its terms,
and everything stays feasible; c, and with it the objective, is as before. For the same reason there is a solution
exactly if r is nowhere negative with every c that is not fixed at infinity.

**Which of several optima.** Where u > alpha, or with SGD, a larger c in one layer may save just as much in another. So
that the earlier layers get the larger learning rates then, and no feature learns slowly without need, what is minimised
is :math:`\sum_l (1 + \epsilon\, e^{-l/L}) c_l`, l the layer's index of L in the graph, :math:`\epsilon` = 0.001. Along
an edge of the polyhedron on which :math:`\sum_l c_l` falls by s this can't rise, unless the layers' c move by more than
1000 s in all: so it is the smallest of the optima. It is the only one: two would be joined by a face in which some
direction :math:`d \ne 0` is rational, as the coefficients are whole numbers, and :math:`\sum_l (1 + \epsilon\,
e^{-l/L}) d_l = 0` contradicts the theorem of Lindemann and Weierstrass. As the only solution of a program in whose
right-hand side alone the alignment stands, c is a Lipschitz continuous function of the alignment.

**Feature learning** asks for r = 0 at the inputs of the readouts, for r as the smallest of its terms and not merely at
most that. This is a union of polyhedra. If the linear program's optimum has r = 0 there, it is the optimum of the
smaller set too. Else a mixed-integer program, with one binary variable per term, chooses which term each r is equal to,
and the linear program is solved once more with these equalities. Of several optima it then is the best among those with
the same choice.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ignite_monitor.scaling.exponents import Term, Variable, evaluate, terms
from ignite_monitor.scaling.graph import Alignment, LayerGraph, as_alignment

OPTIMIZER_TYPES = ("adam", "sgd")
TOLERANCE = 1e-6
EARLIER = 1e-3  # the weight of earlier layers where the sum is the same


class InfeasibleError(ValueError):
    """There are no learning rates with which every activation's change stays bounded as the width grows."""


@dataclass(frozen=True)
class Solution:
    """Exponents that solve a graph.

    Attributes:
        c: the learning-rate exponent of every layer, by name.
        r: how fast the change of every node's output vanishes with width, by name.
        bias_c: the learning-rate exponent of a bias that is added before the layer's multiplier, by the layer's name:
            that with which the bias changes the layer's output at the layer's own rate r.
    """

    c: dict[str, float]
    r: dict[str, float]
    bias_c: dict[str, float]


def solve(
    graph: LayerGraph,
    alignment: str | tuple[float, float, float] | Mapping[str, Any] = "full",
    *,
    optimizer_type: str = "adam",
    feature_learning: bool = False,
) -> Solution:
    """The largest learning rates, as exponents of the width, with which no activation's change grows with it.

    Args:
        graph: the layers, with their (a, b), and with c where it is fixed.
        alignment: "full", "no" or (alpha, omega, u) for all layers, or a mapping from every layer's name to one.
        optimizer_type: "adam" for optimizers that change each weight by as much, whatever the sizes of the gradient
            and of the layer; or "sgd".
        feature_learning: whether the readouts' inputs have to change by as much at any width.

    Raises:
        ImportError: if SciPy is not installed.
        ValueError: if an argument has a value it can't have, or the graph one with which it can't be solved.

    Examples:
        .. code-block:: python

            graph = chain([Node("in", "embedding", a=-0.5, b=0.5), Node("out", "readout", a=0.5, b=0.5)])
            solve(graph, "full").c  # {"in": 0.5, "out": 0.5}
    """
    sgd = check_optimizer_type(optimizer_type) == "sgd"
    if not graph.layers:
        raise ValueError("Argument graph should have at least one layer with weights")
    alignments = _per_node(graph, alignment)
    minima = terms(graph, alignments, optimizer_type)
    _check_feasible(graph, minima)
    if feature_learning:
        _check_features(graph, alignments)
    program = _Program(graph, minima)
    c = program.minimise()
    values = evaluate(minima, c)
    features = sorted({("r", name) for node in graph.nodes if node.kind == "readout" for name in node.inputs})
    if feature_learning and any(values[feature] > TOLERANCE for feature in features):
        c = program.minimise(program.choose(features), features)
        values = evaluate(minima, c)
    bias_c = {}
    for node in graph.nodes:
        if node.has_weights:
            gradient = node.a + values.get(("g", node.name), 0.0) if sgd else 0.0
            bias_c[node.name] = values["r", node.name] - node.a - gradient
    return Solution(c, {name: value for (kind, name), value in values.items() if kind == "r"}, bias_c)


def check_optimizer_type(optimizer_type: object) -> str:
    """The argument, if there are rules for it.

    Raises:
        ValueError: if it is neither "adam" nor "sgd".
    """
    if not isinstance(optimizer_type, str) or optimizer_type not in OPTIMIZER_TYPES:
        raise ValueError(f"Argument optimizer_type should be one of {OPTIMIZER_TYPES}, but given {optimizer_type!r}")
    return optimizer_type


def _per_node(graph: LayerGraph, alignment: object) -> dict[str, Alignment]:
    nodes = [node for node in graph.nodes if node.kind in {"hidden", "readout", "attention"}]
    if not isinstance(alignment, Mapping):
        return dict.fromkeys((node.name for node in nodes), as_alignment("alignment", alignment))
    named = {node.name: node.name if node.name in alignment else node.layer for node in nodes}
    if missing := sorted({name for name in named.values() if name not in alignment}):
        raise ValueError(f"Argument alignment should have every layer, but lacks {missing}")
    return {node: as_alignment(f"alignment of {name}", alignment[name]) for node, name in named.items()}


def _check_features(graph: LayerGraph, alignment: Mapping[str, Alignment]) -> None:
    for node in graph.nodes:
        if node.kind == "readout" and node.inputs and node.a + node.b < alignment[node.name].omega - TOLERANCE:
            raise InfeasibleError(
                f"Feature learning is not possible before {node.name}: with omega {alignment[node.name].omega:g} and "
                f"a + b = {node.a + node.b:g}, its output only stays bounded if the change of its input vanishes with "
                "width"
            )


def _check_feasible(graph: LayerGraph, minima: Mapping[Variable, list[Term]]) -> None:
    fixed = {node.name: node.c for node in graph.layers if node.c is not None}

    def first_negative_r(without: str | None = None) -> tuple[float, str]:
        c = {node.name: math.inf if node.c is None or node.name == without else node.c for node in graph.layers}
        values = evaluate(minima, c)
        negative = ((value, node.name) for node in graph.nodes if (value := values["r", node.name]) < -TOLERANCE)
        return next(negative, (0.0, ""))

    value, name = first_negative_r()
    if value < 0:
        guilty = [each for each in fixed if first_negative_r(each)[1] != name] or list(fixed)
        pins = ", ".join(f"{fixed[each]:g} in {each}" for each in guilty)
        raise InfeasibleError(
            f"With c fixed at {pins}, the change of the output of {name} grows as width to the power of {-value:g}, "
            "whatever the learning rates of the other layers"
        )


_Row = tuple[dict[Variable, float], float]  # coefficients, and the most they come to


def _row(variable: Variable, term: Term, sign: float = 1.0) -> _Row:
    """That a variable is at most a term; with a sign of -1, at least."""
    coefficients = dict.fromkeys(term.variables, -sign)
    coefficients[variable] = sign
    return coefficients, sign * term.constant


class _Program:
    """The program of a graph, over columns for c, r and gamma."""

    def __init__(self, graph: LayerGraph, minima: Mapping[Variable, list[Term]]) -> None:
        self._minima = {variable: candidates for variable, candidates in minima.items() if candidates}
        self._layers: list[Variable] = [("c", node.name) for node in graph.layers]
        variables = [*self._layers, *self._minima]
        fixed = {("c", node.name): (node.c, node.c) for node in graph.layers if node.c is not None}
        self._columns = {variable: index for index, variable in enumerate(variables)}
        self._bounds = [
            fixed.get(variable, (0.0 if variable[0] == "r" else -math.inf, math.inf)) for variable in variables
        ]
        self._rows: list[_Row] = [
            _row(variable, term)
            for variable, candidates in self._minima.items()
            for term in candidates
            if all(each in self._columns for each in term.variables)
        ]

    def minimise(self, equal: Mapping[Variable, Term] | None = None, zero: Iterable[Variable] = ()) -> dict[str, float]:
        """The optimal c by layer, where some variables are equal to one of their terms, or 0."""
        equal = equal or {}
        rows = [_row(variable, Term(0.0)) for variable in zero] + [_row(*choice, -1.0) for choice in equal.items()]
        count = len(self._layers)
        weights = {layer: 1 + EARLIER * math.exp(-index / count) for index, layer in enumerate(self._layers)}
        return {name: value for (_, name), value in zip(self._layers, self._solve(rows, weights), strict=False)}

    def choose(self, zero: Iterable[Variable]) -> dict[Variable, Term]:
        """Which term each variable is equal to in an optimum in which some are 0."""
        rows = [_row(variable, Term(0.0)) for variable in zero]
        # No r has to be larger than all constants there are, added up.
        large = 1.0 + 2.0 * sum(max(abs(term.constant) for term in each) for each in self._minima.values())
        choices: dict[Variable, tuple[Variable, Term]] = {}
        for variable, candidates in self._minima.items():
            chosen = {("chosen", f"{len(choices) + index}"): (variable, term) for index, term in enumerate(candidates)}
            rows += [(dict.fromkeys(chosen, sign), sign) for sign in (1.0, -1.0)]
            for each, choice in chosen.items():
                coefficients, most = _row(*choice, -1.0)
                rows.append((coefficients | {each: large}, most + large))
            choices |= chosen
        values = self._solve(rows, dict.fromkeys(self._layers, 1.0), choices)[len(self._columns) :]
        return dict(choice for choice, value in zip(choices.values(), values, strict=True) if value > 0.5)

    def _solve(
        self, more: list[_Row], objective: Mapping[Variable, float], binaries: Iterable[Variable] = ()
    ) -> list[float]:
        """The value of each column, those of the binaries last.

        Raises:
            ImportError: if SciPy is not installed.
            InfeasibleError: if there is no solution.
        """
        try:
            optimize: Any = importlib.import_module("scipy.optimize")
        except ImportError as error:
            raise ImportError("Width scaling needs SciPy: pip install 'ignite-monitor[scaling]'") from error
        np: Any = importlib.import_module("numpy")
        sparse: Any = importlib.import_module("scipy.sparse")
        rows = self._rows + more
        columns = self._columns | {each: len(self._columns) + index for index, each in enumerate(binaries)}
        count, binary = len(columns), len(columns) - len(self._columns)
        index = np.repeat(np.arange(len(rows)), [len(row) for row, _ in rows])
        column = np.array([columns[each] for row, _ in rows for each in row])
        value = np.array([each for row, _ in rows for each in row.values()])
        lower, upper = np.array([*self._bounds, *[(0.0, 1.0)] * binary]).T
        matrix = sparse.csr_array((value, (index, column)), shape=(len(rows), count))
        result = optimize.milp(
            np.array([objective.get(variable, 0.0) for variable in columns]),
            integrality=[0] * (count - binary) + [1] * binary if binary else None,
            bounds=optimize.Bounds(lower, upper),
            constraints=optimize.LinearConstraint(matrix, -np.inf, np.array([most for _, most in rows])),
        )
        if result.x is None:
            raise InfeasibleError(
                "No learning rates keep all changes bounded and let the readouts' inputs change by as much at any width"
            )
        return [float(each) + 0.0 for each in result.x]  # without -0.0
