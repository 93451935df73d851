"""A metric's series, what is said of it in numbers, and how names and numbers are written."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


class Series(NamedTuple):
    """A metric over the run."""

    steps: Array  # the iterations at which it was written, in ascending order
    values: Array  # its values there, in float64; NaN and infinities as they were written

    @property
    def finite(self) -> Series:
        """Its finite part."""
        keep = np.isfinite(self.values)
        return self if keep.all() else Series(self.steps[keep], self.values[keep])

    def at(self, steps: Array) -> Array:
        """Its values at steps, NaN where there is none."""
        if not len(self.steps):
            return np.full(len(steps), math.nan)
        index = np.minimum(np.searchsorted(self.steps, steps), len(self.steps) - 1)
        return np.where(self.steps[index] == steps, self.values[index], math.nan)

    def where(self, condition: Array) -> Array:
        """The steps at which a condition holds."""
        return np.asarray(self.steps[condition])

    def start(self, share: float = 0.1, at_most: int = 50) -> float:
        """The median of its first finite values, NaN if it has none."""
        values = self.finite.values
        return float(np.median(values[: _count(values, share, at_most)])) if len(values) else math.nan

    def end(self, share: float = 0.1, at_most: int = 50) -> float:
        """The median of its last finite values, NaN if it has none."""
        values = self.finite.values
        return float(np.median(values[-_count(values, share, at_most) :])) if len(values) else math.nan

    @property
    def last(self) -> float:
        """Its last finite value, NaN if it has none."""
        values = self.finite.values
        return float(values[-1]) if len(values) else math.nan


class Statistics(NamedTuple):
    """A series in a line of a table."""

    first: float  # finite or not
    last: float
    min: float  # of the finite values; NaN if there is none
    max: float
    values: int  # how many
    nonfinite: int  # how many of them
    first_step: int
    last_step: int


def statistics(series: Series) -> Statistics:
    """A series in numbers; it has one value at least."""
    steps, values = series
    finite = series.finite.values
    return Statistics(
        float(values[0]),
        float(values[-1]),
        float(finite.min()) if len(finite) else math.nan,
        float(finite.max()) if len(finite) else math.nan,
        len(values),
        len(values) - len(finite),
        int(steps[0]),
        int(steps[-1]),
    )


def tidy(run: Mapping[str, Sequence[Any]]) -> dict[str, Series]:
    """A run's metrics as series in ascending order of steps, without those that have no value.

    Names stay in the order in which they were first recorded.

    Args:
        run: name -> (steps, values, …), as :func:`~ignite_monitor.hdf5.read_hdf5` returns it.
    """
    tidied = {}
    for name in run:
        steps, values = np.asarray(run[name][0]), np.asarray(run[name][1], dtype=np.float64)
        if len(steps) > 1 and (np.diff(steps) < 0).any():
            order = np.argsort(steps, kind="stable")
            steps, values = steps[order], values[order]
        if len(steps):
            tidied[name] = Series(steps, values)
    return tidied


def last_quarter(series: Series) -> Series:
    """The part of a series in the last quarter of its values, one at least."""
    first = len(series.steps) - max(1, len(series.steps) // 4)
    return Series(series.steps[first:], series.values[first:])


def natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts ``layers.2`` before ``layers.10``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]


def number(value: float, digits: int = 4) -> str:
    """A number as people write it."""
    if math.isfinite(value) and value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.{digits}g}"


def times(factor: float) -> str:
    """How many times as large something is."""
    if factor >= 1e6:
        return f"{factor:.2g} times"
    return f"{factor:.0f} times" if factor >= 10 else f"{factor:.2g} times"


def plural(count: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {what}{'s' * (count != 1)}"


def printable(name: str) -> str:
    """A name that is safe to send to a terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)


def listed(words: Iterable[str], at_most: int = 5) -> str:
    """Words in a sentence: ``a, b and 3 more``."""
    words = list(words)
    named = words[:at_most] if len(words) > at_most + 1 else words
    left = len(words) - len(named)
    if left:
        return f"{', '.join(named)} and {left} more"
    return f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else "".join(named)


def iterations(steps: Iterable[int], at_most: int = 6) -> str:
    """Ascending steps in a sentence: ``iteration 7``, ``iterations 7, 20-25 and 90``."""
    ranges: list[list[int]] = []
    for step in map(int, steps):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    plural = len(ranges) > 1 or any(first != last for first, last in ranges)
    return f"iteration{'s' * plural} {listed(words, at_most)}"


def _count(values: Array, share: float, at_most: int) -> int:
    return max(1, min(at_most, math.ceil(share * len(values))))


def thinned(series: Series, points: int) -> Series:
    """A series with fewer points that looks the same: of each stretch the smallest and the largest value."""
    count = len(series.steps)
    if count <= 2 * points:
        return series
    edges = np.linspace(0, count, points + 1).astype(int)
    keep: list[int] = []
    for first, end in pairwise(edges):
        values = series.values[first:end]
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad) == len(values):
            keep.append(int(first))
            continue
        plain = np.where(np.isfinite(values), values, np.nan)
        keep += [int(first + index) for index in (np.nanargmin(plain), np.nanargmax(plain), *bad[:1])]
    kept = sorted(set(keep))
    return Series(series.steps[kept], series.values[kept])


def decades(values: Array) -> float:
    """How many decades finite positive values span; 0 if there are none."""
    positive = values[values > 0]
    return float(np.log10(positive.max()) - np.log10(positive.min())) if len(positive) else 0.0


def short(labels: list[str], length: int = 36) -> list[str]:
    """Labels without what all of them begin with, and without their middles where they are long."""
    parts = [label.split(".") for label in labels]
    common = 0
    if len(labels) > 1 and Counter(labels).most_common(1)[0][1] == 1:
        while all(len(part) > common + 1 and part[common] == parts[0][common] for part in parts):
            common += 1
        common -= common and any(part[common][:1].isdecimal() for part in parts)  # h.0, not 0
    return [shortened(("…" if common else "") + ".".join(part[common:]), length) for part in parts]


def shortened(text: str, length: int) -> str:
    """A text without its middle where it is longer."""
    return text if len(text) <= length else f"{text[: length // 3]}…{text[-(length - length // 3 - 1) :]}"
