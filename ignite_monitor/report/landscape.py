"""Findings about how large a batch and a step may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.series import number


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


NOISE_RULES = (noise_scale,)
