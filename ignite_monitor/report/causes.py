"""Causes: reports of monitors, learning rates, clipping, the scale of data and loss, weights that change otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.finding import SETUP, SEVERITIES, Finding, iterations, listed, number
from ignite_monitor.report.losses import fell
from ignite_monitor.report.run import MIN_ONSET, Array, MonitorSeries, Run, Series


def reported(run: Run) -> Iterator[Finding]:
    """Reports of the monitors, one finding for those of a kind by one monitor."""
    groups: dict[tuple[str, str], list[Any]] = {}
    for report in run.reports:
        groups.setdefault((report.monitor, report.kind), []).append(report)
    for (monitor, kind), reports in groups.items():
        first, at = reports[0], sorted({it.iteration for it in reports})
        end = "" if first.text.endswith((".", "!", "?")) else "."
        what = f"{monitor}, iteration {first.iteration}: {first.text}{end}"
        what += f" Reported in {iterations(np.array(at))}." * (len(reports) > 1)
        severity = min((it.severity for it in reports), key=SEVERITIES.index)
        # Biases before a normalization layer have no gradient but rounding errors, and what moved before may converge.
        measured = max(((it.get("frozen_count").iterations < at[0]).sum() for it in run.of("weights")), default=0)
        are_biases = all(name.endswith("bias") for it in reports for name in it.names)
        if kind == "frozen_parameters" and (are_biases or measured >= MIN_ONSET):
            severity = "note"
        # A fault of the set-up was there from the beginning.
        yield Finding(kind, severity, what, tuple(first.names), at, onset=0 if kind in SETUP else at[0])


def _damage(findings: Iterable[Finding]) -> list[Finding]:
    return [it for it in findings if it.severity != "note" and "damage" in it.about.explained_by]


def large_updates(monitor: MonitorSeries, run: Run, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Steps that are large beside the parameters: at the first measurements, or from some iteration on."""
    ratios = run.sibling(monitor, "weights").get("update_ratio_median").finite
    growth = _growth(monitor, run)
    is_harmless = run.judges_loss and _has_fallen(run.loss)
    moved = "in {0} a step moved the median parameter by {1} of its norm"
    grown = "by {0} the parameters' norm had changed by {1} of itself per step since the measurement before"
    # Many steps are between two measurements of the norm: one of three times the limit is enough.
    for sizes, text, limit, count in ((ratios, moved, 1, 3), (growth, grown, 1, 3), (growth, grown, 3, 1)):
        large = sizes.values > limit * limits.LARGE_UPDATE
        begins = [i for i in np.flatnonzero(large).tolist() if large[i : i + count].sum() == count]
        if not begins:
            continue
        part = sizes.part(slice(begins[0], begins[0] + count))
        is_first, until = part.iterations[0] <= run.first_made + limits.REACH, part.iterations[0] + limits.RATE_EFFECT
        if is_harmless and is_first and not any(it.is_symptom and it.onset <= until for it in _damage(findings)):
            continue
        what = text.format(iterations(part.iterations), listed(number(size, 2) for size in part.values))
        what = f"Steps were too large: {what} ({sizes.name}); 1e-3 is usual."
        rate = monitor.rates(part.iterations)[0]
        what += f" The learning rate was {number(rate, 3)}." * bool(np.isfinite(rate))
        values, onset = {"size": float(part.values.max())}, 0 if part.iterations[0] <= run.first_made else -1
        yield Finding("large_updates", "problem", what, (sizes.name,), part.iterations, values, onset=onset)
        return


def _has_fallen(loss: Series) -> bool:
    """Return True for a loss that ended below its first value, and was never twice as high as that and its end."""
    first, last = loss.values[:1].sum(), loss.last_quarter.finite.values
    most = last.max(initial=first)  # of a noisy loss far above the first value
    return bool(loss.tail.median < first and (~(loss.values <= most + abs(most))).sum() < MIN_ONSET)


