"""What a figure of a run shows: panels by family, each a few lines or very many."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from ignite_monitor.report.families import PER_LAYER, Group, groups
from ignite_monitor.report.series import Array, Series, natural

TWO_STYLES = 6
"""Of how many layers at most solid and dashed lines can be told from each other."""

HEAD = re.compile(r"/head_\d+/(query|key|value)$")

SHARE = (-0.02, 1.02)
"""The scale of what is between 0 and 1."""

OWN_PANELS = 12
"""How many panels the user's own metrics have at most."""


class Line(NamedTuple):
    """A line of a panel.

    Attributes:
        label: what the legend calls it.
        series: what it shows.
        style: ``solid``, ``dashed``, or ``points`` where there may be gaps.
        colour: which colour of the panel; lines with the same one belong together.
    """

    label: str
    series: Series
    style: str = "solid"
    colour: int = 0


@dataclass(frozen=True)
class Panel:
    """A panel of a figure.

    Attributes:
        title: what it shows.
        lines: its lines.
        kind: of which kind of group it is.
        band: the lower and upper end of a shaded band.
        marked: points to be marked as spikes.
        note: what the line styles mean, where that is not in the legend.
        x: what is counted to the right.
        limits: the ends of its scale, where they are known beforehand.
    """

    title: str
    lines: list[Line]
    kind: str
    band: tuple[Series, Series] | None = None
    marked: Series | None = None
    note: str = ""
    x: str = "iteration"
    limits: tuple[float, float] | None = None


@dataclass(frozen=True)
class Picture:
    """All that a figure of a run shows.

    Attributes:
        panels: its panels.
        spikes: the iterations that had a gradient spike.
        last: the run's last iteration.
    """

    panels: list[Panel] = field(default_factory=list)
    spikes: tuple[int, ...] = ()
    last: int = 0


def picture(run: Mapping[str, Series], selection: re.Pattern[str] | None = None) -> Picture:
    """The panels of a run.

    Args:
        selection: which metrics to show, by a match anywhere in their names; None for all.
    """
    found = groups(run)
    spikes: set[int] = set()
    for group in found:
        flags = group.get("spike")
        if group.kind == "grad" and flags is not None:
            spikes |= {int(step) for step in flags.where(flags.values > 0)}
    panels: list[Panel] = []
    for group in found:
        chosen = _selected(group, selection)
        panels += [panel for panel in PANELS[group.kind](chosen) if panel.lines]
    own = [panel for panel in panels if panel.kind == "other"]
    last = max((int(series.steps[-1]) for group in found for series in _all(group) if group.kind != "other"), default=0)
    return Picture(own + [panel for panel in panels if panel.kind != "other"], tuple(sorted(spikes)), last)


def _all(group: Group) -> Iterator[Series]:
    yield from (series for _, series in group.scalars.values())
    for items in group.items.values():
        yield from (series for _, series in items.values())


def _selected(group: Group, selection: re.Pattern[str] | None) -> Group:
    if selection is None:
        return group
    scalars = {metric: entry for metric, entry in group.scalars.items() if selection.search(entry[0])}
    items = {
        metric: {item: entry for item, entry in entries.items() if selection.search(entry[0])}
        for metric, entries in group.items.items()
    }
    return Group(group.kind, group.root, scalars, items)


def _scalars(group: Group, *metrics: str) -> list[Line]:
    there = [(metric, group.get(metric)) for metric in metrics]
    return [Line(metric, series, colour=at) for at, (metric, series) in enumerate(there) if series is not None]


def _grad(group: Group) -> Iterator[Panel]:
    norm, threshold, flags = group.get("norm"), group.get("threshold"), group.get("spike")
    lines = [Line("norm", norm)] if norm is not None else []
    lines += [Line("threshold", threshold, "dashed", 1)] if threshold is not None else []
    lines = lines or _scalars(group, "mean", "std")
    marked = None
    if norm is not None and flags is not None:
        at = flags.where(flags.values > 0)
        marked = Series(at, norm.at(at))
    yield Panel(f"{group.root}: gradient norm", lines, "grad", marked=marked)
    counts = _scalars(group, "spike_count", "skipped_count", "nonfinite_count")
    if any((line.series.values > 0).any() for line in counts):
        yield Panel(f"{group.root}: counts so far", counts, "grad")


def _weights(group: Group) -> Iterator[Panel]:
    for what, title in (("update_ratio", "update ratio over parameters"), ("grad", "gradient norm over parameters")):
        lines = _scalars(group, *(f"{what}_{which}" for which in ("median", "p95", "max", "min")))
        low, high = group.get(f"{what}_min"), group.get(f"{what}_max")
        band = (low, high) if low is not None and high is not None and len(low.steps) == len(high.steps) else None
        yield Panel(f"{group.root}: {title}", lines, "weights", band=band)
    yield Panel(
        f"{group.root}: parameters counted",
        _scalars(group, "frozen_count", "vanishing_count", "exploding_count"),
        "weights",
    )
    named = {"topk_grad": "largest gradient norms", "topk_frozen": "monitored steps without a move"}
    for metric, title in named.items():
        yield Panel(f"{group.root}: {title}", _lines(group.each(metric), "points"), "weights")


def _lines(items: Mapping[str, Series], style: str = "solid") -> list[Line]:
    return [Line(item, items[item], style, at) for at, item in enumerate(sorted(items, key=natural))]


def _per_layer(group: Group) -> Iterator[Panel]:
    for metric in sorted(group.items):
        every = group.each(metric)
        heads = {item: series for item, series in every.items() if HEAD.search(item)}
        modules = {item: series for item, series in every.items() if item not in heads}
        for items, of in ((modules, ""), (heads, " of each head's query, key and value")):
            quiet = metric == "nonfinite_count" and not any((series.values != 0).any() for series in items.values())
            if not quiet:
                limits = SHARE if metric == "dead_fraction" else None
                yield Panel(f"{group.root}: {metric}{of}", _lines(items), group.kind, limits=limits)
    yield Panel(group.root, _scalars(group, *group.scalars), group.kind)


