"""Causes: what a monitor reported, learning rates and clipping, the scale of data and loss, weights, learning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ignite_monitor.hdf5.layout import printable
from ignite_monitor.report import limits
from ignite_monitor.report.finding import SETUP, SEVERITIES, Finding, iterations, listed, number, plural
from ignite_monitor.report.run import MIN_ONSET, Recorded, Run, Series, is_loss

HELD_OUT = re.compile(r"(^|[^a-z])(val|valid|validation|test|eval|dev|held_?out)([^a-z]|$)", re.IGNORECASE)


def reported(run: Run) -> Iterator[Finding]:
    """Reports of the monitors, one finding for those of a kind by one monitor."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for report in run.reports:
        groups.setdefault((report.monitor, report.kind), []).append(report)
    for (monitor, kind), reports in groups.items():
        first = reports[0]
        text = first.text if first.text.endswith((".", "!", "?")) else f"{first.text}."
        what = f"{printable(monitor)}, iteration {first.iteration}: {printable(text)}"
        what += f" Reported in {iterations(np.unique([it.iteration for it in reports]))}." * (len(reports) > 1)
        severity = min((it.severity for it in reports), key=SEVERITIES.index)
        at = sorted({it.iteration for it in reports})
        # A fault of the set-up was there from the beginning.
        yield Finding(kind, severity, what, tuple(first.names), at, onset=0 if kind in SETUP else at[0])


def step_sizes(monitor: Recorded, run: Run) -> Series:
    """The size of each measured step relative to that of the parameters: of the update, or of plain SGD's."""
    norm, moved = monitor.get("parameter_norm").finite, run.beside(monitor, "optimizer").get("update_norm").finite
    if not moved:
        rates, gradients = monitor.items("lr/{}"), monitor.get("gradient_norm").finite
        rate = np.max([series.at(gradients.steps) for series in rates.values()], axis=0) if rates else np.nan
        moved = Series(gradients.steps, gradients.values * rate)
    return Series(moved.steps, moved.values / norm.at(moved.steps)).finite


def growth(monitor: Recorded, run: Run) -> Series:
    """Relative growth of the parameters' norm per optimizer step, between measurements; steps are at least as large."""
    norm, stepped = monitor.get("parameter_norm").finite, run.beside(monitor, "grad").get("stepped")
    counts = np.diff(np.searchsorted(stepped.steps[stepped.values > 0], norm.steps, "right"))
    return Series(norm.steps[1:], np.diff(norm.values) / norm.values[:-1] / counts).finite


