"""What is told layer by layer: activations, attention, the coordinate check, spectral norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Series, iterations, listed, natural, number, plural, printable, times
from ignite_monitor.report.weights import together


def nonfinite(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Activations that are inf or NaN."""
    counts = group.each("nonfinite_count")
    bad = {module: at for module, series in counts.items() if len(at := series.where(~(series.values == 0)))}
    if not bad:
        return
    begin = min(int(at[0]) for at in bad.values())
    first = _innermost([module for module, at in bad.items() if at[0] == begin])
    at = np.unique(np.concatenate(list(bad.values())))
    lasting = any(series.values[-1] != 0 for series in counts.values())
    more = f", and in {plural(len(bad) - 1, 'more module')}" if len(bad) > 1 else ""
    what = f"Activations that are inf or NaN ({group.root}), first in {printable(first)}{more}: {iterations(at)}."
    what += " They stay so to the end." * lasting
    severity, names = "problem" if lasting else "warning", group.names("nonfinite_count", bad)
    yield Finding("nonfinite_activations", severity, what, names, steps(at), {"modules": len(bad)})


def _innermost(modules: Sequence[str]) -> str:
    """The first that holds no other of them: what holds a module has its output after it."""
    return next(
        name
        for name in modules
        if not any(
            other != name and (name == "_root_" or other.startswith((f"{name}.", f"{name}/"))) for other in modules
        )
    )


