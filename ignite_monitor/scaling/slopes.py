"""Values of a coordinate check, and their slopes over the width."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

QUANTITIES = ("activation", "change", "weight_update", "input_drift")
FLAT = 0.1
"""Slopes up to this size count as flat."""


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
        """True if it is beyond ±:data:`FLAT` by more than two standard errors."""
        return abs(self.slope) - FLAT > 2 * self.standard_error


def log_log_slope(points: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    """Return the least-squares slope through points (x, y) and its standard error; None if all have one x."""
    xs, ys = zip(*points, strict=True)
    if len(set(xs)) < 2:
        return None
    slope, intercept = statistics.linear_regression(xs, ys)
    if len(points) < 3:
        return slope, math.inf
    mean = math.fsum(xs) / len(xs)
    residual = math.fsum((y - intercept - slope * x) ** 2 for x, y in points)
    return slope, math.sqrt(residual / (len(xs) - 2) / math.fsum((x - mean) ** 2 for x in xs))


def shown(layer: str) -> str:
    """The name of a layer in texts."""
    return layer or "_root_"
