"""What a figure of a run shows: panels by family, each a few lines or very many."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ignite_monitor.keys import SCHEMAS
from ignite_monitor.report.families import KINDS, PER_LAYER, Group, groups
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.series import Series, natural
from ignite_monitor.report.summary import detection, find
from ignite_monitor.report.training import rollback_steps

TWO_STYLES = 6
"""Of how many layers at most solid and dashed lines can be told from each other."""

HEAD = re.compile(r"/head_\d+/(query|key|value)$")

SHARE = (-0.02, 1.02)
"""The scale of what is between 0 and 1."""

OWN_PANELS = 12
"""How many panels the user's own metrics have at most."""

ONE_SCREEN = 9
"""How many panels there are where not all are asked for."""

LATER = 99
"""The rank of a panel that is shown only if there is room."""

_SCHEMAS = {schema.kind: schema for schema in SCHEMAS}

RANKS = {"std": 5, "dead_fraction": 6}


class Line(NamedTuple):
    """A line of a panel."""

    label: str  # what the legend calls it
    series: Series
    name: str  # the metric's
    style: str = "solid"  # "solid", "dashed", or "points" where there may be gaps
    colour: int = 0  # which one of the panel; lines with the same one belong together
    told: bool = False  # whether a problem or a warning speaks of it


@dataclass(frozen=True)
class Panel:
    """A panel of a figure."""

    title: str
    lines: list[Line]
    kind: str  # of the group
    band: tuple[Series, Series] | None = None  # the lower and upper end of a shaded band
    marked: Series | None = None  # points to be marked as spikes
    note: str = ""  # what the line styles mean, where that is not in the legend
    x: str = "iteration"  # what is counted to the right
    limits: tuple[float, float] | None = None  # the ends of its scale, where they are known beforehand
    rank: int = LATER  # how soon it is shown, of those that no finding speaks of


@dataclass(frozen=True)
class Picture:
    """All that a figure of a run shows."""

    panels: list[Panel] = field(default_factory=list)
    spikes: tuple[int, ...] = ()  # the iterations that had a gradient spike
    rollbacks: tuple[int, ...] = ()  # those after which training went back
    last: int = 0  # the run's last iteration
    detection: str = ""  # the run in a few words, empty where metrics were selected
    findings: tuple[Finding, ...] = ()
    left_out: int = 0  # how many panels it does not show


def picture(run: Mapping[str, Series], selection: re.Pattern[str] | None = None, every: bool = False) -> Picture:
    """The panels of a run: those that matter, what findings speak of first.

    Args:
        selection: which metrics to show, by a match anywhere in their names.
        every: whether to show all panels, and lines that are constant.
    """
    all_groups = groups(run)
    monitored = [group for group in all_groups if group.kind != "other"]
    flags = [group.get("spike") for group in monitored if group.kind == "grad"]
    spikes = tuple(sorted({int(step) for each in flags for step in each.where(each.values > 0)}))
    last = max((int(series.steps[-1]) for group in monitored for series in _all(group)), default=0)
    panels = [panel for group in all_groups for panel in PANELS[group.kind](_selected(group, selection)) if panel.lines]
    panels.sort(key=lambda panel: panel.kind != "other")
    if selection is not None:
        return Picture(panels, spikes, rollback_steps(run), last)
    findings = find(run)
    shown = panels if every else _that_matter(panels, findings)
    words = detection(findings, bool(monitored))
    return Picture(shown, spikes, rollback_steps(run), last, words, tuple(findings), len(panels) - len(shown))


def _that_matter(panels: list[Panel], findings: list[Finding]) -> list[Panel]:
    """One screen of panels without what is constant, what findings speak of first."""
    order = {name: at for at, finding in reversed(list(enumerate(findings))) for name in finding.metrics}
    alarming = {name for finding in findings if finding.severity != "note" for name in finding.metrics}
    ranked = []
    for panel in panels:
        lines = [each for each in panel.lines if each.name in order or each.style == "dashed" or _varies(each.series)]
        if all(each.style == "dashed" for each in lines):
            lines = []
        colours = {colour: at for at, colour in enumerate(sorted({each.colour for each in lines}))}
        lines = [each._replace(told=each.name in alarming, colour=colours[each.colour]) for each in lines]
        first = min((order.get(each.name, LATER) for each in lines if each.told), default=LATER)
        ranked += [(first, panel.rank, replace(panel, lines=lines))] * bool(lines)
    ranked.sort(key=lambda entry: entry[:2])
    return [panel for _, _, panel in ranked[:ONE_SCREEN]] or panels[:ONE_SCREEN]


