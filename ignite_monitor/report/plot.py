"""A figure of a run: panels by family, with the spikes marked."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ignite_monitor.report.panels import Line, Panel, Picture
from ignite_monitor.report.series import Array, Series, decades, printable, short, shortened, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SEVERITY = {"problem": "#d1242f", "warning": "#9a5b00", "note": "#4b5563"}
GREY = "#c3c8cf"
COLOURS = ("#0b5fa5", "#e07b00", "#2a8f4b", "#8b4fb3", "#8a5a44", "#c2468f")
SPIKE = "#d1242f"
ROLLBACK = "#1a7f37"
FEW = len(COLOURS)
MOST_LINES = 400
MOST_FINDINGS = 8
POINTS = 1500
"""How many stretches a line is drawn from: more than a panel has pixels across."""
LARGEST = 1e100
"""What is larger, or smaller than its inverse, is drawn there: matplotlib's ticks leave float64's range beyond."""
LOG_DECADES = 1.5
"""From how many decades on the scale of positive values is logarithmic."""
SIGNED_RANGE = 1e4
"""How many times the median size the largest has to be, for values of both signs to be drawn on a logarithmic scale."""


def draw(picture: Picture, path: str | Path, title: str = "", log: bool = False) -> None:
    """Write a figure of a run.

    Args:
        path: where to; the ending says in which format (png, pdf, svg).
        log: whether every panel has a logarithmic scale, and not those alone whose values span decades.

    Raises:
        ModuleNotFoundError: if matplotlib is not installed.
        OSError: if the file can't be written.
        ValueError: if the ending is that of no image.

    Examples:
        .. code-block:: python

            draw(picture(tidy(read_hdf5("run.h5"))), "run.png")
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.style import context
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] != "matplotlib":
            raise
        raise ModuleNotFoundError(
            "A figure needs matplotlib: pip install 'ignite-monitor[cli]'", name="matplotlib"
        ) from error
    count = len(picture.panels)
    columns = min(count, 2 if count <= 8 else 3 if count <= 24 else 4)
    rows = math.ceil(count / columns)
    style: Any = {"font.size": 8.5, "axes.titlesize": 9.5, "axes.spines.top": False, "axes.spines.right": False}
    with context("default"), matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a font without a letter of a name
        head = _head(picture, printable(title), 82 * columns)
        width, heights = 0.4 + 5.2 * columns, (0.1 + 0.19 * len(head), 0.3 + 2.75 * rows)
        figure = Figure(figsize=(width, sum(heights)), dpi=110, layout="constrained")
        above, body = cast(Any, figure.subfigures(2, 1, height_ratios=heights))
        for row, (text, colour, weight) in enumerate(head):
            y = 1 - (row + 0.7) / (len(head) + 0.5)
            above.text(0.1 / width, y, text, color=colour, fontweight=weight, fontsize=9, parse_math=False, va="center")
        for index, panel in enumerate(picture.panels, 1):
            axes = body.add_subplot(rows, columns, index)
            with np.errstate(all="ignore"):
                _panel(axes, panel, picture, log)
        figure.savefig(path, format=Path(path).suffix[1:].lower() or "png")


def _head(picture: Picture, title: str, length: int) -> list[tuple[str, str, str]]:
    """The lines above the panels: their words, colours and weights."""
    left_out = f"   ({picture.left_out} more panels with --all)" if picture.left_out else ""
    first = f"{title}{': ' * bool(title and picture.detection)}{picture.detection}{left_out}"
    lines = [(first, "black", "bold")] if first else []
    findings = picture.findings
    for finding in findings if len(findings) <= MOST_FINDINGS else findings[: MOST_FINDINGS - 1]:
        text = f"{finding.severity}: {finding.text}"
        lines.append((text if len(text) <= length else f"{text[: length - 1]}…", SEVERITY[finding.severity], "normal"))
    if len(findings) > MOST_FINDINGS:
        lines.append((f"{len(findings) - MOST_FINDINGS + 1} more: ignite-monitor summary", SEVERITY["note"], "normal"))
    return lines


