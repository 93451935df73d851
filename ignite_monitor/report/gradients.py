"""Findings of GradMonitor and SpikeMonitor: spikes, what became of these steps, what followed, overflows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ignite_monitor.hdf5.layout import printable
from ignite_monitor.report import limits
from ignite_monitor.report.finding import Finding, iterations, listed, number, plural, times
from ignite_monitor.report.run import Array, Recorded, Run, Series


@dataclass
class Norms:
    """The series of one GradMonitor."""

    norm: Series  # one per optimizer step, and per step that was skipped at a spike
    threshold: Series
    spikes: Array  # iterations with a spike of the norm, non-finite ones included
    loss_spikes: Array  # iterations with a spike of the loss alone
    missing: int  # number of spikes in iterations that are not in the file
    outcomes: dict[str, Array]  # what became of a step -> iterations

    def outcome(self, at: Array) -> tuple[str, bool]:
        """Describe what became of the steps at some iterations; True if some were made without handling."""
        rest, parts = at, []
        for outcome, steps in self.outcomes.items():
            matching = np.isin(rest, steps)
            if matching.any():
                parts.append(f"{matching.sum()} {outcome}")
            if outcome != "made":
                rest = rest[~matching]
        text = f"Of these steps {listed(parts)}." if parts else "No step was skipped or clipped by the handler."
        return text, bool(len(rest))


def norms(monitor: Recorded) -> Norms | None:
    """Return the series of a GradMonitor, None if the file does not hold them."""
    norm, flags, stepped, threshold = map(monitor.get, ("norm", "spike", "stepped", "threshold"))
    if not norm or not flags:
        return None
    spikes, missing = _counted(flags, monitor.get("spike_count"))
    made, not_made = stepped.steps[stepped.values > 0], stepped.steps[stepped.values == 0]
    if len(made):  # of accumulated gradients only the last norm, spikes and overflows
        keep = ~np.isin(norm.steps, not_made) | np.isin(norm.steps, spikes)
        keep |= ~np.isfinite(norm.values) & ~np.isin(norm.steps, flags.steps[flags.values > 0])
        norm = norm.part(keep)
    sizes = norm.at(spikes)
    of_loss = (monitor.get("loss_spike").at(spikes) > 0) & ~(sizes > threshold.at(spikes)) & np.isfinite(sizes)
    skips, clips = monitor.get("skipped_count"), monitor.get("clipped_count")
    skipped, clipped = (counts.steps[np.diff(counts.values, prepend=0.0) > 0] for counts in (skips, clips))
    if skips.last >= monitor.get("spike_count").last > 0:
        skipped = spikes
    outcomes = {"skipped": skipped, "clipped": clipped, "not made by the train step": not_made, "made": made}
    return Norms(norm, threshold, spikes[~of_loss], spikes[of_loss], missing, outcomes)


def _counted(flags: Series, counts: Series) -> tuple[Array, int]:
    """Flagged iterations that the monitor's counter has kept, and the number that it counts beyond them.

    A spike in a gradient that is still accumulated is retracted by the next detection: the counter falls by one, or
    stays if that is a spike too. Any other fall is a counter that was reset.
    """
    flagged = flags.values > 0
    if not counts:
        return flags.steps[flagged], 0
    rises = np.diff(counts.at(flags.steps), prepend=0.0)
    kept = flagged & ~np.append(rises[1:] == flagged[1:] - 1.0, False)
    return flags.steps[kept], max(0, int(counts.last) - int(kept.sum()))


def gradient_findings(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Findings about gradient norms."""
    known = norms(monitor)
    yield from _steps(monitor, known)
    if known is not None:
        for rule in (_nonfinite, _spikes, _loss_spikes, _first_norms):
            yield from rule(monitor, known)