def _varies(series: Series) -> bool:
    return len(series.values) == 1 or bool((series.values != series.values[0]).any())


def _all(group: Group) -> Iterator[Series]:
    yield from (series for _, series in group.scalars.values())
    for items in group.items.values():
        yield from (series for _, series in items.values())


def _selected(group: Group, selection: re.Pattern[str] | None) -> Group:
    def chosen(entries: Mapping[str, tuple[str, Series]]) -> dict[str, tuple[str, Series]]:
        return {each: entry for each, entry in entries.items() if selection is None or selection.search(entry[0])}

    items = {metric: chosen(entries) for metric, entries in group.items.items()}
    return Group(group.kind, group.root, chosen(group.scalars), items)


def _scalars(group: Group, *metrics: str) -> list[Line]:
    return [
        Line(metric, group.get(metric), group.scalars[metric][0], colour=at)
        for at, metric in enumerate(metrics)
        if metric in group.scalars
    ]


def _judged(group: Group) -> Iterator[Panel]:
    """A number with its threshold: the gradient's norm, or what a SpikeMonitor looks at."""
    name, title, rank = ("norm", "gradient norm", 1) if group.kind == "grad" else ("value", "value", 2)
    value, flags = group.get(name), group.get("spike")
    lines = _scalars(group, name)
    lines += [each._replace(style="dashed", colour=1) for each in _scalars(group, "threshold")]
    lines = lines or _scalars(group, "mean", "std")
    at = flags.where(flags.values > 0)
    marked = Series(at, value.at(at)) if value and flags else None
    yield Panel(f"{group.root}: {title}", lines, group.kind, marked=marked, rank=rank)
    counts = _scalars(group, "spike_count", "skipped_count", "nonfinite_count")
    if any((line.series.values > 0).any() for line in counts):
        yield Panel(f"{group.root}: counts so far", counts, group.kind)


def _weights(group: Group) -> Iterator[Panel]:
    for what, title in (("update_ratio", "update ratio over parameters"), ("grad", "gradient norm over parameters")):
        lines = _scalars(group, *(f"{what}_{which}" for which in ("median", "p95", "max", "min")))
        low, high = group.get(f"{what}_min"), group.get(f"{what}_max")
        band = (low, high) if low and len(low.steps) == len(high.steps) else None
        rank = 2 if what == "update_ratio" else LATER
        yield Panel(f"{group.root}: {title}", lines, "weights", band=band, rank=rank)
    counts = _scalars(group, "frozen_count", "vanishing_count", "exploding_count")
    yield Panel(f"{group.root}: parameters counted", counts, "weights")
    named = {"topk_grad": "largest gradient norms", "topk_frozen": "monitored steps without a move"}
    for metric, title in named.items():
        yield Panel(f"{group.root}: {title}", _lines(group, metric, style="points"), "weights")


def _lines(group: Group, metric: str, items: Mapping[str, Series] | None = None, style: str = "solid") -> list[Line]:
    items, names = group.each(metric) if items is None else items, group.items.get(metric, {})
    return [Line(item, items[item], names[item][0], style, at) for at, item in enumerate(sorted(items, key=natural))]


def _optimizer(group: Group) -> Iterator[Panel]:
    lines = _scalars(group, "rms_median", "rms_p95", "rms_max")
    yield Panel(f"{group.root}: gradient against second moment (RMS)", lines, "optimizer", rank=7)
    for metrics, title, limits in (
        (("epsilon_dominated_median", "epsilon_dominated_max"), "share of elements where eps rules", SHARE),
        (("momentum_cosine_median", "momentum_cosine_min"), "cosine of gradient and momentum", (-1.02, 1.02)),
        (("update_norm",), "norm of the update", None),
    ):
        yield Panel(f"{group.root}: {title}", _scalars(group, *metrics), "optimizer", limits=limits)
    yield Panel(f"{group.root}: largest RMS", _lines(group, "topk_rms", style="points"), "optimizer")


def _per_layer(group: Group) -> Iterator[Panel]:
    for metric in sorted(group.items):
        every = group.each(metric)
        heads = {item: series for item, series in every.items() if HEAD.search(item)}
        modules = {item: series for item, series in every.items() if item not in heads}
        for items, of in ((modules, ""), (heads, " of each head's query, key and value")):
            is_quiet = metric == "nonfinite_count" and not any((series.values != 0).any() for series in items.values())
            if not is_quiet:
                limits = SHARE if metric == "dead_fraction" else None
                rank = LATER if of or group.kind != "activation" else RANKS.get(metric, LATER)
                lines = _lines(group, metric, items)
                yield Panel(f"{group.root}: {metric}{of}", lines, group.kind, limits=limits, rank=rank)
    yield Panel(group.root, _scalars(group, *group.scalars), group.kind)


