r"""Learning-rate exponents as the solution of a linear program.

The largest learning rates with which no activation's change grows with width: minimise :math:`\sum_l c_l` over all
layers, such that :math:`r \ge 0` at every node, where each r is the smallest of several terms that are linear in c and
in other r (:mod:`ignite_monitor.scaling.exponents`).

**Why a linear program is enough.** The program has r as variables that are *at most* each of their terms. Every term
grows with r and c. So if (c, r) is feasible, then r can be raised, from the inputs on, to the smallest of its terms,
and everything stays feasible; c, and with it the objective, is as before. For the same reason there is a solution
exactly if r is nowhere negative with every c that is not fixed at infinity.

**Which of several optima.** Where u > alpha, or with SGD, a larger c in one layer may save just as much in another. Of
all optima the one with the smallest :math:`\sum_l e^{-l/L} c_l` is taken, l the layer's place of L in the graph: the
earlier layers get the larger learning rates, so that no feature learns slowly without need. It is the only one: two
optima would be joined by a face of the polyhedron in which some direction :math:`d \ne 0` is rational, as the
coefficients are whole numbers, and :math:`\sum_l e^{-l/L} d_l = 0` contradicts the theorem of Lindemann and
Weierstrass. As the only solution of a program in whose right-hand side alone the alignment stands, c is a Lipschitz
continuous function of the alignment.

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
    check_optimizer_type(optimizer_type)
    if not graph.layers:
        raise ValueError("Argument graph should have at least one layer with weights")
    alignments = _per_node(graph, alignment)
    minima = terms(graph, alignments, optimizer_type)
    _check_feasible(graph, minima)
    if feature_learning:
        _check_features(graph, alignments)
    program = LinearProgram(graph, minima)
    c = program.minimise()
    values = evaluate(minima, c)
    if feature_learning:
        features = sorted({("r", name) for node in graph.nodes if node.kind == "readout" for name in node.inputs})
        if any(values[feature] > TOLERANCE for feature in features):
            c = program.minimise(program.choose(features), features)
            values = evaluate(minima, c)
    return Solution(
        c,
        {name: value for (kind, name), value in values.items() if kind == "r"},
        {
            node.name: values["r", node.name]
            - node.a
            - (0.0 if optimizer_type == "adam" else node.a + values.get(("g", node.name), 0.0))
            for node in graph.nodes
            if node.has_weights
        },
    )


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
    named = {node.name: node.name if node.name in alignment else node.shares or node.name for node in nodes}
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

    def smallest_r(without: str | None = None) -> tuple[float, str]:
        c = {node.name: fixed.get(node.name, math.inf) for node in graph.layers}
        if without is not None:
            c[without] = math.inf
        values = evaluate(minima, c)
        # Of several that are negative the first is where it starts.
        return next(
            ((values["r", node.name], node.name) for node in graph.nodes if values["r", node.name] < -TOLERANCE),
            (0.0, ""),
        )

    value, name = smallest_r()
    if value < 0:
        guilty = [each for each in fixed if smallest_r(each)[1] != name] or list(fixed)
        pins = ", ".join(f"{fixed[each]:g} in {each}" for each in guilty)
        raise InfeasibleError(
            f"With c fixed at {pins}, the change of the output of {name} grows as width to the power of {-value:g}, "
            "whatever the learning rates of the other layers"
        )


class InfeasibleError(ValueError):
    """There are no learning rates with which every activation's change stays bounded as the width grows."""


