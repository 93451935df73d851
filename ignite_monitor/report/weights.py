"""What WeightUpdateHandler's series say: frozen parameters, vanishing gradients, unusual update ratios."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Series, iterations, listed, number, printable, times


def weight_findings(group: Group) -> Iterator[Finding]:
    """Findings about how the parameters move.

    Args:
        group: the metrics of one WeightUpdateHandler.
    """
    yield from _frozen(group)
    yield from _ratios(group)
    what = {"vanishing_count": "below the vanishing threshold", "exploding_count": "above the exploding threshold"}
    for metric, where in what.items():
        series = group.get(metric)
        if series is not None and persists(series.finite, 0.0):
            count = round(last_quarter(series.finite).end(1.0))
            yield Finding(
                metric.replace("_count", "_gradients"),
                "warning",
                f"{max(1, count)} parameter{'s' * (count > 1)} with a gradient norm {where} "
                f"({group.name(metric)}), to the end.",
                (group.name(metric),),
                steps(series.where(series.values > 0)[-1:]),
                {"count": count},
            )


def last_quarter(series: Series) -> Series:
    """The part of a series in the last quarter of its values, one at least.

    Args:
        series: the series.
    """
    first = len(series.steps) - max(1, len(series.steps) // 4)
    return Series(series.steps[first:], series.values[first:])


def persists(series: Series, above: float) -> bool:
    """Whether a series is above a number at its end, and not now and then only.

    Args:
        series: the series.
        above: the number.
    """
    values = last_quarter(series).values
    return bool(len(values)) and float(np.mean(values > above)) >= limits.PERSISTENT_SHARE and values[-1] > above


def _frozen(group: Group) -> Iterator[Finding]:
    counts = group.get("frozen_count")
    counts = counts.finite if counts is not None else None
    if counts is None or not (counts.values > 0).any():
        return
    name, count = group.name("frozen_count"), int(counts.values[-1])
    if not count:
        at = counts.where(counts.values > 0)
        yield Finding(
            "frozen_for_a_while",
            "note",
            f"Up to {int(counts.values.max())} parameters stood still in {iterations(at)} ({name}), and move again.",
            (name,),
            steps(at),
            {"count": float(counts.values.max())},
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
        settled = last_quarter(series.finite)
        middle = median.at(settled.steps)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = settled.values / middle if words == "more" else middle / settled.values
        ratios = ratios[np.isfinite(ratios) & (middle > 0) & (settled.values > 0)]
        far = float(np.median(ratios)) if len(ratios) else 0.0
        if far > limits.UPDATE_SPREAD:
            yield Finding(
                "update_ratio_outlier",
                "warning",
                f"One parameter moves {times(far)} {words} for its size than the median one, to the end "
                f"({group.name(metric)}, about {number(last_quarter(series.finite).end(1.0), 3)}).",
                (group.name(metric), name),
                steps(settled.steps[-1:]),
                {"factor": far},
            )