def _growth(monitor: MonitorSeries, run: Run) -> Series:
    """Change of the parameters' norm per optimizer step between measurements, relative; none by other means."""
    norm, stepped = monitor.get("parameter_norm").finite, run.sibling(monitor, "grad").get("stepped")
    if not norm:
        return norm
    made, known = (
        np.diff(np.searchsorted(steps, norm.iterations, "right"))
        for steps in (stepped.iterations[stepped.values > 0], stepped.iterations)
    )
    distances = np.diff(norm.iterations)
    sizes = np.abs(np.diff(norm.values)) / norm.values[:-1] / np.where(known == distances, made, distances)
    sizes[[place for place, _ in _changes(monitor, run)]] = 0
    sizes[_restarted(norm, run)] = 0
    return Series(norm.iterations[1:], sizes, norm.name).finite


def _restarted(series: Series, run: Run) -> Array:
    """Between which values the trainer was run again from the beginning, maybe with another model."""
    return np.diff(np.searchsorted(run.restarts, series.iterations)) > 0


def rate_rises(run: Run, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Learning rates that rose far above earlier ones, with damage during the rise or soon after."""
    damage = [it.onset for it in _damage(findings)]
    for monitor in run.of("step"):
        for group, rates in monitor.items("lr/{}").items():
            highest = np.maximum.accumulate(rates.values)
            # The highest rate in the first half of the run up to each measurement, at least the first one.
            half = highest[np.maximum(np.searchsorted(rates.iterations, rates.iterations / 2, "right") - 1, 0)]
            factors = np.divide(rates.values, half, out=np.zeros(len(half)), where=half > 0)
            if not factors.max() >= limits.RATE_RISE:
                continue
            high = int(np.argmax(factors >= limits.RATE_RISE))
            low = int(np.flatnonzero(factors[:high] < limits.RATE_RISE_START)[-1])  # the first factor is 1
            end = high + int(np.argmin(np.append(np.diff(rates.values[high:]) > 0, False)))
            begin, until = int(rates.iterations[low]) + 1, int(rates.iterations[end])
            distance = max(limits.RATE_EFFECT, int(np.diff(rates.iterations)[0]))
            if any(begin <= onset <= until + distance for onset in damage):
                first, most = float(rates.values[low]), float(rates.values[end])
                what = f"The learning rate of parameter {group.replace('_', ' ')} rose from {number(first, 3)} "
                what += f"to {number(most, 3)} ({rates.name}) in {iterations(np.arange(begin, until + 1))}, "
                what += "and damage followed."
                values = {"before": first, "largest": most}
                yield Finding("rate_rose", "problem", what, (rates.name,), (begin,), values)
                return


def rate_vanished(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Learning rates that fell to nearly nothing long before the end."""
    for group, rates in monitor.items("lr/{}").items():
        highest, last = float(rates.values.max()), int(rates.iterations[-1])
        low = rates.values < limits.VANISHED_RATE * highest
        since = rates.since(low)
        if low[-1] and low.sum() >= MIN_ONSET and last - since >= limits.VANISHED_SHARE * last:
            what = f"The learning rate of parameter {group.replace('_', ' ')} fell from {number(highest, 3)} to less "
            what += f"than a thousandth ({rates.name}) by iteration {since}, and stayed there to the end."
            values = {"highest": highest, "last": float(rates.values[-1])}
            yield Finding("rate_vanished", "warning", what, (rates.name,), (since,), values)
            return


def group_rates(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Parameter groups whose learning rate, and whose update ratios, are far above the others'."""
    groups, weights = monitor.items("lr/{}"), run.sibling(monitor, "weights")
    rates = {group: float(series.values.max()) for group, series in groups.items()}
    for group, rate in rates.items():
        usual = float(np.median([other for name, other in rates.items() if name != group and other > 0] or [rate]))
        if not rate >= limits.GROUP_RATE * usual > 0:
            continue
        for item, ratios in weights.items(f"largest_update_ratio/{group}/{{}}").items():
            if len(ratios.iterations) >= MIN_ONSET and ratios.median >= limits.GROUP_UPDATE:
                name, values = groups[group].name, {"rate": rate, "usual": usual, "size": ratios.median}
                what = f"Parameter {group.replace('_', ' ')} has a learning rate of {number(rate, 3)} ({name}), "
                what += f"{number(rate / usual, 2)} times that of the other groups, and a step moves {item} by "
                what += f"{number(ratios.median, 2)} of its norm ({ratios.name}); 1e-3 is usual."
                yield Finding("group_rate", "warning", what, (name, ratios.name), groups[group].iterations[:1], values)
                break


def clipped_away(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Gradients that the step used at a small fraction of their size."""
    used, norm = monitor.get("gradient_norm").finite, run.sibling(monitor, "grad").get("norm").finite
    shares = used.over(norm)
    is_scaled = any(it.kind == "scaler_not_given" for it in run.reports)
    if len(shares.iterations) >= MIN_ONSET and shares.median < limits.CLIPPED_SHARE and not is_scaled:
        before = norm.part(np.isin(norm.iterations, used.iterations)).median
        what = f"The step used a gradient with a norm of {number(used.median, 2)} ({used.name}); the "
        what += f"backward pass made one of {number(before, 2)} ({norm.name})."
        names, values = (used.name, norm.name), {"share": shares.median}
        yield Finding("clipped_away", "warning", what, names, shares.iterations[:1], values, onset=0)


def input_scale(monitor: MonitorSeries, run: Run, findings: Iterable[Finding]) -> Iterator[Finding]:
    """Inputs, or other numbers of the batch, that are far from 1; and losses far above what the outputs explain."""
    places = monitor.items("batch_rms/{}")
    is_harmless = fell(run.loss) and not _damage(findings)
    first_outputs = [it.values[0] for it in run.sibling(monitor, "activation").items("activation/{}/std").values()]
    is_normalized = 0 < max(first_outputs, default=0.0) < limits.USUAL_ACTIVATION and not _damage(findings)
    for index, (place, series) in enumerate(places.items()):
        far = (series.values > limits.LARGE_INPUT) | ((series.values < limits.SMALL_INPUT) & (index == 0))
        far &= index == 0 or run.loss.values[:1].sum() > limits.LARGE_INPUT  # else these are no targets
        if far.sum() >= MIN_ONSET and far[-max(1, len(far) // 4) :].mean() >= 0.5:
            name, (onset, since), rms = series.name, series.onset(far), series.part(far).median
            what = f"batch[{place}] is {'large' if rms > 1 else '0'} {since}: its root mean square is "
            what += f"{number(rms, 3)} ({name}); networks expect about 1."
            kind, onset = "loss_scale" if index else "input_scale", 0 if far.all() else onset
            is_known = is_harmless or (is_normalized and index == 0 and rms > 1)  # or normalized by the model
            severity = "note" if is_known else "warning"
            yield Finding(kind, severity, what, (name,), series.iterations[:1], {"rms": rms}, onset=onset)
    outputs = run.sibling(monitor, "activation").get("activation/_root_/max_abs").finite
    if outputs and (loss := run.loss) and len(places) <= 1:
        begin, size = float(loss.values[0]), float(outputs.values[0])
        if np.inf > begin > limits.LARGE_LOSS * np.square(1 + size):
            what = f"The loss begins at {number(begin)} ({loss.name}), while the model's outputs are at most "
            what += f"{number(size, 2)} at the beginning, as with large targets or rewards, or a loss that is a sum."
            severity = "note" if is_harmless else "warning"
            yield Finding("loss_scale", severity, what, (loss.name,), loss.iterations[:1], {"loss": begin}, onset=0)


def weight_changed(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Parameters whose norm changed between two measurements by more than the steps between them can."""
    norm = monitor.get("parameter_norm").finite
    for place, most in _changes(monitor, run)[:1]:
        at, (before, after) = norm.iterations[place : place + 2], norm.values[place : place + 2].tolist()
        weights = run.sibling(monitor, "weights").items("largest_weight/{}")
        sizes = {item: series.at(at)[1] for item, series in weights.items() if series.at(at)[1] > limits.JUMP * before}
        largest = f", most of all {max(sizes, key=sizes.__getitem__)}," if sizes else ""
        what = f"The parameters{largest} changed by other means than steps between iterations {at[0]} and {at[1]}: "
        what += f"their norm from {number(before, 3)} to {number(after, 3)} ({norm.name}), which steps move by about "
        what += f"{number(most, 2)} there."
        values = {"before": before, "after": after, "steps": most}
        yield Finding("weight_changed", "problem", what, (norm.name,), (int(at[0]) + 1,), values)


def _changes(monitor: MonitorSeries, run: Run) -> list[tuple[int, float]]:
    """Changes by other means: places in the norms, and what steps move there; unknown before the first update norm."""
    norm, changes = monitor.get("parameter_norm").finite, []
    far = np.abs(np.diff(norm.values)) > limits.JUMP * np.minimum(norm.values[:-1], norm.values[1:])
    jumps = np.flatnonzero(far & ~_restarted(norm, run))
    # Unlike Adam's, other steps may grow with the gradient.
    is_scaled = bool(run.sibling(monitor, "optimizer").get("rms_median"))
    least = limits.OTHER_MEANS if is_scaled else limits.OTHER_MEANS_SGD
    for place in jumps[: limits.JUMPS].tolist():
        before, after = norm.values[place : place + 2].tolist()
        most = _reach(monitor, run, norm.iterations[place : place + 2], is_scaled)
        if most > 0 and abs(after - before) > least * most:
            changes.append((place, most))
    return changes


def _reach(monitor: MonitorSeries, run: Run, at: Array, is_scaled: bool) -> float:
    """Distance that steps move parameters between two iterations, judged by the last update norms before them."""
    moved, gradients = run.sibling(monitor, "optimizer").get("update_norm").finite, Series()
    moved = moved.part(moved.iterations <= at[0]).part(slice(-MIN_ONSET, None))
    rates = [np.nan_to_num(monitor.rates(steps), nan=1.0) for steps in (moved.iterations, at)]
    sizes, total = moved.values / rates[0] * rates[1].max(), float(at[1] - at[0])
    if not is_scaled and (gradients := run.sibling(monitor, "grad").get("norm").finite):
        ends = np.searchsorted(
            gradients.iterations, [moved.iterations - limits.REACH, moved.iterations], "right"
        ).T.tolist()
        sizes = sizes / np.array([gradients.values[begin:end].mean() for begin, end in ends])
        total = float(gradients.values[slice(*np.searchsorted(gradients.iterations, at, "right"))].sum())
    return float(np.max(sizes[np.isfinite(sizes)], initial=0.0)) * total


def shrinking(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Parameters whose norm falls fast from the first measurement on, not all at once, and stays low."""
    norm = monitor.get("parameter_norm").finite
    early = norm.part(norm.iterations <= norm.iterations[:1].sum() + limits.SHRINK_ITERATIONS)
    lowest = float(early.values.min(initial=np.inf))
    if norm and limits.SHRINK_FACTOR * max(lowest, norm.tail.median) < norm.values[0]:
        falls, whole = -np.diff(np.log(early.values)), np.log(norm.values[0] / lowest)
        if falls.max(initial=0.0) > limits.SUDDEN * whole:
            return
        what = f"The norm of all parameters fell from {number(norm.values[0], 3)} to {number(lowest, 3)} in iterations "
        what += f"{norm.iterations[0]} to {early.iterations[early.values.argmin()]} ({norm.name})."
        values = {"first": float(norm.values[0]), "lowest": lowest}
        onset = 0 if norm.iterations[0] <= run.first_made else -1
        yield Finding("weights_shrank", "warning", what, (norm.name,), norm.iterations[:1], values, onset=onset)
