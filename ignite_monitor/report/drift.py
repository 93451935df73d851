"""What the coordinate check and the spectral norms say."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.series import listed, number, printable, times


def drift_findings(group: Group) -> Iterator[Finding]:
    """Findings about what changed each layer's output: its own weights, or what comes in."""
    update = {layer: series.end() for layer, series in group.each("weight_update").items()}
    drift = {layer: series.end() for layer, series in group.each("input_drift").items()}
    both = {layer: (update[layer], drift[layer]) for layer in update if layer in drift}
    both = {layer: pair for layer, pair in both.items() if np.isfinite(pair).all() and max(pair) > 0}
    if both:
        drifting = [layer for layer, (own, from_below) in both.items() if from_below > limits.DRIFT_FACTOR * own]
        drifting.sort(key=lambda layer: both[layer][0] / both[layer][1])
        share = float(np.median([own / (own + from_below) for own, from_below in both.values()]))
        text = f"Of what changed the layers' outputs since the start, {100 * share:.0f} % is their own weights' doing "
        text += f"(median of {len(both)} layers, {group.root}), the rest their inputs' drift."
        if drifting:
            named = [
                f"{printable(each)} ({number(both[each][1], 2)} against {number(both[each][0], 2)})"
                for each in drifting
            ]
            text += (
                f" Input drift outweighs weight update by more than {number(limits.DRIFT_FACTOR)} in {listed(named)}."
            )
        yield Finding(
            "input_drift",
            "note",
            text,
            tuple(group.items["input_drift"][layer][0] for layer in drifting),
            values={"weight_share": share, "layers": len(drifting)},
        )
    yield from _far_layers(group, update)


def spectral_findings(group: Group) -> Iterator[Finding]:
    """Findings about the weights' largest singular values."""
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


def _far_layers(group: Group, update: dict[str, float]) -> Iterator[Finding]:
    known = {layer: value for layer, value in update.items() if np.isfinite(value) and value > 0}
    if len(known) < 4:
        return
    middle = float(np.median(list(known.values())))
    far = {layer: value / middle for layer, value in known.items()}
    spread = limits.LAYER_SPREAD
    far = {layer: factor for layer, factor in far.items() if factor > spread or factor < 1 / spread}
    if far:
        order = sorted(far, key=lambda layer: -abs(np.log(far[layer])))
        named = [f"{printable(each)} ({number(known[each], 2)})" for each in order]
        yield Finding(
            "weight_update_outlier",
            "warning",
            f"Layers whose weight update is more than {number(spread)} times above or below the median layer's "
            f"{number(middle, 2)} ({group.root}/weight_update): {listed(named)}.",
            tuple(group.items["weight_update"][layer][0] for layer in order),
            values={"median": middle, "layers": len(far)},
        )