def _panel(axes: Axes, panel: Panel, picture: Picture, log: bool) -> None:
    axes.set_title(shortened(printable(panel.title), 60), loc="left", parse_math=False)
    lines = [line._replace(series=_drawable(line.series)) for line in _chosen(panel.lines)]
    left_out = len(panel.lines) - len(lines)
    steps = np.concatenate([line.series.steps for line in lines])
    values = np.concatenate([line.series.finite.values for line in lines])
    _scale(axes, values, log, panel.limits)
    colours = max(line.colour for line in panel.lines) + 1
    if panel.band is not None:
        low, high = (each.values for each in panel.band)
        visible = np.isfinite(low) & np.isfinite(high) & ((low > 0) | (axes.get_yscale() != "log"))
        axes.fill_between(panel.band[0].steps, low, high, where=visible, color=COLOURS[0], alpha=0.1, linewidth=0)
    told = [line.colour for line in lines if line.told]
    crowd = colours > FEW and 0 < len(told) <= len(lines) / 2  # those that a finding speaks of stand out
    lines.sort(key=lambda line: crowd and line.told)
    handles = []
    for line in lines:
        spoken_of = COLOURS[told.index(line.colour) % FEW] if line.told else GREY
        handles.append(_line(axes, line, spoken_of if crowd else _colour(line.colour, colours), len(lines)))
    _bad_values(axes, lines)
    _spikes(axes, panel, picture, steps)
    _legend(axes, panel, lines, handles, colours)
    notes = [panel.note] * bool(panel.note)
    notes += [f"{colours} in order, dark to light" if not crowd else "the others in grey"] * (colours > FEW)
    notes += [f"{left_out} lines left out"] * bool(left_out)
    notes += ["no finite value"] * (not len(values))
    axes.set_xlabel(f"{panel.x}{'   (' + '; '.join(notes) + ')' if notes else ''}", fontsize=8)
    axes.grid(visible=True, color="#e6e8eb", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.margins(x=0.02)
    if len(np.unique(steps)) == 1:
        axes.set_xticks([int(steps[0])])


def _drawable(series: Series) -> Series:
    """A series without sizes that can't be drawn."""
    sizes = np.abs(series.values)
    clipped = np.sign(series.values) * np.clip(sizes, 1 / LARGEST, LARGEST)
    return series._replace(values=np.where(np.isfinite(sizes), clipped, series.values))


def _scale(axes: Axes, values: Array, log: bool, limits: tuple[float, float] | None) -> None:
    from matplotlib.ticker import LogFormatterSciNotation, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))
    sizes = np.abs(values[values != 0])
    if not len(values):
        axes.set_yticks([])
    elif limits is not None and not log:
        axes.set_ylim(*limits)
    elif not len(sizes):
        axes.set_ylim(-0.05, 1)
        axes.set_yticks([0, 1])
    elif (values >= 0).all() and (log or decades(sizes) > LOG_DECADES) and (values == 0).mean() < 0.5:
        axes.set_yscale("log", nonpositive="mask")
        if decades(sizes) < 1:
            axes.yaxis.set_major_formatter(LogFormatterSciNotation(minor_thresholds=(2, 1)))
    elif log or sizes.max() > SIGNED_RANGE * np.median(sizes):
        axes.set_yscale("symlog", linthresh=float(max(np.quantile(sizes, 0.05), sizes.max() * 1e-8)))
    elif (values == np.round(values)).all() and np.ptp(values) < 10:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True))


def _chosen(lines: list[Line]) -> list[Line]:
    """Not more lines than a panel bears: evenly chosen ones, and the highest and the lowest."""
    if len(lines) <= MOST_LINES:
        return lines
    ends = np.array([line.series.last for line in lines])
    keep = set(np.linspace(0, len(lines) - 1, MOST_LINES - 10).astype(int).tolist())
    order = np.argsort(np.where(np.isfinite(ends), ends, np.inf))
    keep |= set(order[:5].tolist()) | set(order[-5:].tolist())
    return [lines[at] for at in sorted(keep)]


