"""The result of a coordinate check: values, their slopes over the width, and the figure."""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

STEEP_SLOPE = 0.1
"""Slopes up to this size count as flat."""
QUANTITIES = {
    "activation": "output",
    "output_change": "change of the output",
    "weight_update": "change by its weights",
    "input_drift": "change by its input",
}
"""Names of the quantities, and their titles in figures."""


class Record(NamedTuple):
    """One value of one layer in a training run, after a number of updates (``step``)."""

    width: int
    seed: int
    step: int
    layer: str
    quantity: str
    value: float


class Slope(NamedTuple):
    """Growth of a quantity of one layer with the width, as an exponent, after a number of updates (``step``)."""

    layer: str
    step: int
    quantity: str
    slope: float
    standard_error: float  # infinite for two points
    expected: tuple[float, float] | None = None  # lowest and highest, by the parametrization; None if not known

    @property
    def is_steep(self) -> bool:
        """True if it is above 0.1, or 0.1 below 0 and all expected slopes, by more than two standard errors."""
        low = 0.0 if self.expected is None else min(self.expected[0], 0.0)
        return max(self.slope, low - self.slope) - STEEP_SLOPE > 2 * self.standard_error

    def __str__(self) -> str:
        low, high = (f"{slope:+.2f}" for slope in self.expected or (0.0, 0.0))
        expected = "" if self.expected is None else f" ({low})" if low == high else f" ({low} to {high})"
        return f"{self.slope:+.2f} ± {self.standard_error:.2f}{expected}{' *' * self.is_steep}"


class CoordinateCheck:
    """Records of the same training at several widths, made by :func:`coordinate_check`.

    Args:
        expected: (layer, quantity) -> the lowest and the highest expected slope.

    Attributes:
        records: the records, in the order in which they were made.
        slopes: for each layer, step and quantity, the least-squares slope of log value over log width, without values
            of 0, such as all changes before the first update.
    """

    def __init__(
        self, records: Iterable[Record], expected: Mapping[tuple[str, str], tuple[float, float]] | None = None
    ) -> None:
        self.records = list(records)
        self._layers = list(dict.fromkeys(record.layer for record in self.records))
        points: dict[tuple[str, int, str], list[tuple[float, float]]] = defaultdict(list)
        for record in self.records:
            if record.value > 0 and math.isfinite(record.value):
                key = record.layer, record.step, record.quantity
                points[key].append((math.log(record.width), math.log(record.value)))
        self.slopes = [
            Slope(*key, *fitted, (expected or {}).get((key[0], key[2])))
            for key, values in points.items()
            if (fitted := log_log_slope(values)) is not None
        ]
        self._last = last = max(record.step for record in self.records)
        self._last_slopes = {(slope.layer, slope.quantity): slope for slope in self.slopes if slope.step == last}

    def table(self) -> str:
        """Return the slopes after the last step as text: slope ± standard error (expected slopes), * if it is steep."""
        slopes = self._last_slopes
        rows = [["layer", *QUANTITIES]]
        for layer in self._layers:
            rows.append([layer or "_root_", *(str(slopes.get((layer, quantity), "-")) for quantity in QUANTITIES)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lost = dict.fromkeys((item.layer, item.width) for item in self.records if not math.isfinite(item.value))
        return "\n".join([*lines, *(f"{layer or '_root_'}: not finite at width {width}" for layer, width in lost)])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw each quantity over the width after the last step, with the slopes of :meth:`table` as legends.

        Args:
            path: the figure's file: .png, .pdf or .svg.

        Raises:
            ImportError: if matplotlib is not installed.
        """
        try:
            from matplotlib import colormaps
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("A figure needs matplotlib: pip install 'ignite-monitor[scaling]'") from error
        slopes, layers, last = self._last_slopes, self._layers, self._last
        runs: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for record in self.records:
            if record.step == last and 0 < record.value < math.inf:
                runs[record.layer, record.quantity][record.width].append(record.value)
        widths = sorted({record.width for record in self.records})
        figure = Figure((13, 3.4 + 0.16 * len(layers)), dpi=120, layout="constrained")
        axes: Any = figure.subplots(1, len(QUANTITIES), sharey=True)
        for axis, (quantity, title) in zip(axes, QUANTITIES.items(), strict=True):
            for row, layer in enumerate(layers):
                values = runs[layer, quantity]
                label = f"{slopes.get((layer, quantity), '-')}  {layer or '_root_'}".replace("$", r"\$")
                color = colormaps["viridis"](0.9 * row / len(layers))
                axis.plot([*values], [*map(statistics.geometric_mean, values.values())], ".-", color=color, label=label)
            axis.set(title=title, xlabel="width", xscale="log", yscale="log")
            axis.set_xticks(widths, widths)
            axis.set_xticks([], minor=True)
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize=7)
        axes[0].set_ylabel("root mean square")
        figure.suptitle(f"Coordinate check after step {last}: slope ± error (expected), * if steep")
        figure.savefig(path)


def log_log_slope(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the least-squares slope through points (x, y) and its standard error; None if all have one x."""
    xs, ys = zip(*points, strict=True)
    if len(set(xs)) < 2:
        return None
    slope, intercept = statistics.linear_regression(xs, ys)
    if len(points) < 3:
        return slope, math.inf
    residual = math.fsum((y - intercept - slope * x) ** 2 for x, y in points)
    return slope, math.sqrt(residual / (len(xs) - 2) / (statistics.pvariance(xs) * len(xs)))
