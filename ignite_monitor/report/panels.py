"""Contents of a figure of a run: one panel per chart of the schemas, or per metric."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ignite_monitor.keys import ACTIVATION, SCHEMAS
from ignite_monitor.report.families import OTHER, Group, groups
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.series import Series, natural
from ignite_monitor.report.summary import detection, find
from ignite_monitor.report.training import rollback_steps

OWN_PANELS = 12
"""How many panels the user's own metrics have at most."""

ONE_SCREEN = 8
"""How many panels there are unless all are requested."""

RANKS = ["loss", "norm", "value", "update_ratio_median", "weight_update_max", "dead_fraction", "std", "norm_max"]
"""Metrics whose panels are shown first, of those that no finding is about."""

_SCHEMAS = {schema.kind: schema for schema in SCHEMAS}


class Line(NamedTuple):
    """A line of a panel."""

    label: str  # in the legend
    series: Series
    name: str  # of the metric
    style: str = "solid"  # "dashed" for thresholds, "points" where there may be gaps


@dataclass(frozen=True)
class Panel:
    """A panel of a figure."""

    title: str
    lines: list[Line]
    kind: str  # of the group
    marked: Series | None = None  # points that are marked as spikes
    rank: int = len(RANKS)


@dataclass(frozen=True)
class Picture:
    """Contents of a figure of a run."""

    panels: list[Panel] = field(default_factory=list)
    spikes: tuple[int, ...] = ()  # iterations with a gradient spike
    rollbacks: tuple[int, ...] = ()  # iterations with a rollback
    detection: str = ""  # the run in a few words, empty where metrics were selected
    findings: tuple[Finding, ...] = ()
    left_out: int = 0  # number of panels that are not shown


def picture(run: Mapping[str, Series], selection: re.Pattern[str] | None = None, every: bool = False) -> Picture:
    """The panels of a run: those that findings are about first.

    Args:
        selection: which metrics to show, by a match anywhere in their names.
        every: whether to show all panels, and lines that are constant.
    """
    all_groups = groups(run)
    flags = [group.get("spike") for group in all_groups if group.kind == "grad"]
    spikes = tuple(sorted({int(step) for each in flags for step in each.where(each.values > 0)}))
    panels = [panel for group in all_groups for panel in _panels(_selected(group, selection)) if panel.lines]
    panels.sort(key=lambda panel: panel.kind != OTHER)
    if selection is not None:
        return Picture(panels, spikes, rollback_steps(run))
    findings = find(run)
    shown = panels if every else _that_matter(panels, findings)
    words = detection(findings, any(group.kind != OTHER for group in all_groups))
    return Picture(shown, spikes, rollback_steps(run), words, tuple(findings), len(panels) - len(shown))


def _that_matter(panels: list[Panel], findings: list[Finding]) -> list[Panel]:
    """One screen of panels without constant lines, those that findings are about first."""
    alarms = [name for finding in findings if finding.severity != "note" for name in finding.metrics[:1]]
    order = {name: place for place, name in reversed(list(enumerate(alarms)))}
    ranked = []
    for panel in panels:
        lines = [line for line in panel.lines if line.name in order or line.style == "dashed" or _varies(line.series)]
        if any(line.style != "dashed" for line in lines):
            first = min(order.get(line.name, len(alarms)) for line in lines)
            ranked.append((first, panel.rank, replace(panel, lines=lines)))
    ranked.sort(key=lambda entry: entry[:2])
    return [panel for _, _, panel in ranked[:ONE_SCREEN]] or panels[:ONE_SCREEN]


def _varies(series: Series) -> bool:
    return len(series.values) == 1 or bool((series.values != series.values[0]).any())


def _selected(group: Group, selection: re.Pattern[str] | None) -> Group:
    def chosen(entries: Mapping[str, tuple[str, Series]]) -> dict[str, tuple[str, Series]]:
        return {each: entry for each, entry in entries.items() if selection is None or selection.search(entry[0])}

    items = {metric: chosen(entries) for metric, entries in group.items.items()}
    return Group(group.kind, group.root, chosen(group.scalars), items)


def _panels(group: Group) -> Iterator[Panel]:
    """Panels of a group: metrics of one chart share a panel; layers and parameters are the lines of their metric's."""
    if group.kind == OTHER:
        yield from _own(group)
        return
    charts: dict[str, list[str]] = defaultdict(list)
    for metric in sorted(group.scalars, key=natural):
        charts[_chart(group, metric) or metric].append(metric)
    for chart, metrics in charts.items():
        lines = [
            Line(metric, group.get(metric), group.scalars[metric][0], "dashed" if "threshold" in metric else "solid")
            for metric in metrics
        ]
        title = group.name(chart) if chart == metrics[0] else f"{group.root}: {chart}"
        yield Panel(title, lines, group.kind, _marked(group, metrics), _rank(metrics))
    for metric, items in sorted(group.items.items(), key=lambda entry: natural(entry[0])):
        style = "points" if metric.startswith("topk") else "solid"
        lines = [Line(item, items[item][1], items[item][0], style) for item in sorted(items, key=natural)]
        chart = _chart(group, metric)
        yield Panel(f"{group.root}: {chart or metric}", lines, group.kind, rank=_rank([metric]))


def _chart(group: Group, metric: str) -> str:
    schema = _SCHEMAS.get(group.kind, ACTIVATION)
    if schema is ACTIVATION:  # the kind is one of its families
        item = "_/head_0" if metric in ("entropy", "logit_max") else f"_/{metric}"
        metric = f"{group.kind}/{item}"
    names = metric, f"{metric}/_", f"{metric}/0"
    keys = [key for key in schema.keys if key.chart and any(re.fullmatch(key.regex, name) for name in names)]
    return keys[0].chart if keys else ""


def _marked(group: Group, metrics: list[str]) -> Series | None:
    metric = next((name for name in ("norm", "value") if name in metrics), "")
    flags = group.get("spike")
    if not metric or not flags:
        return None
    at = flags.where(flags.values > 0)
    return Series(at, group.get(metric).at(at))


def _rank(metrics: list[str]) -> int:
    return min((RANKS.index(metric) for metric in metrics if metric in RANKS), default=len(RANKS))


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
        lines = [Line(name, run[name], name) for name in sorted(names, key=natural)]
        yield Panel(title, lines, OTHER, rank=0 if _is_loss(word) else len(RANKS))


def _last_word(name: str) -> str:
    head, _, last = name.rpartition("/")
    return _last_word(head) if head and re.fullmatch(r"(group_)?\d+", last) else last


def _is_loss(word: str) -> bool:
    return "loss" in word.lower()
