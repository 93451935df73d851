"""A metric's series, what is said of it in numbers, and how names and numbers are written."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


class Series(NamedTuple):
    """A metric over the run; without values, and false, if it was not recorded."""

    steps: Array = np.empty(0, int)  # the iterations in which it was written, ascending
    values: Array = np.empty(0)  # its values there, in float64; NaN and infinities as they were written

    def __bool__(self) -> bool:
        return bool(len(self.steps))

    def part(self, which: Array | slice) -> Series:
        """A part of it, by a mask, by indices or as a slice."""
        return Series(self.steps[which], self.values[which])

    @property
    def finite(self) -> Series:
        """Its finite part."""
        keep = np.isfinite(self.values)
        return self if keep.all() else self.part(keep)

    @property
    def last_quarter(self) -> Series:
        """Its part in the last quarter of its values, one at least."""
        return self.part(slice(-max(1, len(self.steps) // 4), None))

    def at(self, steps: Array) -> Array:
        """Its values at steps, NaN where there is none."""
        if not self:
            return np.full(len(steps), math.nan)
        index = np.minimum(np.searchsorted(self.steps, steps), len(self.steps) - 1)
        return np.where(self.steps[index] == steps, self.values[index], math.nan)

    def where(self, condition: Array) -> Array:
        """The steps at which a condition holds."""
        return np.asarray(self.steps[condition])

    def start(self, share: float = 0.1, at_most: int = 50) -> float:
        """The median of its first finite values, NaN if it has none."""
        return self._median(share, at_most, 1)

    def end(self, share: float = 0.1, at_most: int = 50) -> float:
        """The median of its last finite values, NaN if it has none."""
        return self._median(share, at_most, -1)

    def _median(self, share: float, at_most: int, direction: int) -> float:
        values = self.finite.values[::direction]
        count = max(1, min(at_most, math.ceil(share * len(values))))
        return float(np.median(values[:count])) if len(values) else math.nan

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
    least, most = (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)
    bad = len(values) - len(finite)
    return Statistics(float(values[0]), float(values[-1]), least, most, len(values), bad, int(steps[0]), int(steps[-1]))


class Run(dict[str, Series]):
    """A run's metrics by name.

    Attributes:
        monitors: name -> (kind of the monitor that published it, what precedes the monitor's key in it).
    """

    def __init__(self, series: Mapping[str, Series], monitors: Mapping[str, tuple[str, str]]) -> None:
        super().__init__(series)
        self.monitors = monitors


def tidy(recording: Any) -> Run:
    """A run's metrics over iterations, in ascending order, without those that have no value.

    Names stay in the order in which they were first recorded.

    Args:
        recording: as :func:`~ignite_monitor.hdf5.reader.read_hdf5` returns it.
    """
    series, monitors = {}, {}
    for name in recording:
        each = Series(recording.iterations(name), recording[name][1])
        if (np.diff(each.steps) < 0).any():
            each = each.part(np.argsort(each.steps, kind="stable"))
        if each:
            series[name], monitors[name] = each, recording.monitor(name)
    return Run(series, monitors)


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
    return f"{factor:{'.0f' if 10 <= factor < 1e6 else '.2g'}} times"


def plural(count: int, what: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {what}{'s' * (count != 1)}"


def printable(name: str) -> str:
    """A name that is safe to send to a terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in name)


def listed(words: Iterable[str], at_most: int = 5, hidden: int = 0) -> str:
    """Words in a sentence: ``a, b and 3 more``.

    Args:
        hidden: how many more there are.
    """
    words = list(words)
    named = words[:at_most] if len(words) + hidden > at_most + 1 else words
    left = len(words) + hidden - len(named)
    if left:
        return f"{', '.join(named)} and {left} more"
    return f"{', '.join(named[:-1])} and {named[-1]}" if len(named) > 1 else "".join(named)


def iterations(steps: Iterable[int], at_most: int = 6) -> str:
    """Ascending steps in a sentence: ``iteration 7``, ``iterations 7, 20-25 and 90``."""
    at = np.asarray(list(steps) if not isinstance(steps, np.ndarray) else steps)
    if not len(at):
        return "no iteration"
    starts = np.flatnonzero(np.diff(at, prepend=at[:1] - 2) != 1)
    firsts, lasts = at[starts], at[np.append(starts[1:], len(at)) - 1]
    shown = [
        str(first) if first == last else f"{first}-{last}"
        for first, last in zip(firsts[: at_most + 1].tolist(), lasts[: at_most + 1].tolist(), strict=True)
    ]
    hidden = len(starts) - len(shown)
    many = len(at) > 1
    return f"iteration{'s' * many} {listed(shown, at_most, hidden)}"


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
