"""Findings about losses, rollbacks, batch size, curvature and ranks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ignite_monitor.hdf5.layout import printable
from ignite_monitor.report import limits
from ignite_monitor.report.finding import Finding, iterations, number, steps, times
from ignite_monitor.report.run import Recorded, Run, Series

_SUFFIX = r"([_ .-]?(mean|avg|average|ema|total|sum|epoch|step|train|val|valid|test|\d+))*$"
SMALLER_IS_BETTER = re.compile(
    rf"(^|[^a-z])(\w*loss|nll|perplexity|ppl|error|mse|mae|rmse|wer|cer){_SUFFIX}", re.IGNORECASE
)
LARGER_IS_BETTER = re.compile(
    r"(^|[^a-z])(acc|accuracy|top\d|f1|precision|recall|auc|auroc|roc_auc|bleu|rouge|iou|miou|dice|map|psnr|ssim|r2|"
    rf"reward|return){_SUFFIX}",
    re.IGNORECASE,
)


def direction(name: str) -> int:
    """Return -1 if smaller values of a metric are better, 1 if larger are, 0 if the end of its name does not tell."""
    last = name.rpartition("/")[2]
    return -1 if SMALLER_IS_BETTER.search(last) else 1 if LARGER_IS_BETTER.search(last) else 0


def curves(run: Run) -> Iterator[Finding]:
    """The user's own metrics that are non-finite, and losses that rose again."""
    for name, series in run.own.items():
        bad = ~np.isfinite(series.values)
        if bad.any():
            stays = bool(bad[-1])
            where = f"from iteration {series.since(bad)} to the end" if stays else f"in {iterations(series.where(bad))}"
            numbers = "NaN" if np.isnan(series.values[bad]).all() else "inf or NaN"
            what = f"{printable(name)} is {numbers} {where} ({bad.sum()} of {len(bad)} values)."
            problem = stays and direction(name) < 0
            severity = "problem" if problem else "note" if bad.all() else "warning"
            at, values = steps(series.where(bad)), {"count": int(bad.sum())}
            yield Finding("nonfinite_metric", severity, what, (name,), at, values)
        if direction(name) < 0:
            yield from _lost(name, series.finite)


