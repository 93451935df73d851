"""What is told layer by layer: activations, attention, the coordinate check, spectral norms."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import (
    Array,
    Series,
    iterations,
    last_quarter,
    listed,
    natural,
    number,
    plural,
    printable,
    times,
)
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
    yield Finding(
        "nonfinite_activations",
        "problem" if lasting else "warning",
        what + " They stay so to the end." * lasting,
        group.names("nonfinite_count", bad),
        steps(at),
        {"modules": len(bad)},
    )


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
    ends = {module: last_quarter(series).end(1.0) for module, series in fractions.items()}
    worst = sorted((module for module in ends if ends[module] >= limits.DEAD_FRACTION), key=lambda each: -ends[each])
    if not worst:
        return
    named = []
    for module in worst:
        onset = _onset(fractions[module], fractions[module].values < limits.DEAD_FRACTION)
        since = " from the beginning" if onset is None else f" (half of them since iteration {onset})"
        named.append(f"module {printable(module)}: {100 * ends[module]:.0f} %{since}")
    yield Finding(
        "dead_units",
        "problem" if ends[worst[0]] >= limits.MOSTLY_DEAD_FRACTION else "warning",
        f"Units that are 0 over the whole batch, at the end ({group.root}/…/dead_fraction): {listed(named)}.",
        group.names("dead_fraction", worst),
        (),
        {"modules": len(worst), "largest": ends[worst[0]]},
    )


def outliers(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Modules whose outputs are far larger than the others', or all of them far too large."""
    deviations = group.finite("std")
    if not deviations:
        return
    for when, ends in (
        ("at the end", {module: last_quarter(series).end(1.0) for module, series in deviations.items()}),
        ("at the first look", {module: float(series.values[0]) for module, series in deviations.items()}),
    ):
        usual = float(np.median(list(ends.values())))
        limit = max(limits.USUAL_ACTIVATION, min(limits.ACTIVATION_SPREAD * usual, max(limits.LARGE_ACTIVATION, usual)))
        far = sorted((module for module in ends if ends[module] > limit), key=lambda each: -ends[each])
        if far and usual > 0:
            from_the_first = when == "at the end" and deviations[far[0]].values[0] > limit
            since = "from the first look on" if from_the_first else when
            named = [f"{printable(each)} ({number(ends[each], 3)})" for each in far]
            yield Finding(
                "activation_outlier",
                "warning",
                f"Outputs whose standard deviation is far above the median module's {number(usual, 3)}, {since} "
                f"({group.root}/…/std): {listed(named)}.",
                group.names("std", far),
                steps(deviations[far[0]].steps[:1]),
                {"modules": len(far), "largest": ends[far[0]], "median": usual},
            )
            return


