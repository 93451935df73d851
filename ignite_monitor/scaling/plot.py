"""The figure of a coordinate check."""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

FLAT = 0.1
"""Slopes up to this size count as flat."""

_NAMES = {
    "activation": "output",
    "change": "change of the output",
    "weight_update": "change by its weights",
    "input_drift": "change by its input",
}


def shown(layer: str) -> str:
    """The name of a layer in texts."""
    return layer or "_root_"


def draw(result: Any, path: str | os.PathLike[str]) -> None:
    """Draw the result of a coordinate check."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.style import context
    except ImportError as error:
        raise ImportError("A figure needs matplotlib: pip install 'ignite-monitor[scaling]'") from error
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
        for (values, slopes), quantity in zip(axes.T, result.quantities, strict=True):
            _draw_values(values, result, quantity, palette)
            _draw_slopes(slopes, result, quantity, palette)
        low, high = axes[1, 0].get_xlim()
        axes[1, 0].set_xlim(min(-0.6, low), max(0.6, high))
        axes[0, 0].set_ylabel("root mean square")
        figure.suptitle(
            f"Coordinate check after step {result.last_step}: flat lines do not depend on the width\n"
            f"Dots: training runs. Circles: beyond ±{FLAT} by two standard errors. Crosses: expected.",
            fontsize=10,
        )
        figure.savefig(path, format=Path(path).suffix[1:].lower() or "png")


def _draw_values(axes: Any, result: Any, quantity: str, palette: list[Any]) -> None:
    logs: dict[str, dict[int, list[float]]] = {layer: defaultdict(list) for layer in result.layers}
    for record in sorted(result.records):
        if (record.step, record.quantity) == (result.last_step, quantity) and 0 < record.value < math.inf:
            logs[record.layer][record.width].append(math.log(record.value))
    for known, colour in zip(logs.values(), palette, strict=True):
        means = [math.exp(statistics.fmean(values)) for values in known.values()]
        axes.plot([*known], means, color=colour, linewidth=1.3)
        for width, values in known.items():
            axes.plot([width] * len(values), list(map(math.exp, values)), ".", color=colour, markersize=3)
    widths = sorted({record.width for record in result.records})
    axes.set(title=_NAMES[quantity], xlabel="width", yscale="log")
    axes.set_xscale("log", base=2)
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set_xticks([], minor=True)
    axes.grid(visible=True, color="#e6e8eb", linewidth=0.6)


def _draw_slopes(axes: Any, result: Any, quantity: str, palette: list[Any]) -> None:
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
            axes.plot(slope.slope, row, "o", markersize=8.5, markerfacecolor="none", markeredgecolor="#d1242f")
    axes.set(ylim=(len(result.layers) - 0.4, -0.6), xlabel="slope (± 2 standard errors)", axisbelow=True)
    axes.set_yticks(range(len(result.layers)), [shown(layer) for layer in result.layers], parse_math=False)
    axes.grid(visible=True, axis="x", color="#e6e8eb", linewidth=0.6)