def dead(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Units that are 0 over the whole batch."""
    fractions = group.finite("dead_fraction")
    ends = _ends(fractions)
    worst = sorted((module for module in ends if ends[module] >= limits.DEAD_FRACTION), key=lambda each: -ends[each])
    if not worst:
        return
    named = []
    for module in worst:
        onset = _onset(fractions[module], above=False, limit=limits.DEAD_FRACTION)
        since = " from the beginning" if onset is None else f" (half of them since iteration {onset})"
        named.append(f"module {printable(module)}: {100 * ends[module]:.0f} %{since}")
    severity = "problem" if ends[worst[0]] >= limits.MOSTLY_DEAD_FRACTION else "warning"
    what = f"Units that are 0 over the whole batch, at the end ({group.root}/…/dead_fraction): {listed(named)}."
    values = {"modules": len(worst), "largest": ends[worst[0]]}
    yield Finding("dead_units", severity, what, group.names("dead_fraction", worst), values=values)


def outliers(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Modules whose outputs are far larger than the others', or all of them far too large."""
    deviations = group.finite("std")
    if not deviations:
        return
    first_look = {module: float(series.values[0]) for module, series in deviations.items()}
    for when, ends in (("at the end", _ends(deviations)), ("at the first look", first_look)):
        usual = float(np.median(list(ends.values())))
        limit = max(limits.USUAL_ACTIVATION, min(limits.ACTIVATION_SPREAD * usual, max(limits.LARGE_ACTIVATION, usual)))
        far = sorted((module for module in ends if ends[module] > limit), key=lambda each: -ends[each])
        if far and usual > 0:
            since = "from the first look on" if when == "at the end" and first_look[far[0]] > limit else when
            named = listed(f"{printable(each)} ({number(ends[each], 3)})" for each in far)
            what = f"Outputs whose standard deviation is far above the median module's {number(usual, 3)}, {since} "
            what += f"({group.root}/…/std): {named}."
            names, at = group.names("std", far), steps(deviations[far[0]].steps[:1])
            values = {"modules": len(far), "largest": ends[far[0]], "median": usual}
            yield Finding("activation_outlier", "warning", what, names, at, values)
            return


def collapsed(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Attention heads that look at one place alone."""
    heads = group.finite("entropy")
    modules: dict[str, list[str]] = defaultdict(list)
    for head in sorted(heads, key=natural):
        modules[head.rpartition("/")[0]].append(head)
    ends, fallen = _ends(heads), limits.ENTROPY_FALL * limits.COLLAPSED_ENTROPY
    low = {head for head in heads if ends[head] < limits.COLLAPSED_ENTROPY}
    fell = {head for head in low if float(heads[head].values.max()) > fallen}
    # Some heads of a module may always have been sharp, but not all of them.
    sharp = {head for its in modules.values() for head in its if head in fell or low.issuperset(its)}
    if not sharp:
        return
    single = all((series.values == 0).all() for series in heads.values())
    onsets = {head: _onset(heads[head], above=True, limit=limits.COLLAPSED_ENTROPY) for head in sharp}
    named = []
    for module, every in modules.items():
        its = [head for head in every if head in sharp]
        if its:
            begins = [onsets[head] for head in its]
            known = [begin for begin in begins if begin is not None]
            since = "from the first look on" if len(known) < len(begins) else f"since iteration {min(known)}"
            of = listed([head.rpartition("/head_")[2] for head in its], 8)
            named.append(f"{printable(module)} head{'s' * (len(its) > 1)} {of} ({since})")
    largest = max(ends[head] for head in sharp)
    severity = "note" if single else "problem" if 2 * len(sharp) >= len(heads) else "warning"
    what = f"{len(sharp)} of {len(heads)} attention heads look at a single place, their entropy {number(largest, 2)} "
    what += f"nats or less ({group.root}): {listed(named)}."
    names = group.names("entropy", (head for head in heads if head in sharp))
    at = tuple(sorted({int(heads[head].steps[0]) if onset is None else onset for head, onset in onsets.items()}))
    values = {"count": len(sharp), "heads": len(heads), "largest": largest}
    advice = "Nothing to do if there is but one place to look at." if single else ""
    yield Finding("attention_collapse", severity, what, names, at, values, advice)


def large_logits(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Attention scores so large that rounding, and one key, decide."""
    heads = group.finite("logit_max")
    largest = {head: float(series.values.max()) for head, series in heads.items()}
    far = sorted((head for head in heads if largest[head] > limits.LARGE_LOGIT), key=lambda each: -largest[each])
    if far:
        first = {head: int(heads[head].where(heads[head].values > limits.LARGE_LOGIT)[0]) for head in far}
        named = [f"{printable(each)} ({number(largest[each], 3)}, since iteration {first[each]})" for each in far]
        what = f"Attention scores above {number(limits.LARGE_LOGIT)} ({group.root}): {listed(named)}."
        names, at = group.names("logit_max", far), tuple(sorted(set(first.values())))
        values = {"heads": len(far), "largest": largest[far[0]]}
        yield Finding("large_logits", "warning", what, names, at, values)


def _ends(series: Mapping[str, Series]) -> dict[str, float]:
    return {item: each.last_quarter.end(1.0) for item, each in series.items()}


def _onset(series: Series, above: bool, limit: float) -> int | None:
    """The first step after the last at which it was above a limit, or below; None if it never was."""
    known = np.flatnonzero(series.values >= limit if above else series.values < limit)
    return int(series.steps[min(known[-1] + 1, len(series.steps) - 1)]) if len(known) else None


def drift(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Layers whose output changed by what comes in far more than by their own weights."""
    both = updates_and_drifts(group)
    far = [layer for layer, (own, from_below) in both.items() if from_below > limits.DRIFT_FACTOR * own > 0]
    far.sort(key=lambda layer: both[layer][0] / both[layer][1])
    if far:
        named = [f"{printable(each)} ({number(both[each][1], 2)} against {number(both[each][0], 2)})" for each in far]
        what = f"Layers whose output changed by their inputs' drift more than {number(limits.DRIFT_FACTOR)} times as "
        what += f"much as by their own weights ({group.root}): {listed(named)}."
        values = {"weight_share": weight_share(both), "layers": len(far)}
        yield Finding("input_drift", "note", what, group.names("input_drift", far), values=values)


def updates_and_drifts(group: Group) -> dict[str, tuple[float, float]]:
    """Of each layer of a coordinate check what its weights changed of its output at the end, and what its input."""
    update, drifts = group.each("weight_update"), group.each("input_drift")
    both = {layer: (update[layer].end(), drifts[layer].end()) for layer in update if layer in drifts}
    return {layer: pair for layer, pair in both.items() if np.isfinite(pair).all() and max(pair) > 0}


def weight_share(both: Mapping[str, tuple[float, float]]) -> float:
    """What share of the layers' changes is their own weights' doing, in the median."""
    return float(np.median([own / (own + from_below) for own, from_below in both.values()]))


def untrained(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Layers whose weights are those they began with, while others' are not."""
    update = {layer: each for layer, each in group.finite("weight_update").items() if len(each.values) > 1}
    still = [layer for layer, series in update.items() if not series.values.any()]
    if 0 < len(still) < len(update):
        what = f"{plural(len(still), 'layer')} whose weights are what they were at the start, to the end "
        what += f"({group.root}/weight_update): {together(still)}."
        names = group.names("weight_update", still)
        yield Finding("untrained", "note", what, names, values={"count": len(still)})


def far_layers(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Layers whose own weight update is far from the others'."""
    update = {layer: series.end() for layer, series in group.each("weight_update").items()}
    known = {layer: value for layer, value in update.items() if np.isfinite(value) and value > 0}
    if len(known) < 4:
        return
    middle, spread = float(np.median(list(known.values()))), limits.LAYER_SPREAD
    far = [layer for layer, value in known.items() if not 1 / spread <= value / middle <= spread]
    far.sort(key=lambda layer: -abs(np.log(known[layer] / middle)))
    if far:
        named = listed(f"{printable(each)} ({number(known[each], 2)})" for each in far)
        what = f"Layers whose weight update is more than {number(spread)} times above or below the median layer's "
        what += f"{number(middle, 2)} ({group.root}/weight_update): {named}."
        names, values = group.names("weight_update", far), {"median": middle, "layers": len(far)}
        yield Finding("weight_update_outlier", "warning", what, names, values=values)


def spectral(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """The weights' largest singular value, where it grew."""
    name, series = group.name("norm_max"), group.get("norm_max").finite
    begin, end = float(series.values[0]) if series else 0.0, series.end()
    if begin > 0 and end > limits.SPECTRAL_GROWTH * begin:
        what = f"The largest spectral norm grew {times(end / begin)} ({name}), from {number(begin)} to {number(end)}."
        yield Finding("spectral_growth", "warning", what, (name,), values={"first": begin, "end": end})
