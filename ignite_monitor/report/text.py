"""Summaries, comparisons and spike files for a terminal, a pipe or a file."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Column, Table
from rich.text import Text

from ignite_monitor.hdf5.layout import printable
from ignite_monitor.report.finding import Finding, listed, number, plural
from ignite_monitor.report.summary import Comparison, Difference, Statistics, Summary

COLUMNS = ("metric", "first", "last", "min", "max", "count")
ROWS = 30  # of a table, unless all are requested
STYLES = {"problem": ("✗", "bold red"), "warning": ("!", "yellow"), "note": ("·", "cyan")}


def describe(described: Summary | Comparison, every: bool) -> list[RenderableType]:
    """Describe a run, or two side by side: findings, and a table of metrics or of what differs."""
    if isinstance(described, Comparison):
        return _comparison(described, every)
    iterations, metrics = f"iterations {described.first} to {described.last}, ", described.metrics
    extent = f": {iterations if metrics else ''}{plural(len(metrics), 'metric')}"
    head = Text.assemble((printable(described.file), "bold"), extent)
    extent = extent if described.metrics else ": no metrics"
    rows = [statistics_cells(name, numbers) for name, numbers in described.metrics.items()]
    return [head, Text(), *findings_text(described), Text(), *_table(COLUMNS, rows, every)]


def findings_text(summary: Summary) -> list[RenderableType]:
    """Describe what happened in a run."""
    worst = {finding.severity for finding in summary.findings}
    style = "bold red" if "problem" in worst else "bold green" if summary.healthy else "bold yellow"
    measured = Text(f"Measured: {printable('; '.join(summary.measured) or 'nothing by a monitor')}.", "dim")
    return [Text(summary.assessment, style), *_findings(summary), measured]


def _findings(summary: Summary) -> list[RenderableType]:
    failed = [Text(f" {printable(line)}", "bold yellow") for line in summary.failed]
    return [*map(_finding, summary.findings), *failed]


def _comparison(comparison: Comparison, every: bool) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for letter, run in zip("AB", comparison.runs, strict=True):
        parts.append(Text.assemble((f"{letter} {printable(run.file)}", "bold"), f": to iteration {run.last}"))
        parts += _findings(run) or [Text("  nothing unusual", "green")]
        parts.append(Text())
    differences = comparison.differences
    if differences:
        unequal = len({run.last for run in comparison.runs}) > 1
        until = f", up to iteration {comparison.until} where one is longer" if unequal else ""
        matter = sum(difference.matters for difference in differences.values())
        parts.append(Text(f"{matter} of {len(differences)} metrics that are in both differ by more than noise{until}:"))
        rows = [_difference_cells(name, it) for name, it in differences.items()]
        parts += _table(("metric", "A", "B", "B to A"), rows, every)
        parts.append(Text("A and B are medians of a metric's last tenth.", "dim"))
    else:
        parts.append(Text("No metric is in both."))
    for letter, names in zip("AB", comparison.only, strict=True):
        if names:
            shown = listed(map(printable, names), len(names) if every else 8)
            parts.append(Text(f"Only in {letter} ({len(names)}): {shown}"))
    return parts


def show(parts: Iterable[RenderableType], width: int = 100_000) -> None:
    """Print to the standard output: on a terminal in colour and its width, else plain and wide."""
    stream, target = sys.stdout, io.StringIO()
    plain: Any = {"width": width, "color_system": None, "force_terminal": False, "legacy_windows": False}
    console = Console(file=target, **({"force_terminal": True} if stream.isatty() else plain))
    for part in parts:
        console.print(part, crop=False)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = target.getvalue().encode(encoding, "replace").decode(encoding)
    stream.write("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def _finding(finding: Finding) -> RenderableType:
    sign, style = STYLES[finding.severity]
    grid = Table.grid(Column(no_wrap=True), Column(no_wrap=True, min_width=7), Column(overflow="fold"), padding=(0, 1))
    text = Text.assemble(finding.what, " ", (finding.action, "italic"))
    grid.add_row(Text(f" {sign}", style), Text(finding.severity, style), text)
    return grid


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], every: bool) -> list[RenderableType]:
    """A table of names and numbers, at most ROWS of them; only the names are folded on a narrow terminal."""
    kept = rows if every else rows[:ROWS]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column(header[0], overflow="fold", min_width=12)
    for column, name in enumerate(header[1:], 1):
        width = max((len(row[column]) for row in kept), default=0)
        table.add_column(name, justify="right", no_wrap=True, min_width=width)
    for name, *cells in kept:
        table.add_row(Text(printable(name)), *map(Text, cells))
    if len(kept) == len(rows):
        return [table]
    return [table, Text(f"{len(rows) - len(kept)} of {len(rows)} metrics are not in the table: --all shows them.")]


def statistics_cells(name: str, numbers: Statistics) -> list[str]:
    """Format the statistics of a metric, a cell for each of COLUMNS."""
    bad = f" ({numbers.nonfinite} not finite)" if numbers.nonfinite else ""
    cells = [number(numbers.first), number(numbers.last), _cell(numbers.min), _cell(numbers.max)]
    return [name, *cells, f"{numbers.values}{bad}"]


def _difference_cells(name: str, it: Difference) -> list[str]:
    ratio = it.b / it.a if it.a and math.isfinite(it.a) and math.isfinite(it.b) else math.nan
    change = f"{100 * (ratio - 1):+.1f} %" if 0.5 <= ratio <= 2 else f"x {ratio:.3g}" if math.isfinite(ratio) else ""
    return [f"{name}{'' if it.matters else '  (noise)'}", _cell(it.a), _cell(it.b), change]


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else number(value)


def spikes_text(path: Path) -> list[RenderableType]:
    """Describe a directory's spike files, the earliest first, or one file; ValueError if none can be read."""
    from ignite_monitor.spike_recorder.description import fields, title
    from ignite_monitor.spike_recorder.record import ENDING, load_spike

    files = sorted(path.glob(f"*{ENDING}")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} holds no spike files (*{ENDING})")
    described: list[tuple[tuple[Any, ...], list[RenderableType]]] = []
    failed: list[str] = []
    for file in files:
        try:
            record = load_spike(file)
        except ValueError as error:
            failed.append(str(error))
            continue
        table = Table.grid(Column(style="dim", no_wrap=True), Column(overflow="fold"), padding=(0, 2))
        for name, text in filter(itemgetter(1), fields(record)):
            table.add_row(f"  {name}", Text(printable(text)))
        place = (record.iteration, record.name, record.rank, record.path)
        described.append((place, [Text(printable(title(record)), style="bold"), table, Text()]))
    if not described:
        raise ValueError(failed[0])
    parts = [part for _, texts in sorted(described, key=itemgetter(0)) for part in texts]
    return [*parts, *map(Text, map(printable, failed)), Text(plural(len(described), "record"))]
