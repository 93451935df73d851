"""What GradMonitor's series say: spikes, what was skipped, what came after, overflows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import KINDS, Finding, steps
from ignite_monitor.report.series import Array, Series, iterations, listed, number, plural, times
from ignite_monitor.report.training import went_back


class Norms(NamedTuple):
    """What one GradMonitor has judged."""

    each: Series  # the norms, one per optimizer step (and per step that was left out at a spike)
    threshold: Series  # what they were compared with
    spikes: Array  # where they were spikes, NaN and infinities among them
    missing: int  # how many spikes were in iterations that are not in the file
    left_out: Array  # of which spikes the step is known to have been left out
    written: Array  # the iterations that are in the file
    stepped: Series  # 1 where the optimizer made its step, 0 where not; empty in files that do not tell


def norms(group: Group, run: Sequence[Group]) -> Norms | None:
    """What a GradMonitor has judged, None if the file does not hold it."""
    norm, flags = group.get("norm"), group.get("spike")
    if not norm or not flags:
        return None
    own = (each.get(f"{group.root}/stepped") for each in run if each.kind == "other")
    stepped = group.get("stepped") or next(own, Series())
    flagged = flags.where(flags.values > 0)
    spikes, missing = _counted(flagged, group.get("spike_count"))
    if (stepped.values > 0).any():  # of a partial gradient, or of one that grew, only spikes
        keep = ~(stepped.at(norm.steps) == 0) | np.isin(norm.steps, spikes)
        keep |= ~np.isfinite(norm.values) & ~np.isin(norm.steps, flagged)  # an overflow
        norm = norm.part(keep)
    left_out = _skipped(group, spikes) | (stepped.at(spikes) == 0)
    return Norms(norm, group.get("threshold"), spikes, missing, left_out, flags.steps, stepped)


def _counted(flagged: Array, counts: Series) -> tuple[Array, int]:
    """Of the flagged iterations those that GradMonitor's counter has kept, and how many it counts beside them.

    A spike in a gradient that goes on growing is taken back at the next look: the counter falls by one there, or stays
    if that is a spike too. Any other fall is a counter that began anew.
    """
    if not counts:
        return flagged, 0
    counted: list[int | None] = []
    before, last_rise = 0, -1
    for index, (step, count) in enumerate(zip(*counts.finite, strict=True)):
        rise, is_flagged = int(count) - before, bool(np.isin(step, flagged))
        if last_rise == index - 1 and rise == is_flagged - 1:  # with its own spike, or without one
            counted[-1:] = [int(step)] * is_flagged
            last_rise = index if is_flagged else last_rise
        elif rise:
            rise = rise if rise > 0 else int(count)
            is_flagged = is_flagged and rise > 0
            counted += [None] * (rise - is_flagged) + [int(step)] * is_flagged
            last_rise = index
        before = int(count)
    kept = [step for step in counted if step is not None]
    return np.asarray(kept, dtype=flagged.dtype), len(counted) - len(kept)


def _skipped(group: Group, at: Array) -> Array:
    """Of which spikes the handler is known to have skipped the step."""
    skips, spikes = group.get("skipped_count"), group.get("spike_count")
    if skips.last >= spikes.last > 0:
        return np.ones(len(at), bool)
    rises = [Series(each.steps, np.diff(each.values, prepend=0.0)).at(at) for each in (skips, spikes)]
    return np.asarray((rises[0] >= rises[1]) & (rises[0] > 0))


def gradient_findings(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Findings about gradient norms."""
    known = norms(group, run)
    if known is not None:
        for rule in (_judged, _nonfinite, _overflows, _spikes, _early, _gaps):
            yield from rule(group, known)
        yield from _new_levels(group, known, {at for each in run for at, *_ in went_back(each)})


def _judged(group: Group, known: Norms) -> Iterator[Finding]:
    """Whether there was anything to judge by."""
    name, count = group.name("norm"), len(known.each.steps)
    calm = np.setdiff1d(known.each.finite.steps, known.spikes)
    if known.stepped:
        stepless = len(calm) > 0 and not (known.stepped.values > 0).any()
    else:  # norms enter the mean with the optimizer's steps
        stepless = len(calm) > 1 and not group.get("mean") and not known.threshold.finite
    if stepless:
        yield no_step(name, count)
    elif not known.threshold.finite:
        what = f"Of {plural(count, 'gradient norm')} ({name}) none was judged: the threshold's warm-up was not over."
        advice = "Train for longer, or give the threshold rule a shorter warmup."
        yield Finding("not_judged", "note", what, (name,), values={"count": count}, advice=advice)


