"""Figure of a run: one panel for related keys of a monitor, or per metric, with spikes and reported events marked."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ignite_monitor.hdf5.layout import printable
from ignite_monitor.keys import SCHEMAS
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.run import Array, MonitorSeries, Run, Series, natural
from ignite_monitor.report.summary import summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ONE_SCREEN = 8  # panels, unless all are requested

_SCHEMAS = {schema.kind: schema for schema in SCHEMAS}

# Legible on white and on black.
LINES = ("#2f7fc1", "#e07b00", "#2a9d4a", "#9b6bd0", "#a0704f", "#d060a0")
SPIKE, EVENT, GRID = "#e5383b", "#808080", "#80808040"
EVENT_STYLES = ("--", ":", "-.")
COME_AND_GO = ("topk", "largest", "smallest", "culprit")  # keys of the items that were the extreme ones at a time
MARKED = 30  # spikes, or events, beyond which marks would hide the lines
FEW = len(LINES)
STATISTIC = re.compile(r"_(median|mean|p95|min|max|up|down)$")  # keys that differ in it alone share a panel
AROUND = {"threshold", "lower_threshold", "low", "high"}  # keys in the panel of a monitor's value
LARGEST = 1e100  # of larger sizes, and of smaller ones than the inverse, matplotlib's ticks would exceed float64
LOG_DECADES = 1.5  # of positive values, from which on their scale is logarithmic
SIGNED_RANGE = 1e4  # ratio of largest to median size from which on a scale for both signs is logarithmic


class Line(NamedTuple):
    """A line of a panel."""

    label: str  # in the legend
    series: Series
    style: str = "solid"  # "dashed" for thresholds, "points" for items that come and go


@dataclass(frozen=True)
class Panel:
    """A panel of a figure."""

    title: str
    lines: list[Line]
    marked: Series | None = None  # points that are marked as spikes
    is_chart: bool = True  # False for a single key of a monitor, unless it is a loss


@dataclass(frozen=True)
class Picture:
    """Contents of a figure of a run."""

    panels: list[Panel]
    spikes: tuple[int, ...] = ()  # iterations with a gradient spike
    events: Mapping[str, list[int]] = field(default_factory=dict)  # kind of report -> iterations; without notes
    headline: str = ""  # about the run and the omitted panels; empty if metrics were selected


def picture(run: Run, selection: re.Pattern[str] | None = None, every: bool = False) -> Picture:
    """Choose the panels of a run: those that findings are about first, then the user's own, then by monitor."""
    flags = [monitor.get("spike") for monitor in run.of("grad")]
    spikes = tuple(sorted({step for series in flags for step in series.iterations[series.values > 0].tolist()}))
    events: dict[str, list[int]] = {}
    for report in run.reports:
        if report.severity != "note":
            events.setdefault(report.kind, []).append(report.iteration)
    panels = [*_user_panels(run), *(panel for monitor in run.monitors for panel in _panels(monitor))]
    if selection is not None:
        chosen = [(panel, [line for line in panel.lines if selection.search(line.series.name)]) for panel in panels]
        return Picture([replace(panel, lines=lines) for panel, lines in chosen if lines], spikes, events)
    summary = summarise("", run)
    shown = panels if every else _most_important(panels, summary.findings)
    omitted = f"   ({len(panels) - len(shown)} more panels with --all)" if len(panels) > len(shown) else ""
    return Picture(shown, spikes, events, f"{summary.assessment}{omitted}")


def _most_important(panels: list[Panel], findings: list[Finding]) -> list[Panel]:
    """One screen of panels without constant lines: those that findings are about first, single keys last."""
    alarms = [name for finding in findings if finding.severity != "note" for name in finding.metrics[:1]]
    order = {name: place for place, name in reversed(list(enumerate(alarms)))}
    ranked = []
    for panel in panels:
        lines = [it for it in panel.lines if it.series.name in order or it.style == "dashed" or _varies(it.series)]
        if any(line.style != "dashed" for line in lines):
            first = min(order.get(line.series.name, len(alarms)) for line in lines)
            ranked.append((first, replace(panel, lines=lines)))
    ranked.sort(key=lambda entry: (entry[0], not entry[1].is_chart))
    return [panel for _, panel in ranked[:ONE_SCREEN]] or panels[:ONE_SCREEN]


def _varies(series: Series) -> bool:
    return len(series.values) == 1 or bool((series.values != series.values[0]).any())


