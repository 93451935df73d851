"""Findings of GradMonitor and SpikeMonitor: spikes, how they were handled, what followed, overflows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Array, Series, iterations, listed, number, plural, printable, times
from ignite_monitor.report.training import went_back


class Norms(NamedTuple):
    """The series of one GradMonitor."""

    each: Series  # the norms, one per optimizer step (and per step that was skipped at a spike)
    threshold: Series  # what they were compared with
    spikes: Array  # iterations with a spike of the norm, NaN and infinities among them
    loss_spikes: Array  # iterations with a spike of the loss alone
    missing: int  # number of spikes in iterations that are not in the file
    skipped: Array  # iterations whose step the handler skipped
    clipped: Array  # iterations whose gradient the handler clipped
    stepped: Series  # 1 where the optimizer made its step, 0 where not


def norms(group: Group) -> Norms | None:
    """The series of a GradMonitor, None if the file does not hold them."""
    norm, flags, stepped = group.get("norm"), group.get("spike"), group.get("stepped")
    if not norm or not flags:
        return None
    spikes, missing = _counted(flags, group.get("spike_count"))
    flagged = flags.where(flags.values > 0)
    if (stepped.values > 0).any():  # of accumulated gradients only the last norm, unless it is a spike
        keep = ~(stepped.at(norm.steps) == 0) | np.isin(norm.steps, spikes)
        keep |= ~np.isfinite(norm.values) & ~np.isin(norm.steps, flagged)  # an overflow
        norm = norm.part(keep)
    threshold = group.get("threshold")
    of_loss = (group.get("loss_spike").at(spikes) > 0) & ~(norm.at(spikes) > threshold.at(spikes))
    of_loss &= np.isfinite(norm.at(spikes))
    skipped, clipped = (_rises(group.get(f"{what}_count")) for what in ("skipped", "clipped"))
    if group.get("skipped_count").last >= group.get("spike_count").last > 0:
        skipped = spikes
    return Norms(norm, threshold, spikes[~of_loss], spikes[of_loss], missing, skipped, clipped, stepped)


def _counted(flags: Series, counts: Series) -> tuple[Array, int]:
    """Flagged iterations that the monitor's counter has kept, and the number that it counts beyond them.

    A spike in a gradient that is still accumulated is retracted by the next detection: the counter falls by one, or
    stays if that is a spike too. Any other fall is a counter that was reset.
    """
    flagged = flags.values > 0
    if not counts:
        return flags.steps[flagged], 0
    rises = np.diff(counts.at(flags.steps), prepend=0.0)
    following = np.append(rises[1:] == flagged[1:].astype(float) - 1, False)
    kept = flagged & ~following
    retracted = np.append(False, (flagged & following)[:-1])
    total = np.nansum(np.where((rises < 0) & ~retracted, counts.at(flags.steps), rises))
    return flags.steps[kept], max(0, int(total) - int(kept.sum()))


def _rises(counts: Series) -> Array:
    return counts.where(np.diff(counts.values, prepend=0.0) > 0)


def gradient_findings(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Findings about gradient norms."""
    known = norms(group)
    yield from _steps(group, known)
    if known is not None:
        for rule in (_nonfinite, _overflows, _spikes, _loss_spikes, _early, _gaps):
            yield from rule(group, known)
        yield from _new_levels(group, known, [at for each in run for at, *_ in went_back(each)])


def _steps(group: Group, known: Norms | None) -> Iterator[Finding]:
    """Steps that were never made, or no longer; and norms of which none was compared with a threshold."""
    stepped, name = group.get("stepped"), group.name("stepped")
    made = stepped.where(stepped.values > 0)
    since = stepped.steps[stepped.steps > made[-1]] if len(made) else stepped.steps
    handled = known is not None and len(np.setdiff1d(since, known.spikes)) == 0
    if len(since) >= limits.STEPLESS and not handled and len(made):
        what = f"The optimizer made no step after iteration {int(made[-1])}: {plural(len(since), 'iteration')} without "
        what += f"one, to the end ({name})."
        advice = "If the train step returns at a spike, call optimizer.zero_grad() first: gradients keep accumulating."
        yield Finding("no_step", "problem", what, (name,), steps(since[:1]), {"count": len(since)}, advice)
    elif len(since) and not handled and not len(made):
        yield _no_step(name, len(since), int(since[0]))
    elif known is not None and not known.threshold.finite:
        what = f"None of {plural(len(known.each.steps), 'gradient norm')} ({group.name('norm')}) was compared with a "
        what += "threshold: the threshold's warm-up was not over."
        advice = "Train for longer, or give the threshold rule a shorter warmup."
        yield Finding("not_monitored", "note", what, (group.name("norm"),), advice=advice)


