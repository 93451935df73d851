"""What RollbackHandler's series say: each time that the training went back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ignite_monitor.report.families import Group, groups
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.series import Series, plural


def went_back(group: Group) -> list[tuple[int, int, int]]:
    """Each time: the iteration, the one after which the state was, and how many were undone before the next time."""
    count, back, undone = (group.get(name) for name in ("count", "iteration", "undone_count"))
    if group.kind != "rollback" or not count or not back or not undone:
        return []
    at = np.intersect1d(count.steps[np.diff(count.values, prepend=0.0) > 0], back.steps)
    before = [undone.values[undone.steps < step].max(initial=0.0) for step in at]
    left = np.diff(before, append=undone.values.max(initial=0.0))
    return [(int(step), int(target), int(more)) for step, target, more in zip(at, back.at(at), left, strict=True)]


def rollbacks(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """A finding for each time that the training went back."""
    name = group.name("count")
    for at, target, undone in went_back(group):
        more = f", and {plural(undone, 'iteration')} undone until it was well again" if undone else ""
        what = f"In iteration {at} the training went back to the state after iteration {target} ({name}): "
        what += f"{at - target} batches are left out{more}."
        yield Finding("went_back", "warning", what, (name,), (at,), {"target": target, "undone": undone})


def rollback_steps(run: Mapping[str, Series]) -> tuple[int, ...]:
    """The iterations at which a run went back."""
    return tuple(at for group in groups(run) for at, *_ in went_back(group))
