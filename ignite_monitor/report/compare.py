"""Two runs side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ignite_monitor.report.curves import direction
from ignite_monitor.report.families import groups
from ignite_monitor.report.series import Series, natural
from ignite_monitor.report.summary import VERSION, Summary, findings_json, plain, summarise

MATTERS = 0.05
"""By what share of their size two values have to differ to matter."""

NOISE = 2.0
"""How many times their spread within the runs they have to differ."""


@dataclass(frozen=True)
class Difference:
    """A metric in two runs."""

    name: str
    a: float  # the median of its last tenth in the first run
    b: float  # in the second
    best_a: float  # in the first run, the smallest of a loss, the largest of an accuracy; NaN if its name does not tell
    best_b: float
    relative: float  # how far b is from a, by the larger size of the two; NaN if one has no finite value
    matters: bool  # whether it is more than noise
    own: bool  # whether it is a metric of the user's


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    runs: tuple[Summary, Summary]
    until: int  # up to which iteration they were compared, the last that both have
    differences: list[Difference]  # what differs most comes first, the user's own before the rest
    only: tuple[list[str], list[str]]  # the names of the metrics that only the one has, and only the other


def compare(files: tuple[str, str], runs: tuple[Mapping[str, Series], Mapping[str, Series]]) -> Comparison:
    """Two runs side by side, up to the last iteration that both have."""
    first, second = runs
    told = (summarise(files[0], first), summarise(files[1], second))
    own = {name for run in runs for group in groups(run) if group.kind == "other" for name, _ in group.scalars.values()}
    both = [name for name in first if name in second]
    differences = [_difference(name, first[name], second[name], name in own) for name in both]
    differences.sort(key=lambda each: (not each.matters, not each.own, -_size(each), natural(each.name)))
    only = (sorted(first.keys() - second.keys(), key=natural), sorted(second.keys() - first.keys(), key=natural))
    return Comparison(told, min(each.last for each in told), differences, only)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """A comparison as JSON's own types; numbers that are not finite are None."""
    return {
        "version": VERSION,
        "compared_until": comparison.until,
        "runs": [
            {"file": run.file, "last_iteration": run.last, "findings": findings_json(run.findings), "only_here": only}
            for run, only in zip(comparison.runs, comparison.only, strict=True)
        ],
        "metrics": {
            each.name: plain({key: getattr(each, key) for key in ("a", "b", "best_a", "best_b", "relative", "matters")})
            for each in comparison.differences
        },
    }


def _difference(name: str, a: Series, b: Series, own: bool) -> Difference:
    until = min(a.steps[-1], b.steps[-1])
    a, b = (each.part(each.steps <= until) for each in (a, b))
    if not a or not b:
        return Difference(name, math.nan, math.nan, math.nan, math.nan, math.nan, False, own)
    ends = [each.end() if np.isfinite(each.values[-1]) else float(each.values[-1]) for each in (a, b)]
    finite = all(map(math.isfinite, ends))
    size = max(map(abs, ends))
    gap = abs(ends[1] - ends[0]) if finite else math.nan
    relative = (ends[1] - ends[0]) / size if finite and size else 0.0 if finite else math.nan
    noise = max(_spread(a), _spread(b))
    matters = (gap > MATTERS * size and gap > NOISE * noise) if finite else repr(ends[0]) != repr(ends[1])
    return Difference(name, ends[0], ends[1], _best(name, a), _best(name, b), relative, matters, own)


def _spread(series: Series) -> float:
    """The usual distance of the values in the last tenth from their median."""
    values = series.finite.values
    values = values[-max(1, min(50, math.ceil(0.1 * len(values)))) :]
    return float(np.median(np.abs(values - np.median(values)))) if len(values) else 0.0


def _best(name: str, series: Series) -> float:
    values, better = series.finite.values, direction(name)
    if not better or not len(values):
        return math.nan
    return float(values.min() if better < 0 else values.max())


def _size(difference: Difference) -> float:
    return math.inf if math.isnan(difference.relative) else abs(difference.relative)