def no_step(name: str, count: int) -> Finding:
    """That nothing was seen of the optimizer's steps; with accumulation a short run may hold none."""
    kind, severity = ("no_step", "warning") if count >= limits.STEPLESS else ("not_judged", "note")
    looks = plural(count, "monitored iteration")
    what = f"No gradient was judged: GradMonitor's optimizer made no step in {looks} ({name})."
    return Finding(kind, severity, what, (name,), values={"count": count}, advice=KINDS["no_step"])


def _nonfinite(group: Group, known: Norms) -> Iterator[Finding]:
    """Gradients that are inf or NaN, and no scaler looks after them."""
    bad = known.each.where(~np.isfinite(known.each.values))
    at = np.intersect1d(bad, known.spikes)
    if not len(at):
        return
    what = f"{plural(len(at), 'gradient')} with inf or NaN in {'it' if len(at) == 1 else 'them'} "
    what += f"({group.name('norm')}): {iterations(at)}."
    severity, advice = "warning", ""
    if not np.isfinite(known.each.values[-1]):
        last_good = known.each.finite.steps
        since = f" since iteration {int(last_good[-1])}" if len(last_good) else ""
        what += f" It stays so to the end: no finite norm{since}."
        severity, advice = "problem", "Go back to a checkpoint from before, with a lower learning rate."
    else:
        what += f" {_handled(group, known, at)}".rstrip()
    count = {"count": float(len(at))}
    yield Finding("nonfinite_gradients", severity, what, (group.name("norm"),), steps(at), count, advice)


def _overflows(group: Group, known: Norms) -> Iterator[Finding]:
    """Gradients that are inf or NaN, which a GradScaler looks after."""
    at = np.setdiff1d(known.each.where(~np.isfinite(known.each.values)), known.spikes)
    if not len(at):
        return
    rate = len(at) / len(known.each.steps)
    many = rate > limits.OVERFLOW_RATE and len(at) > limits.OVERFLOW_ALLOWANCE
    judgement = "far more than a GradScaler needs to find its scale" if many else "as a GradScaler makes them"
    what = f"{plural(len(at), 'overflow')} of the scaled gradient, {judgement} ({100 * rate:.2g} % of "
    what += f"{len(known.each.steps)}): {iterations(at)}."
    names, values = (group.name("norm"), group.name("nonfinite_count")), {"count": len(at), "share": rate}
    severity, advice = ("warning", "") if many else ("note", "Nothing to do.")
    yield Finding("overflows", severity, what, names, steps(at), values, advice)


def _spikes(group: Group, known: Norms) -> Iterator[Finding]:
    """Norms above their threshold."""
    finite = np.isfinite(known.each.at(known.spikes))
    at, missing, total = known.spikes[finite], known.missing, int(finite.sum()) + known.missing
    if not total:
        return
    sizes, thresholds = known.each.at(at), known.threshold.at(at)
    factors = sizes / np.where(thresholds > 0, thresholds, np.nan)
    worst = int(np.nanargmax(factors)) if np.isfinite(factors).any() else None
    factor = float(factors[worst]) if worst is not None else float("nan")
    rate = total / max(1, len(known.each.steps))
    few = factor < limits.SPIKE_FACTOR and rate <= limits.SPIKE_RATE and not missing
    small = factor < limits.SMALL_EXCESS and rate <= limits.SMALL_EXCESS_RATE and not missing
    after = _aftermath(known.each, at[(factors >= limits.SPIKE_FACTOR) & ~known.left_out[finite]], at)
    values = {"count": float(total), "worst_factor": factor, "aftermath_factor": after}
    severity = "problem" if after > limits.AFTERMATH_FACTOR else "note" if few or small else "warning"
    where = [iterations(at)] * bool(len(at))
    where += [f"{f'{missing} of them' if len(at) else 'all'} in iterations that are not in the file"] * bool(missing)
    what = f"{plural(total, 'gradient spike')} ({group.name('norm')}): {'; '.join(where)}."
    if worst is not None:
        size, threshold = float(sizes[worst]), float(thresholds[worst])
        which = f"The largest, in iteration {int(at[worst])}," if len(at) > 1 else "It"
        above = "just above" if factor < 1.05 else times(factor)
        what += f" {which} was {number(size)}, {above} its threshold of {number(threshold)}."
        values |= {"worst_norm": size, "worst_threshold": threshold}
    advice = ""
    if severity == "note":
        noise = "So few, so near the threshold, are noise." if few else "So near the threshold, they are hardly spikes."
        what += f" {noise}"
        advice = "Nothing to do." if few else "With threshold=RobustThreshold() there may be fewer."
    what = f"{what} {_handled(group, known, at, missing)}".rstrip()
    if severity == "problem":
        what += f" Afterwards the norm stayed {times(after)} as large as before: it has done damage."
        advice = "Go back to a checkpoint from before; GradMonitor(on_spike='skip') leaves such steps out."
    elif severity == "warning" and total == _total(group, "skipped_count"):
        advice = "Look at these batches; there is nothing else to do."
    yield Finding("spikes", severity, what, (group.name("spike"), group.name("norm")), steps(at), values, advice)


