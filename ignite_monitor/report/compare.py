"""Two runs side by side."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ignite_monitor.report.run import Run
from ignite_monitor.report.series import Series, natural
from ignite_monitor.report.summary import VERSION, Summary, finding_json, plain, summarise
from ignite_monitor.report.training import direction

MATTERS = 0.05  # relative difference of two values
NOISE = 2.0  # ratio of the difference to the noise within the runs


@dataclass(frozen=True)
class Difference:
    """A metric in two runs."""

    name: str
    a: float  # median of its last tenth in the first run
    b: float  # and in the second
    best_a: float  # smallest value of a loss, largest of an accuracy; NaN if the name does not tell
    best_b: float
    relative: float  # (b - a) / max(|a|, |b|); NaN if one is non-finite
    matters: bool  # whether the difference is more than noise
    own: bool  # whether it is one of the user's own metrics


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    runs: tuple[Summary, Summary]
    until: int  # the last iteration that both have
    differences: list[Difference]  # the largest first, the user's own before the rest
    only: tuple[list[str], list[str]]  # names of metrics of the first run only, and of the second only


def compare(files: tuple[str, str], runs: tuple[Run, Run]) -> Comparison:
    """Compare two runs, each metric up to the last iteration that both have."""
    first, second = (run.series for run in runs)
    summaries = summarise(files[0], runs[0]), summarise(files[1], runs[1])
    own = {*runs[0].own, *runs[1].own}
    differences = [_difference(name, first[name], second[name], name in own) for name in first if name in second]
    differences.sort(key=lambda it: (not it.matters, not it.own, -_size(it), natural(it.name)))
    only = (sorted(first.keys() - second.keys(), key=natural), sorted(second.keys() - first.keys(), key=natural))
    return Comparison(summaries, min(summary.last for summary in summaries), differences, only)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Convert a comparison to JSON's own types."""
    keys = ("a", "b", "best_a", "best_b", "relative", "matters")
    runs = []
    for run, only in zip(comparison.runs, comparison.only, strict=True):
        findings = [finding_json(finding) for finding in run.findings]
        runs.append({"file": run.file, "last_iteration": run.last, "findings": findings, "only_here": only})
    metrics = {it.name: plain(it, keys) for it in comparison.differences}
    return {"version": VERSION, "compared_until": comparison.until, "runs": runs, "metrics": metrics}


def _difference(name: str, a: Series, b: Series, own: bool) -> Difference:
    until = min(a.steps[-1], b.steps[-1])
    a, b = (series.part(series.steps <= until) for series in (a, b))
    if not a or not b:
        return Difference(name, math.nan, math.nan, math.nan, math.nan, math.nan, False, own)
    ends = [series.end if np.isfinite(series.values[-1]) else float(series.values[-1]) for series in (a, b)]
    gap, size = abs(ends[1] - ends[0]), max(map(abs, ends))
    if math.isfinite(gap):
        relative = (ends[1] - ends[0]) / size if size else 0.0
        matters = gap > MATTERS * size and gap > NOISE * max(_noise(a), _noise(b))
    else:
        relative, matters = math.nan, repr(ends[0]) != repr(ends[1])
    return Difference(name, ends[0], ends[1], _best(name, a), _best(name, b), relative, matters, own)


def _noise(series: Series) -> float:
    """Median distance of the last values from their median."""
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