def _panels(monitor: MonitorSeries) -> Iterator[Panel]:
    """Panels of a monitor: related keys share a panel, and so do the layers or parameters of one metric."""
    charts: dict[str, list[Line]] = defaultdict(list)
    for key in sorted(monitor.series, key=natural):
        chart, label = _chart(monitor.kind, key)
        style = "dashed" if "threshold" in key else "points" if key.startswith(COME_AND_GO) else "solid"
        charts[chart].append(Line(label, monitor.series[key], style))
    flags = monitor.get("spike")
    for chart, lines in charts.items():
        value = next((line.series for line in lines if line.label in ("norm", "value")), None)
        spikes = flags.iterations[flags.values > 0]
        marked = Series(spikes, value.at(spikes)) if value is not None and flags else None
        is_chart = chart != lines[0].label or len(lines) > 1
        title = f"{monitor.root or monitor.kind}: {chart}" if is_chart else lines[0].series.name
        yield Panel(title, lines, marked, is_chart or monitor.kind == "loss")


def _chart(kind: str, key: str) -> tuple[str, str]:
    """Title of a key's panel, and the label of its line there."""
    keys = _SCHEMAS[kind].keys if kind in _SCHEMAS else ()
    pattern = next((schema.pattern for schema in keys if re.fullmatch(schema.regex, key)), "")
    if "{" not in pattern or "/" not in pattern:
        return _related(kind, key), key
    family, _, item = key.partition("/")
    if re.search(r"\{\w+\}$", pattern) and not pattern.endswith("{metric}"):
        return family, item
    item, _, metric = item.rpartition("/")
    return metric if family == kind else f"{family} {metric}", item


def _related(kind: str, key: str) -> str:
    """Return what a key shares with those of its panel."""
    if key in AROUND:
        return "norm" if kind == "grad" else "value"
    return "counts" if key.endswith("count") else STATISTIC.sub("", key)


def _user_panels(run: Run) -> Iterator[Panel]:
    """Panels of the user's own metrics by the last word of their names, losses first."""
    panels: dict[str, list[str]] = defaultdict(list)
    for name in run.user_series:
        panels[re.sub(r"/(group_)?\d+$", "", name).rpartition("/")[2]].append(name)
    for word, names in sorted(panels.items(), key=lambda entry: ("loss" not in entry[0].lower(), natural(entry[0]))):
        lines = [Line(name, run.user_series[name]) for name in sorted(names, key=natural)]
        yield Panel(names[0] if len(names) == 1 else word, lines)


