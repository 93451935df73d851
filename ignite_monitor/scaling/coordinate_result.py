"""What a coordinate check has found."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

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
    """

    layer: str
    step: int
    quantity: str
    slope: float
    standard_error: float

    @property
    def is_steep(self) -> bool:
        """Whether it is further from 0 than :data:`FLAT`, by more than two standard errors."""
        return abs(self.slope) - FLAT > 2 * self.standard_error


class CoordinateCheck:
    """Records of the same training at several widths.

    Args:
        records: the records.

    Attributes:
        records: the records, in the order in which they were made.
        slopes: of each layer, step and quantity, the least-squares slope of log value over log width. Values that are
            0, as all changes before the first update, have none.
    """

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        points: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
        for record in self.records:
            if record.value > 0 and math.isfinite(record.value):
                key = record.layer, record.step, record.quantity
                points.setdefault(key, []).append((math.log(record.width), math.log(record.value)))
        self.slopes = [
            Slope(*key, *fitted) for key, each in points.items() if (fitted := log_log_slope(each)) is not None
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
        """All slopes at one step, with their standard errors, as text; those that are too steep have a star.

        Args:
            step: how many updates there were before; None for the last step.
        """
        slopes = self.slopes_at(step)
        rows = [["layer", *self.quantities]]
        for layer in self.layers:
            rows.append([layer or "_root_", *(_cell(slopes.get((layer, each))) for each in self.quantities)])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)

    def summary(self) -> str:
        """Which layers depend on the width after the last step, and which have diverged, in words."""
        steep: dict[str, list[str]] = {}
        for (layer, quantity), slope in self.slopes_at().items():
            if slope.is_steep:
                steep.setdefault(layer or "_root_", []).append(
                    f"{quantity} {'grows' if slope.slope > 0 else 'shrinks'} as width^{slope.slope:.2f} "
                    f"(± {slope.standard_error:.2f})"
                )
        lines = [f"{layer}: {'; '.join(each)}" for layer, each in steep.items()]
        lost = dict.fromkeys(
            (record.layer or "_root_", record.width) for record in self.records if not math.isfinite(record.value)
        )
        lines += [f"{layer}: not finite at width {width}" for layer, width in lost]
        slopes = self.slopes_at().values()
        if not lines and slopes and all(math.isinf(slope.standard_error) for slope in slopes):
            return "Slopes through two points have no standard error and say nothing: give more widths, or more seeds."
        if not lines:
            return f"No layer depends on the width: no slope after step {self.last_step} is clearly beyond ±{FLAT}."
        return "\n".join([f"These layers depend on the width after step {self.last_step}:", *lines])

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw each quantity over the width, and its slopes, as they are after the last step.

        Args:
            path: the picture's file: .png, .pdf or .svg.

        Raises:
            ImportError: if matplotlib is not installed.
            ValueError: if there is nothing to draw, or the file is of another kind.
        """
        from ignite_monitor.scaling.coordinate_plot import draw

        draw(self, path)


def log_log_slope(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """The least-squares slope through points and its standard error; None if they are all at one place.

    Args:
        points: (x, y).
    """
    count = len(points)
    mean_x = math.fsum(x for x, _ in points) / count
    mean_y = math.fsum(y for _, y in points) / count
    spread = math.fsum((x - mean_x) ** 2 for x, _ in points)
    if len({x for x, _ in points}) < 2:
        return None
    slope = math.fsum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    if count < 3:
        return slope, math.inf
    residual = math.fsum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return slope, math.sqrt(residual / (count - 2) / spread)


def _cell(slope: Slope | None) -> str:
    if slope is None:
        return "-"
    return f"{slope.slope:+.2f} ± {slope.standard_error:.2f}{' *' if slope.is_steep else ''}"
