"""Causes: reports of monitors, learning rates, clipping, the scale of data and loss, weights that change otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ignite_monitor.hdf5.layout import printable
from ignite_monitor.report import limits
from ignite_monitor.report.finding import SETUP, SEVERITIES, Finding, iterations, listed, number, times
from ignite_monitor.report.run import MIN_ONSET, Array, MonitorSeries, Run, Series


def reported(run: Run) -> Iterator[Finding]:
    """Reports of the monitors, one finding for those of a kind by one monitor."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for report in run.reports:
        groups.setdefault((report.monitor, report.kind), []).append(report)
    for (monitor, kind), reports in groups.items():
        first, at = reports[0], sorted({it.iteration for it in reports})
        text = first.text if first.text.endswith((".", "!", "?")) else f"{first.text}."
        what = f"{printable(monitor)}, iteration {first.iteration}: {printable(text)}"
        what += f" Reported in {iterations(np.array(at))}." * (len(reports) > 1)
        severity = min((it.severity for it in reports), key=SEVERITIES.index)
        # Biases before a normalization layer have no gradient but rounding errors.
        if kind == "frozen_parameters" and all(name.endswith("bias") for it in reports for name in it.names):
            severity = "note"
        # A fault of the set-up was there from the beginning.
        yield Finding(kind, severity, what, tuple(first.names), at, onset=0 if kind in SETUP else at[0])


