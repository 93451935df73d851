"""Findings about weights: vanishing and exploding gradients, frozen parameters, sizes of updates."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Array, Series, iterations, listed, number, plural, printable, times

KEY = re.compile(r"(^|.*[._])(k|key|keys)(_?(proj|projection|lin|linear))?\.bias|.*\.(w_?k|to_k)\.bias")
BATCH_NORM = re.compile(r"(^|.*[._])(bn|batch_?norm)[\d_a-z]*", re.IGNORECASE)


def without_gradient(run: Sequence[Group]) -> dict[str, str]:
    """Biases that have no gradient by the model's make -> why, as far as the recorded names tell."""
    biases: dict[str, None] = {}
    follows: dict[str, str] = {}
    for group in run:
        names = [item for items in group.items.values() for item in items]
        if group.kind in ("weights", "parameter", "gradient"):
            biases |= dict.fromkeys(name for name in names if name.endswith(".bias"))
        if group.kind in ("activation", "rcc"):
            follows |= pairwise(dict.fromkeys(names))
            biases |= dict.fromkeys(f"{name}.bias" for name in names if KEY.fullmatch(f"{name}.bias"))
    causes = {}
    for name in biases:
        if KEY.fullmatch(name):
            causes[name] = "attention's softmax takes the bias of its keys away again"
        elif BATCH_NORM.fullmatch(follows.get(name.removesuffix(".bias"), "")):
            causes[name] = "the BatchNorm that follows takes it away again"
    return causes


def persistent(group: Group, metric: str) -> tuple[str, Series, Array, bool]:
    """Name, finite series and the steps above the metric's limit, and whether it persists there to the end."""
    series, limit = group.get(metric).finite, limits.PERSISTENT[metric]
    end = series.last_quarter.values > limit
    lasts = len(end) > 0 and bool(end[-1]) and float(np.mean(end)) >= limits.PERSISTENT_SHARE
    return group.name(metric), series, series.where(series.values > limit), lasts