def _entropy(group: Group) -> Iterator[Panel]:
    yield Panel(f"{group.root} of each head, in nats", _lines(group, "entropy"), group.kind, rank=4)


def _logits(group: Group) -> Iterator[Panel]:
    yield Panel(f"{group.root}, the largest score of each head", _lines(group, "logit_max"), group.kind)


def _rcc(group: Group) -> Iterator[Panel]:
    update, drift = group.each("weight_update"), group.each("input_drift")
    layers = {layer: at for at, layer in enumerate(sorted({*update, *drift}, key=natural))}
    if len(layers) <= TWO_STYLES:
        lines = [
            Line(layer, series, group.items[metric][layer][0], style, layers[layer])
            for metric, found, style in (("weight_update", update, "solid"), ("input_drift", drift, "dashed"))
            for layer, series in sorted(found.items(), key=lambda entry: natural(entry[0]))
        ]
        note = "solid: weight update, dashed: input drift"
        yield Panel(f"{group.root}: weight update against input drift", lines, "rcc", note=note, rank=3)
    else:
        yield Panel(f"{group.root}: weight update", _lines(group, "weight_update"), "rcc", rank=3)
        yield Panel(f"{group.root}: input drift", _lines(group, "input_drift"), "rcc", rank=7)
    for metric in ("weight_share", "output_change", "input_change"):
        limits = SHARE if metric == "weight_share" else None
        yield Panel(f"{group.root}: {metric}", _lines(group, metric), "rcc", limits=limits)
    yield Panel(f"{group.root}: over layers", _scalars(group, *sorted(group.scalars)), "rcc")


def _mixed(group: Group) -> Iterator[Panel]:
    """What shares a chart of TensorBoard's shares a panel; each other metric has a unit of its own."""
    together: dict[str, list[str]] = defaultdict(list)
    for metric in sorted(group.scalars, key=natural):
        key = _SCHEMAS[group.kind].find(metric)
        together[key.chart if key and key.chart else metric].append(metric)
    for chart, metrics in together.items():
        title = group.name(metrics[0]) if len(metrics) == 1 else f"{group.root}: {chart}"
        yield Panel(title, _scalars(group, *metrics), group.kind)
    for metric in sorted(group.items, key=natural):
        yield Panel(f"{group.root}/{metric}", _lines(group, metric), group.kind)


def _spectral(group: Group) -> Iterator[Panel]:
    norms = sorted(metric for metric in group.scalars if "norm" in metric)
    yield Panel(f"{group.root}: norms over weights", _scalars(group, *norms), group.kind, rank=8)
    rest = {metric: entry for metric, entry in group.scalars.items() if metric not in norms}
    yield from _mixed(Group(group.kind, group.root, rest, group.items))


def _own(group: Group) -> Iterator[Panel]:
    run = dict(group.scalars.values())
    panels: dict[str, list[str]] = defaultdict(list)
    crowded = len(set(map(_last_word, run))) > OWN_PANELS
    for name in run:
        panels[name.partition("/")[0] if crowded else _last_word(name)].append(name)
    if len(panels) > OWN_PANELS:
        words = sorted(panels, key=lambda word: (-len(panels[word]), natural(word)))
        panels["other metrics"] = [name for word in words[OWN_PANELS - 1 :] for name in panels.pop(word)]
    for word, names in sorted(panels.items(), key=lambda entry: (not _is_loss(entry[0]), natural(entry[0]))):
        title = names[0] if len(names) == 1 else word
        lines = [Line(name, run[name], name, colour=at) for at, name in enumerate(sorted(names, key=natural))]
        yield Panel(title, lines, "other", x="step", rank=0 if _is_loss(word) else 9)


def _last_word(name: str) -> str:
    head, _, last = name.rpartition("/")
    return _last_word(head) if head and re.fullmatch(r"(group_)?\d+", last) else last


def _is_loss(word: str) -> bool:
    return "loss" in word.lower()


PANELS: dict[str, Callable[[Group], Iterator[Panel]]] = {
    **dict.fromkeys(KINDS, _mixed),
    "grad": _judged,
    "spike": _judged,
    "weights": _weights,
    "optimizer": _optimizer,
    "rcc": _rcc,
    "attention_entropy": _entropy,
    "attention_logit_max": _logits,
    **dict.fromkeys(PER_LAYER, _per_layer),
    "spectral": _spectral,
    "other": _own,
}
