"""The figure of a coordinate check."""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ignite_monitor.scaling.slopes import FLAT, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {
    "activation": "output",
    "change": "change of the output",
    "weight_update": "change by its weights",
    "input_drift": "change by its input",
}
STEEP = "#d1242f"


def draw(result: Any, path: str | os.PathLike[str]) -> None:
    """Draw the result of a coordinate check."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.style import context
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "A figure needs matplotlib: pip install 'ignite-monitor[scaling]'", name="matplotlib"
        ) from error
    if not result.records:
        raise ValueError("A coordinate check without records can't be drawn")
    count, layers = len(result.quantities), len(result.layers)
    heights = 2.6, 0.45 + 0.2 * layers
    style: Any = {"font.size": 8.5, "axes.titlesize": 9.5, "axes.spines.top": False, "axes.spines.right": False}
    with context("default"), matplotlib.rc_context(style):
        longest = max(map(len, result.layers))
        size = max(0.6 + 0.07 * longest + 2.9 * count, 6.8), 0.9 + sum(heights)  # at least the title's width
        figure = Figure(figsize=size, dpi=120, layout="constrained")
        axes: Any = figure.subplots(2, count, squeeze=False, sharex="row", sharey="row", height_ratios=heights)
        colours = matplotlib.colormaps["viridis"]
        palette = [colours(0.9 * index / max(layers - 1, 1)) for index in range(layers)]
        for column, quantity in zip(axes.T, result.quantities, strict=True):
            _draw_values(column[0], result, quantity, palette)
            _draw_slopes(column[1], result, quantity, palette)
        low, high = axes[1, 0].get_xlim()
        axes[1, 0].set_xlim(min(-0.6, low), max(0.6, high))
        axes[0, 0].set_ylabel("root mean square")
        figure.suptitle(
            f"Coordinate check after step {result.last_step}: flat lines do not depend on the width\n"
            f"Dots: training runs. Circles: beyond ±{FLAT} by two standard errors. Crosses: expected.",
            fontsize=10,
        )
        figure.savefig(path, format=Path(path).suffix[1:].lower() or "png")


def _draw_values(axes: Axes, result: Any, quantity: str, palette: list[Any]) -> None:
    axes.set_title(NAMES[quantity], loc="left")
    widths = sorted({record.width for record in result.records})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    logs: dict[tuple[str, int], list[float]] = defaultdict(list)
    for record in result.records:
        if (record.step, record.quantity) == (result.last_step, quantity) and 0 < record.value < math.inf:
            logs[record.layer, record.width].append(math.log(record.value))
    for layer, colour in zip(result.layers, palette, strict=True):
        known = {width: logs[layer, width] for width in widths if (layer, width) in logs}
        axes.plot([*known], [math.exp(statistics.fmean(each)) for each in known.values()], color=colour, linewidth=1.3)
        dots = [(width, math.exp(value)) for width, each in known.items() for value in each]
        axes.plot([width for width, _ in dots], [value for _, value in dots], ".", color=colour, markersize=3)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("width")
    axes.grid(visible=True, color="#e6e8eb", linewidth=0.6)


def _draw_slopes(axes: Axes, result: Any, quantity: str, palette: list[Any]) -> None:
    slopes = result.slopes_at()
    axes.axvspan(-FLAT, FLAT, color="#dfe9df", linewidth=0)
    axes.axvline(0.0, color="#9aa5b1", linewidth=0.6)
    for row, (layer, colour) in enumerate(zip(result.layers, palette, strict=True)):
        slope = slopes.get((layer, quantity))
        if slope is None:
            continue
        error = 2 * slope.standard_error if math.isfinite(slope.standard_error) else 0.0
        axes.errorbar(slope.slope, row, xerr=error, fmt="o", color=colour, markersize=4.5, elinewidth=1.2)
        if slope.expected is not None:
            axes.plot(slope.expected, row, "x", color="#4b5563", markersize=5)
        if slope.is_steep:
            axes.plot(slope.slope, row, "o", markersize=8.5, markerfacecolor="none", markeredgecolor=STEEP)
    axes.set_ylim(len(result.layers) - 0.4, -0.6)
    axes.set_yticks(range(len(result.layers)), [shown(layer) for layer in result.layers], parse_math=False)
    axes.set_xlabel("slope (± 2 standard errors)")
    axes.grid(visible=True, axis="x", color="#e6e8eb", linewidth=0.6)
    axes.set_axisbelow(True)