def _line(axes: Axes, line: Line, colour: Any, count: int) -> Any:
    steps, values = thinned(line.series, POINTS if count <= 20 else POINTS // 5)
    values = np.where(np.isfinite(values), values, np.nan)
    alone = line.style == "points" or len(line.series.finite.steps) <= 2
    return axes.plot(
        steps,
        values,
        color=colour,
        linestyle="none" if line.style == "points" else "--" if line.style == "dashed" else "-",
        marker="o" if alone else "." if np.isnan(values).any() and len(steps) < 300 else None,
        markersize=3.5,
        linewidth=1.2 if count <= FEW else 0.9 if count <= 40 else 0.5,
        alpha=1.0 if count <= 40 else 0.7,
    )[0]


def _colour(at: int, count: int) -> Any:
    from matplotlib import colormaps

    return COLOURS[at] if count <= FEW else colormaps["viridis"](0.92 * at / (count - 1))


def _bad_values(axes: Axes, lines: list[Line]) -> None:
    bad = np.unique(np.concatenate([line.series.where(~np.isfinite(line.series.values)) for line in lines]))
    if len(bad):
        bad = bad[np.linspace(0, len(bad) - 1, min(len(bad), 200)).astype(int)]
        at_the_top: Any = {"transform": axes.get_xaxis_transform(), "label": "inf or NaN"}
        axes.plot(bad, np.full(len(bad), 0.985), "v", color=SPIKE, markersize=4, **at_the_top)


def _spikes(axes: Axes, panel: Panel, picture: Picture, steps: Array) -> None:
    if panel.marked is not None and len(panel.marked.steps):
        steps_marked, values = panel.marked.finite
        axes.plot(steps_marked, values, "x", color=SPIKE, markersize=6, markeredgewidth=1.6, label="spike")
    if panel.x != "iteration" and steps.max() <= picture.last / 2:  # another clock
        return
    low, high = axes.get_xlim()
    for at in picture.spikes if len(picture.spikes) <= 30 else ():
        if low <= at <= high:
            axes.axvline(at, color=SPIKE, linewidth=0.8, alpha=0.25, zorder=0.5)
    for at in picture.rollbacks:
        if low <= at <= high:
            label = "_" if at > picture.rollbacks[0] else "went back"
            axes.axvline(at, color=ROLLBACK, linewidth=1.0, linestyle="--", zorder=0.6, label=label)


def _legend(axes: Axes, panel: Panel, lines: list[Line], handles: list[Any], colours: int) -> None:
    marks, words = axes.get_legend_handles_labels()
    if len(panel.lines) == 1 and not marks and lines[0].label in panel.title:
        return
    first_of = {line.colour: at for at, line in reversed(list(enumerate(lines)))}
    firsts = sorted(first_of.values())
    remarks = dict.fromkeys(firsts, "") if colours <= FEW else _telling(lines, firsts)
    every = list(dict.fromkeys(printable(line.label) for line in panel.lines))
    names = dict(zip(every, short(every), strict=True))
    labels = [f"{names[printable(lines[at].label)]}{remark}" for at, remark in sorted(remarks.items())]
    shown = [*(handles[at] for at in sorted(remarks)), *marks]
    style: Any = {"fontsize": 7, "framealpha": 0.75, "edgecolor": "none", "labelspacing": 0.25, "borderpad": 0.2}
    place: Any = "best" if sum(len(line.series.steps) for line in lines) < 5000 else "upper right"
    # Texts are set afterwards: matplotlib leaves out labels that begin with an underscore.
    legend = axes.legend(shown, ["x"] * len(shown), loc=place, handlelength=1.6, **style)
    for text, label in zip(legend.get_texts(), [*labels, *words], strict=True):
        text.set_parse_math(False)
        text.set_text(label)
    for handle in legend.get_lines():
        handle.set_linewidth(max(1.5, handle.get_linewidth()))
        handle.set_alpha(1)


def _telling(lines: list[Line], indices: list[int]) -> dict[int, str]:
    """Of many lines the first and the last, and with a remark those that end highest and lowest."""
    ends = {at: lines[at].series.last for at in indices}
    told = [at for at in indices if lines[at].told]
    if 0 < len(told) <= len(lines) / 2:
        return dict.fromkeys(told[:FEW], "")
    known = [at for at in indices if math.isfinite(ends[at])] or indices
    remarks = {indices[0]: "", indices[-1]: ""}
    remarks[max(known, key=lambda at: ends[at])] = " (ends highest)"
    remarks[min(known, key=lambda at: ends[at])] = " (ends lowest)"
    return remarks
