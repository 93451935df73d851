"""Findings about losses, rollbacks, learning rates, batch size, curvature and ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ignite_monitor.hdf5.layout import printable
from ignite_monitor.report import limits
from ignite_monitor.report.finding import Finding, iterations, number, times
from ignite_monitor.report.run import MIN_ONSET, Recorded, Run, Series, is_loss


def curves(run: Run) -> Iterator[Finding]:
    """The user's own metrics that are non-finite, and the course of losses."""
    for name, series in run.own.items():
        bad = ~np.isfinite(series.values)
        if bad.any():
            stays = bool(bad[-1])
            where = f"from iteration {series.since(bad)} to the end" if stays else f"in {iterations(series.steps[bad])}"
            numbers = "NaN" if np.isnan(series.values[bad]).all() else "inf or NaN"
            what = f"{printable(name)} is {numbers} {where} ({bad.sum()} of {len(bad)} values)."
            severity = "problem" if stays and is_loss(name) else "note" if bad.all() else "warning"
            yield Finding("nonfinite_metric", severity, what, (name,), series.steps[bad], {"count": int(bad.sum())})
    for name, series in run.losses.items():
        begun = series.part(series.steps >= run.first_made)
        yield from course(name, begun, has_to_fall=name not in run.own and run.judges_loss)


