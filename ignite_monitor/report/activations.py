"""What ActivationHandler's series say: dead units, values that are not finite, attention that collapsed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Series, iterations, listed, natural, number, printable
from ignite_monitor.report.weights import last_quarter


def activation_findings(group: Group) -> Iterator[Finding]:
    """Findings about what layers put out.

    Args:
        group: the metrics of one ActivationHandler, of its kind ``activation``.
    """
    yield from _nonfinite(group)
    yield from _dead(group)


def entropy_findings(group: Group) -> Iterator[Finding]:
    """Findings about attention heads.

    Args:
        group: the metrics of the kind ``attention_entropy``.
    """
    heads = group.each("entropy")
    collapsed = {head: series for head, series in heads.items() if _has_collapsed(series.finite)}
    if not collapsed:
        return
    by_module: dict[str, list[str]] = defaultdict(list)
    for head in sorted(collapsed, key=natural):
        module, _, number_of = head.rpartition("/head_")
        by_module[module].append(number_of)
    onsets = {head: _onset(series.finite) for head, series in collapsed.items()}
    named = [
        f"{printable(module)} head{'s' * (len(its) > 1)} {listed(its, 8)} (since iteration "
        f"{min(onsets[f'{module}/head_{each}'] for each in its)})"
        for module, its in by_module.items()
    ]
    ends = [last_quarter(series.finite).end(1.0) for series in collapsed.values()]
    yield Finding(
        "attention_collapse",
        "problem" if 2 * len(collapsed) >= len(heads) else "warning",
        f"The entropy of {len(collapsed)} of {len(heads)} attention heads collapsed, to {number(max(ends), 2)} nats or "
        f"less ({group.root}): {listed(named)}.",
        tuple(group.items["entropy"][head][0] for head in collapsed),
        tuple(sorted(set(onsets.values()))),
        {"count": len(collapsed), "heads": len(heads), "largest": max(ends)},
    )


def _has_collapsed(series: Series) -> bool:
    if len(series.values) < 2:
        return False
    end = last_quarter(series).end(1.0)
    return (
        end < limits.COLLAPSED_ENTROPY and float(series.values.max()) > limits.ENTROPY_FALL * limits.COLLAPSED_ENTROPY
    )


def _onset(series: Series) -> int:
    """The first step from which on it stays collapsed."""
    above = np.flatnonzero(series.values >= limits.COLLAPSED_ENTROPY)
    return int(series.steps[min(above[-1] + 1, len(series.steps) - 1)]) if len(above) else int(series.steps[0])


def _nonfinite(group: Group) -> Iterator[Finding]:
    places = {module: series.where(~(series.values == 0)) for module, series in group.each("nonfinite_count").items()}
    places = {module: at for module, at in places.items() if len(at)}
    if not places:
        return
    first = min(places, key=lambda module: int(places[module][0]))
    at = np.unique(np.concatenate(list(places.values())))
    lasting = [module for module, series in group.each("nonfinite_count").items() if series.values[-1] != 0]
    more = f", and in {len(places) - 1} more modules" if len(places) > 1 else ""
    text = f"Activations that are inf or NaN ({group.root}), first in {printable(first)}{more}: {iterations(at)}."
    yield Finding(
        "nonfinite_activations",
        "problem" if lasting else "warning",
        text + (" They stay so to the end." if lasting else ""),
        tuple(group.items["nonfinite_count"][module][0] for module in places),
        steps(at),
        {"modules": len(places)},
    )


def _dead(group: Group) -> Iterator[Finding]:
    ends = {
        module: last_quarter(series.finite).end(1.0)
        for module, series in group.each("dead_fraction").items()
        if len(series.finite.values)
    }
    dead = {module: end for module, end in ends.items() if end >= limits.DEAD_FRACTION}
    if not dead:
        return
    worst = sorted(dead, key=lambda module: -dead[module])
    named = [f"module {printable(module)}: {100 * dead[module]:.0f} %{_grown(group, module)}" for module in worst]
    yield Finding(
        "dead_units",
        "problem" if dead[worst[0]] >= limits.MOSTLY_DEAD_FRACTION else "warning",
        f"Units that are 0 over the whole batch, at the end ({group.root}/…/dead_fraction): {listed(named)}.",
        tuple(group.items["dead_fraction"][module][0] for module in worst),
        (),
        {"modules": len(dead), "largest": dead[worst[0]]},
    )


def _grown(group: Group, module: str) -> str:
    series = group.each("dead_fraction")[module].finite
    above = np.flatnonzero(series.values < limits.DEAD_FRACTION)
    if not len(above):
        return " from the beginning"
    return f" (half of them since iteration {int(series.steps[min(above[-1] + 1, len(series.steps) - 1)])})"