def collapsed(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Attention heads that look at one place alone."""
    heads = group.finite("entropy")
    modules: dict[str, list[str]] = defaultdict(list)
    for head in sorted(heads, key=natural):
        modules[head.rpartition("/")[0]].append(head)
    low = {head: last_quarter(series).end(1.0) < limits.COLLAPSED_ENTROPY for head, series in heads.items()}
    fell = {head for head in heads if low[head] and _has_fallen(heads[head])}
    # Some heads of a module may always have been sharp, but not all of them.
    sharp = {head for its in modules.values() for head in its if head in fell or all(low[each] for each in its)}
    if not sharp:
        return
    single = all((heads[head].values == 0).all() for head in heads)
    onsets = {head: _onset(heads[head], heads[head].values >= limits.COLLAPSED_ENTROPY) for head in sharp}
    named = []
    for module, every in modules.items():
        its = [head for head in every if head in sharp]
        if its:
            begins = [onsets[head] for head in its]
            known = [begin for begin in begins if begin is not None]
            since = "from the first look on" if len(known) < len(begins) else f"since iteration {min(known)}"
            of = listed([head.rpartition("/head_")[2] for head in its], 8)
            named.append(f"{printable(module)} head{'s' * (len(its) > 1)} {of} ({since})")
    largest = max(last_quarter(heads[head]).end(1.0) for head in sharp)
    yield Finding(
        "attention_collapse",
        "note" if single else "problem" if 2 * len(sharp) >= len(heads) else "warning",
        f"{len(sharp)} of {len(heads)} attention heads look at a single place, their entropy {number(largest, 2)} nats "
        f"or less ({group.root}): {listed(named)}.",
        group.names("entropy", (head for head in heads if head in sharp)),
        tuple(sorted({int(heads[head].steps[0]) if onset is None else onset for head, onset in onsets.items()})),
        {"count": len(sharp), "heads": len(heads), "largest": largest},
        "Nothing to do if there is but one place to look at." if single else "",
    )


def large_logits(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Attention scores so large that rounding, and one key, decide."""
    heads = {head: each.finite for head, each in group.each("logit_max").items() if len(each.finite.values)}
    largest = {head: float(series.values.max()) for head, series in heads.items()}
    far = sorted((head for head in heads if largest[head] > limits.LARGE_LOGIT), key=lambda each: -largest[each])
    if far:
        first = {head: int(heads[head].where(heads[head].values > limits.LARGE_LOGIT)[0]) for head in far}
        named = [f"{printable(each)} ({number(largest[each], 3)}, since iteration {first[each]})" for each in far]
        yield Finding(
            "large_logits",
            "warning",
            f"Attention scores above {number(limits.LARGE_LOGIT)} ({group.root}): {listed(named)}.",
            tuple(group.items["logit_max"][head][0] for head in far),
            tuple(sorted(set(first.values()))),
            {"heads": len(far), "largest": largest[far[0]]},
        )


def _has_fallen(series: Series) -> bool:
    return float(series.values.max()) > limits.ENTROPY_FALL * limits.COLLAPSED_ENTROPY


def _onset(series: Series, fine: Array) -> int | None:
    """The first step after the last at which it was fine; None if it never was."""
    known = np.flatnonzero(fine)
    return int(series.steps[min(known[-1] + 1, len(series.steps) - 1)]) if len(known) else None


def drift(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Layers whose output changed by what comes in far more than by their own weights."""
    both = updates_and_drifts(group)
    far = [layer for layer, (own, from_below) in both.items() if from_below > limits.DRIFT_FACTOR * own > 0]
    far.sort(key=lambda layer: both[layer][0] / both[layer][1])
    if far:
        named = [f"{printable(each)} ({number(both[each][1], 2)} against {number(both[each][0], 2)})" for each in far]
        yield Finding(
            "input_drift",
            "note",
            f"Layers whose output changed by their inputs' drift more than {number(limits.DRIFT_FACTOR)} times as much "
            f"as by their own weights ({group.root}): {listed(named)}.",
            group.names("input_drift", far),
            values={"weight_share": weight_share(both), "layers": len(far)},
        )


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
    told = any({"not_optimized", "no_gradient"} & each.items.keys() for each in run if each.kind == "weights")
    if 0 < len(still) < len(update) and not told:
        yield Finding(
            "untrained",
            "note",
            f"{plural(len(still), 'layer')} whose weights are what they were at the start, to the end "
            f"({group.root}/weight_update): {together(still)}.",
            group.names("weight_update", still),
            values={"count": len(still)},
        )


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
        named = [f"{printable(each)} ({number(known[each], 2)})" for each in far]
        yield Finding(
            "weight_update_outlier",
            "warning",
            f"Layers whose weight update is more than {number(spread)} times above or below the median layer's "
            f"{number(middle, 2)} ({group.root}/weight_update): {listed(named)}.",
            group.names("weight_update", far),
            values={"median": middle, "layers": len(far)},
        )


def spectral(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """The weights' largest singular value, where it grew."""
    series = group.get("norm_max")
    if series is None or not len(series.finite.values):
        return
    begin, end = float(series.finite.values[0]), series.end()
    if begin > 0 and end > limits.SPECTRAL_GROWTH * begin:
        yield Finding(
            "spectral_growth",
            "warning",
            f"The largest spectral norm grew {times(end / begin)} ({group.name('norm_max')}), from {number(begin)} to "
            f"{number(end)}.",
            (group.name("norm_max"),),
            values={"first": begin, "end": end},
        )


ACTIVATION_RULES = (nonfinite, dead, outliers)
ENTROPY_RULES = (collapsed,)
LOGIT_RULES = (large_logits,)
RCC_RULES = (drift, untrained, far_layers)
SPECTRAL_RULES = (spectral,)
