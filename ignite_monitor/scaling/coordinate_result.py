"""The result of a coordinate check: values, their slopes over the width, and the figure."""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

FLAT = 0.1
"""Slopes up to this size count as flat."""
QUANTITIES = {
    "activation": "output",
    "change": "change of the output",
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
    """Growth of a quantity of one layer with the width, as an exponent, after a number of updates (``step``).

    ``standard_error`` is infinite for two points. ``expected`` is the exponent that the parametrization expects after
    the first update; None if it is not known.
    """

    layer: str
    step: int
    quantity: str
    slope: float
    standard_error: float
    expected: float | None = None

    @property
    def is_steep(self) -> bool:
        """True if it is beyond ±0.1 by more than two standard errors."""
        return abs(self.slope) - FLAT > 2 * self.standard_error

    def __str__(self) -> str:
        expected = "" if self.expected is None else f" ({self.expected:+.2f})"
        return f"{self.slope:+.2f} ± {self.standard_error:.2f}{expected}{' *' * self.is_steep}"


class CoordinateCheck:
    """Records of the same training at several widths.

    Args:
        records: the records.
        expected: (layer, quantity) -> the expected slope.

    Attributes:
        records: the records, in the order in which they were made.
        slopes: for each layer, step and quantity, the least-squares slope of log value over log width, without values
            of 0, such as all changes before the first update.
        layers: names of the layers.
        quantities: names of the measured quantities.
        last_step: the last step.
    """

    def __init__(self, records: Iterable[Record], expected: Mapping[tuple[str, str], float] | None = None) -> None:
        self.records = list(records)
        self.layers = list(dict.fromkeys(record.layer for record in self.records))
        self.quantities = list(dict.fromkeys(record.quantity for record in self.records))
        self.last_step = max((record.step for record in self.records), default=0)
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

    def slopes_at(self, step: int | None = None) -> dict[tuple[str, str], Slope]:
        """Return (layer, quantity) -> slope.

        Args:
            step: the step; None for the last one.
        """
        step = self.last_step if step is None else step
        return {(slope.layer, slope.quantity): slope for slope in self.slopes if slope.step == step}

    def table(self, step: int | None = None) -> str:
        """Return the slopes as text: slope ± standard error (expected slope), with a star if the slope is steep.

        Layers whose values were not finite are named below.

        Args:
            step: the step; None for the last one.
        """
        slopes = self.slopes_at(step)
        rows = [["layer", *self.quantities]]
        for name in self.layers:
            rows.append([name or "_root_", *(str(slopes.get((name, quantity), "-")) for quantity in self.quantities)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        lost = dict.fromkeys((item.layer, item.width) for item in self.records if not math.isfinite(item.value))
        return "\n".join([*lines, *(f"{layer or '_root_'}: not finite at width {width}" for layer, width in lost)])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw each quantity over the width, and its slopes, after the last step.

        Args:
            path: the figure's file: .png, .pdf or .svg.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if there are no records, or the file is of another kind.
        """
        try:
            import matplotlib
            from matplotlib.figure import Figure
            from matplotlib.style import context
        except ImportError as error:
            raise ImportError("A figure needs matplotlib: pip install 'ignite-monitor[scaling]'") from error
        if not self.records:
            raise ValueError("A coordinate check without records has no figure")
        count, layers = len(self.quantities), len(self.layers)
        heights = 2.6, 0.45 + 0.2 * layers
        style: Any = {"font.size": 8.5, "axes.titlesize": 9.5, "axes.spines.top": False, "axes.spines.right": False}
        with context("default"), matplotlib.rc_context(style):
            longest = max(map(len, self.layers))
            size = max(0.6 + 0.07 * longest + 2.9 * count, 6.8), 0.9 + sum(heights)  # at least the title's width
            figure = Figure(figsize=size, dpi=120, layout="constrained")
            axes: Any = figure.subplots(2, count, squeeze=False, sharex="row", sharey="row", height_ratios=heights)
            palette = [matplotlib.colormaps["viridis"](0.9 * row / max(layers - 1, 1)) for row in range(layers)]
            for (values, slopes), quantity in zip(axes.T, self.quantities, strict=True):
                self._plot_values(values, quantity, palette)
                self._plot_slopes(slopes, quantity, palette)
            low, high = axes[1, 0].get_xlim()
            axes[1, 0].set_xlim(min(-0.6, low), max(0.6, high))
            axes[0, 0].set_ylabel("root mean square")
            figure.suptitle(
                f"Coordinate check after step {self.last_step}: flat lines do not depend on the width\n"
                f"Dots: training runs. Circles: beyond ±{FLAT} by two standard errors. Crosses: expected.",
                fontsize=10,
            )
            figure.savefig(path, format=Path(path).suffix[1:].lower() or "png")

    def _plot_values(self, axes: Any, quantity: str, palette: list[Any]) -> None:
        logs: dict[str, dict[int, list[float]]] = {layer: defaultdict(list) for layer in self.layers}
        for record in sorted(self.records):
            if (record.step, record.quantity) == (self.last_step, quantity) and 0 < record.value < math.inf:
                logs[record.layer][record.width].append(math.log(record.value))
        for runs, colour in zip(logs.values(), palette, strict=True):
            means = [math.exp(statistics.fmean(values)) for values in runs.values()]
            axes.plot([*runs], means, color=colour, linewidth=1.3)
            for width, values in runs.items():
                axes.plot([width] * len(values), list(map(math.exp, values)), ".", color=colour, markersize=3)
        widths = sorted({record.width for record in self.records})
        axes.set(title=QUANTITIES[quantity], xlabel="width", yscale="log")
        axes.set_xscale("log", base=2)
        axes.set_xticks(widths, [str(width) for width in widths])
        axes.grid(visible=True, color="#e6e8eb", linewidth=0.6)

    def _plot_slopes(self, axes: Any, quantity: str, palette: list[Any]) -> None:
        slopes = self.slopes_at()
        axes.axvspan(-FLAT, FLAT, color="#dfe9df", linewidth=0)
        for row, (layer, colour) in enumerate(zip(self.layers, palette, strict=True)):
            slope = slopes.get((layer, quantity))
            if slope is None:
                continue
            error = 2 * slope.standard_error if math.isfinite(slope.standard_error) else 0.0
            axes.errorbar(slope.slope, row, xerr=error, fmt="o", color=colour, markersize=4.5, elinewidth=1.2)
            if slope.expected is not None:
                axes.plot(slope.expected, row, "x", color="#4b5563", markersize=5)
            if slope.is_steep:
                axes.plot(slope.slope, row, "o", markersize=8.5, markerfacecolor="none", markeredgecolor="#d1242f")
        names = [layer or "_root_" for layer in self.layers]
        axes.set(ylim=(len(names) - 0.4, -0.6), xlabel="slope (± 2 standard errors)", axisbelow=True)
        axes.set_yticks(range(len(names)), names, parse_math=False)
        axes.grid(visible=True, axis="x", color="#e6e8eb", linewidth=0.6)


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