def monitored_value(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """The course of a SpikeMonitor's value."""
    yield from course(monitor.name("value"), monitor.get("value"))


def course(name: str, series: Series, has_to_fall: bool = False) -> Iterator[Finding]:
    """A loss that ended far above its best, or that was far above its start for a while; a finite one.

    Unless it has to fall, only one that fell at first is a loss: others grow with the returns of a policy.
    """
    if len(series.values) < limits.LOSS_POINTS or not np.isfinite(series.values[-1]):
        return
    series = series.finite
    begin, end, smooth = series.head.median, series.tail.median, _smoothed(series)
    lowest, best = int(smooth.values.argmin()), float(smooth.values.min())
    noise = float(np.median(np.abs(np.diff(series.values))))
    gained, lost = begin - best, end - best
    much = lost > max(limits.LOST_GAIN * gained, 2 * noise)
    far = best > 0 and end > limits.LOST_FACTOR * best and lost > max(limits.LOST_NOISE * noise, 0.1 * gained)
    advice = "Lower the learning rate, or use a warm-up." if lowest < len(series.head.values) else ""
    kind = ""
    if not has_to_fall and not smooth.values[: max(1, len(smooth.values) // 2)].min() < begin - 2 * noise:
        return
    if end > begin and lost > limits.LOST_GAIN * max(abs(begin), gained):
        kind, severity, what = "loss_rose", "problem", f"ended above its start, at {number(end)} after {number(begin)}"
    elif gained > 0 and (much or far):
        kind, severity = "loss_rose_again", "warning"
        what = f"fell from {number(begin)} to {number(best)} and rose again to {number(end)}"
    if kind:
        rise = smooth.since(smooth.values > best + lost / 2)  # it stays above the middle between its best and its end
        what = f"{printable(name)} {what}; it was lowest about iteration {smooth.steps[lowest]} and rose about {rise}."
        yield Finding(kind, severity, what, (name,), (rise,), {"first": begin, "best": best, "end": end}, advice)
        return
    # One value of a heavy-tailed loss is no peak.
    lasting = np.lib.stride_tricks.sliding_window_view(series.values, MIN_ONSET).min(1)
    peak, least = int(lasting.argmax()), max(limits.PEAK_FACTOR * begin, begin + limits.PEAK_NOISE * noise)
    if peak >= len(series.head.values) and lasting[peak] > least:
        size, step = float(series.values[peak]), series.steps[peak]
        what = f"{printable(name)} was {number(size)} in iteration {step}, far above its start of {number(begin)}, "
        what += f"and ended at {number(end)}."
        yield Finding("loss_peak", "warning", what, (name,), (step,), {"first": begin, "peak": size, "end": end})


def _smoothed(series: Series) -> Series:
    """Running medians over a tenth of the series, at most 51 values; of a long series about 2,000 of them."""
    half = min(25, len(series.values) // 20)
    windows = np.lib.stride_tricks.sliding_window_view(series.values, 2 * half + 1)
    every = max(1, len(windows) // 2000)
    return Series(series.steps[half : len(series.steps) - half : every], np.median(windows[::every], axis=1))


def rollbacks(run: Run) -> Iterator[Finding]:
    """One finding per rollback, with the number of iterations discarded until the next one."""
    for monitor in run.of("rollback"):
        count, restored, discarded = map(monitor.get, ("count", "restored_iteration", "discarded_count"))
        at = np.intersect1d(count.steps[np.diff(count.values, prepend=0.0) > 0], restored.steps)
        before = [discarded.values[discarded.steps < step].max(initial=0.0) for step in at]
        later = np.diff(before, append=discarded.values.max(initial=0.0))
        for step, target, more in np.stack([at, restored.at(at), later], 1).astype(int).tolist():
            name = monitor.name("count")
            what = f"Rolled back to iteration {target} at iteration {step} ({name}): {step - target} batches skipped"
            what += f", {more} more discarded during recovery." if more else "."
            yield Finding("rolled_back", "warning", what, (name,), (step,), {"target": target, "discarded": more})


def rate_rises(run: Run, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Learning rates that rose far above earlier ones, with damage during the rise or soon after."""
    follows = [it.onset for it in findings if it.severity != "note" and "rate_rose" in it.about.explained_by]
    for monitor in run.of("step"):
        for group, rates in monitor.items("lr/{}").items():
            highest = np.maximum.accumulate(rates.values)
            # The largest rate of the first half until each measurement, at least the first one.
            half = highest[np.maximum(np.searchsorted(rates.steps, rates.steps / 2, "right") - 1, 0)]
            factors = np.divide(rates.values, half, out=np.zeros(len(half)), where=half > 0)
            if not factors.max() >= limits.RATE_RISE:
                continue
            high = int(np.argmax(factors >= limits.RATE_RISE))
            low = int(np.flatnonzero(factors[:high] < limits.RATE_RISE_START)[-1])  # the first factor is 1
            end = high + int(np.argmin(np.append(np.diff(rates.values[high:]) > 0, False)))
            begin, until = int(rates.steps[low]) + 1, int(rates.steps[end])
            distance = max(limits.RATE_EFFECT, int(np.diff(rates.steps)[0]))
            if not any(begin <= onset <= until + distance for onset in follows):
                continue
            name, first, most = monitor.name(f"lr/{group}"), float(rates.values[low]), float(rates.values[end])
            what = f"The learning rate of parameter {printable(group).replace('_', ' ')} rose {times(most / first)} "
            what += f"({name}), from {number(first, 3)} to {number(most, 3)}, in "
            what += f"{iterations(np.arange(begin, until + 1))}, and damage followed."
            yield Finding("rate_rose", "problem", what, (name,), (begin,), {"before": first, "largest": most})


def noise_scale(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Batch size against the noise scale."""
    numbers = {key: monitor.get(key).last for key in ("value", "low", "high", "batch")}
    value, low, high, batch = numbers.values()
    if not (low > 0 and batch > 0):
        return
    what, advice = "a larger batch saves steps and a smaller one saves data.", ""
    if limits.BATCH_FACTOR * batch < low:
        what = "twice the batch should need at least 40 % fewer steps."
        advice = "Use larger batches if devices allow it, with a learning rate to match."
    elif batch > limits.BATCH_FACTOR * high:
        what = "half the batch should need at most 20 % more steps."
        advice = "Use smaller batches if device time matters."
    scale = f"The noise scale is {number(value, 3)} items ({number(low, 3)} to {number(high, 3)}, "
    what = f"{scale}{monitor.name('value')}), and a step uses {number(batch, 3)}: {what}"
    yield Finding("batch_size", "note", what, tuple(map(monitor.name, numbers)), (), numbers, advice)


def curvature(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Sharpness above the stability threshold of the learning rate, or near it, in most recent measurements."""
    key, limit = "hessian_max_eigenvalue", monitor.get("stability_threshold")
    if monitor.get(f"{key}_preconditioned"):
        key = f"{key}_preconditioned"
    largest = monitor.get(key).finite
    latest = largest.part(slice(-limits.CURVATURE_MEASUREMENTS, None))
    share = float(np.median(latest.values / limit.at(latest.steps))) if latest else 0.0
    if len(latest.steps) < limits.CURVATURE_MEASUREMENTS or not share > limits.CURVATURE_NEAR:
        return
    names = monitor.name(key), monitor.name("stability_threshold")
    what = f"Sharpness is {times(share)} the stability threshold of this learning rate ({names[0]} "
    what += f"{number(largest.last, 3)}, {names[1]} {number(limit.last, 3)})"
    values = {"hessian_max_eigenvalue": largest.last, "limit": limit.last}
    if share > limits.CURVATURE:
        yield Finding("large_curvature", "warning", f"{what}.", names, latest.steps, values)
    else:
        what += ": with small batches, with momentum and with Adam the loss rises not much later."
        yield Finding("near_curvature", "note", what, names, values=values)


def disagreement(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Ranks that are not in sync."""
    name, series = monitor.name("in_sync"), monitor.get("in_sync")
    at = series.steps[series.values == 0]
    if len(at):
        what = f"The ranks are not in sync ({name}) in {iterations(at)}; the log names them."
        yield Finding("ranks_differ", "problem", what, (name,), at, {"measurements": len(at)})
