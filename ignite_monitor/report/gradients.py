"""Findings about gradient norms and other spikes: what became of these steps, their period, overflows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.finding import Finding, iterations, listed, number, plural
from ignite_monitor.report.losses import loss_outliers
from ignite_monitor.report.run import Array, MonitorSeries, Run, Series


@dataclass
class Norms:
    """The series of one GradMonitor."""

    norm: Series  # one per optimizer step, and per step that was skipped at a spike
    threshold: Series
    spikes: Array  # iterations with a spike of the norm, non-finite ones included
    missing: int  # number of spikes in iterations that are not in the file
    unpublished: int  # number of spikes in iterations that have published another norm
    outcomes: dict[int, str]  # iteration of a spike -> what became of its step, unless it was made

    def outcome(self, at: Array) -> tuple[str, bool]:
        """Describe what became of the steps at some spikes; True if it is not known of all that they were handled."""
        counts = Counter(self.outcomes.get(iteration, "made") for iteration in at.tolist())
        known = listed(f"{count} {outcome}" for outcome, count in counts.items())
        return f"Steps at spikes: {known or 'not known'}.", not counts or "made" in counts


def norms_of(monitor: MonitorSeries) -> Norms | None:
    """Return the series of a GradMonitor, None if the file does not hold them."""
    norm, flags, stepped, threshold = map(monitor.get, ("norm", "spike", "stepped", "threshold"))
    if not norm or not flags:
        return None
    spikes, missing, unpublished = _counted(flags, monitor.get("spike_count").finite)
    if stepped.values.any():  # of accumulated gradients only the last norm, spikes and overflows
        keep = ~np.isin(norm.iterations, stepped.iterations[stepped.values == 0]) | np.isin(norm.iterations, spikes)
        keep |= ~np.isfinite(norm.values) & ~np.isin(norm.iterations, flags.iterations[flags.values > 0])
        norm = norm.part(keep)
    if not norm:
        return None
    outcomes = dict.fromkeys(np.intersect1d(spikes, stepped.iterations[stepped.values == 0]).tolist(), "not made")
    for outcome in ("clipped", "skipped"):
        counts = monitor.get(f"{outcome}_count")
        outcomes |= dict.fromkeys(counts.iterations[np.diff(counts.values, prepend=0.0) > 0].tolist(), outcome)
    return Norms(norm, threshold, spikes, missing, unpublished, outcomes)


def _counted(flags: Series, counts: Series) -> tuple[Array, int, int]:
    """Flagged iterations that the monitor's counter has kept; how many it counts between and within iterations."""
    # A spike in a gradient that is still accumulated is retracted by the next detection: the counter falls by one, or
    # stays if that is a spike too. Any other fall is a counter that was reset.
    flagged = flags.values > 0
    if not counts:
        return flags.iterations[flagged], 0, 0
    rises = np.diff(counts.at(flags.iterations), prepend=0.0)
    retracted = np.append(rises[1:] == flagged[1:] - 1.0, False)
    between = np.diff(flags.iterations, prepend=0) > 1  # where iterations precede that are not in the file
    beyond = np.maximum(rises - flagged, 0)
    return flags.iterations[flagged & ~retracted], *(int(beyond[at].sum()) for at in (between, ~between & ~retracted))