def large_updates(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Steps that are large beside the parameters: at the first measurements, or from some iteration on."""
    norm, growth = monitor.name("parameter_norm"), _growth(monitor, run)
    for sizes, words, limit, count in (
        (_step_sizes(monitor, run), "of their norm", limits.LARGE_UPDATE, MIN_ONSET),
        (growth, "more than their norm", limits.LARGE_UPDATE, MIN_ONSET),
        (growth, "more than their norm", 3 * limits.LARGE_UPDATE, 1),  # many steps are between two measurements
    ):
        large = sizes.values > limit
        begins = [i for i in np.flatnonzero(large).tolist() if large[i : i + count].sum() == count]
        if not begins:
            continue
        part = sizes.part(slice(begins[0], begins[0] + count))
        what = f"Steps were too large: in {iterations(part.steps)} a step moved the parameters by "
        what += f"{listed([number(size, 2) for size in part.values])} {words} ({norm}); 1e-3 is usual."
        rate = _largest_rate(monitor, part.steps)[0]
        what += f" The learning rate was {number(rate, 3)}." * bool(np.isfinite(rate))
        onset, values = 0 if part.steps[0] <= run.first_made else -1, {"size": float(part.values.max())}
        yield Finding("large_updates", "problem", what, (norm,), part.steps, values, onset=onset)
        return


def _largest_rate(monitor: MonitorSeries, steps: Array) -> Array:
    """The largest learning rate of all groups at some steps, NaN where none was measured."""
    rates = [series.at(steps) for series in monitor.items("lr/{}").values()]
    return np.max(rates, axis=0) if rates else np.full(len(steps), np.nan)


def _step_sizes(monitor: MonitorSeries, run: Run) -> Series:
    """The size of each measured step relative to that of the parameters: of the update, or of plain SGD's."""
    norm, moved = monitor.get("parameter_norm").finite, run.beside(monitor, "optimizer").get("update_norm").finite
    if not moved:
        gradients = monitor.get("gradient_norm").finite
        moved = Series(gradients.steps, gradients.values * _largest_rate(monitor, gradients.steps))
    return Series(moved.steps, moved.values / norm.at(moved.steps)).finite


def _growth(monitor: MonitorSeries, run: Run) -> Series:
    """Relative growth of the parameters' norm per optimizer step, between measurements; steps are at least as large."""
    norm, stepped = monitor.get("parameter_norm").finite, run.beside(monitor, "grad").get("stepped")
    counts = np.diff(np.searchsorted(stepped.steps[stepped.values > 0], norm.steps, "right"))
    return Series(norm.steps[1:], np.diff(norm.values) / norm.values[:-1] / counts).finite


def rate_rises(run: Run, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Learning rates that rose far above earlier ones, with damage during the rise or soon after."""
    damage = [it.onset for it in findings if it.severity != "note" and "damage" in it.about.follows]
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
            if any(begin <= onset <= until + distance for onset in damage):
                name, first, most = monitor.name(f"lr/{group}"), float(rates.values[low]), float(rates.values[end])
                what = f"The learning rate of {_title(group)} rose {times(most / first)} ({name}), from "
                what += f"{number(first, 3)} to {number(most, 3)}, in {iterations(np.arange(begin, until + 1))}, and "
                what += "damage followed."
                yield Finding("rate_rose", "problem", what, (name,), (begin,), {"before": first, "largest": most})
                return


def _title(group: str) -> str:
    return f"parameter {printable(group).replace('_', ' ')}"


def rate_vanished(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Learning rates that fell to nearly nothing long before the end."""
    for group, rates in monitor.items("lr/{}").items():
        highest, last = float(rates.values.max()), int(rates.steps[-1])
        low = rates.values < limits.VANISHED_RATE * highest
        since = rates.since(low)
        if low[-1] and low.sum() >= MIN_ONSET and last - since >= limits.VANISHED_SHARE * last:
            name = monitor.name(f"lr/{group}")
            what = f"The learning rate of {_title(group)} fell from {number(highest, 3)} to less than a thousandth "
            what += f"({name}) by iteration {since}, and stayed there to the end, iteration {last}."
            yield Finding("rate_vanished", "warning", what, (name,), (since,), {"highest": highest, "last": rates.last})
            return


def group_rates(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Parameter groups whose learning rate, and whose update ratios, are far above the others'."""
    groups, weights = monitor.items("lr/{}"), run.beside(monitor, "weights")
    rates = {group: float(series.values.max()) for group, series in groups.items()}
    for group, rate in rates.items():
        usual = float(np.median([other for name, other in rates.items() if name != group and other > 0] or [rate]))
        if not rate >= limits.GROUP_RATE * usual > 0:
            continue
        for item, ratios in weights.items(f"largest_update_ratio/{group}/{{}}").items():
            factors = Series(ratios.steps, ratios.values / weights.get("update_ratio_median").at(ratios.steps))
            if len(factors.finite.steps) >= MIN_ONSET and factors.median >= limits.GROUP_RATIO:
                name = monitor.name(f"lr/{group}")
                what = f"{_title(group).capitalize()} has a learning rate of {number(rate, 3)} ({name}), "
                what += f"{times(rate / usual)} that of the other groups, and moves {printable(item)} "
                what += f"{times(factors.median)} as far for its size as the median parameter."
                values = {"rate": rate, "usual": usual, "factor": factors.median}
                yield Finding("group_rate", "warning", what, (name,), groups[group].steps[:1], values)
                break


def clipped_away(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Gradients that the step used at a small fraction of their size."""
    used, before = monitor.get("gradient_norm").finite, run.beside(monitor, "grad").get("norm").finite
    norms = Series(used.steps, before.at(used.steps))
    shares = Series(used.steps, used.values / norms.values).finite
    if len(shares.steps) >= MIN_ONSET and shares.median < limits.CLIPPED_SHARE:
        name = monitor.name("gradient_norm")
        what = f"Gradients are clipped away: the step used {number(used.median, 2)} ({name}) of a norm of "
        what += f"{number(norms.median, 2)}."
        yield Finding("clipped_away", "warning", what, (name,), shares.steps[:1], {"share": shares.median}, onset=0)


def input_scale(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Inputs, or other numbers of the batch, that are far from 1; and losses far above what the outputs explain."""
    places = monitor.items("batch_rms/{}")
    for index, (place, series) in enumerate(places.items()):
        far = (series.values > limits.LARGE_INPUT) | ((series.values < limits.SMALL_INPUT) & (index == 0))
        if far.sum() >= MIN_ONSET and far.mean() >= 0.5:
            name, (onset, words) = monitor.name(f"batch_rms/{place}"), series.onset(far)
            kind, which = ("loss_scale", "Targets") if index else ("input_scale", "Inputs")
            what = f"{which} are {'large' if series.median > 1 else '0'} {words}: the root mean square of "
            what += f"batch[{printable(place)}] is {number(series.median, 3)} ({name}); networks expect about 1."
            onset = 0 if far.all() else onset
            yield Finding(kind, "warning", what, (name,), series.steps[:1], {"rms": series.median}, onset=onset)
    outputs = run.beside(monitor, "activation").get("activation/_root_/max_abs").finite
    if outputs and run.loss and len(places) <= 1:
        begin, size = float(run.loss.values[0]), float(outputs.values[0])
        if begin > limits.LARGE_LOSS * (1 + size) ** 2:
            what = f"The loss begins at {number(begin)} ({run.loss_name}), while the model's outputs are at most "
            what += f"{number(size, 2)} at the beginning: targets or rewards are large, or the loss is a sum."
            yield Finding("loss_scale", "warning", what, (run.loss_name,), run.loss.steps[:1], {"loss": begin}, onset=0)


def weight_changed(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Parameters whose norm changed between two measurements by more than the steps between them can."""
    norm, name = monitor.get("parameter_norm"), monitor.name("parameter_norm")
    weights = run.beside(monitor, "weights").items("largest_weight/{}")
    jumps = np.flatnonzero(np.abs(np.diff(norm.values)) > limits.JUMP * norm.values[:-1])
    for place in jumps[: limits.JUMPS].tolist():
        at, (before, after) = norm.steps[place : place + 2], norm.values[place : place + 2].tolist()
        most = _movable(monitor, run, at)
        if most == 0 or not abs(after - before) > limits.OTHER_MEANS * most:
            continue
        grown = {item: series.at(at)[1] for item, series in weights.items() if series.at(at)[1] > limits.JUMP * before}
        largest = f", most of all {printable(max(grown, key=lambda item: grown[item]))}," * bool(grown)
        what = f"The parameters{largest} changed by other means than steps between iterations {at[0]} and {at[1]}: "
        what += f"their norm from {number(before, 3)} to {number(after, 3)} ({name}), which steps move by at most "
        what += f"{number(most, 2)} there."
        values = {"before": before, "after": after, "steps": most}
        yield Finding("weight_changed", "problem", what, (name,), (int(at[0]) + 1,), values)
        return


def _movable(monitor: MonitorSeries, run: Run, at: Array) -> float:
    """The distance that the optimizer steps between two iterations can move the parameters, at most."""
    optimizer, gradients = run.beside(monitor, "optimizer"), run.beside(monitor, "grad").get("norm")
    first_rate, rate = map(float, np.nan_to_num(_largest_rate(monitor, at)))
    if optimizer.get("rms_median"):  # Adam's steps depend on the rate alone
        moved = optimizer.get("update_norm").finite
        known = moved.values[moved.steps <= at[0]][-MIN_ONSET:]
        rise = max(1.0, rate / first_rate) if first_rate > 0 else np.inf if rate > 0 else 1.0
        return float(known.max(initial=0.0) * (at[1] - at[0]) * rise) if len(known) else 0.0
    between = gradients.values[slice(*np.searchsorted(gradients.steps, at, "right"))]
    # Momentum adds up to ten gradients.
    return 10.0 * max(first_rate, rate) * float(np.nan_to_num(between, posinf=np.inf).sum())


def shrinking(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Parameters whose norm falls fast from the first measurement on, and stays low."""
    norm, name = monitor.get("parameter_norm").finite, monitor.name("parameter_norm")
    if not norm:
        return
    early = norm.part(norm.steps <= norm.steps[0] + limits.SHRINK_ITERATIONS)
    begin, low, end = float(norm.values[0]), float(early.values.min()), norm.tail.median
    if limits.SHRINK_FACTOR * max(low, end) < begin:
        what = f"The norm of all parameters fell from {number(begin, 3)} to {number(low, 3)} in iterations "
        what += f"{norm.steps[0]} to {early.steps[early.values.argmin()]} ({name})."
        yield Finding("weights_shrank", "warning", what, (name,), norm.steps[:1], {"first": begin, "lowest": low})