class LinearProgram:
    """The linear program of a graph as sparse rows over columns for c, r and gamma.

    Args:
        minima: what r and gamma of every node are the smallest of.
    """

    def __init__(self, graph: LayerGraph, minima: Mapping[Variable, list[Term]]) -> None:
        self._minima = {variable: candidates for variable, candidates in minima.items() if candidates}
        self._layers = [node.name for node in graph.layers]
        variables = [*(("c", name) for name in self._layers), *self._minima]
        self._columns = {variable: place for place, variable in enumerate(variables)}
        self._lower = [0.0 if kind == "r" else -math.inf for kind, _ in variables]
        self._upper = [math.inf] * len(variables)
        for node in graph.layers:
            if node.c is not None:
                self._lower[self._columns["c", node.name]] = self._upper[self._columns["c", node.name]] = node.c
        self._rows = _Rows()
        for variable, candidates in self._minima.items():
            for term in candidates:
                if all(each in self._columns for each in term.variables):
                    self._rows.add([(variable, 1.0), *((each, -1.0) for each in term.variables)], term.constant)

    def minimise(self, equal: Mapping[Variable, Term] | None = None, zero: Iterable[Variable] = ()) -> dict[str, float]:
        """The optimal c by layer, with the earlier layers' smallest where there are several.

        Args:
            equal: which of its terms a variable has to be equal to.
            zero: variables that have to be 0.

        Raises:
            InfeasibleError: if there is none.
        """
        rows = self._rows.copy()
        for variable, term in (equal or {}).items():
            rows.add([*((each, 1.0) for each in term.variables), (variable, -1.0)], -term.constant)
        for variable in zero:
            rows.add([(variable, 1.0)], 0.0)
        count = len(self._layers)
        total = dict.fromkeys((("c", name) for name in self._layers), 1.0)
        best = self._solve(rows, total)
        if count > 1:
            rows.add(total.items(), sum(best[:count]))
            best = self._solve(rows, {layer: math.exp(-place / count) for place, layer in enumerate(total)})
        return dict(zip(self._layers, best, strict=False))

    def choose(self, zero: Iterable[Variable]) -> dict[Variable, Term]:
        """Which term each variable is equal to in an optimum in which some are 0.

        Args:
            zero: variables that have to be 0.

        Raises:
            InfeasibleError: if there is none.
        """
        rows = self._rows.copy()
        for variable in zero:
            rows.add([(variable, 1.0)], 0.0)
        # No r has to be larger than all constants there are, added up.
        large = 1.0 + 2.0 * sum(max(abs(term.constant) for term in each) for each in self._minima.values())
        choices: list[tuple[Variable, Variable, Term]] = []
        for variable, candidates in self._minima.items():
            chosen = [("chosen", f"{len(choices) + place}") for place in range(len(candidates))]
            rows.add([(each, 1.0) for each in chosen], 1.0)
            rows.add([(each, -1.0) for each in chosen], -1.0)
            for each, term in zip(chosen, candidates, strict=True):
                rows.add(
                    [*((other, 1.0) for other in term.variables), (variable, -1.0), (each, large)],
                    large - term.constant,
                )
                choices.append((each, variable, term))
        found = self._solve(
            rows, dict.fromkeys((("c", name) for name in self._layers), 1.0), [each for each, _, _ in choices]
        )
        offset = len(self._columns)
        return {variable: term for place, (_, variable, term) in enumerate(choices) if found[offset + place] > 0.5}

    def _solve(
        self, rows: _Rows, objective: Mapping[Variable, float], binaries: Iterable[Variable] = ()
    ) -> list[float]:
        np, optimize, sparse = _scipy()
        columns = dict(self._columns)
        for binary in binaries:
            columns[binary] = len(columns)
        more = len(columns) - len(self._columns)
        weights = np.zeros(len(columns))
        weights[[columns[variable] for variable in objective]] = list(objective.values())
        matrix = sparse.csr_array(
            (rows.values, ([*rows.places], [columns[each] for each in rows.variables])),
            shape=(len(rows.upper), len(columns)),
        )
        result = optimize.milp(
            weights,
            integrality=np.array([0] * len(self._columns) + [1] * more) if more else None,
            bounds=optimize.Bounds(self._lower + [0.0] * more, self._upper + [1.0] * more),
            constraints=optimize.LinearConstraint(matrix, -np.inf, rows.upper),
        )
        if result.x is None:
            raise InfeasibleError(
                "No learning rates keep all changes bounded and let the readouts' inputs change by as much at any width"
            )
        return [float(value) + 0.0 for value in result.x]  # without -0.0


class _Rows:
    """Rows of a sparse matrix, each with the most that it may come to."""

    def __init__(self) -> None:
        self.places: list[int] = []
        self.variables: list[Variable] = []
        self.values: list[float] = []
        self.upper: list[float] = []

    def add(self, entries: Iterable[tuple[Variable, float]], upper: float) -> None:
        """Add a row.

        Args:
            entries: variables with their coefficients; those of one that comes twice add up.
            upper: the most that the row may come to.
        """
        for variable, value in entries:
            self.places.append(len(self.upper))
            self.variables.append(variable)
            self.values.append(value)
        self.upper.append(upper)

    def copy(self) -> _Rows:
        """Rows that can be added to without changing these."""
        other = _Rows()
        for name, value in vars(self).items():
            setattr(other, name, list(value))
        return other


def _scipy() -> tuple[Any, Any, Any]:
    try:
        optimize = importlib.import_module("scipy.optimize")
    except ImportError as error:
        raise ImportError("Width scaling needs SciPy: pip install 'ignite-monitor[scaling]'") from error
    return importlib.import_module("numpy"), optimize, importlib.import_module("scipy.sparse")
