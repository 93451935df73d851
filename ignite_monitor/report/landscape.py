"""Findings about how large a batch and a step may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.series import number, times


def noise_scale(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Whether the batch is far below or above the noise scale, beyond what its interval leaves open."""
    known = {name: group.get(name) for name in ("value", "low", "high", "batch")}
    value, low, high, batch = (series.last if series is not None else 0.0 for series in known.values())
    if not (low > 0 and batch > 0):
        return
    said = f"The noise scale is {number(value, 3)} items ({number(low, 3)} to {number(high, 3)}, {group.name('value')})"
    if limits.SMALL_BATCH * batch < low:
        kind, what = "small_batch", "twice the batch should need at least 40 % fewer steps."
    elif batch > limits.LARGE_BATCH * high:
        kind, what = "large_batch", "half the batch should need at most 20 % more steps."
    else:
        kind, what = "batch_size", "a larger batch saves steps and a smaller one saves data."
    names = tuple(group.name(name) for name in ("value", "low", "high", "batch"))
    numbers = {"value": value, "low": low, "high": high, "batch": batch}
    yield Finding(kind, "note", f"{said}, and a step uses {number(batch, 3)}: {what}", names, values=numbers)


def curvature(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Whether the loss bends more sharply than the steps stand, or nearly so, at most looks lately."""
    metric = "largest_preconditioned" if "largest_preconditioned" in group.scalars else "largest"
    largest, limit = group.get(metric), group.get("limit")
    if largest is None or limit is None:
        return
    shares = largest.finite.values / limit.at(largest.finite.steps)
    if len(shares) < limits.CURVATURE_LOOKS:
        return
    lately = sorted(shares[-limits.CURVATURE_LOOKS :])[limits.CURVATURE_LOOKS // 2]
    names = group.name(metric), group.name("limit")
    said = (
        f"The loss bends {times(float(lately))} as sharply as steps at this learning rate stand ({names[0]} "
        f"{number(largest.last, 3)}, {names[1]} {number(limit.last, 3)})"
    )
    values = {"largest": largest.last, "limit": limit.last}
    if lately > limits.CURVATURE:
        yield Finding("large_curvature", "warning", f"{said}.", names, values=values)
    elif lately > limits.CURVATURE_NEAR:
        what = f"{said}: with small batches, with momentum and with Adam the loss rises not much later."
        yield Finding("near_curvature", "note", what, names, values=values)


NOISE_RULES = (noise_scale,)
CURVATURE_RULES = (curvature,)