def _steps(monitor: Recorded, known: Norms | None) -> Iterator[Finding]:
    """Steps that were never made, or no longer; and norms of which none was compared with a threshold."""
    stepped, name = monitor.get("stepped"), monitor.name("stepped")
    made = stepped.steps[stepped.values > 0]
    since = stepped.steps[stepped.steps > made[-1]] if len(made) else stepped.steps
    lasting = len(since) >= limits.STEPLESS
    kind, severity, advice = "no_step", "problem" if len(made) else "warning", ""
    if len(since) and (known is None or len(np.setdiff1d(since, known.spikes))) and (lasting or not len(made)):
        what = f"The optimizer made no step in {plural(len(since), 'monitored iteration')} ({name}), to the end."
        if len(made):
            advice = "If the train step returns at a spike, call optimizer.zero_grad() first: gradients accumulate."
        elif not lasting:  # perhaps all of one accumulation
            kind, severity, advice = "not_monitored", "note", "Give GradMonitor the optimizer that makes the steps."
        yield Finding(kind, severity, what, (name,), since[:1], {"count": len(since)}, advice)
    elif known is not None and not known.threshold.finite:
        name = monitor.name("norm")
        what = f"None of {plural(len(known.norm.steps), 'gradient norm')} ({name}) was compared with a threshold: the "
        what += "threshold's warm-up was not over."
        advice = "Train for longer, or give the threshold rule a shorter warmup."
        yield Finding("not_monitored", "note", what, (name,), advice=advice)


def _nonfinite(monitor: Recorded, known: Norms) -> Iterator[Finding]:
    """Non-finite gradients, without a GradScaler that handles them and with one."""
    norm, name = known.norm, monitor.name("norm")
    bad = norm.steps[~np.isfinite(norm.values)]
    at, overflows = np.intersect1d(bad, known.spikes), np.setdiff1d(bad, known.spikes)
    if len(at):
        outcome, unhandled = known.outcome(at)
        what = f"{plural(len(at), 'gradient')} with inf or NaN ({name}): {_where(known, at)}. {outcome}"
        severity, advice = "warning", "" if unhandled else "Inspect these batches."
        if not np.isfinite(norm.values[-1]):
            severity, what = "problem", f"{what} The norm is not finite at the end."
            advice = "Lower the learning rate, and check the scale of the inputs."
            if at[0] >= known.threshold.finite.first_step:
                advice = f"Restore a checkpoint from before, and inspect the batch of iteration {at[0]}."
        yield Finding("nonfinite_gradients", severity, what, (name,), at, {"count": len(at)}, advice)
    rate = len(overflows) / len(norm.steps)
    if rate > limits.OVERFLOW_RATE and len(overflows) > limits.OVERFLOW_ALLOWANCE:
        what = f"{len(overflows)} overflows of the scaled gradient, far more than a GradScaler needs to find its scale "
        what += f"({100 * rate:.2g} % of the norms): {iterations(overflows)}."
        names, values = (name, monitor.name("nonfinite_count")), {"count": len(overflows), "share": rate}
        yield Finding("overflows", "warning", what, names, overflows, values)


def _spikes(monitor: Recorded, known: Norms) -> Iterator[Finding]:
    """Finite norms above their threshold."""
    norm, name, missing = known.norm, monitor.name("norm"), known.missing
    at = known.spikes[np.isfinite(norm.at(known.spikes))]
    total = len(at) + missing
    if not total:
        return
    sizes, thresholds = norm.at(at), known.threshold.at(at)
    factors = np.nan_to_num(sizes / np.where(thresholds > 0, thresholds, np.nan))
    factor, rate = float(factors.max(initial=0.0)), total / max(1, len(norm.steps))
    allowed = limits.SMALL_EXCESS_RATE if factor < limits.SMALL_EXCESS else limits.SPIKE_RATE
    noise = 0 < factor < limits.SPIKE_FACTOR and rate <= allowed and not missing
    recent = float(np.isin(norm.steps[-limits.RECENT :], at).mean()) if norm else 0.0
    values = {"count": total, "recent_share": recent}
    where = _where(known, at) if len(at) else ""
    if missing:
        where += f"{f'; {missing} of them' if len(at) else 'all'} in iterations that are not in the file"
    what = f"{plural(total, 'gradient spike')} ({name}): {where}."
    if factor:
        worst = int(factors.argmax())
        size, threshold = float(sizes[worst]), float(thresholds[worst])
        above = "just above" if factor < 1.05 else times(factor)
        what += f" The largest, in iteration {int(at[worst])}, was {number(size)}, {above} its threshold of "
        what += f"{number(threshold)}{_excess(monitor, at[worst])}."
        values |= {"worst_norm": size, "worst_threshold": threshold, "worst_factor": factor}
    outcome, unhandled = known.outcome(at)
    what, severity, advice = f"{what} {outcome}", "warning", "" if unhandled or missing else "Inspect these batches."
    kind = "spikes"
    if not noise and not missing and _passes(known, at):
        kind = "periodic_spikes" if _period(known.norm.steps, at) else "bad_batches"
        what = f"{what} The next norm was within the threshold again, so it was these batches."
    if noise:
        what, severity, advice = f"{what} So few, so near the threshold, are noise.", "note", "No action needed."
    onset = next(iter(at[factors >= limits.SPIKE_FACTOR].tolist()), -1)
    yield Finding(kind, severity, what, (name, monitor.name("spike")), at, values, advice, onset)


