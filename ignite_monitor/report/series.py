"""The series of a metric, and names and numbers in words."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


class Series(NamedTuple):
    """A metric over the run; without values, and false, if it was not recorded."""

    steps: Array = np.empty(0, int)  # iterations, ascending
    values: Array = np.empty(0)  # float64, non-finite ones included

    def __bool__(self) -> bool:
        return bool(len(self.steps))

    def part(self, which: Array | slice) -> Series:
        """Select values by a mask, by indices or by a slice."""
        return Series(self.steps[which], self.values[which])

    @property
    def finite(self) -> Series:
        """The finite values."""
        keep = np.isfinite(self.values)
        return self if keep.all() else self.part(keep)

    @property
    def last_quarter(self) -> Series:
        """The last quarter of the values, at least one."""
        return self.part(slice(-max(1, len(self.steps) // 4), None))

    @property
    def median(self) -> float:
        """Median of the finite values, NaN if there is none."""
        values = self.finite.values
        return float(np.median(values)) if len(values) else math.nan

    @property
    def start(self) -> float:
        """Median of the first tenth of the finite values, at most 50."""
        finite = self.finite
        return finite.part(slice(_tenth(finite))).median

    @property
    def end(self) -> float:
        """Median of the last tenth of the finite values, at most 50."""
        finite = self.finite
        return finite.part(slice(-_tenth(finite), None)).median

    @property
    def last(self) -> float:
        """The last finite value, NaN if there is none."""
        values = self.finite.values
        return float(values[-1]) if len(values) else math.nan

    def at(self, steps: Array) -> Array:
        """Return the values at some steps, NaN where there is none."""
        if not self:
            return np.full(len(steps), math.nan)
        index = np.minimum(np.searchsorted(self.steps, steps), len(self.steps) - 1)
        return np.where(self.steps[index] == steps, self.values[index], math.nan)

    def where(self, condition: Array) -> Array:
        """Return the steps at which a condition holds."""
        return np.asarray(self.steps[condition])

    def since(self, condition: Array) -> int:
        """Return the step from which on a condition holds to the end, or else the last step."""
        failing = np.flatnonzero(~condition)
        return int(self.steps[min(failing[-1] + 1, len(self.steps) - 1) if len(failing) else 0])


def _tenth(series: Series) -> int:
    return max(1, min(50, math.ceil(0.1 * len(series.values))))


class Statistics(NamedTuple):
    """A series as a row of a table."""

    first: float
    last: float
    min: float  # of the finite values; NaN if there is none
    max: float
    values: int  # number of values
    nonfinite: int  # number of non-finite values
    first_step: int
    last_step: int


def statistics(series: Series) -> Statistics:
    """Describe a series that has at least one value."""
    steps, values = series
    finite = series.finite.values
    least, most = (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)
    bad = len(values) - len(finite)
    return Statistics(float(values[0]), float(values[-1]), least, most, len(values), bad, int(steps[0]), int(steps[-1]))


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts ``layers.2`` before ``layers.10``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def number(value: float, digits: int = 4) -> str:
    """Format a number; whole numbers without a decimal point."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.{digits}g}"


def times(factor: float) -> str:
    """Format a factor: ``3.5 times``."""
    return f"{factor:{'.0f' if 10 <= factor < 1e6 else '.2g'}} times"


def plural(count: int, what: str) -> str:
    """Format a count: ``1 step``, ``2 steps``."""
    return f"{count} {what}{'s' * (count != 1)}"


def printable(name: str) -> str:
    """Escape control characters, so that a name is safe to print to a terminal."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def listed(words: Iterable[str], at_most: int = 5) -> str:
    """Join words: ``a, b and 3 more``."""
    words = list(words)
    if len(words) > at_most + 1:
        return f"{', '.join(words[:at_most])} and {len(words) - at_most} more"
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def iterations(steps: Array) -> str:
    """Format ascending steps: ``iteration 7``, ``iterations 7, 20-25 and 90``."""
    starts = np.flatnonzero(np.diff(steps, prepend=steps[:1] - 2) != 1)
    ranges = zip(steps[starts].tolist(), steps[np.append(starts[1:], len(steps)) - 1].tolist(), strict=True)
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"iteration{'s' * (len(steps) > 1)} {listed(words, 6)}"