def _entropy(group: Group) -> Iterator[Panel]:
    yield Panel(f"{group.root} of each head, in nats", _lines(group.each("entropy")), group.kind)


def _rcc(group: Group) -> Iterator[Panel]:
    update, drift = group.each("weight_update"), group.each("input_drift")
    layers = {layer: at for at, layer in enumerate(sorted({*update, *drift}, key=natural))}
    if len(layers) <= TWO_STYLES:
        lines = [Line(layer, update[layer], "solid", at) for layer, at in layers.items() if layer in update]
        lines += [Line(layer, drift[layer], "dashed", at) for layer, at in layers.items() if layer in drift]
        note = "solid: weight update, dashed: input drift"
        yield Panel(f"{group.root}: weight update against input drift", lines, "rcc", note=note)
    else:
        yield Panel(f"{group.root}: weight update", _lines(update), "rcc")
        yield Panel(f"{group.root}: input drift", _lines(drift), "rcc")
    for metric in ("weight_share", "output_change", "input_change"):
        limits = SHARE if metric == "weight_share" else None
        yield Panel(f"{group.root}: {metric}", _lines(group.each(metric)), "rcc", limits=limits)
    yield Panel(f"{group.root}: over layers", _scalars(group, *sorted(group.scalars)), "rcc")


def _mixed(group: Group) -> Iterator[Panel]:
    """Every metric has a unit of its own."""
    for metric in group.scalars:
        yield Panel(group.name(metric), _scalars(group, metric), group.kind)
    for metric in group.items:
        yield Panel(f"{group.root}/{metric}", _lines(group.each(metric)), group.kind)


def _spectral(group: Group) -> Iterator[Panel]:
    norms = [metric for metric in group.scalars if "norm" in metric]
    yield Panel(f"{group.root}: norms over weights", _scalars(group, *norms), group.kind)
    rest = {metric: entry for metric, entry in group.scalars.items() if metric not in norms}
    yield from _mixed(Group(group.kind, group.root, rest, group.items))


def _own(group: Group) -> Iterator[Panel]:
    run = dict(group.scalars.values())
    panels: dict[str, list[str]] = {}
    for part in (_last_word, _first_word):
        panels = {}
        for name in run:
            panels.setdefault(part(name), []).append(name)
        if len(panels) <= OWN_PANELS:
            break
    if len(panels) > OWN_PANELS:
        crowded = sorted(panels, key=lambda word: (-len(panels[word]), natural(word)))
        rest = [name for word in crowded[OWN_PANELS - 1 :] for name in panels.pop(word)]
        panels["other metrics"] = rest
    for word, names in sorted(panels.items(), key=lambda entry: (not _is_loss(entry[0]), natural(entry[0]))):
        title = names[0] if len(names) == 1 else word
        yield Panel(title, _lines({name: run[name] for name in names}), "other", x="step")


def _last_word(name: str) -> str:
    head, _, last = name.rpartition("/")
    return _last_word(head) if head and re.fullmatch(r"(group_)?\d+", last) else last


def _first_word(name: str) -> str:
    return name.partition("/")[0]


def _is_loss(word: str) -> bool:
    return "loss" in word.lower()


PANELS: dict[str, Callable[[Group], Iterator[Panel]]] = {
    "grad": _grad,
    "weights": _weights,
    "rcc": _rcc,
    "attention_entropy": _entropy,
    **dict.fromkeys(PER_LAYER, _per_layer),
    "spectral": _spectral,
    "step": _mixed,
    "alignment": _mixed,
    "maxp": _mixed,
    "other": _own,
}


def thinned(series: Series, points: int) -> Series:
    """A series with fewer points that looks the same: of each stretch the smallest and the largest value."""
    count = len(series.steps)
    if count <= 2 * points:
        return series
    edges = np.linspace(0, count, points + 1).astype(int)
    keep: list[int] = []
    for first, end in pairwise(edges):
        values = series.values[first:end]
        bad = np.flatnonzero(~np.isfinite(values))
        if len(bad) == len(values):
            keep.append(int(first))
            continue
        keep += [int(first + np.nanargmin(_plain(values))), int(first + np.nanargmax(_plain(values)))]
        keep += [int(first + bad[0])] if len(bad) else []
    kept = sorted(set(keep))
    return Series(series.steps[kept], series.values[kept])


def decades(values: Array) -> float:
    """How many decades positive values span; 0 if there are none.

    Args:
        values: finite values.
    """
    positive = values[values > 0]
    return float(np.log10(positive.max()) - np.log10(positive.min())) if len(positive) else 0.0


def short(labels: list[str], length: int = 36) -> list[str]:
    """Labels without what all of them begin with, and without their middles where they are long.

    Args:
        length: how long they may be.
    """
    parts = [label.split(".") for label in labels]
    common = 0
    if len(labels) > 1 and Counter(labels).most_common(1)[0][1] == 1:
        while all(len(part) > common + 1 and part[common] == parts[0][common] for part in parts):
            common += 1
        common -= common and any(part[common][:1].isdecimal() for part in parts)  # h.0, not 0
    cut = [("…" if common else "") + ".".join(part[common:]) for part in parts]
    return [
        each if len(each) <= length else f"{each[: length // 3]}…{each[-(length - length // 3 - 1) :]}" for each in cut
    ]


def _plain(values: Array) -> Array:
    return np.where(np.isfinite(values), values, np.nan)
