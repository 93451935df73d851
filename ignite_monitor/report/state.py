"""What is said of an optimizer's state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import iterations, last_quarter, listed, number, printable
from ignite_monitor.report.weights import persists


def stale(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Gradients that have become too large for the second moments that they are divided by."""
    series = group.get("rms_p95")
    if series is None or not len(series.finite.values):
        return
    name, finite = group.name("rms_p95"), series.finite
    at = finite.where(finite.values > limits.STALE_RMS)
    lasts = persists(finite, limits.STALE_RMS)
    if not lasts and len(at) <= limits.STALE_SHARE * len(finite.steps):
        return
    names = group.items.get("topk_rms", {})
    largest = sorted(names, key=lambda each: -float(np.nanmax(names[each][1].values)))[:3]
    where = f"; largest in {listed(map(printable, largest))}" if largest else ""
    yield Finding(
        "stale_moments",
        "warning" if lasts else "note",
        f"Gradients {number(float(finite.values.max()), 3)} times as large as the root of their second moments expects "
        f"({name}, usual is 1), in {iterations(at)}{where}.",
        (name, *(names[each][0] for each in largest)),
        steps(at),
        {"largest": float(finite.values.max()), "count": len(at)},
    )


def eps_rules(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Steps that are not adapted to the gradient, since it is small beside eps."""
    series = group.get("eps_share_median")
    if series is not None and persists(series.finite, limits.EPS_SHARE):
        share, name = last_quarter(series.finite).end(1.0), group.name("eps_share_median")
        yield Finding(
            "eps_rules",
            "warning",
            f"Of the median parameter's elements {100 * share:.0f} % have a second moment below eps, to the end "
            f"({name}): their steps are smaller than the learning rate says.",
            (name,),
            values={"share": share},
        )


OPTIMIZER_RULES = (stale, eps_rules)
