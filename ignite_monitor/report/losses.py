"""Findings about losses and the user's own metrics: non-finite values, their course, learning, overfitting."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.finding import Finding, iterations, number, plural
from ignite_monitor.report.run import MIN_ONSET, Array, MonitorSeries, Run, Series, is_loss

HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|test|eval|dev|held_?out)([^a-z]|$)", re.IGNORECASE)


def curves(run: Run) -> Iterator[Finding]:
    """The user's own metrics that are non-finite, and the course of losses."""
    for name, series in run.user_series.items():
        bad = ~np.isfinite(series.values)
        at, stays = series.iterations[bad], bool(bad[-1])
        if len(at):
            where = f"from iteration {series.since(bad)} to the end" if stays else f"in {iterations(at)}"
            numbers = "NaN" if np.isnan(series.values[bad]).all() else "inf or NaN"
            what = f"{name} is {numbers} {where} ({len(at)} of {len(bad)} values)."
            severity = "problem" if stays and is_loss(name) else "note" if bad.all() else "warning"
            yield Finding("nonfinite_metric", severity, what, (name,), at, {"count": len(at)})
    for series in run.losses:
        begun = series.part(series.iterations >= run.first_made)
        # A number without a name may be an accuracy, and losses of a policy, which begin below 0, may rise.
        is_named, is_positive = is_loss(series.name), begun.head.median > 0
        is_judged = run.judges_loss and (is_named or is_positive) and len(begun.values) >= limits.LOSS_POINTS
        if is_judged and np.isfinite(begun.values[-1]):
            has_to_fall = is_named and is_positive and series.name not in run.user_series
            yield from _course(begun.finite, has_to_fall)