def small_or_large_gradients(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Gradients that vanish or explode, to the end."""
    for metric, where in (("vanishing", "below"), ("exploding", "above")):
        name, counts, above, lasts = persistent(group, f"{metric}_count")
        if not lasts:
            continue
        count = max(1, round(counts.last_quarter.end(1.0)))
        known = without_gradient(run) if metric == "vanishing" else {}
        explained = 0 < count <= len(known)
        harmless = explained or (metric == "vanishing" and _from_the_beginning(group, counts, count))
        what = f"{plural(count, 'parameter')} with a gradient norm {where} the {metric} threshold ({name}), "
        what += "from the beginning, while the rest learn" if harmless else "to the end"
        if explained:
            what += f", as expected: {_because(known)}"
        severity, advice = "note" if harmless else "warning", "No action needed." if explained else ""
        yield Finding(f"{metric}_gradients", severity, f"{what}.", (name,), steps(above[:1]), {"count": count}, advice)


def _because(known: Mapping[str, str]) -> str:
    """Names by their cause."""
    by_cause: dict[str, list[str]] = {}
    for name, cause in known.items():
        by_cause.setdefault(cause, []).append(printable(name))
    return "; ".join(f"{listed(names)} ({cause})" for cause, names in by_cause.items())


def _from_the_beginning(group: Group, counts: Series, count: int) -> bool:
    """Whether those that vanish are few, and have been as many from the beginning."""
    first = counts.values[: max(1, len(counts.values) // 4)]
    known = len(group.each("topk_grad"))  # no more than there are: the largest of each iteration
    few = count <= max(limits.FEW_VANISHING, limits.VANISHING_SHARE * known)
    return few and float(np.mean(first > 0)) >= limits.PERSISTENT_SHARE and count <= float(np.median(first))


def frozen(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Parameters that no longer move, or did not for a while."""
    name, counts = group.name("frozen_count"), group.get("frozen_count").finite
    at = counts.where(counts.values > 0)
    if not len(at):
        return
    count = int(counts.values[-1])
    if not count:
        most = int(counts.values.max())
        what = f"Up to {plural(most, 'parameter')} stood still in {iterations(at)} ({name}), and move"
        what += f"{'s' * (most == 1)} again."
        yield Finding("frozen_for_a_while", "note", what, (name,), steps(at), {"count": float(most)})
        return
    known = without_gradient(run)
    since = {
        parameter: _since(series, counts)
        for parameter, series in group.each("topk_frozen").items()
        if series.steps[-1] == counts.steps[-1]
    }
    expected = {each: known[each] for each in since if each in known}
    idle = all(each.endswith(".bias") and f"{each.removesuffix('bias')}weight" not in since for each in since)
    harmless = len(since) == count and idle
    told = sorted((step, each) for each, step in since.items() if harmless or each not in expected)
    named = [f"{printable(each)} since iteration {step}" for step, each in told]
    left = count - len(named) - len(expected) * (not harmless)
    more = f" and {left} more" if left else ""
    where = f": {listed(named, 8)}{more}" if named else f", first in iteration {int(at[0])}"
    why = f" It is so by the model's make: {_because(expected)}." if expected else ""
    why += " They are biases whose weights move." if harmless and len(expected) < count else ""
    what = f"{plural(count, 'parameter')} no longer move{'s' * (count == 1)} ({name}){where}.{why}"
    severity, advice = ("note", "No action needed.") if harmless else ("problem", "")
    names, begins = (name, *group.names("topk_frozen", since)), tuple(sorted(set(since.values()))) or steps(at[:1])
    yield Finding("frozen_parameters", severity, what, names, begins, {"count": count}, advice)


def _since(series: Series, counts: Series) -> int:
    """The first iteration of the period without a move that lasts to the end.

    A value is the number of monitored steps since; their distance follows from two values, or from the log.
    """
    step, still = int(series.steps[-1]), series.values[-1]
    distance = float(np.median(np.diff(counts.steps))) if len(counts.steps) > 1 else 1.0
    if len(series.values) > 1 and still > series.values[-2]:
        distance = (step - series.steps[-2]) / (still - series.values[-2])
    return max(int(counts.steps[0]), round(float(step - (still - 1) * distance)))


def group_rates(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """A parameter group whose learning rate is far above the others', and whose updates are far larger."""
    metric = "lr"
    rates = {item: series.finite for item, series in group.each(metric).items()}
    rates |= {name[3:]: series.finite for name, (_, series) in group.scalars.items() if name.startswith("lr/")}
    largest = {item: float(series.values.max()) for item, series in rates.items() if series and series.values.max() > 0}
    weights = next((each for each in run if each.kind == "weights"), None)
    ratio = Series() if weights is None else weights.get("update_ratio_max").finite
    factors = _factors(ratio, weights.get("update_ratio_median").finite) if weights is not None else ratio
    for item, rate in largest.items():
        others = [value for other, value in largest.items() if other != item]
        usual = float(np.median(others)) if others else rate
        if rate < limits.GROUP_RATE * usual:
            continue
        part = max(1, len(factors.values) // 4)
        quarters = [float(np.median(factors.values[at : at + part])) for at in range(0, len(factors.values), part)]
        factor = max(quarters, default=0.0)
        what = (
            f"Parameter {item.replace('_', ' ')} has a learning rate of {number(rate, 3)} ({group.name(metric)}/{item}"
        )
        what += f"), {times(rate / usual)} that of the other groups"
        severity = "note"
        if factor >= limits.GROUP_RATIO and weights is not None:
            severity = "warning"
            named = weights.each("topk_update_ratio")
            worst = sorted(named, key=lambda name: -float(np.nanmax(named[name].values)))[:3]
            where = f"; largest in {listed(map(printable, worst))}" if worst else ""
            what += f", and the largest update ratio is up to {times(factor)} the median one{where}"
        at = steps(rates[item].steps[:1])
        yield Finding(
            "group_rate", severity, f"{what}.", group.names(metric, [item]), at, {"rate": rate, "usual": usual}
        )


def ratios(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """How much a step moves the parameters for their size."""
    name, median = group.name("update_ratio_median"), group.get("update_ratio_median").finite
    if not median:
        return
    usual, since = float(np.median(median.values)), steps(median.steps[:1])
    for kind, unusual, share, norm in (
        ("large_updates", usual > limits.LARGE_UPDATE, f"{100 * usual:.2g} %", "0.1 %"),
        ("small_updates", 0 < usual < limits.SMALL_UPDATE, number(usual, 2), "1e-3"),
    ):
        if unusual:
            what = f"A step moves the median parameter by {share} of its size ({name}); {norm} is usual."
            yield Finding(kind, "warning", what, (name,), since, {"median": usual})
    for metric, words in (("update_ratio_max", "more"), ("update_ratio_min", "less")):
        end = group.get(metric).finite
        factors = _factors(end, median) if words == "more" else _factors(median, end)
        if not factors:
            continue
        far = float(np.median(factors.last_quarter.values))
        severity = ""
        if words == "less":
            severity = "note" if far > limits.SLOW_SPREAD and not without_gradient(run) else ""
        elif _lasts(factors, far):
            severity = "warning" if far >= limits.UPDATE_SPREAD else "note" if far >= limits.NOTED_SPREAD else ""
        if severity:
            what = f"One parameter moves {times(far)} {words} for its size than the median one, to the end "
            what += f"({group.name(metric)}, about {number(end.last_quarter.end(1.0), 3)})."
            names, at = (group.name(metric), name), steps(factors.steps[:1])
            yield Finding("update_ratio_outlier", severity, what, names, at, {"factor": far})


def _factors(larger: Series, smaller: Series) -> Series:
    """How many times one series is above another, where both are above 0."""
    others = smaller.at(larger.steps)
    known = (larger.values > 0) & (others > 0)
    return Series(larger.steps[known], larger.values[known] / others[known])


def _lasts(factors: Series, end: float) -> bool:
    """Whether the factors have not come down to their end from where they were in the second quarter."""
    count = len(factors.values)
    second = factors.values[count // 4 : count // 2]
    return count >= limits.RATIO_POINTS and end >= limits.LASTING_SHARE * float(np.median(second))


def lost_updates(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Updates that rounding takes."""
    name, series, above, lasts = persistent(group, "lost_update_fraction")
    if lasts:
        share = float(np.median(series.last_quarter.values))
        what = f"Rounding to low precision takes {100 * share:.0f} % of the updates ({name}), to the end."
        yield Finding("lost_updates", "warning", what, (name,), steps(above[:1]), {"share": share})


def together(names: Mapping[str, int] | Iterable[str]) -> str:
    """Names (and how many parameters they stand for) in a sentence, a block as one: ``blocks.3 (12 in it)``."""
    counts = names if isinstance(names, Mapping) else dict.fromkeys(names, 1)
    blocks: dict[str, list[str]] = {}
    for name in counts:
        numbered = re.match(r"(.*?\.\d+)\.", name)
        blocks.setdefault(numbered[1] if numbered else name, []).append(name)
    within = {block: sum(counts[each] for each in its) for block, its in blocks.items()}
    return listed(
        printable(its[0] if within[block] == 1 else f"{block} ({within[block]} in it)") for block, its in blocks.items()
    )
