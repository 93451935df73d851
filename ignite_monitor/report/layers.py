"""Findings about values beyond a limit at the end of a run: of the whole model, or of layers and parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.finding import KINDS, Finding, listed, number
from ignite_monitor.report.run import MIN_ONSET, MonitorSeries, Run, Series


def persistent(run: Run) -> Iterator[Finding]:
    """Metrics that are beyond their limit."""
    for limit in limits.PERSISTENT:
        for monitor in run.of(limit.monitor):
            items = monitor.items(limit.key) if "{}" in limit.key else {"": monitor.get(limit.key).finite}
            yield from _beyond(monitor, run, limit, items)


def _beyond(
    monitor: MonitorSeries, run: Run, limit: limits.Persistent, items: Mapping[str, Series]
) -> Iterator[Finding]:
    """The items that are beyond a limit at the end, and in 3 measurements at least, the farthest first."""
    loss = run.loss if run.judges_loss else Series()
    if limit.below and loss and loss.values[0] > 0 == loss.last_quarter.median:  # gradients are 0 at its minimum too
        return
    sign = -1 if limit.below else 1
    medians = {item: series.last_quarter.median for item, series in items.items()}
    masks = {item: sign * series.values > sign * limit.limit for item, series in items.items()}
    far = [item for item in items if sign * medians[item] > sign * limit.limit and masks[item].sum() >= MIN_ONSET]
    far = [item for item in far if masks[item].all() or not limit.always]
    if not far or run.items < limit.least_items - 0.5:
        return
    far.sort(key=lambda item: -sign * medians[item])
    onsets = {item: items[item].onset(masks[item]) for item in far}
    worst, at = medians[far[0]], sorted({since for since, _ in onsets.values()})
    # A measurement in the first step's iteration comes before that step.
    before_steps = 0 < at[0] <= run.first_made and any(masks[item].all() for item in far)
    initially = before_steps and not KINDS[limit.kind].is_cause
    names, text = [items[item].name for item in far], limit.text.format(worst)
    if "{}" in limit.key:
        what = listed(f"{item} ({number(medians[item], 2)}, {onsets[item][1]})" for item in far)
        what = f"{text}: {what}."
    else:
        largest = monitor.items(limit.largest) if limit.largest else {}
        named = sorted(largest, key=lambda item: -largest[item].last_quarter.median)[:3]
        names += [largest[item].name for item in named]
        what = f"{text} ({names[0]}), {onsets[far[0]][1]}{'; largest in ' * bool(named)}{listed(named)}."
    severity = "problem" if worst >= limit.problem else limit.severity
    values, onset = {"count": len(far), "farthest": worst}, 0 if initially else at[0]
    yield Finding(limit.kind, severity, what, tuple(names), at, values, onset=onset, initially=initially)


def exploding(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Large gradients; a note if the loss falls and is larger still, as one that is a sum."""
    loss, counts = run.loss if run.judges_loss else Series(), monitor.get("exploding_count").finite
    is_harmless = loss.tail.median < loss.head.median and monitor.get("grad_max").over(loss).median <= 1
    limit = limits.EXPLODING._replace(severity="note" if is_harmless else "warning")
    yield from _beyond(monitor, run, limit, {"": counts})


def vanishing(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Weights, not biases, whose gradients are far smaller than the largest."""
    largest = monitor.get("grad_max")
    shares = {  # of a parameter that is not among the smallest at most 1
        name: Series(
            largest.iterations, np.nan_to_num(series.at(largest.iterations) / largest.values, nan=1.0), series.name
        )
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