def _passes(known: Norms, at: Array) -> bool:
    """Check that the largest spike, or most of them, passed: the next other norm was within the threshold before it."""
    norm = known.norm.finite
    places = np.flatnonzero(np.isin(norm.steps, at))
    if not len(places):
        return False
    groups = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)  # of spikes that follow each other
    limits_before = known.threshold.at(norm.steps[[group[0] for group in groups]])
    following = np.append(norm.values, np.inf)[[group[-1] + 1 for group in groups]]
    passed = following <= limits_before
    largest = np.argmax([norm.values[group].max() for group in groups])
    return bool(passed[largest] or passed.mean() >= limits.PERIODIC_SHARE)


def _where(known: Norms, at: Array) -> str:
    return f"{iterations(at)}{_period(known.norm.steps, at)}"


def _period(steps: Array, at: Array) -> str:
    """The period of a fault that recurs, in the steps that were measured: one per optimizer step."""
    places = np.searchsorted(steps, at)
    places = places[np.diff(places, prepend=-2) > 1]  # the first of those that follow each other
    distances, counts = np.unique(np.diff(places), return_counts=True)
    if len(places) < limits.PERIODIC or counts.max() < limits.PERIODIC_SHARE * (len(places) - 1):
        return ""
    period = int(distances[counts.argmax()])
    return f", every {period} optimizer steps" if period > 1 else ""


def _excess(monitor: Recorded, step: int) -> str:
    """The parameters with the largest excess over their thresholds at a spike."""
    shares = {item: float(series.at(np.array([step]))[0]) for item, series in monitor.items("culprit/{}").items()}
    known = sorted((item for item in shares if np.isfinite(shares[item])), key=lambda item: -shares[item])
    named = [f"{printable(item)} {100 * shares[item]:.0f} %" for item in known[:3]]
    return f" (share of the excess: {listed(named)})" if named else ""


def _loss_spikes(monitor: Recorded, known: Norms) -> Iterator[Finding]:
    at, name = known.loss_spikes, monitor.name("loss_spike")
    if len(at):
        what = f"{plural(len(at), 'loss spike')} ({name}): {_where(known, at)}. {known.outcome(at)[0]}"
        yield Finding("loss_spikes", "warning", what, (name,), at, {"count": len(at)})


def value_spikes(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Spikes of a SpikeMonitor's value."""
    at, _ = _counted(monitor.get("spike"), monitor.get("spike_count"))
    if len(at):
        few = len(at) <= limits.SPIKE_RATE * len(monitor.get("value").steps)
        names = monitor.name("value"), monitor.name("spike")
        what = f"{plural(len(at), 'spike')} ({names[0]}): {iterations(at)}{_period(monitor.get('value').steps, at)}."
        yield Finding("loss_spikes", "note" if few else "warning", what, names, at, {"count": len(at)})


def _first_norms(monitor: Recorded, known: Norms) -> Iterator[Finding]:
    """Norms in the threshold's warm-up that are far above the run's own."""
    norm, threshold, name = known.norm.finite, known.threshold.finite, monitor.name("norm")
    first = norm.part(slice(limits.EARLY_WINDOW))
    usual = max(norm.median, first.median)
    at = norm.steps[(norm.steps < threshold.first_step) & (norm.values > limits.EARLY_FACTOR * usual)]
    if threshold and len(at) and usual > 0:
        largest = float(norm.at(at).max())
        what = f"In the threshold's warm-up the gradient norm was {number(largest, 3)} ({name}), "
        what += f"{times(largest / usual)} the run's median of {number(usual, 3)}: {iterations(at)}."
        yield Finding("early_norms", "warning", what, (name,), at, {"largest": largest, "median": usual})
