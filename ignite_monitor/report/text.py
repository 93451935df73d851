"""Summaries and comparisons for a terminal, a pipe or a file."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from ignite_monitor.report.compare import Comparison, Difference
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.series import Statistics, listed, number, plural, printable
from ignite_monitor.report.summary import Summary, assessment

try:
    from rich import box
    from rich.console import Console
    from rich.console import RenderableType as RenderableType
    from rich.table import Table as Table
    from rich.text import Text as Text
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("This needs rich: pip install 'ignite-monitor[cli]'", name="rich") from error

ROWS = 30  # of a table, unless all are requested
STYLES = {"problem": ("✗", "bold red"), "warning": ("!", "yellow"), "note": ("·", "cyan")}


def summary_text(summary: Summary, every: bool = False) -> list[RenderableType]:
    """Describe a run: findings, measurements, and a table of its metrics."""
    count = len(summary.metrics)
    head = f": iterations {summary.first} to {summary.last}, {plural(count, 'metric')}"
    rows = [_statistics(name, numbers) for name, numbers in summary.metrics.items()][: None if every else ROWS]
    table = _table(("metric", "first", "last", "min", "max", "count"), rows)
    parts = [Text.assemble((printable(summary.file), "bold"), head), Text(), *findings_text(summary), Text(), table]
    if len(rows) < count:
        parts.append(Text(f"{count - len(rows)} of {count} metrics are not in the table: --all shows them.", "dim"))
    return parts


def findings_text(summary: Summary) -> list[RenderableType]:
    """Describe what happened in a run."""
    worst = {finding.severity for finding in summary.findings}
    style = "bold red" if "problem" in worst else "bold green" if summary.healthy else "bold yellow"
    parts: list[RenderableType] = [Text(assessment(summary.findings, bool(summary.measured)), style)]
    parts += map(_finding, summary.findings)
    if summary.measured:
        parts.append(Text(f"Measured: {printable('; '.join(summary.measured))}.", "dim"))
    return parts


def comparison_text(comparison: Comparison, every: bool = False) -> list[RenderableType]:
    """Describe two runs: their findings, and a table of what differs."""
    parts: list[RenderableType] = []
    for letter, run in zip("AB", comparison.runs, strict=True):
        parts.append(Text.assemble((f"{letter} {printable(run.file)}", "bold"), f": to iteration {run.last}"))
        parts += map(_finding, run.findings)
        if not run.findings:
            parts.append(Text("  nothing unusual", "green"))
        parts.append(Text())
    differences = comparison.differences
    if differences:
        unequal = len({run.last for run in comparison.runs}) > 1
        until = f", up to iteration {comparison.until} where one is longer" if unequal else ""
        matter = sum(difference.matters for difference in differences)
        parts.append(Text(f"{matter} of {len(differences)} metrics that are in both differ by more than noise{until}:"))
        kept = differences if every else differences[:ROWS]
        parts.append(_table(("metric", "A", "B", "B to A", "best A", "best B"), map(_difference, kept)))
        if len(kept) < len(differences):
            omitted = len(differences) - len(kept)
            parts.append(Text(f"{omitted} more metrics are not in the table: --all shows them.", "dim"))
        parts.append(Text("A and B are medians of a metric's last tenth.", "dim"))
    else:
        parts.append(Text("No metric is in both."))
    for letter, names in zip("AB", comparison.only, strict=True):
        if names:
            words = listed(map(printable, names), len(names) if every else 8)
            parts.append(Text(f"Only in {letter} ({len(names)}): {words}"))
    return parts


def show(parts: Iterable[RenderableType], stream: TextIO | None = None, width: int = 100_000) -> None:
    """Print to a stream or the standard output: on a terminal in colour and its width, else plain and wide.

    Args:
        width: columns of what is no terminal.
    """
    stream = stream or sys.stdout
    target = io.StringIO()
    plain: Any = {"width": width, "color_system": None, "force_terminal": False, "legacy_windows": False}
    console = Console(file=target, **({"force_terminal": True} if stream.isatty() else plain))
    for part in parts:
        console.print(part, crop=False)
    encoding = getattr(stream, "encoding", None) or "utf-8"
    text = target.getvalue().encode(encoding, "replace").decode(encoding)
    stream.write("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def _finding(finding: Finding) -> RenderableType:
    sign, style = STYLES[finding.severity]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, min_width=7)
    grid.add_column(overflow="fold")
    text = Text.assemble(finding.what, " ", (finding.action, "italic"))
    grid.add_row(Text(f" {sign}", style), Text(finding.severity, style), text)
    return grid


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of names and numbers; only the names are folded on a narrow terminal."""
    rows = list(rows)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column(header[0], overflow="fold", min_width=12)
    for column, name in enumerate(header[1:], 1):
        widest = max(len(row[column]) for row in rows)
        table.add_column(name, justify="right", no_wrap=True, min_width=widest)
    for name, *cells in rows:
        table.add_row(Text(printable(name)), *map(Text, cells))
    return table


def _statistics(name: str, numbers: Statistics) -> list[str]:
    bad = f" ({numbers.nonfinite} not finite)" if numbers.nonfinite else ""
    cells = [number(numbers.first), number(numbers.last), _cell(numbers.min), _cell(numbers.max)]
    return [name, *cells, f"{numbers.values}{bad}"]


def _difference(it: Difference) -> list[str]:
    ratio = it.b / it.a if it.a and math.isfinite(it.a) and math.isfinite(it.b) else math.nan
    change = f"{100 * (ratio - 1):+.1f} %" if 0.5 <= ratio <= 2 else f"x {ratio:.3g}" if math.isfinite(ratio) else ""
    best = ["" if math.isnan(value) else _cell(value) for value in (it.best_a, it.best_b)]
    return [f"{it.name}{'' if it.matters else '  (noise)'}", _cell(it.a), _cell(it.b), change, *best]


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else number(value)