def _no_step(name: str, count: int, first: int) -> Finding:
    """With accumulation a short run may hold no step."""
    kind, severity = ("no_step", "warning") if count >= limits.STEPLESS else ("not_monitored", "note")
    what = "No gradient was compared with a threshold: the optimizer made no step in "
    what += f"{plural(count, 'monitored iteration')} ({name})."
    advice = "Give GradMonitor the optimizer whose step() the train step calls."
    return Finding(kind, severity, what, (name,), (first,), {"count": count}, advice)


def _nonfinite(group: Group, known: Norms) -> Iterator[Finding]:
    """Gradients that are inf or NaN, without a scaler that handles them."""
    at = np.intersect1d(known.each.where(~np.isfinite(known.each.values)), known.spikes)
    if not len(at):
        return
    what = f"{plural(len(at), 'gradient')} with inf or NaN ({group.name('norm')}): {iterations(at)}{_period(at)}."
    severity, advice = "warning", ""
    if not np.isfinite(known.each.values[-1]):
        last_good = known.each.finite.steps
        since = f" since iteration {int(last_good[-1])}" if len(last_good) else ""
        what += f" No finite norm{since}, to the end."
        severity, advice = "problem", "Restore a checkpoint from before, with a lower learning rate."
    else:
        handled, unhandled = _handled(known, at)
        what += f" {handled}"
        advice = "" if unhandled else "Inspect these batches."
    yield Finding("nonfinite_gradients", severity, what, (group.name("norm"),), steps(at), {"count": len(at)}, advice)


def _overflows(group: Group, known: Norms) -> Iterator[Finding]:
    """Gradients that are inf or NaN, and handled by a GradScaler."""
    at = np.setdiff1d(known.each.where(~np.isfinite(known.each.values)), known.spikes)
    if not len(at):
        return
    rate = len(at) / len(known.each.steps)
    many = rate > limits.OVERFLOW_RATE and len(at) > limits.OVERFLOW_ALLOWANCE
    judgement = "far more than a GradScaler needs to find its scale" if many else "as expected of a GradScaler"
    what = f"{plural(len(at), 'overflow')} of the scaled gradient, {judgement} ({100 * rate:.2g} % of "
    what += f"{len(known.each.steps)}): {iterations(at)}."
    names, values = (group.name("norm"), group.name("nonfinite_count")), {"count": len(at), "share": rate}
    severity, advice = ("warning", "") if many else ("note", "No action needed.")
    yield Finding("overflows", severity, what, names, steps(at), values, advice)