def _aftermath(norm: Series, made: Array, spikes: Array) -> float:
    """The largest ratio of the norms after a spike to those before it.

    A norm that is back soon, or at the end, has not stayed: both the norms right after and all that follow count.

    Args:
        made: the spikes whose step was made, and that are far above the threshold.
    """
    finite = norm.finite
    calm = finite.part(~np.isin(finite.steps, spikes))
    ratios, least = [0.0], limits.AFTERMATH_WINDOW // 2
    for spike in made:
        before = calm.values[calm.steps < spike][-limits.AFTERMATH_WINDOW :]
        after = calm.values[calm.steps > spike]
        if len(after) < least:  # it spikes to the end
            after = finite.values[finite.steps > spike]
        if min(len(before), len(after)) >= least:
            stayed = min(np.median(after[: limits.AFTERMATH_WINDOW]), np.median(after))
            ratios.append(float(stayed / max(np.median(before), np.finfo(float).tiny)))
    return max(ratios)


def _handled(group: Group, known: Norms, at: Array, missing: int = 0) -> str:
    """What became of the steps at spikes, as far as it is known."""
    skipped, count = _total(group, "skipped_count"), len(at) + missing
    told = {1: "the step", 2: "both steps"}.get(skipped, f"all {skipped} steps")
    said = [f"The handler skipped {told if skipped >= count else f'{skipped} steps'}."] * bool(skipped)
    if not known.stepped:
        return " ".join(said) or "The handler skipped no step (a train step that looks at the flag may have)."
    made = at[known.stepped.at(at) > 0]
    left_out = at[(known.stepped.at(at) == 0) & ~_skipped(group, at)]
    said += [f"The step was made all the same in {iterations(made)}."] * bool(len(made))
    said += [f"The train step left the step out in {iterations(left_out)}."] * bool(len(left_out))
    return " ".join(said)


def _new_levels(group: Group, known: Norms, rollbacks: set[int]) -> Iterator[Finding]:
    """Spikes in a row, at which a rule starts afresh, unless the training went back there."""
    begins, length = [], 0
    for step, norm in zip(*known.each, strict=True):
        length = length + 1 if np.isin(step, known.spikes) and np.isfinite(norm) else 0
        if length == limits.SPIKES_IN_A_ROW and step not in rollbacks:
            begins.append(step)
    if begins:
        name = group.name("spike")
        what = f"{limits.SPIKES_IN_A_ROW} spikes in a row or more ({name}), up to {iterations(begins)}: "
        what += "the norm's level has changed, and a rule of GradMonitor's starts afresh there."
        yield Finding("level_change", "warning", what, (name,), steps(begins))


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
    """Where values are missing that were otherwise written at even distances."""
    at, name = known.written, group.name("norm")
    distances = np.diff(at)
    usual = np.median(distances) if len(distances) else 0
    gaps = np.flatnonzero(distances > usual)
    if len(gaps) and np.mean(distances != usual) <= limits.GAPS:
        named = [f"{int(at[gap])} and {int(at[gap + 1])}" for gap in gaps]
        what = f"Nothing is in the file between iterations {listed(named)} ({name}): "
        what += "a run that was killed and resumed, perhaps."
        yield Finding("gap", "note", what, (name,), steps(at[gaps]), {"count": len(gaps)})


def _total(group: Group, metric: str) -> int:
    return int(group.get(metric).finite.values.max(initial=0))
