"""The program whose solution learning-rate exponents are, as SciPy's HiGHS takes it."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ignite_monitor.scaling.exponents import Term, Variable
from ignite_monitor.scaling.graph import LayerGraph


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