def _spikes(group: Group, known: Norms) -> Iterator[Finding]:
    """Finite norms above their threshold."""
    at = known.spikes[np.isfinite(known.each.at(known.spikes))]
    missing, total = known.missing, len(at) + known.missing
    if not total:
        return
    sizes, thresholds = known.each.at(at), known.threshold.at(at)
    factors = sizes / np.where(thresholds > 0, thresholds, np.nan)
    worst = int(np.nanargmax(factors)) if np.isfinite(factors).any() else None
    factor = float(factors[worst]) if worst is not None else float("nan")
    rate = total / max(1, len(known.each.steps))
    few = factor < limits.SPIKE_FACTOR and rate <= limits.SPIKE_RATE and not missing
    small = factor < limits.SMALL_EXCESS and rate <= limits.SMALL_EXCESS_RATE and not missing
    made = ~np.isin(at, known.skipped) & ~(known.stepped.at(at) == 0)
    after = _aftermath(known.each, at[(factors >= limits.SPIKE_FACTOR) & made], at)
    lately = known.each.steps[-limits.RECENT :]
    recent = int((at >= lately[0]).sum()) / len(lately) if len(lately) else 0.0
    values = {"count": float(total), "aftermath_factor": after, "recent_share": recent}
    severity = "problem" if after > limits.AFTERMATH_FACTOR else "note" if few or small else "warning"
    where = [f"{iterations(at)}{_period(at)}"] * bool(len(at))
    where += [f"{f'{missing} of them' if len(at) else 'all'} in iterations that are not in the file"] * bool(missing)
    what = f"{plural(total, 'gradient spike')} ({group.name('norm')}): {'; '.join(where)}."
    if worst is not None:
        size, threshold = float(sizes[worst]), float(thresholds[worst])
        which = f"The largest, in iteration {int(at[worst])}," if len(at) > 1 else "It"
        above = "just above" if factor < 1.05 else times(factor)
        what += f" {which} was {number(size)}, {above} its threshold of {number(threshold)}{_excess(group, at[worst])}."
        values |= {"worst_norm": size, "worst_threshold": threshold, "worst_factor": factor}
    if severity != "note" and recent > limits.SPIKE_RATE and len(known.each.steps) > limits.RECENT:
        what += f" Of the last {limits.RECENT} norms {100 * recent:.2g} % are spikes."
    handled, unhandled = _handled(known, at, missing, int(group.get("skipped_count").finite.values.max(initial=0)))
    advice = "" if unhandled else "Inspect these batches."
    if severity == "note":
        noise = "So few, so near the threshold, are noise." if few else "So near the threshold, they are hardly spikes."
        what += f" {noise}"
        advice = "No action needed." if few else "With threshold=RobustThreshold() there may be fewer."
    what = f"{what} {handled}".rstrip()
    if severity == "problem":
        what += f" Afterwards the norm stayed {times(after)} as large as before: the spike did damage."
        advice = 'Restore a checkpoint from before; GradMonitor(on_spike="skip") skips such steps.'
    yield Finding("spikes", severity, what, (group.name("norm"), group.name("spike")), steps(at), values, advice)


def _period(at: Array) -> str:
    """The period of a fault that recurs."""
    distances, counts = np.unique(np.diff(at), return_counts=True)
    if len(at) < limits.PERIODIC or counts.max() < limits.PERIODIC_SHARE * (len(at) - 1):
        return ""
    period = int(distances[counts.argmax()])
    return f", every {period} iterations: look for a batch or event with this period" if period > 1 else ""


def _excess(group: Group, step: int) -> str:
    """The parameters with the largest excess over their thresholds at a spike."""
    shares = {item: float(series.at(np.array([step]))[0]) for item, series in group.each("culprit").items()}
    known = sorted((item for item in shares if np.isfinite(shares[item])), key=lambda item: -shares[item])
    named = [f"{printable(item)} {100 * shares[item]:.0f} %" for item in known[:3]]
    return f" (share of the excess: {listed(named)})" if named else ""


def _loss_spikes(group: Group, known: Norms) -> Iterator[Finding]:
    at = known.loss_spikes
    if len(at):
        handled, _ = _handled(known, at)
        what = f"{plural(len(at), 'loss spike')} ({group.name('loss_spike')}): {iterations(at)}{_period(at)}. {handled}"
        yield Finding("loss_spikes", "warning", what, (group.name("loss_spike"),), steps(at), {"count": len(at)})