def gradient_findings(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Findings about gradient norms."""
    norms = norms_of(monitor)
    is_reported = any(it.kind == "no_step" and it.severity != "note" for it in run.reports)
    steps = [it for it in _steps(monitor, norms) if it.severity != "warning" or not is_reported]
    yield from steps
    if norms is not None:
        yield from _nonfinite(monitor, norms)
        stepped = monitor.get("stepped")
        if stepped.values.any() and any(it.kind.startswith("no_step") for it in [*steps, *run.reports]):
            last = stepped.iterations[stepped.values > 0][-1]
            norms.spikes = norms.spikes[norms.spikes <= last]  # later ones are of sums
        yield from _spikes(monitor, norms, run)
        if norms.unpublished:
            what = (
                f"{plural(norms.unpublished, 'more gradient spike')} ({monitor.get('spike_count').name}): not the last "
            )
            what += "gradients of their iterations, whose norms are published."
            yield Finding("spikes", "note", what, (monitor.get("spike_count").name,), advice="Inspect these batches.")


def not_monitored(run: Run) -> Iterator[Finding]:
    """A run without gradient norms."""
    if not any(monitor.get("norm") or monitor.get("stepped") for monitor in run.of("grad")):
        advice = "Check that a GradMonitor of the trained model is attached, and logs to the logger."
        yield Finding("not_monitored", "note", "The file has no gradient norms.", advice=advice)


def _steps(monitor: MonitorSeries, norms: Norms | None) -> Iterator[Finding]:
    """Steps that were never made, or no longer; and norms that were never compared with a threshold."""
    stepped = monitor.get("stepped")
    made = stepped.values > 0
    since = stepped.iterations[stepped.iterations > stepped.iterations[made][-1]] if made.any() else stepped.iterations
    is_skipped = norms is not None and np.isin(since, norms.spikes).all()
    is_known = (np.diff(since) == 1).all()  # otherwise steps may be in iterations that are not in the file
    if len(since) and is_known and not is_skipped and (len(since) >= limits.STEPLESS or not made.any()):
        count = plural(len(since), "monitored iteration")
        what, values = f"The optimizer made no step in {count} ({stepped.name}), to the end.", {"count": len(since)}
        advice = "Call step() of the optimizer that GradMonitor was given."
        kind, severity = "no_step", "warning"
        if len(since) < limits.STEPLESS:  # perhaps all of one accumulation
            kind, severity = "not_monitored", "note"
        elif made.any():
            advice = "If the train step returns at a spike, call optimizer.zero_grad() first: gradients accumulate."
            severity = "problem"
        yield Finding(kind, severity, what, (stepped.name,), since[:1], values, advice)
    elif norms is not None and not norms.threshold.finite:
        norm = norms.norm
        what = f"No gradient norm ({norm.name}) of {plural(len(norm.iterations), 'iteration')} was compared with a "
        what += "threshold: the warm-up of the rule, in finite norms above 0, was not over."
        advice = "Train for longer, or give the threshold rule a shorter warmup."
        yield Finding("not_monitored", "note", what, (norm.name,), advice=advice)


def _nonfinite(monitor: MonitorSeries, norms: Norms) -> Iterator[Finding]:
    norm, name = norms.norm, norms.norm.name
    bad = norm.iterations[~np.isfinite(norm.values)]
    at, overflows = np.intersect1d(bad, norms.spikes), np.setdiff1d(bad, norms.spikes)
    if len(at):
        outcome, unhandled = norms.outcome(at)
        what = f"{plural(len(at), 'gradient')} with inf or NaN ({name}): {iterations(at)}{period(norm, at)}. {outcome}"
        severity, advice = "warning", "" if unhandled else "Inspect these batches."
        if not np.isfinite(norm.values[-1]):
            severity, what = "problem", f"{what} The norm is not finite at the end."
            advice = f"Restore a checkpoint from before iteration {at[0]}, and inspect its batch and learning rate."
        yield Finding("nonfinite_gradients", severity, what, (name,), at, {"count": len(at)}, advice)
    rate = len(overflows) / len(norm.iterations)
    if rate > limits.OVERFLOW_RATE and len(overflows) > limits.OVERFLOW_ALLOWANCE:
        what = f"{len(overflows)} overflows of the scaled gradient, far more than a GradScaler needs to find its scale "
        what += f"({100 * rate:.2g} % of the norms): {iterations(overflows)}."
        names, values = (name, monitor.name("nonfinite_count")), {"count": len(overflows), "share": rate}
        yield Finding("overflows", "warning", what, names, overflows, values)


def _spikes(monitor: MonitorSeries, norms: Norms, run: Run) -> Iterator[Finding]:
    """Finite norms above their threshold; those where the loss is far above its usual value too are no noise."""
    norm, loss = norms.norm, run.loss
    at = norms.spikes[np.isfinite(norm.at(norms.spikes))]
    total = len(at) + norms.missing
    if not total:
        return
    thresholds = norms.threshold.at(at)
    factors = np.nan_to_num(norm.at(at) / np.where(thresholds > 0, thresholds, np.nan))
    factor, rate = float(factors.max(initial=0.0)), total / max(1, len(norm.iterations))
    allowed = limits.SMALL_EXCESS_RATE if factor < limits.SMALL_EXCESS else limits.SPIKE_RATE
    every = period(norm, at)
    where = [f"{iterations(at)}{every}"] if len(at) else []
    where += [f"{norms.missing} not in the file"] * bool(norms.missing)
    what = f"{plural(total, 'gradient spike')} ({norm.name}): {'; '.join(where)}."
    names: tuple[str, ...] = (norm.name,)
    values: dict[str, Any] = {"count": total}
    if factor:
        worst = int(factors.argmax())
        values |= {"worst_norm": float(norm.at(at)[worst]), "worst_threshold": float(thresholds[worst])}
        what += (
            f" The largest, in iteration {at[worst]}, was {number(values['worst_norm'])}, {number(factor)} times its "
        )
        what, names = f"{what}threshold of {number(values['worst_threshold'])}.", (*names, norms.threshold.name)
    outcome, unhandled = norms.outcome(at)
    what, kind, severity = f"{what} {outcome}", "spikes", "warning"
    advice = "" if unhandled or norms.missing else "Inspect these batches."
    if len(outliers := np.intersect1d(at, high := loss_outliers(run))):
        also, names = period(loss, high), (*names, loss.name)
        what += (
            f" The loss is far above its usual value in {iterations(high if also else outliers)}{also} ({loss.name})."
        )
        every = every or also
    if 0 < factor < limits.SPIKE_FACTOR and rate <= allowed and not len(outliers) and not norms.missing:
        what, severity, advice = f"{what} Healthy runs have as many of this size.", "note", "No action needed."
    elif every:
        kind = "periodic_spikes"
    elif not norms.missing and _are_single(norms, at, factors):
        kind, what = "bad_batches", f"{what} The norms before and after the largest are usual."
    onset = next(iter(at[factors >= limits.SPIKE_FACTOR].tolist()), -1)
    yield Finding(kind, severity, what, names, at, values, advice, onset)


def _are_single(norms: Norms, at: Array, factors: Array) -> bool:
    """Check that the largest spike is alone, and that spikes of its size are rare: others may follow damage."""
    norm, large = norms.norm, factors > factors.max(initial=0.0) / 2
    if not large.any() or large.sum() > max(1.0, limits.SPIKE_RATE * len(norm.iterations)):
        return False
    worst = at[factors.argmax()]
    place = int(np.searchsorted(norm.iterations, worst))
    around = np.pad(norm.values, 1, constant_values=np.inf)[[place, place + 2]]
    return bool((around <= norms.threshold.at(np.array([worst]))).all())


def period(series: Series, at: Array) -> str:
    """Describe the period of values that are far above those between, from a spike on."""
    if len(at) < limits.PERIODIC:  # more values than spikes are needed: a threshold that adapts hides some of them
        return ""
    values = np.nan_to_num(series.values[series.iterations >= at[0]][: limits.PERIODIC_VALUES], posinf=limits.HUGE)
    sizes = np.log(np.clip(np.abs(values), 1 / limits.HUGE, limits.HUGE))
    for distance in range(2, min(limits.LONGEST_PERIOD, len(sizes) // limits.PERIODIC) + 1):
        rows = sizes[: len(sizes) // distance * distance].reshape(-1, distance)
        usual = np.quantile(rows, 1 - limits.PERIODIC_SHARE, axis=0)
        phase = int(usual.argmax())
        often = (rows.argmax(1) == phase).mean() >= limits.PERIODIC_SHARE
        if often and usual[phase] - np.median(rows) > np.log(limits.SPIKE_FACTOR):
            return f", every {np.median(series.iterations[distance:] - series.iterations[:-distance]):g} iterations"
    return ""


def value_spikes(monitor: MonitorSeries, run: Run) -> Iterator[Finding]:
    """Spikes of a SpikeMonitor's value."""
    flags, value = monitor.get("spike"), monitor.get("value")
    at, *_ = _counted(flags, monitor.get("spike_count").finite)
    if len(at):
        what = f"{plural(len(at), 'spike')} ({value.name}): {iterations(at)}{period(value, at)}."
        severity = "note" if len(at) <= limits.SPIKE_RATE * len(value.iterations) else "warning"
        yield Finding("loss_spikes", severity, what, (value.name, flags.name), at, {"count": len(at)})
