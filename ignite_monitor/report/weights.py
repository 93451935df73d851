"""What WeightUpdateHandler's series say: frozen parameters, vanishing gradients, unusual update ratios."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Series, iterations, listed, number, printable, times


def weight_findings(group: Group) -> Iterator[Finding]:
    """Findings about how the parameters move."""
    yield from _frozen(group)
    yield from _ratios(group)
    for metric, where in (
        ("vanishing_count", "below the vanishing threshold"),
        ("exploding_count", "above the exploding threshold"),
    ):
        series = group.get(metric)
        if series is None or not persists(series.finite, 0.0):
            continue
        count = max(1, round(last_quarter(series.finite).end(1.0)))
        built_in = metric == "vanishing_count" and _from_the_beginning(group, series.finite, count)
        text = f"{count} parameter{'s' * (count > 1)} with a gradient norm {where} ({group.name(metric)}), "
        text += (
            "from the beginning, while the rest learn: so it is of a bias that a BatchNorm takes away again."
            if built_in
            else "to the end."
        )
        yield Finding(
            metric.replace("_count", "_gradients"),
            "note" if built_in else "warning",
            text,
            (group.name(metric),),
            steps(series.where(series.values > 0)[-1:]),
            {"count": count},
        )


def last_quarter(series: Series) -> Series:
    """The part of a series in the last quarter of its values, one at least."""
    first = len(series.steps) - max(1, len(series.steps) // 4)
    return Series(series.steps[first:], series.values[first:])


def persists(series: Series, above: float) -> bool:
    """Whether a series is above a number at its end, and not now and then only."""
    values = last_quarter(series).values
    return bool(len(values)) and float(np.mean(values > above)) >= limits.PERSISTENT_SHARE and values[-1] > above


def _from_the_beginning(group: Group, counts: Series, count: int) -> bool:
    """Whether those that vanish are few, and have been as many from the beginning."""
    first = counts.values[: max(1, len(counts.values) // 4)]
    known = len(group.each("topk_grad"))  # no more than there are: the largest of each iteration
    few = count <= max(limits.FEW_VANISHING, limits.VANISHING_SHARE * known)
    return few and float(np.mean(first > 0)) >= limits.PERSISTENT_SHARE and count <= float(np.median(first))


def _frozen(group: Group) -> Iterator[Finding]:
    counts = group.get("frozen_count")
    counts = counts.finite if counts is not None else None
    if counts is None or not (counts.values > 0).any():
        return
    name, count = group.name("frozen_count"), int(counts.values[-1])
    if not count:
        at, most = counts.where(counts.values > 0), int(counts.values.max())
        yield Finding(
            "frozen_for_a_while",
            "note",
            f"Up to {most} parameter{'s' * (most > 1)} stood still in {iterations(at)} ({name}), and move"
            f"{'s' * (most == 1)} again.",
            (name,),
            steps(at),
            {"count": float(most)},
        )
        return
    since = {}
    for parameter, series in group.each("topk_frozen").items():
        if series.steps[-1] == counts.steps[-1]:
            since[parameter] = _since(series, counts)
    named = [f"{printable(each)} since iteration {step}" for each, step in sorted(since.items(), key=lambda e: e[1])]
    at = counts.where(counts.values > 0)
    more = f" and {count - len(named)} more" if count > len(named) > 0 else ""
    told = f": {listed(named, 8)}{more}" if named else f", first in iteration {int(at[0])}"
    yield Finding(
        "frozen_parameters",
        "problem",
        f"{count} parameter{'s' * (count > 1)} no longer move{'s' * (count == 1)} ({name}){told}.",
        (name, *(group.items["topk_frozen"][each][0] for each in since)),
        tuple(sorted(set(since.values()))) or steps(at[:1]),
        {"count": count},
    )


def _since(series: Series, counts: Series) -> int:
    """The first iteration of the still stand that lasts to the end.

    A value says in how many monitored steps the parameter has not moved, so each tells where the stand began.
    """
    step, still = int(series.steps[-1]), int(series.values[-1])
    place = int(np.searchsorted(counts.steps, step)) - still + 1
    return int(counts.steps[max(0, place)])


def _ratios(group: Group) -> Iterator[Finding]:
    median = group.get("update_ratio_median")
    median = median.finite if median is not None else None
    if median is None or not len(median.values):
        return
    name, usual = group.name("update_ratio_median"), float(np.median(median.values))
    if usual > limits.LARGE_UPDATE:
        yield Finding(
            "large_updates",
            "warning",
            f"A step moves the median parameter by {100 * usual:.2g} % of its size ({name}); 0.1 % is usual. The "
            "learning rate may be too large.",
            (name,),
            values={"median": usual},
        )
    if usual < limits.SMALL_UPDATE:
        yield Finding(
            "small_updates",
            "warning",
            f"A step moves the median parameter by {number(usual, 2)} of its size ({name}); 1e-3 is usual. It hardly "
            "learns.",
            (name,),
            values={"median": usual},
        )
    for metric, words in (("update_ratio_max", "more"), ("update_ratio_min", "less")):
        series = group.get(metric)
        if series is None:
            continue
        larger, smaller = (series.finite, median) if words == "more" else (median, series.finite)
        factors = _factors(larger, smaller)
        if not len(factors.steps):
            continue
        far = float(np.median(last_quarter(factors).values))
        if words == "less":
            severity = "warning" if far > limits.SLOW_SPREAD else ""
        elif _lasts(factors, far):
            severity = "warning" if far >= limits.UPDATE_SPREAD else "note" if far >= limits.NOTED_SPREAD else ""
        else:
            severity = ""
        if severity:
            yield Finding(
                "update_ratio_outlier",
                severity,
                f"One parameter moves {times(far)} {words} for its size than the median one, to the end "
                f"({group.name(metric)}, about {number(last_quarter(series.finite).end(1.0), 3)}).",
                (group.name(metric), name),
                steps(factors.steps[-1:]),
                {"factor": far},
            )


def _factors(larger: Series, smaller: Series) -> Series:
    """How many times one series is above another, where both are above 0."""
    others = smaller.at(larger.steps)
    known = (larger.values > 0) & (others > 0)
    return Series(larger.steps[known], larger.values[known] / others[known])


def _lasts(factors: Series, end: float) -> bool:
    """Whether the factors have not come down to their end from where they were in the second quarter."""
    count = len(factors.values)
    second = factors.values[count // 4 : count // 2]
    return len(second) > 0 and end >= limits.LASTING_SHARE * float(np.median(second))
