"""What a coordinate check has found."""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FLAT = 0.1
"""How far from 0 a slope may be."""


class Record(NamedTuple):
    """A number of one layer at one step of a training.

    Attributes:
        width: the model's width.
        seed: the training's seed.
        step: how many updates there were before.
        layer: the layer's name.
        quantity: what was measured.
        value: the number.
    """

    width: int
    seed: int
    step: int
    layer: str
    quantity: str
    value: float


class Slope(NamedTuple):
    """How a quantity of one layer grows with the width, as a power of it.

    Attributes:
        layer: the layer's name.
        step: how many updates there were before.
        quantity: what was measured.
        slope: the exponent.
        standard_error: its standard error; infinite of two points, which say nothing of it.
        start: the exponent that it has before anything is learned, as that of a readout: 1/2 - a - b.
        rate: of what the weights of a layer with a parametrization have done, a + c; 0 where it is not known.
        drift: the largest exponent that it may have where its layer is one of a pair as LoRA's, 1 - a - b.
    """

    layer: str
    step: int
    quantity: str
    slope: float
    standard_error: float
    start: float = 0.0
    rate: float = 0.0
    drift: float = 0.0

    @property
    def is_steep(self) -> bool:
        """Whether it is further from 0 than :data:`FLAT`, by more than two standard errors, and not explained."""
        return self._is_clear and not self.is_explained

    @property
    def is_explained(self) -> bool:
        """Whether it is clearly off 0 for a reason that the summary gives."""
        return self.is_start or self.is_unaligned or self.is_drift

    @property
    def is_start(self) -> bool:
        """Whether it lies between 0 and the exponent of its start, clearly off 0."""
        return self._is_clear and self.start - FLAT - 2 * self.standard_error < self.slope < 0

    @property
    def alignment(self) -> float:
        """With which alpha updates of the weights make it: it is the exponent alpha - a - c."""
        return self.slope + self.rate

    @property
    def is_unaligned(self) -> bool:
        """Whether it is below 0 because alpha is: between 1/2, as for random numbers, and 1, full alignment."""
        return self.rate > 0 > self.slope and self._is_clear and 0.5 - FLAT < self.alignment < 1 - FLAT

    @property
    def is_drift(self) -> bool:
        """Whether it lies between 0 and the exponent of a drift along the first of a pair as LoRA's, clearly off 0."""
        return self._is_clear and 0 < self.slope < self.drift + FLAT + 2 * self.standard_error and self.drift > 0

    @property
    def _is_clear(self) -> bool:
        return abs(self.slope) - FLAT > 2 * self.standard_error


class CoordinateCheck:
    """Records of the same training at several widths.

    Args:
        records: the records.
        starts: layer -> the exponent of its output before the first update, where that is not 0.
        rates: layer -> a + c, where that is known.
        drifts: layer -> the largest exponent of a drift through it, where there may be one.

    Attributes:
        records: the records, in the order in which they were made.
        slopes: of each layer, step and quantity, the least-squares slope of log value over log width. Values that are
            0, as all changes before the first update, have none.
    """

    def __init__(
        self,
        records: Iterable[Record],
        starts: Mapping[str, float] | None = None,
        rates: Mapping[str, float] | None = None,
        drifts: Mapping[str, float] | None = None,
    ) -> None:
        self.records = list(records)

        def expected(layer: str, quantity: str) -> tuple[float, float, float]:
            drift = (drifts or {}).get(layer, 0.0)
            if quantity != "weight_update":
                return (starts or {}).get(layer, 0.0), 0.0, drift
            rate = (rates or {}).get(layer, 0.0)
            return 0.0, rate, 0.0 if rate else drift  # the second of a pair is all that its weights have done

        points: dict[tuple[str, int, str], list[tuple[float, float]]] = defaultdict(list)
        for record in self.records:
            if record.value > 0 and math.isfinite(record.value):
                key = record.layer, record.step, record.quantity
                points[key].append((math.log(record.width), math.log(record.value)))
        self.slopes = [
            Slope(*key, *fitted, *expected(key[0], key[2]))
            for key, each in points.items()
            if (fitted := log_log_slope(each)) is not None
        ]

    @property
    def layers(self) -> list[str]:
        """The layers' names."""
        return list(dict.fromkeys(record.layer for record in self.records))

    @property
    def quantities(self) -> list[str]:
        """What was measured."""
        return list(dict.fromkeys(record.quantity for record in self.records))

    @property
    def last_step(self) -> int:
        """The last step."""
        return max((record.step for record in self.records), default=0)

    def slopes_at(self, step: int | None = None) -> dict[tuple[str, str], Slope]:
        """Layer and quantity -> slope at one step.

        Args:
            step: how many updates there were before; None for the last step.
        """
        step = self.last_step if step is None else step
        return {(slope.layer, slope.quantity): slope for slope in self.slopes if slope.step == step}

    def table(self, step: int | None = None) -> str:
        """All slopes at one step, with their standard errors, as text.

        Those that are too steep have a star; those that the summary explains, a circle.

        Args:
            step: how many updates there were before; None for the last step.
        """
        slopes = self.slopes_at(step)
        rows = [
            [_shown(layer), *(_cell(slopes.get((layer, each))) for each in self.quantities)] for layer in self.layers
        ]
        rows = [["layer", *self.quantities], *rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)

    def summary(self) -> str:
        """Which layers depend on the width after the last step, and which have diverged, in words.

        Readouts that still are as they started, and layers whose updates are aligned less than fully, have lines of
        their own, and are no fault.
        """
        slopes = self.slopes_at().values()
        steep: dict[str, list[str]] = defaultdict(list)
        explained: dict[str, list[str]] = defaultdict(list)
        for slope in slopes:
            if slope.is_steep:
                grows = "grows" if slope.slope > 0 else "shrinks"
                told = f"{slope.quantity} {grows} as width^{slope.slope:.2f} (± {slope.standard_error:.2f})"
                steep[_shown(slope.layer)].append(told)
            elif slope.is_explained:
                explained[_why(slope)].append(f"{slope.quantity} {slope.slope:+.2f}")
        lines = [f"{each}: {'; '.join(told)}" for each, told in steep.items()]
        lost = {(each.layer, each.width): None for each in self.records if not math.isfinite(each.value)}
        lines += [f"{_shown(layer)}: not finite at width {width}" for layer, width in lost]
        if lines:
            head = f"These layers depend on the width after step {self.last_step}:"
        elif slopes and all(math.isinf(slope.standard_error) for slope in slopes):
            return "Slopes through two points have no standard error and say nothing: give more widths, or more seeds."
        else:
            but = ", but for what is named below" if explained else ""
            head = (
                f"No layer depends on the width: no slope after step {self.last_step} is clearly beyond ±{FLAT}{but}."
            )
        return "\n".join([head, *lines, *(f"{why}: {', '.join(told)}" for why, told in explained.items())])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw each quantity over the width, and its slopes, as they are after the last step.

        Args:
            path: the picture's file: .png, .pdf or .svg.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if there is nothing to draw, or the file is of another kind.
        """
        _draw(self, path)


def log_log_slope(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The least-squares slope through points (x, y) and its standard error; None if all have one x."""
    xs, ys = zip(*points, strict=True)
    if len(set(xs)) < 2:
        return None
    slope, intercept = statistics.linear_regression(xs, ys)
    if len(points) < 3:
        return slope, math.inf
    mean = math.fsum(xs) / len(xs)
    residual = math.fsum((y - intercept - slope * x) ** 2 for x, y in points)
    return slope, math.sqrt(residual / (len(xs) - 2) / math.fsum((x - mean) ** 2 for x in xs))