def large_updates(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Steps that are large beside the parameters: at the first measurements, or from some iteration on."""
    norm = monitor.name("parameter_norm")
    for sizes, name in ((step_sizes(monitor, run), "of their norm"), (growth(monitor, run), "more than their norm")):
        large = sizes.values > limits.LARGE_UPDATE
        following = large[:-2] & large[1:-1] & large[2:]
        # Between two measurements are many steps.
        begin = int(following.argmax()) if following.any() else 0
        if not following.any() and not (name[0] == "m" and (sizes.values > 3 * limits.LARGE_UPDATE).any()):
            continue
        begin = begin if following.any() else int((sizes.values > 3 * limits.LARGE_UPDATE).argmax())
        part = sizes.part(slice(begin, begin + (MIN_ONSET if following.any() else 1)))
        what = f"Steps were too large: in {iterations(part.steps)} a step moved the parameters by "
        what += f"{listed([number(size, 2) for size in part.values])} {name} ({norm}); 1e-3 is usual."
        rate = max((float(series.at(part.steps)[0]) for series in monitor.items("lr/{}").values()), default=np.nan)
        what += f" The learning rate was {number(rate, 3)}." * bool(np.isfinite(rate))
        onset = 0 if part.steps[0] <= run.first_made else int(part.steps[0])
        yield Finding(
            "large_updates", "problem", what, (norm,), part.steps, {"size": float(part.values.max())}, onset=onset
        )
        return


def rate_vanished(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Learning rates that fell to nearly nothing long before the end."""
    for group, rates in monitor.items("lr/{}").items():
        highest = float(rates.values.max())
        low = rates.values < limits.VANISHED_RATE * highest
        if not low[-1] or highest <= 0:
            continue
        since = rates.since(low)
        if (rates.steps[-1] - since) < limits.VANISHED_SHARE * rates.steps[-1] or low.sum() < MIN_ONSET:
            continue
        name = monitor.name(f"lr/{group}")
        what = (
            f"The learning rate of parameter {printable(group).replace('_', ' ')} fell from {number(highest, 3)} below "
        )
        what += (
            f"{number(limits.VANISHED_RATE * highest, 2)} ({name}) by iteration {since}, and stayed there to the end, "
        )
        what += f"iteration {rates.steps[-1]}."
        yield Finding("rate_vanished", "warning", what, (name,), (since,), {"highest": highest, "last": rates.last})


def clipped_away(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Gradients that the step used at a small fraction of their size."""
    used, before = monitor.get("gradient_norm").finite, run.beside(monitor, "grad").get("norm").finite
    shares = Series(used.steps, used.values / before.at(used.steps)).finite
    if len(shares.steps) >= MIN_ONSET and shares.median < limits.CLIPPED_SHARE:
        name = monitor.name("gradient_norm")
        what = f"Gradients are clipped away: the step used {number(used.median, 2)} ({name}) of a norm of "
        what += f"{number(float(np.median(before.at(used.steps)[np.isfinite(before.at(used.steps))])), 2)}."
        yield Finding("clipped_away", "warning", what, (name,), shares.steps[:1], {"share": shares.median}, onset=0)


def input_scale(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Inputs, or other numbers of the batch, that are far from 1; and losses far above what the outputs explain."""
    places = monitor.items("batch_rms/{}")
    for index, (place, series) in enumerate(places.items()):
        large = series.values > limits.LARGE_INPUT
        if large.sum() >= MIN_ONSET and large.mean() >= 0.5:
            name, (onset, words) = monitor.name(f"batch_rms/{place}"), series.onset(large)
            kind, which = ("loss_scale", "Targets") if index else ("input_scale", "Inputs")
            what = f"{which} are large {words}: the root mean square of batch[{printable(place)}] is "
            what += f"{number(series.median, 3)} ({name}); networks expect about 1."
            onset = 0 if large.all() else onset
            yield Finding(kind, "warning", what, (name,), series.steps[:1], {"rms": series.median}, onset=onset)
    outputs = run.beside(monitor, "activation").get("activation/_root_/max_abs").finite
    if outputs and run.loss and not len(places) > 1:
        begin, size = float(run.loss.values[0]), outputs.values[0]
        if begin > limits.LARGE_LOSS * (1 + size) ** 2:
            what = f"The loss begins at {number(begin)} ({run.loss_name}), while the model's outputs are at most "
            what += f"{number(float(size), 2)} at the beginning: targets or rewards are large, or the loss is a sum."
            yield Finding("loss_scale", "warning", what, (run.loss_name,), run.loss.steps[:1], {"loss": begin}, onset=0)


def weight_changed(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Parameters whose norm changed between two measurements by more than the steps between them can."""
    norm, moved = monitor.get("parameter_norm"), run.beside(monitor, "optimizer").get("update_norm").finite
    gradients, is_adam = run.beside(monitor, "grad").get("norm"), run.beside(monitor, "optimizer").get("rms_median")
    rates = [*monitor.items("lr/{}").values()]
    jumps = np.abs(np.diff(norm.values)) > limits.JUMP * norm.values[:-1]
    for a in np.flatnonzero(jumps)[: limits.JUMPS].tolist():
        b = a + 1
        first, last, jump = norm.steps[a], norm.steps[b], abs(norm.values[b] - norm.values[a])
        between = gradients.values[slice(*np.searchsorted(gradients.steps, [first, last], "right"))]
        rate = max((float(np.nan_to_num(series.at(norm.steps[[a, b]])).max()) for series in rates), default=0.0)
        if is_adam:
            known = moved.values[(moved.steps <= first)][-3:]
            most = float(known.max(initial=0.0)) * (last - first)
            if rates and len(known):
                earlier = max(float(np.nan_to_num(series.at(norm.steps[[a]])).max()) for series in rates)
                most *= max(1.0, rate / earlier) if earlier > 0 else np.inf
        else:
            most = 10 * rate * float(np.nan_to_num(between, posinf=np.inf).sum())  # momentum adds up to ten gradients
        if most == 0 or not jump > limits.OTHER_MEANS * most:
            continue
        weights = run.beside(monitor, "weights").items("largest_weight/{}")
        named = {
            name: (float(before), float(after))
            for name, series in weights.items()
            for before, after in [(_newest(series, first), _newest(series, last))]
            if after > limits.JUMP * norm.values[a] and not after < (1 + limits.JUMP) * before
        }
        largest = max(named, key=lambda name: named[name][1], default="")
        words = "The norm of all parameters"
        if largest:
            words = f"The norm of {printable(largest)}"
        before, after = named.get(largest, (np.nan, np.nan))
        before = before if np.isfinite(before) else norm.values[a]
        after = after if np.isfinite(after) else norm.values[b]
        name = monitor.name("parameter_norm")
        what = f"{words} changed from {number(before, 3)} to {number(after, 3)} between iterations {first} and {last} "
        what += f"({name}), by other means than steps: those move it by at most {number(most, 2)}."
        onset, values = int(first) + 1, {"before": before, "after": after, "steps": most}
        yield Finding("weight_changed", "problem", what, (name,), (onset,), values)
        return


def _newest(series: Series, step: int) -> float:
    """The value at a step, or NaN."""
    return float(series.at(np.array([step]))[0])


def learning(run: Run) -> Iterator[Finding]:
    """A recorded loss that does not fall, or that rises from the beginning; outputs that the loss cannot fit."""
    loss, name = run.loss.finite, run.loss_name
    if len(loss.values) < limits.LEARNING_POINTS or not run.judges_loss:
        return
    begin, end = loss.head.median, loss.tail.median
    values = {"first": begin, "last": end}
    for monitor in run.of("activation"):
        most, std = (monitor.get(f"activation/_root_/{key}").finite for key in ("max_abs", "std"))
        bounded = most and (most.values <= 1.0).all() and most.last_quarter.median > limits.SATURATED
        if bounded and std.median < limits.BINARY and end > max(1.0, limits.UNFITTED * begin):
            what = (
                f"The model's outputs are never above 1 and reach it ({monitor.name('activation/_root_/max_abs')}), as "
            )
            what += f"those of softmax or sigmoid, while the loss ended at {number(end)} after {number(begin)}."
            yield Finding("bounded_outputs", "warning", what, (name,), (), values)
            return
    tenths = np.array([np.median(part) for part in np.array_split(loss.values, 10)])
    if (np.diff(tenths) > 0).sum() >= limits.RISING and end - begin > limits.RISE * abs(begin):
        what = f"The loss rises from the first step on ({name}), from {number(begin)} to {number(end)}."
        yield Finding("wrong_sign", "problem", what, (name,), loss.steps[:1], values)
    elif abs(begin - end) < limits.FLAT * max(abs(begin), abs(end)) and loss.steps[0] <= max(1, run.first_made):
        what = f"The loss has not fallen in {plural(int(loss.steps[-1] - loss.steps[0]), 'iteration')} ({name}): "
        what += f"{number(begin)} at the beginning, {number(end)} at the end."
        yield Finding("not_learning", "warning", what, (name,), (), values, onset=int(loss.steps[-1]))


def overfitting(run: Run) -> Iterator[Finding]:
    """A held-out loss that rose again while the training loss fell."""
    train = run.loss.finite
    for name, series in run.own.items():
        held = series.finite
        if not is_loss(name) or not HELD_OUT.search(name) or len(held.values) < 5 or len(train.values) < 5:
            continue
        place = int(held.values.argmin())
        best, end, at = float(held.values[place]), held.tail.median, int(held.steps[place])
        near = train.part(np.abs(train.steps - at) <= max(5, train.steps[-1] // 20)).median
        if end > limits.OVERFIT * best > 0 and len(held.values) - place > MIN_ONSET and train.tail.median < near:
            what = f"{printable(name)} rose from {number(best)} in iteration {at} to {number(end)}, while the training "
            what += f"loss ({run.loss_name}) fell from {number(near)} to {number(train.tail.median)}."
            yield Finding("overfitting", "warning", what, (name, run.loss_name), (at,), {"best": best, "last": end})
