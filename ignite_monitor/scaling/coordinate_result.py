"""The result of a coordinate check: values, and their slopes over the width."""

from __future__ import annotations

import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from ignite_monitor.scaling.plot import FLAT, draw, shown

QUANTITIES = ("activation", "change", "weight_update", "input_drift")


class Record(NamedTuple):
    """One value of one layer at one step of a training run.

    Attributes:
        width: the model's width.
        seed: the run's seed.
        step: number of updates before.
        layer: the layer's name.
        quantity: name of the quantity.
        value: the value.
    """

    width: int
    seed: int
    step: int
    layer: str
    quantity: str
    value: float


class Slope(NamedTuple):
    """Growth of a quantity of one layer with the width, as an exponent.

    Attributes:
        layer: the layer's name.
        step: number of updates before.
        quantity: name of the quantity.
        slope: the exponent.
        standard_error: its standard error; infinite for two points, which have none.
        expected: the exponent that the parametrization expects after the first update; None if it is not known.
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


class CoordinateCheck:
    """Records of the same training at several widths.

    Args:
        records: the records.
        expected: (layer, quantity) -> the expected slope.

    Attributes:
        records: the records, in the order in which they were made.
        slopes: for each layer, step and quantity, the least-squares slope of log value over log width. Values of 0,
            such as all changes before the first update, are not used.
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
        """Return (layer, quantity) -> slope at one step.

        Args:
            step: number of updates before; None for the last step.
        """
        step = self.last_step if step is None else step
        return {(slope.layer, slope.quantity): slope for slope in self.slopes if slope.step == step}

    def table(self, step: int | None = None) -> str:
        """Return all slopes at one step as text: slope ± standard error, and the expected slope in parentheses.

        Steep slopes are marked by a star.

        Args:
            step: number of updates before; None for the last step.
        """
        slopes = self.slopes_at(step)
        rows = [["layer", *self.quantities]]
        rows += [[shown(name), *(_cell(slopes.get((name, item))) for item in self.quantities)] for name in self.layers]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join(lines)

    def summary(self) -> str:
        """Describe which layers depend on the width after the last step, and which have diverged."""
        slopes = list(self.slopes_at().values())
        steep: dict[str, list[str]] = defaultdict(list)
        for slope in slopes:
            if slope.is_steep:
                verb = "grows" if slope.slope > 0 else "shrinks"
                expected = "" if slope.expected is None else f", expected {slope.expected:+.2f}"
                steep[shown(slope.layer)].append(
                    f"{slope.quantity} {verb} as width^{slope.slope:.2f} (± {slope.standard_error:.2f}{expected})"
                )
        lines = [f"{layer}: {'; '.join(texts)}" for layer, texts in steep.items()]
        lost = {(item.layer, item.width): None for item in self.records if not math.isfinite(item.value)}
        lines += [f"{shown(layer)}: not finite at width {width}" for layer, width in lost]
        if lines:
            return "\n".join([f"These layers depend on the width after step {self.last_step}:", *lines])
        if slopes and all(math.isinf(slope.standard_error) for slope in slopes):
            return "Slopes through two points have no standard error: use more widths, or more seeds."
        return f"No layer depends on the width: no slope after step {self.last_step} is clearly beyond ±{FLAT}."

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw each quantity over the width, and its slopes, after the last step.

        Args:
            path: the figure's file: .png, .pdf or .svg.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if there are no records, or the file is of another kind.
        """
        draw(self, path)


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


def _cell(slope: Slope | None) -> str:
    if slope is None:
        return "-"
    expected = "" if slope.expected is None else f" ({slope.expected:+.2f})"
    return f"{slope.slope:+.2f} ± {slope.standard_error:.2f}{expected}{' *' * slope.is_steep}"