def lost_value(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """A SpikeMonitor's value that ended far above its best."""
    yield from _lost(monitor.name("value"), monitor.get("value").finite)


def _lost(name: str, series: Series) -> Iterator[Finding]:
    if len(series.values) < limits.LOSS_POINTS:
        return
    begin, end, smooth = series.head.median, series.tail.median, _smoothed(series)
    lowest, best = int(smooth.steps[smooth.values.argmin()]), float(smooth.values.min())
    noise = float(np.median(np.abs(np.diff(series.values))))
    gained, lost = begin - best, end - best
    much = lost > max(limits.LOST_GAIN * gained, 2 * noise)
    far = best > 0 and end > limits.LOST_FACTOR * best and lost > max(limits.LOST_NOISE * noise, 0.1 * gained)
    if end > begin and lost > limits.LOST_GAIN * max(abs(begin), gained):
        kind, severity, what = "loss_rose", "problem", f"ended above its start, at {number(end)} after {number(begin)}"
    elif gained > 0 and (much or far):
        kind, severity = "loss_rose_again", "warning"
        what = f"fell from {number(begin)} to {number(best)} and rose again to {number(end)}"
    else:
        return
    what = f"{printable(name)} {what}; it was lowest about iteration {lowest}."
    yield Finding(kind, severity, what, (name,), (lowest,), {"first": begin, "best": best, "end": end})


def _smoothed(series: Series) -> Series:
    """Running medians over a tenth of the series, at most 51 values; of a long series about 2,000 of them."""
    half = min(25, len(series.values) // 20)
    windows = np.lib.stride_tricks.sliding_window_view(series.values, 2 * half + 1)
    every = max(1, len(windows) // 2000)
    return Series(series.steps[half : len(series.steps) - half : every], np.median(windows[::every], axis=1))


class Rollback(NamedTuple):
    """A rollback: its iteration, the restored one, and the number of iterations discarded until the next rollback."""

    step: int
    target: int
    discarded: int
    name: str


def rollbacks(run: Run) -> list[Rollback]:
    """Return the rollbacks of a run."""
    found = []
    for monitor in run.of("rollback"):
        count, restored, discarded = map(monitor.get, ("count", "restored_iteration", "discarded_count"))
        at = np.intersect1d(count.steps[np.diff(count.values, prepend=0.0) > 0], restored.steps)
        before = [discarded.values[discarded.steps < step].max(initial=0.0) for step in at]
        left = np.diff(before, append=discarded.values.max(initial=0.0))
        for step, target, more in zip(at, restored.at(at), left, strict=True):
            found.append(Rollback(int(step), int(target), int(more), monitor.name("count")))
    return found


def rolled_back(run: Run) -> Iterator[Finding]:
    """One finding per rollback."""
    for step, target, discarded, name in rollbacks(run):
        more = f", {discarded} more discarded during recovery" if discarded else ""
        what = f"Rolled back to iteration {target} at iteration {step} ({name}): {step - target} batches skipped{more}."
        yield Finding("rolled_back", "warning", what, (name,), (step,), {"target": target, "discarded": discarded})


def noise_scale(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Batch size against the noise scale."""
    numbers = {key: monitor.get(key).last for key in ("value", "low", "high", "batch")}
    value, low, high, batch = numbers.values()
    if not (low > 0 and batch > 0):
        return
    if limits.BATCH_FACTOR * batch < low:
        kind, what = "small_batch", "twice the batch should need at least 40 % fewer steps."
    elif batch > limits.BATCH_FACTOR * high:
        kind, what = "large_batch", "half the batch should need at most 20 % more steps."
    else:
        kind, what = "batch_size", "a larger batch saves steps and a smaller one saves data."
    scale = f"The noise scale is {number(value, 3)} items ({number(low, 3)} to {number(high, 3)}, "
    what = f"{scale}{monitor.name('value')}), and a step uses {number(batch, 3)}: {what}"
    yield Finding(kind, "note", what, tuple(map(monitor.name, numbers)), values=numbers)


def curvature(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Sharpness above the stability threshold of the learning rate, or near it, in most recent measurements."""
    largest, limit = monitor.get("hessian_max_eigenvalue").finite, monitor.get("stability_threshold")
    key = "hessian_max_eigenvalue"
    if monitor.get("hessian_max_eigenvalue_preconditioned"):
        key, largest = f"{key}_preconditioned", monitor.get("hessian_max_eigenvalue_preconditioned").finite
    latest = largest.part(slice(-limits.CURVATURE_MEASUREMENTS, None))
    share = float(np.median(latest.values / limit.at(latest.steps))) if latest else 0.0
    if len(latest.steps) < limits.CURVATURE_MEASUREMENTS or not share > limits.CURVATURE_NEAR:
        return
    names = monitor.name(key), monitor.name("stability_threshold")
    what = f"Sharpness is {times(share)} the stability threshold of this learning rate ({names[0]} "
    what += f"{number(largest.last, 3)}, {names[1]} {number(limit.last, 3)})"
    values = {"hessian_max_eigenvalue": largest.last, "limit": limit.last}
    if share > limits.CURVATURE:
        yield Finding("large_curvature", "warning", f"{what}.", names, steps(latest.steps), values)
    else:
        what += ": with small batches, with momentum and with Adam the loss rises not much later."
        yield Finding("near_curvature", "note", what, names, values=values)


def disagreement(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Ranks that are not in sync."""
    name, series, counts = monitor.name("in_sync"), monitor.get("in_sync"), monitor.get("differing_count").finite
    at = series.where(series.values == 0)
    if len(at):
        most = f", in up to {int(counts.values.max())} tensors" if counts else ""
        what = f"The ranks are not in sync ({name}) in {iterations(at)}{most}; the log names them."
        yield Finding("ranks_differ", "problem", what, (name,), steps(at), {"measurements": len(at)})