def _course(series: Series, has_to_fall: bool) -> Iterator[Finding]:
    """A loss that ended far above its best; unless it has to fall, only one that fell at first is a loss."""
    begin, end, smooth = series.head.median, series.tail.median, smoothed(series)
    lowest, best = int(smooth.values.argmin()), float(smooth.values.min())
    noise = float(np.median(np.abs(np.diff(series.values))))
    gained, lost = begin - best, end - best
    if not has_to_fall and not smooth.values[: max(1, len(smooth.values) // 2)].min() < begin - 2 * noise:
        return
    fell = gained > 2 * noise
    much = lost > max(limits.LOST_GAIN * gained, 2 * noise)
    far = best > 0 and end > limits.LOST_FACTOR * best and lost > max(limits.LOST_NOISE * noise, 0.1 * gained)
    share = limits.LOST_GAIN if fell else limits.RISE_SHARE
    if end > begin and lost > max(share * max(abs(begin), gained), limits.RISE_NOISE * noise):
        kind, severity, what = "loss_rose", "problem", f"ended above its start, at {number(end)} after {number(begin)}"
    elif fell and (much or far):
        kind, severity = "loss_rose_again", "warning"
        what = f"fell from {number(begin)} to {number(best)} and rose again to {number(end)}"
    else:
        return
    rise = smooth.since(smooth.values > best + lost / 2)  # it stays above the middle between its best and its end
    what = f"{series.name} {what}; it was lowest about iteration {smooth.iterations[lowest]} and rose about {rise}."
    yield Finding(kind, severity, what, (series.name,), (rise,), {"first": begin, "best": best, "end": end})


def fell(loss: Series) -> bool:
    """Return True for a loss that has fallen to less than half."""
    return 0 < loss.tail.median < limits.UNFITTED * loss.head.median


def smoothed(series: Series) -> Series:
    """Running medians over a tenth of the series, at most 51 values; of a long series about 2,000 of them."""
    half = min(25, len(series.values) // 20)
    windows = np.lib.stride_tricks.sliding_window_view(series.values, 2 * half + 1)
    every = max(1, len(windows) // 2000)
    return Series(series.iterations[half : len(series.iterations) - half : every], np.median(windows[::every], axis=1))


def learning(run: Run, findings: Iterable[Finding]) -> Iterator[Finding]:
    """A recorded loss that does not fall, or that rises from the beginning; outputs that the loss cannot fit."""
    loss = run.loss.finite
    if not (run.judges_loss and run.first_made and run.of("step")):
        return
    if len(loss.values) < limits.LEARNING_POINTS:
        what = (
            f"Whether the loss falls was not judged: that takes {limits.LEARNING_POINTS} values of it, and there are "
        )
        what += f"{len(loss.values)}{' in the last run' if run.restarts else ''}."
        is_of_each_step = (np.diff(loss.iterations) == 1).any()
        advice = "Train for longer." if is_of_each_step else 'Return {"loss": loss} in each step.'
        yield Finding("not_monitored", "note", what, advice=advice)
        return
    begin, end, name = loss.head.median, loss.tail.median, loss.name
    values = {"first": begin, "last": end}
    for monitor in run.of("activation"):
        most, std = (monitor.get(f"activation/_root_/{key}").finite for key in ("max_abs", "std"))
        bounded = most and (most.values <= 1.0).all() and most.last_quarter.median > limits.SATURATED
        if bounded and std.median < limits.BINARY and begin >= end > max(1.0, limits.UNFITTED * begin):
            what = f"The model's outputs never exceed 1 ({most.name}), as those of softmax or sigmoid, "
            what += f"while the loss ended at {number(end)} after {number(begin)}."
            yield Finding("bounded_outputs", "warning", what, (name,), (), values)
            return
    tenths = np.array([np.median(part) for part in np.array_split(loss.values, 10)])
    if (np.diff(tenths) > 0).all() and end - begin > limits.RISE * abs(begin):
        course = f"rises from the first step on ({name}), from {number(begin)} to {number(end)}"
        if not is_loss(name):
            advice = 'Return {"loss": loss}, so that it is judged.'
            what = f"What the train step returns {course}: whether it is a loss is not known."
            yield Finding("not_monitored", "note", what, (name,), advice=advice)
        elif begin > 0 and not any(it.kind == "large_updates" for it in findings):
            yield Finding("wrong_sign", "problem", f"The loss {course}.", (name,), loss.iterations[:1], values)
    elif loss.values.max() < 0 and end < limits.NEGATIVE * begin and tenths[-1] - tenths[4] < tenths[4] - tenths[0]:
        what = f"The loss is negative, and falls faster and faster ({name}): from {number(begin)} to {number(end)}."
        yield Finding("wrong_sign", "warning", what, (name,), loss.iterations[:1], values)
    elif np.ptp([*tenths, begin, end]) < limits.FLAT * max(abs(begin), abs(end)) and (
        loss.iterations[0] <= max(1, run.first_made)
    ):
        count = plural(int(loss.iterations[-1] - loss.iterations[0]), "iteration")
        shares = [share for monitor in run.of("step") if (share := _gradient_share(monitor, run)) > 0]
        outputs = [monitor.get("activation/_root_/std") for monitor in run.of("activation")]
        what = f"The loss has changed by less than {limits.FLAT:.0%} in {count} ({name}): {number(begin)} at the "
        what += f"beginning, {number(end)} at the end."
        if shares and max(shares) < limits.SMALL_GRADIENT:
            small = f"Learning rate times gradient is at most {number(max(shares), 2)} of the parameters' norm; "
            yield Finding("small_updates", "warning", f"{small}1e-3 is usual. {what}", (name,), (), values, onset=0)
        elif any(std.last_quarter.median**2 < limits.UNEXPLAINED * end for std in outputs):
            yield Finding("not_learning", "warning", what, (name,), (), values, onset=int(loss.iterations[-1]))


def _gradient_share(monitor: MonitorSeries, run: Run) -> float:
    """Largest learning rate times gradient norm over parameter norm; 0 if steps do not depend on that product."""
    if run.sibling(monitor, "optimizer").get("rms_median"):
        return 0.0
    shares = monitor.get("gradient_norm").finite.over(monitor.get("parameter_norm").finite)
    return float(np.nanmax(monitor.rates(shares.iterations) * shares.values, initial=0.0))


def loss_outliers(run: Run) -> Array:
    """Return the iterations in which the loss is far above those around it."""
    loss, size = run.loss.finite, limits.OUTLIER_WINDOW
    if len(loss.values) < size or not run.judges_loss:
        return np.empty(0, int)
    every = 1 + len(loss.values) // 20_000
    windows = np.lib.stride_tricks.sliding_window_view(loss.values, size)[::every]
    places = np.clip((np.arange(len(loss.values)) - size // 2) // every, 0, len(windows) - 1)
    median, high = np.quantile(windows, [0.5, 0.8], axis=1)[:, places]
    return loss.part(loss.values > median + limits.OUTLIER * (high - median)).iterations


def overfitting(run: Run) -> Iterator[Finding]:
    """A held-out loss that rose again while the training loss fell."""
    train = run.loss.finite
    for series in run.losses:
        name, held = series.name, series.finite
        if not HELD_OUT.search(name) or len(held.values) < 5 or len(train.values) < 5:
            continue
        place = int(held.values.argmin())
        best, end, at = float(held.values[place]), held.tail.median, int(held.iterations[place])
        near = train.part(np.abs(train.iterations - at) <= max(5, train.iterations[-1] // 20)).median
        if end > limits.OVERFIT * best > 0 and len(held.values) - place > MIN_ONSET and train.tail.median < near:
            what = f"{name} rose from {number(best)} in iteration {at} to {number(end)}, while the training "
            what += f"loss ({train.name}) fell from {number(near)} to {number(train.tail.median)}."
            yield Finding("overfitting", "warning", what, (name, train.name), (at,), {"best": best, "last": end})