def value_spikes(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Spikes of a SpikeMonitor's value."""
    at, _ = _counted(group.get("spike"), group.get("spike_count"))
    if len(at):
        few = len(at) <= limits.SPIKE_RATE * len(group.get("value").steps)
        what = f"{plural(len(at), 'spike')} ({group.name('value')}): {iterations(at)}{_period(at)}."
        names = (group.name("value"), group.name("spike"))
        yield Finding("loss_spikes", "note" if few else "warning", what, names, steps(at), {"count": len(at)})


def _aftermath(norm: Series, made: Array, spikes: Array) -> float:
    """The largest ratio of the norms after a spike to those before it.

    A norm that returns soon, or at the end, has not stayed: both the norms right after and all that follow count.

    Args:
        made: the spikes whose step was made, and that are far above the threshold.
    """
    finite, window = norm.finite, limits.AFTERMATH_WINDOW
    calm = finite.part(~np.isin(finite.steps, spikes))
    largest, least, left = 0.0, window // 2, limits.AFTERMATHS
    for spike in made:
        place = int(np.searchsorted(calm.steps, spike))
        before, after = calm.values[max(0, place - window) : place], calm.values[place:]
        if len(after) < least:  # it spikes to the end
            after = finite.values[np.searchsorted(finite.steps, spike, side="right") :]
        if min(len(before), len(after)) >= least:
            usual = max(float(np.median(before)), np.finfo(float).tiny)
            ratio = float(np.median(after[:window])) / usual
            if ratio > largest and left:
                left -= 1
                largest = max(largest, min(ratio, float(np.median(after)) / usual))
    return largest


def _handled(known: Norms, at: Array, missing: int = 0, skipped_in_all: int = 0) -> tuple[str, bool]:
    """What became of the steps at these spikes, in words, and whether some were made without handling."""
    count = len(at) + missing
    skipped = int(np.isin(at, known.skipped).sum())
    if missing and not len(at):
        skipped = min(skipped_in_all, count)
    clipped = int(np.isin(at, known.clipped).sum())
    told = []
    for verb, number_of in (("skipped", skipped), ("clipped", clipped)):
        which = "The step was" if number_of == count == 1 else f"All {count} steps were" if number_of == count else ""
        told += [f"{which or f'{number_of} of {count} steps were'} {verb}."] * bool(number_of)
    rest = at[~np.isin(at, known.skipped) & ~np.isin(at, known.clipped)]
    made, omitted = (rest[known.stepped.at(rest) == value] for value in (1, 0))
    told += [f"The step was made in {iterations(made)}."] * bool(len(made))
    told += [f"The train step made no step in {iterations(omitted)}."] * bool(len(omitted))
    return " ".join(told) or "No step was skipped or clipped by the handler.", skipped + clipped + len(omitted) < count


def _new_levels(group: Group, known: Norms, rollbacks: Sequence[int]) -> Iterator[Finding]:
    """Consecutive spikes, at which a rule resets, unless the run was rolled back there."""
    spiked = np.isin(known.each.steps, known.spikes) & np.isfinite(known.each.values)
    lengths = np.arange(1, len(spiked) + 1)
    lengths = lengths - np.maximum.accumulate(np.where(spiked, 0, lengths))
    resets = np.setdiff1d(known.each.steps[lengths == limits.SPIKES_IN_A_ROW], rollbacks)
    if len(resets):
        name = group.name("spike")
        what = f"{limits.SPIKES_IN_A_ROW} or more consecutive spikes ({name}), up to {iterations(resets)}: "
        what += "the norm's baseline has changed, and GradMonitor resets the threshold statistics there."
        yield Finding("regime_change", "warning", what, (name,), steps(resets))


def _early(group: Group, known: Norms) -> Iterator[Finding]:
    """Norms in the threshold's warm-up, where no rule judges them, that are far above the run's own."""
    norm, judged = known.each.finite, known.threshold.finite
    if not norm or not judged:
        return
    usual = max(float(np.median(norm.values)), norm.start(1.0, limits.EARLY_WINDOW))
    at = norm.where((norm.steps < judged.steps[0]) & (norm.values > limits.EARLY_FACTOR * usual))
    if len(at) and usual > 0:
        name, largest = group.name("norm"), float(norm.at(at).max())
        what = f"In the threshold's warm-up the gradient norm was {number(largest, 3)} ({name}), "
        what += f"{times(largest / usual)} the run's median of {number(usual, 3)}: {iterations(at)}."
        yield Finding("early_norms", "warning", what, (name,), steps(at), {"largest": largest, "median": usual})


def _gaps(group: Group, known: Norms) -> Iterator[Finding]:
    """Iterations without values between values that were otherwise written at equal distances."""
    at, name = group.get("spike").steps, group.name("norm")
    distances = np.diff(at)
    usual = np.median(distances) if len(distances) else 0
    gaps = np.flatnonzero(distances > usual)
    if len(gaps) and np.mean(distances != usual) <= limits.GAPS:
        named = [f"{int(at[gap])} and {int(at[gap + 1])}" for gap in gaps]
        what = f"No values between iterations {listed(named)} ({name}): the run may have been killed and resumed."
        yield Finding("gap", "note", what, (name,), steps(at[gaps]), {"count": len(gaps)})
