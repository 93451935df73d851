"""What GradMonitor's series say: spikes, what was skipped, what came after, overflows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Array, Series, iterations, listed, number, times


def gradient_findings(group: Group, weights: Sequence[Group]) -> Iterator[Finding]:
    """Findings about gradient norms.

    Args:
        weights: those of the WeightUpdateHandlers, which know whether a step was made.
    """
    norm, spike = group.get("norm"), group.get("spike")
    if norm is None or spike is None:
        return
    flagged = spike.where(spike.values > 0)
    bad = norm.where(~np.isfinite(norm.values))
    yield from _nonfinite(group, norm, np.intersect1d(bad, flagged))
    yield from _overflows(group, norm, np.setdiff1d(bad, flagged))
    finite = np.setdiff1d(flagged, bad)
    unseen = _total(group, "spike_count") - len(flagged)
    if len(finite) or unseen > 0:
        yield _spikes(group, norm, finite, max(0, unseen), weights)
    yield from _new_levels(group, spike, bad)
    yield from _gaps(group, norm)


def _nonfinite(group: Group, norm: Series, at: Array) -> Iterator[Finding]:
    if not len(at):
        return
    stays = not np.isfinite(norm.values[-1])
    text = f"{_count(len(at), 'gradient')} with inf or NaN in {_them(at)} ({group.name('norm')}): {iterations(at)}."
    if stays:
        last_good = norm.finite.steps
        since = f" since iteration {int(last_good[-1])}" if len(last_good) else ""
        text += f" It stays so to the end: no finite norm{since}."
    else:
        text += f" {_skipped(group, len(at))}"
    yield Finding(
        "nonfinite_gradients",
        "problem" if stays else "warning",
        text,
        (group.name("norm"),),
        steps(at),
        {"count": len(at)},
    )


def _overflows(group: Group, norm: Series, at: Array) -> Iterator[Finding]:
    if not len(at):
        return
    rate = len(at) / len(norm.steps)
    many = rate > limits.OVERFLOW_RATE and len(at) > limits.OVERFLOW_ALLOWANCE
    judgement = "far more than a GradScaler needs to find its scale" if many else "as a GradScaler makes them"
    yield Finding(
        "overflows",
        "warning" if many else "note",
        f"{_count(len(at), 'overflow')} of the scaled gradient, {judgement} ({100 * rate:.2g} % of "
        f"{len(norm.steps)}): {iterations(at)}.",
        (group.name("norm"), group.name("nonfinite_count")),
        steps(at),
        {"count": len(at), "share": rate},
    )


def _spikes(group: Group, norm: Series, at: Array, unseen: int, weights: Sequence[Group]) -> Finding:
    norms, thresholds = norm.at(at), (group.get("threshold") or Series(at[:0], at[:0])).at(at)
    factors = norms / np.where(thresholds > 0, thresholds, np.nan)
    worst = int(np.nanargmax(factors)) if np.isfinite(factors).any() else None
    factor = float(factors[worst]) if worst is not None else float("nan")
    rate = (len(at) + unseen) / max(1, len(norm.steps))
    few = factor < limits.SPIKE_FACTOR and rate <= limits.SPIKE_RATE and not unseen
    small = factor < limits.SMALL_EXCESS and rate <= limits.SMALL_EXCESS_RATE and not unseen
    made, left_out = _steps_made(weights, at)
    after = _aftermath(norm, at, factors, _skipped_at(group, at) | np.isin(at, left_out))
    values = {"count": len(at) + unseen, "worst_factor": factor, "aftermath_factor": after}
    severity = "problem" if after > limits.AFTERMATH_FACTOR else "note" if few or small else "warning"
    text = _count(len(at) + unseen, "gradient spike") + f" ({group.name('norm')})"
    text += f": {iterations(at)}" if len(at) else ""
    text += f"; {unseen} of them in iterations that are not in the file" if unseen and len(at) else ""
    text += ", all in iterations that are not in the file" if unseen and not len(at) else ""
    text += "."
    if worst is not None:
        which = f"The largest, in iteration {int(at[worst])}," if len(at) > 1 else "It"
        text += f" {which} was {number(float(norms[worst]))}, {_above(factor)} its threshold of "
        text += f"{number(float(thresholds[worst]))}."
        values |= {"worst_norm": float(norms[worst]), "worst_threshold": float(thresholds[worst])}
    if severity == "note":
        text += (
            " So few, so near the threshold, are noise."
            if few
            else " So near the threshold, they are hardly spikes: with threshold=RobustThreshold() there may be fewer."
        )
    text += " " + (_skipped(group, len(at) + unseen) or _stepped(made, left_out, at))
    if severity == "problem":
        text += f" Afterwards the norm stayed {times(after)} as large as before: it has done damage."
    return Finding("spikes", severity, text.strip(), (group.name("spike"), group.name("norm")), steps(at), values)


def _above(factor: float) -> str:
    return "just above" if factor < 1.05 else times(factor)


def _aftermath(norm: Series, at: Array, factors: Array, skipped: Array) -> float:
    """The largest ratio of the norms after a spike to those before it, of spikes whose step was made.

    A norm that is back soon, or at the end, has not stayed: both the norms right after and all that follow count.
    """
    finite = norm.finite
    calm = Series(*(part[~np.isin(finite.steps, at)] for part in finite))
    ratios, least = [0.0], limits.AFTERMATH_WINDOW // 2
    for spike in at[(factors >= limits.SPIKE_FACTOR) & ~skipped]:
        before = calm.values[calm.steps < spike][-limits.AFTERMATH_WINDOW :]
        after = calm.values[calm.steps > spike]
        if len(after) < least:  # it spikes to the end
            after = finite.values[finite.steps > spike]
        if min(len(before), len(after)) >= least:
            stayed = min(np.median(after[: limits.AFTERMATH_WINDOW]), np.median(after))
            ratios.append(float(stayed / max(np.median(before), np.finfo(float).tiny)))
    return max(ratios)


def _skipped_at(group: Group, at: Array) -> Array:
    """Of which spikes the handler is known to have skipped the step."""
    skips, spikes = group.get("skipped_count"), group.get("spike_count")
    if skips is None or spikes is None:
        return np.zeros(len(at), bool)
    if skips.last >= spikes.last:
        return np.ones(len(at), bool)
    rises = [Series(each.steps, np.diff(each.values, prepend=0.0)).at(at) for each in (skips, spikes)]
    return np.asarray((rises[0] >= rises[1]) & (rises[0] > 0))


def _new_levels(group: Group, spike: Series, bad: Array) -> Iterator[Finding]:
    begins, length = [], 0
    for step, flag in zip(spike.steps, (spike.values > 0) & ~np.isin(spike.steps, bad), strict=True):
        length = length + 1 if flag else 0
        if length == limits.SPIKES_IN_A_ROW:
            begins.append(step)
    if begins:
        yield Finding(
            "level_change",
            "warning",
            f"{limits.SPIKES_IN_A_ROW} spikes in a row or more ({group.name('spike')}), up to {iterations(begins)}: "
            "the norm's level has changed, and a rule of GradMonitor's starts afresh there.",
            (group.name("spike"),),
            steps(begins),
        )


def _gaps(group: Group, norm: Series) -> Iterator[Finding]:
    """Where norms are missing that were otherwise written at even distances."""
    distances = np.diff(norm.steps)
    usual = np.median(distances) if len(distances) else 0
    places = np.flatnonzero(distances > usual)
    if not len(places) or np.mean(distances != usual) > limits.GAPS:
        return
    named = [f"{int(norm.steps[place])} and {int(norm.steps[place + 1])}" for place in places]
    yield Finding(
        "gap",
        "note",
        f"Nothing is in the file between iterations {listed(named)} ({group.name('norm')}): a run that was killed and "
        "resumed, perhaps.",
        (group.name("norm"),),
        steps(norm.steps[places]),
        {"count": len(places)},
    )


def _skipped(group: Group, count: int) -> str:
    skipped = _total(group, "skipped_count")
    if not skipped:
        return ""
    if skipped < count:
        return f"The handler skipped {skipped} steps."
    told = {1: "the step", 2: "both steps"}.get(skipped, f"all {skipped} steps")
    return f"The handler skipped {told}."


def _steps_made(weights: Sequence[Group], at: Array) -> tuple[Array, Array]:
    """Where the optimizer made its step, and where it did not, as far as the weights tell."""
    made, left_out = np.zeros(len(at), bool), np.zeros(len(at), bool)
    for group in weights:
        moved, seen = group.get("update_ratio_max"), group.get("grad_median")
        if seen is None:
            continue
        ratios = moved.at(at) if moved is not None else np.full(len(at), np.nan)
        watched = np.isin(at, seen.steps)
        made |= watched & (ratios > 0)
        left_out |= watched & ~(ratios > 0)
    return at[made], at[left_out & ~made]


def _stepped(made: Array, left_out: Array, at: Array) -> str:
    """Whether the optimizer made its step there."""
    told = [f"The step was made all the same in {iterations(made)}."] * bool(len(made))
    told += [f"The step was left out in {iterations(left_out)}."] * bool(len(left_out))
    unknown = np.setdiff1d(at, [*made, *left_out])
    if told and len(unknown):
        told += [f"In {iterations(unknown)} nobody watched the weights, so it is not known."]
    return " ".join(told) or "The handler skipped no step (a train step that looks at the flag may have)."


def _total(group: Group, metric: str) -> int:
    series = group.get(metric)
    return 0 if series is None or not len(series.finite.values) else int(series.finite.values.max())


def _count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _them(at: Array) -> str:
    return "it" if len(at) == 1 else "them"