def _why(slope: Slope) -> str:
    layer = _shown(slope.layer)
    if slope.is_start:
        return (
            f"{layer} is a readout, or ends in one, which starts as width^(1/2 - a - b) = width^{slope.start:.2f} and "
            "comes up to width^0 as what it learns outgrows its start, as it should"
        )
    if slope.is_drift:
        return (
            f"{layer} is one of two weights with as many numbers between them at any width, and the second started at "
            "zero, as LoRA's do: once that has learned, inputs drift along the first, as width^(omega - a - b) with "
            "omega between 1/2 and 1, and a + b = 1/2 (arXiv:2406.08447), the less the smaller the learning rate"
        )
    return (
        f"{layer} learns as width^(alpha - a - c), since updates are aligned with its input as n^{slope.alignment:.2f} "
        "and not n^1: more slowly at large widths than it could, which MaxPScheduler measures and makes up for"
    )


def _shown(layer: str) -> str:
    return layer or "_root_"


def _cell(slope: Slope | None) -> str:
    if slope is None:
        return "-"
    mark = " *" if slope.is_steep else " °" if slope.is_explained else ""
    return f"{slope.slope:+.2f} ± {slope.standard_error:.2f}{mark}"


NAMES = {
    "activation": "output",
    "change": "change of the output",
    "weight_update": "change by the layer's weights",
    "input_drift": "change by what reaches it",
}
QUANTITIES = tuple(NAMES)
STEEP = "#d1242f"


def _draw(result: CoordinateCheck, path: str | os.PathLike[str]) -> None:
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
            f"Coordinate check after step {result.last_step}: what is flat does not depend on the width\n"
            f"Dots are trainings. Circled slopes are beyond ±{FLAT}, by more than two standard errors.",
            fontsize=10,
        )
        figure.savefig(path, format=Path(path).suffix[1:].lower() or "png")


def _draw_values(axes: Axes, result: CoordinateCheck, quantity: str, palette: list[Any]) -> None:
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


def _draw_slopes(axes: Axes, result: CoordinateCheck, quantity: str, palette: list[Any]) -> None:
    slopes = result.slopes_at()
    axes.axvspan(-FLAT, FLAT, color="#dfe9df", linewidth=0)
    axes.axvline(0.0, color="#9aa5b1", linewidth=0.6)
    for row, (layer, colour) in enumerate(zip(result.layers, palette, strict=True)):
        slope = slopes.get((layer, quantity))
        if slope is None:
            continue
        error = 2 * slope.standard_error if math.isfinite(slope.standard_error) else 0.0
        axes.errorbar(slope.slope, row, xerr=error, fmt="o", color=colour, markersize=4.5, elinewidth=1.2)
        if slope.is_steep:
            axes.plot(slope.slope, row, "o", markersize=8.5, markerfacecolor="none", markeredgecolor=STEEP)
    axes.set_ylim(len(result.layers) - 0.4, -0.6)
    axes.set_yticks(range(len(result.layers)), [_shown(layer) for layer in result.layers], parse_math=False)
    axes.set_xlabel("slope (± 2 standard errors)")
    axes.grid(visible=True, axis="x", color="#e6e8eb", linewidth=0.6)
    axes.set_axisbelow(True)
