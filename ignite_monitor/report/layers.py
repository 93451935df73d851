"""Findings about values beyond a limit at the end of a run: of the whole model, or of layers and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from ignite_monitor.hdf5.layout import printable
from ignite_monitor.report import limits
from ignite_monitor.report.finding import KINDS, Finding, listed, number
from ignite_monitor.report.run import MIN_ONSET, MonitorSeries, Run, Series


def persistent(run: Run) -> Iterator[Finding]:
    """Metrics that are beyond their limit."""
    for limit in limits.PERSISTENT:
        for monitor in run.of(limit.monitor):
            items = monitor.items(limit.key) if "{}" in limit.key else {"": monitor.get(limit.key).finite}
            yield from _beyond(monitor, run, limit, items)


class Beyond(NamedTuple):
    """An item beyond its limit."""

    value: float  # median in the last quarter
    since: int  # iteration
    since_text: str  # since when
    always: bool  # whether every measurement is beyond the limit


def _beyond(
    monitor: MonitorSeries, run: Run, limit: limits.Persistent, items: Mapping[str, Series]
) -> Iterator[Finding]:
    """The items that are beyond a limit at the end, and in 3 measurements at least, the farthest first."""
    sign = -1 if limit.below else 1
    far = {
        item: Beyond(series.last_quarter.median, *series.onset(mask), bool(mask.all()))
        for item, series in items.items()
        if sign * series.last_quarter.median > sign * limit.limit
        and (mask := sign * series.values > sign * limit.limit).sum() >= MIN_ONSET
    }
    if not far:
        return
    order = sorted(far, key=lambda item: -sign * far[item].value)
    worst, at = far[order[0]], sorted({it.since for it in far.values()})
    # A measurement in the first step's iteration comes before that step.
    initially = not KINDS[limit.kind].is_cause and any(it.always for it in far.values()) and 0 < at[0] <= run.first_made
    names, text = monitor.names(limit.key, order), limit.text.format(worst.value)
    if "{}" in limit.key:
        what = listed(f"{printable(item)} ({number(far[item].value, 2)}, {far[item].since_text})" for item in order)
        what = f"{text}: {what}."
    else:
        largest = monitor.items(limit.largest) if limit.largest else {}
        named = sorted(largest, key=lambda item: -largest[item].last_quarter.median)[:3]
        names = (*names, *monitor.names(limit.largest, named))
        what = f"{text} ({names[0]}), {worst.since_text}{'; largest in ' * bool(named)}{listed(map(printable, named))}."
    severity = "problem" if worst.value >= limit.problem else limit.severity
    values, onset = {"count": len(far), "farthest": worst.value}, 0 if initially else at[0]
    yield Finding(limit.kind, severity, what, names, at, values, onset=onset, initially=initially)


def vanishing(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Weights, not biases, whose gradients are far smaller than the largest."""
    largest = monitor.get("grad_max")
    shares = {
        name: Series(series.steps, series.values / largest.at(series.steps)).finite
        for name, series in monitor.items(limits.VANISHING.key).items()
        if not name.endswith("bias")
    }
    yield from _beyond(monitor, run, limits.VANISHING, shares)


def outliers(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Modules whose outputs are far larger than the others', or all of them far too large."""
    std = monitor.items(limits.OUTLIERS.key)
    usual = float(np.median([series.last_quarter.median for series in std.values()] or [0.0]))
    limit = max(limits.USUAL_ACTIVATION, min(limits.ACTIVATION_SPREAD * usual, max(limits.LARGE_ACTIVATION, usual)))
    text = f"Outputs with a large standard deviation (that of the median module is {number(usual, 3)})"
    yield from _beyond(monitor, run, limits.OUTLIERS._replace(limit=limit, text=text), std)
