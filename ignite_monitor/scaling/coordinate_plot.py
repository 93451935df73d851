"""A figure of a coordinate check: values over the width, and their slopes."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ignite_monitor.scaling.coordinate_result import FLAT, CoordinateCheck

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES = {
    "activation": "output",
    "change": "change of the output",
    "weight_update": "change by the layer's weights",
    "input_drift": "change by what reaches it",
}
STEEP = "#d1242f"


def draw(result: CoordinateCheck, path: str | os.PathLike[str]) -> None:
    """Write a figure: above, root mean squares over the width; below, their slopes, steep ones in red.

    Args:
        result: the coordinate check.
        path: where to; the ending says in which format (png, pdf, svg).

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        OSError: if the file can't be written.
        ValueError: if there is nothing to draw, or the ending is that of no image.
    """
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
        axes: Any = figure.subplots(2, count, squeeze=False, sharey="row", height_ratios=heights)
        colours = matplotlib.colormaps["viridis"]
        palette = [colours(0.9 * place / max(layers - 1, 1)) for place in range(layers)]
        for place, quantity in enumerate(result.quantities):
            _values(axes[0, place], result, quantity, palette)
            _slopes(axes[1, place], result, quantity, palette)
        limits = [each.get_xlim() for each in axes[1]]
        for each in axes[1]:
            each.set_xlim(min(-0.6, *(low for low, _ in limits)), max(0.6, *(high for _, high in limits)))
        axes[0, 0].set_ylabel("root mean square")
        figure.suptitle(
            f"Coordinate check after step {result.last_step}: what is flat does not depend on the width\n"
            f"Dots are trainings. Circled slopes are beyond ±{FLAT}, by more than two standard errors.",
            fontsize=10,
        )
        figure.savefig(path, format=Path(path).suffix[1:].lower() or "png")


def _values(axes: Axes, result: CoordinateCheck, quantity: str, palette: list[Any]) -> None:
    axes.set_title(NAMES[quantity], loc="left")
    widths = sorted({record.width for record in result.records})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    logs: dict[tuple[str, int], list[float]] = {}
    for record in result.records:
        if (record.step, record.quantity) == (result.last_step, quantity) and 0 < record.value < math.inf:
            logs.setdefault((record.layer, record.width), []).append(math.log(record.value))
    for layer, colour in zip(result.layers, palette, strict=True):
        means = [(width, logs[layer, width]) for width in widths if (layer, width) in logs]
        line = [math.exp(math.fsum(each) / len(each)) for _, each in means]
        axes.plot([width for width, _ in means], line, color=colour, linewidth=1.3)
        axes.plot(
            [width for width, each in means for _ in each],
            [math.exp(value) for _, each in means for value in each],
            ".",
            color=colour,
            markersize=3,
        )
    axes.set_xticks(widths, [str(width) for width in widths])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("width")
    axes.grid(visible=True, color="#e6e8eb", linewidth=0.6)


def _slopes(axes: Axes, result: CoordinateCheck, quantity: str, palette: list[Any]) -> None:
    slopes = result.slopes_at()
    axes.axvspan(-FLAT, FLAT, color="#dfe9df", linewidth=0)
    axes.axvline(0.0, color="#9aa5b1", linewidth=0.6)
    for place, (layer, colour) in enumerate(zip(result.layers, palette, strict=True)):
        slope = slopes.get((layer, quantity))
        if slope is None:
            continue
        error = 2 * slope.standard_error if math.isfinite(slope.standard_error) else 0.0
        axes.errorbar(slope.slope, place, xerr=error, fmt="o", color=colour, markersize=4.5, elinewidth=1.2)
        if slope.is_steep:
            axes.plot(slope.slope, place, "o", markersize=8.5, markerfacecolor="none", markeredgecolor=STEEP)
    axes.set_ylim(len(result.layers) - 0.4, -0.6)
    axes.set_yticks(range(len(result.layers)), [layer or "_root_" for layer in result.layers], parse_math=False)
    axes.set_xlabel("slope (± 2 standard errors)")
    axes.grid(visible=True, axis="x", color="#e6e8eb", linewidth=0.6)
    axes.set_axisbelow(True)
