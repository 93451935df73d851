"""Findings about batch, optimizer state, ranks, data loading and rollbacks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group, groups
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Series, iterations, listed, number, printable, times
from ignite_monitor.report.weights import persistent


def noise_scale(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Batch size against the noise scale, where its interval decides."""
    numbers = {metric: group.get(metric).last for metric in ("value", "low", "high", "batch")}
    value, low, high, batch = numbers.values()
    if not (low > 0 and batch > 0):
        return
    said = f"The noise scale is {number(value, 3)} items ({number(low, 3)} to {number(high, 3)}, {group.name('value')})"
    if limits.SMALL_BATCH * batch < low:
        kind, what = "small_batch", "twice the batch should need at least 40 % fewer steps."
    elif batch > limits.LARGE_BATCH * high:
        kind, what = "large_batch", "half the batch should need at most 20 % more steps."
    else:
        kind, what = "batch_size", "a larger batch saves steps and a smaller one saves data."
    names = tuple(map(group.name, numbers))
    yield Finding(kind, "note", f"{said}, and a step uses {number(batch, 3)}: {what}", names, values=numbers)


def curvature(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Sharpness above the stability threshold of the learning rate, or near it, in most recent measurements."""
    metric = (
        "hessian_max_eigenvalue_preconditioned"
        if "hessian_max_eigenvalue_preconditioned" in group.scalars
        else "hessian_max_eigenvalue"
    )
    largest, limit = group.get(metric), group.get("stability_threshold")
    shares = largest.finite.values / limit.at(largest.finite.steps)
    if not limit or len(shares) < limits.CURVATURE_LOOKS:
        return
    lately = sorted(shares[-limits.CURVATURE_LOOKS :])[limits.CURVATURE_LOOKS // 2]
    names = group.name(metric), group.name("stability_threshold")
    what = f"Sharpness is {times(float(lately))} the stability threshold of this learning rate ({names[0]} "
    what += f"{number(largest.last, 3)}, {names[1]} {number(limit.last, 3)})"
    values = {"hessian_max_eigenvalue": largest.last, "limit": limit.last}
    if lately > limits.CURVATURE:
        yield Finding(
            "large_curvature", "warning", f"{what}.", names, steps(largest.steps[-limits.CURVATURE_LOOKS :]), values
        )
    elif lately > limits.CURVATURE_NEAR:
        what += ": with small batches, with momentum and with Adam the loss rises not much later."
        yield Finding("near_curvature", "note", what, names, values=values)


def stale(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Gradients that are too large for the second moments by which they are divided."""
    name, series, at, lasts = persistent(group, "rms_p95")
    if not lasts and len(at) <= limits.STALE_SHARE * len(series.steps):
        return
    worst = float(series.values.max())
    names = group.items.get("topk_rms", {})
    largest = sorted(names, key=lambda each: -float(np.nanmax(names[each][1].values)))[:3]
    where = f"; largest in {listed(map(printable, largest))}" if largest else ""
    what = f"Gradients {number(worst, 3)} times as large as the root of their second moments expects "
    what += f"({name}, usual is 1), in {iterations(at)}{where}."
    metrics, values = (name, *(names[each][0] for each in largest)), {"largest": worst, "count": len(at)}
    yield Finding("stale_moments", "warning" if lasts else "note", what, metrics, steps(at), values)


def eps_rules(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Steps that are not adapted to the gradient, which is small against eps."""
    name, series, above, lasts = persistent(group, "epsilon_dominated_median")
    if lasts:
        share = series.last_quarter.end(1.0)
        what = f"{100 * share:.0f} % of the median parameter's elements have a second moment below eps, to the end "
        what += f"({name}): their steps are smaller than the learning rate says."
        yield Finding("epsilon_dominated", "warning", what, (name,), steps(above[:1]), {"share": share})


def disagreement(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Ranks that are no longer in sync."""
    name, series, counts = group.name("in_sync"), group.get("in_sync"), group.get("differing_count").finite
    if (series.finite.values == 1).all():
        return
    at = series.where(series.values == 0)
    most = f", in up to {int(counts.values.max())} tensors" if counts else ""
    what = f"The ranks are not in sync ({name}) in {iterations(at)}{most}; the log names them."
    yield Finding("ranks_differ", "problem", what, (name,), steps(at), {"measurements": len(at)})


def waiting(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Train steps that wait for their data."""
    name, series, _, lasts = persistent(group, "data_wait_share")
    if lasts:
        share = float(np.median(series.last_quarter.values))
        what = f"Waiting for data takes {100 * share:.0f} % of the time of wait and train step ({name})."
        yield Finding("data_wait", "note", what, (name,), values={"share": share})


def went_back(group: Group) -> list[tuple[int, int, int]]:
    """Rollbacks: the iteration, the restored one, and the number of iterations discarded before the next rollback."""
    count, back, undone = (group.get(name) for name in ("count", "restored_iteration", "discarded_count"))
    if group.kind != "rollback" or not count or not back or not undone:
        return []
    at = np.intersect1d(count.steps[np.diff(count.values, prepend=0.0) > 0], back.steps)
    before = [undone.values[undone.steps < step].max(initial=0.0) for step in at]
    left = np.diff(before, append=undone.values.max(initial=0.0))
    return [(int(step), int(target), int(more)) for step, target, more in zip(at, back.at(at), left, strict=True)]


def rollbacks(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """One finding per rollback."""
    name = group.name("count")
    for at, target, undone in went_back(group):
        more = f", {undone} more discarded during recovery" if undone else ""
        what = f"Rolled back to iteration {target} at iteration {at} ({name}): {at - target} batches skipped{more}."
        yield Finding("rolled_back", "warning", what, (name,), (at,), {"target": target, "discarded": undone})


def rollback_steps(run: Mapping[str, Series]) -> tuple[int, ...]:
    """The iterations in which a run was rolled back."""
    return tuple(at for group in groups(run) for at, *_ in went_back(group))
