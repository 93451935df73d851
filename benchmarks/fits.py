"""Straight lines and power laws through measurements, with the standard error of what they say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import linear_regression, mean
from typing import NamedTuple


class Slope(NamedTuple):
    """A slope, and its standard error."""

    value: float
    error: float


def line(x: Sequence[float], y: Sequence[float]) -> Slope:
    """The slope of the least-squares line through points, whose errors are taken for independent of each other.

    The standard error is s / sqrt(sum (x - mean x)²), with s² the sum of squared residuals over n - 2.
    """
    slope, intercept = linear_regression(x, y)
    squares = math.fsum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
    spread = math.fsum((a - mean(x)) ** 2 for a in x)
    return Slope(slope, math.sqrt(squares / (len(x) - 2) / spread))


def power_law(sizes: Sequence[float], costs: Sequence[float]) -> Slope:
    """The exponent p of cost = c * size^p: the slope of the logarithms' line."""
    return line([math.log(each) for each in sizes], [math.log(each) for each in costs])
