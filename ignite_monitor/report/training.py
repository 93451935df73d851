"""What is said of batch, step and optimizer state, of ranks, of waiting for data, and of going back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group, groups
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Series, iterations, listed, number, plural, printable, times
from ignite_monitor.report.weights import persists


def noise_scale(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Whether the batch is far below or above the noise scale, beyond what its interval leaves open."""
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
    """Whether the loss bends more sharply than the steps stand, or nearly so, at most looks lately."""
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
    what = f"The loss bends {times(float(lately))} as sharply as steps at this learning rate stand ({names[0]} "
    what += f"{number(largest.last, 3)}, {names[1]} {number(limit.last, 3)})"
    values = {"hessian_max_eigenvalue": largest.last, "limit": limit.last}
    if lately > limits.CURVATURE:
        yield Finding("large_curvature", "warning", f"{what}.", names, values=values)
    elif lately > limits.CURVATURE_NEAR:
        what += ": with small batches, with momentum and with Adam the loss rises not much later."
        yield Finding("near_curvature", "note", what, names, values=values)


def stale(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Gradients that have become too large for the second moments that they are divided by."""
    name, series = group.name("rms_p95"), group.get("rms_p95").finite
    at, lasts = series.where(series.values > limits.STALE_RMS), persists(series, limits.STALE_RMS)
    if not lasts and len(at) <= limits.STALE_SHARE * len(series.steps):
        return
    worst = float(series.values.max())
    names = group.items.get("topk_rms", {})
    largest = sorted(names, key=lambda each: -float(np.nanmax(names[each][1].values)))[:3]
    where = f"; largest in {listed(map(printable, largest))}" if largest else ""
    what = f"Gradients {number(worst, 3)} times as large as the root of their second moments expects "
    what += f"({name}, usual is 1), in {iterations(at)}{where}."
    metrics, values = (name, *(names[each][0] for each in largest)), {"hessian_max_eigenvalue": worst, "count": len(at)}
    yield Finding("stale_moments", "warning" if lasts else "note", what, metrics, steps(at), values)


def eps_rules(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Steps that are not adapted to the gradient, since it is small beside eps."""
    name, series = group.name("epsilon_dominated_median"), group.get("epsilon_dominated_median").finite
    if persists(series, limits.EPS_SHARE):
        share = series.last_quarter.end(1.0)
        what = f"Of the median parameter's elements {100 * share:.0f} % have a second moment below eps, to the end "
        what += f"({name}): their steps are smaller than the learning rate says."
        yield Finding("eps_rules", "warning", what, (name,), values={"share": share})


def disagreement(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Ranks that no longer hold the same."""
    name, series, counts = group.name("in_sync"), group.get("in_sync"), group.get("differing_count").finite
    if (series.finite.values == 1).all():
        return
    at = series.where(series.values == 0)
    most = f", in up to {int(counts.values.max())} tensors" if counts else ""
    what = f"The ranks do not hold the same ({name}) in {iterations(at)}{most}; the log names them."
    yield Finding("ranks_differ", "problem", what, (name,), steps(at), {"looks": len(at)})


def waiting(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Train steps that wait for their data."""
    name, series = group.name("data_wait_share"), group.get("data_wait_share").finite
    if persists(series, limits.DATA_WAIT_SHARE):
        share = float(np.median(series.last_quarter.values))
        what = f"Waiting for data takes {100 * share:.0f} % of the time of wait and train step ({name})."
        yield Finding("data_wait", "note", what, (name,), values={"share": share})


def went_back(group: Group) -> list[tuple[int, int, int]]:
    """Each time: the iteration, the one after which the state was, and how many were undone before the next time."""
    count, back, undone = (group.get(name) for name in ("count", "restored_iteration", "discarded_count"))
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
