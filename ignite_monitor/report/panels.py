"""Contents of a figure of a run: one panel per chart of the schemas, or per metric."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ignite_monitor.keys import SCHEMAS
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.run import Recorded, Run
from ignite_monitor.report.series import Series, natural
from ignite_monitor.report.summary import assessment, find
from ignite_monitor.report.training import rollbacks

ONE_SCREEN = 8  # panels, unless all are requested

_SCHEMAS = {schema.kind: schema for schema in SCHEMAS}


class Line(NamedTuple):
    """A line of a panel."""

    label: str  # in the legend
    series: Series
    name: str  # of the metric
    style: str = "solid"  # "dashed" for thresholds, "points" for items that come and go


@dataclass(frozen=True)
class Panel:
    """A panel of a figure."""

    title: str
    lines: list[Line]
    marked: Series | None = None  # points that are marked as spikes


@dataclass(frozen=True)
class Picture:
    """Contents of a figure of a run."""

    panels: list[Panel]
    spikes: tuple[int, ...] = ()  # iterations with a gradient spike
    rollbacks: tuple[int, ...] = ()  # iterations with a rollback
    assessment: str = ""  # the run in a few words, empty if metrics were selected
    findings: list[Finding] = field(default_factory=list)
    omitted: int = 0  # number of panels that are not shown


def picture(run: Run, selection: re.Pattern[str] | None = None, every: bool = False) -> Picture:
    """Choose the panels of a run: those that findings are about first, then the user's own, then by monitor.

    Args:
        selection: the metrics to show, by a match anywhere in their names.
        every: whether to show all panels, and lines that are constant.
    """
    flags = [monitor.get("spike") for monitor in run.of("grad")]
    spikes = tuple(sorted({step for series in flags for step in series.where(series.values > 0).tolist()}))
    marks = spikes, tuple(rollback.step for rollback in rollbacks(run))
    panels = [*_own(run), *(panel for monitor in run.monitors for panel in _panels(monitor))]
    if selection is not None:
        chosen = [(panel, [line for line in panel.lines if selection.search(line.name)]) for panel in panels]
        return Picture([replace(panel, lines=lines) for panel, lines in chosen if lines], *marks)
    findings = find(run)
    shown = panels if every else _most_important(panels, findings)
    words = assessment(findings, bool(run.monitors))
    return Picture(shown, *marks, words, findings, len(panels) - len(shown))


def _most_important(panels: list[Panel], findings: list[Finding]) -> list[Panel]:
    """One screen of panels without constant lines, those that findings are about first."""
    alarms = [name for finding in findings if finding.severity != "note" for name in finding.metrics[:1]]
    order = {name: place for place, name in reversed(list(enumerate(alarms)))}
    ranked = []
    for panel in panels:
        lines = [line for line in panel.lines if line.name in order or line.style == "dashed" or _varies(line.series)]
        if any(line.style != "dashed" for line in lines):
            first = min(order.get(line.name, len(alarms)) for line in lines)
            ranked.append((first, replace(panel, lines=lines)))
    ranked.sort(key=lambda entry: entry[0])
    return [panel for _, panel in ranked[:ONE_SCREEN]] or panels[:ONE_SCREEN]


def _varies(series: Series) -> bool:
    return len(series.values) == 1 or bool((series.values != series.values[0]).any())


def _panels(monitor: Recorded) -> Iterator[Panel]:
    """Panels of a monitor: keys of one chart share a panel, and so do the layers or parameters of one metric."""
    charts: dict[str, list[Line]] = defaultdict(list)
    for key in sorted(monitor.series, key=natural):
        chart, label = _chart(monitor.kind, key)
        style = "dashed" if "threshold" in key else "points" if key.startswith("topk") else "solid"
        charts[chart].append(Line(label, monitor.series[key], monitor.name(key), style))
    flags = monitor.get("spike")
    for chart, lines in charts.items():
        value = next((line.series for line in lines if line.label in ("norm", "value")), None)
        spikes = flags.where(flags.values > 0)
        marked = Series(spikes, value.at(spikes)) if value is not None and flags else None
        title = lines[0].name if chart == lines[0].label else f"{monitor.root or monitor.kind}: {chart}"
        yield Panel(title, lines, marked)


def _chart(kind: str, key: str) -> tuple[str, str]:
    """Title of a key's panel, and the label of its line there."""
    keys = _SCHEMAS[kind].keys if kind in _SCHEMAS else ()
    matching = [schema for schema in keys if re.fullmatch(schema.regex, key)]
    schema = next((schema for schema in matching if schema.chart), matching[0] if matching else None)
    if schema is None or "{" not in schema.pattern:
        return (schema.chart if schema else "") or key, key
    family, _, item = key.partition("/")
    if re.search(r"\{\w+\}$", schema.pattern) and not schema.pattern.endswith("{metric}"):
        return schema.chart or family, item
    item, _, metric = item.rpartition("/")
    return schema.chart or (metric if family == kind else f"{family} {metric}"), item


def _own(run: Run) -> Iterator[Panel]:
    """Panels of the user's own metrics by the last word of their names, losses first."""
    panels: dict[str, list[str]] = defaultdict(list)
    for name in run.own:
        panels[_last_word(name)].append(name)
    for word, names in sorted(panels.items(), key=lambda entry: ("loss" not in entry[0].lower(), natural(entry[0]))):
        lines = [Line(name, run.own[name], name) for name in sorted(names, key=natural)]
        yield Panel(names[0] if len(names) == 1 else word, lines)


def _last_word(name: str) -> str:
    head, _, last = name.rpartition("/")
    return _last_word(head) if head and re.fullmatch(r"(group_)?\d+", last) else last