def draw(picture: Picture, path: str | Path, title: str = "", dark: bool = False) -> None:
    """Write a figure of a run, in the format that the path's ending selects: png, pdf or svg."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.style import context

    count = len(picture.panels)
    columns = min(count, 2 if count <= 8 else 3 if count <= 24 else 4)
    rows = math.ceil(count / columns)
    settings: Any = {"font.size": 9.5, "axes.titlesize": 10.5, "axes.spines.top": False, "axes.spines.right": False}
    settings |= {"path.simplify": True, "path.simplify_threshold": 0.5, "agg.path.chunksize": 20_000}
    style = context(["default", "dark_background"] if dark else "default")
    with style, matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font without a letter of a name
        figure = Figure(dpi=110, layout="constrained")
        head = _shortened(": ".join(filter(None, [printable(title), picture.headline])), 60 * columns)
        figure.suptitle(head, x=0.01, ha="left", fontsize=9, fontweight="bold", parse_math=False)
        named = np.zeros(rows * columns)  # lines of text of each panel's legend
        for index, panel in enumerate(picture.panels):
            with np.errstate(all="ignore"):
                named[index] = _panel(figure.add_subplot(rows, columns, index + 1), panel, picture)
        figure.set_size_inches(0.4 + 4.0 * columns, 0.4 + 1.9 * rows + 0.14 * named.reshape(rows, -1).max(1).sum())
        figure.savefig(path, format=Path(path).suffix[1:].lower() or "png")


def _panel(axes: Axes, panel: Panel, picture: Picture) -> int:
    """Draw a panel; the number of its legend's lines."""
    from matplotlib import colormaps

    lines, count, handles = panel.lines, len(panel.lines), []
    values = np.concatenate([line.series.finite.values for line in lines])
    _scale(axes, values)
    for place, line in enumerate(lines):
        points = line.style == "points" or len(line.series.finite.iterations) <= 2
        (handle,) = axes.plot(
            line.series.iterations,
            _drawable(line.series.values),
            color=LINES[place] if count <= FEW else colormaps["viridis"](0.1 + 0.85 * place / (count - 1)),
            linestyle={"points": "none", "dashed": "--"}.get(line.style, "-"),
            marker="o" if points else None,
            markersize=3.5,
            linewidth=1.2 if count <= FEW else 0.8,
        )
        handles.append(handle)
    bad = np.unique(np.concatenate([line.series.iterations[~np.isfinite(line.series.values)] for line in lines]))
    if len(bad):
        top: Any = {"transform": axes.get_xaxis_transform(), "label": "inf or NaN"}
        axes.plot(bad, np.full(len(bad), 0.985), "v", color=SPIKE, markersize=4, **top)
    _marks(axes, panel, picture)
    named = _legend(axes, panel, lines, handles)
    title = _shortened(printable(panel.title), 52)
    axes.set_title(title, loc="left", pad=6 + 10 * named, parse_math=False)
    notes = [f"{count} in order, dark to light"] * (count > FEW) + ["no finite value"] * (not len(values))
    axes.set_xlabel(f"iteration{'   (' + '; '.join(notes) + ')' if notes else ''}", fontsize=9)
    axes.grid(visible=True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    return named


def _drawable(values: Array) -> Array:
    sizes = np.clip(np.abs(values), 1 / LARGEST, LARGEST)
    return np.where(np.isfinite(values), np.sign(values) * sizes, np.nan)


def _scale(axes: Axes, values: Array) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    sizes = np.abs(_drawable(values[values != 0]))
    if not len(sizes):
        return
    if (values >= 0).all() and (values == 0).mean() < 0.5 and sizes.max() / sizes.min() > 10**LOG_DECADES:
        axes.set_yscale("log", nonpositive="mask")
    elif sizes.max() > SIGNED_RANGE * np.median(sizes):
        axes.set_yscale("symlog", linthresh=float(max(np.quantile(sizes, 0.05), sizes.max() * 1e-8)))


def _marks(axes: Axes, panel: Panel, picture: Picture) -> None:
    if panel.marked is not None and len(panel.marked.iterations):
        steps, values, _ = panel.marked.finite
        axes.plot(steps, _drawable(values), "x", color=SPIKE, markersize=6, markeredgewidth=1.6, label="spike")
    low, high = axes.get_xlim()
    for at in picture.spikes if len(picture.spikes) <= MARKED else ():
        if low <= at <= high:
            axes.axvline(at, color=SPIKE, linewidth=0.8, alpha=0.25, zorder=0.5)
    for place, (kind, reported) in enumerate(picture.events.items()):
        label, style = printable(kind), EVENT_STYLES[place % len(EVENT_STYLES)]
        for at in [step for step in reported if low <= step <= high][:MARKED]:
            axes.axvline(at, color=EVENT, linewidth=1.0, linestyle=style, zorder=0.6, label=label)
            label = "_"


def _legend(axes: Axes, panel: Panel, lines: list[Line], handles: list[Any]) -> int:
    """Name the lines, of many the first and the last, between title and axes; the number of lines of text."""
    marks, headline = axes.get_legend_handles_labels()
    if len(lines) == 1 and not marks and lines[0].label in panel.title:
        return 0
    chosen = range(len(lines)) if len(lines) <= FEW else (0, len(lines) - 1)
    shown = [*(handles[index] for index in chosen), *marks]
    names = [*(_shortened(printable(lines[index].label), 36) for index in chosen), *headline]
    columns = max(1, int(260 // (26 + 4.5 * max(map(len, names)))))  # 260 points, 26 of a handle, 4.5 of a letter
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0.0, 1.0), "ncols": columns}
    options: Any = {"labelspacing": 0.25, "columnspacing": 1.0, "borderpad": 0.0, "borderaxespad": 0.3}
    # Texts are set afterwards: matplotlib skips labels that begin with an underscore.
    legend = axes.legend(shown, ["x"] * len(shown), fontsize=8, frameon=False, handlelength=1.6, **place, **options)
    for text, label in zip(legend.get_texts(), names, strict=True):
        text.set_parse_math(False)
        text.set_text(label)
    return math.ceil(len(shown) / columns)


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 3]}…{text[-(length - length // 3 - 1) :]}"
