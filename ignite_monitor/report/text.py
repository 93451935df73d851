"""Summaries and comparisons for a terminal, a pipe or a file."""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from ignite_monitor.report.compare import Comparison, Difference
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.series import Statistics, listed, number, plural, printable
from ignite_monitor.report.summary import Summary, detection

try:
    from rich import box
    from rich.console import Console, ConsoleOptions
    from rich.console import RenderableType as RenderableType
    from rich.table import Table as Table
    from rich.text import Text as Text
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("This needs rich: pip install 'ignite-monitor[cli]'", name="rich") from error


ROWS = 30
"""How many rows a table has where all are not asked for."""

NAME = 12
"""How wide the column of names is at least."""

STYLES = {"problem": ("✗", "bold red"), "warning": ("!", "yellow"), "note": ("·", "cyan")}


def summary_text(summary: Summary, every: bool = False) -> list[RenderableType]:
    """A summary to be printed."""
    count = len(summary.metrics)
    head = f": iterations {summary.first} to {summary.last}, {plural(count, 'metric')}"
    rows = [[name, *_numbers(numbers)] for name, numbers in summary.metrics.items()][: None if every else ROWS]
    table = _Rows(("metric", "first", "last", "min", "max", "count"), rows, ("count", "min", "max", "first"))
    title = Text.assemble((printable(summary.file), "bold"), head)
    omitted = f"{count - len(rows)} of {count} metrics are not in the table: --all shows them."
    parts = [title, Text(), *findings_text(summary), Text(), table]
    return [*parts, Text(omitted, style="dim")] if len(rows) < count else parts


def findings_text(summary: Summary) -> list[RenderableType]:
    """What happened in a run, to be printed."""
    parts = [_detection(summary), *(_finding(finding) for finding in summary.findings)]
    if summary.measured:
        parts.append(Text(f"Measured: {printable('; '.join(summary.measured))}.", style="dim"))
    return parts


def comparison_text(comparison: Comparison, every: bool = False) -> list[RenderableType]:
    """A comparison to be printed."""
    parts: list[RenderableType] = []
    for letter, run in zip("AB", comparison.runs, strict=True):
        name = Text.assemble((f"{letter} ", "bold"), (printable(run.file), "bold"), f": to iteration {run.last}")
        parts += [name, *map(_finding, run.findings)]
        if not run.findings:
            parts.append(Text("  nothing unusual", style="green"))
        parts.append(Text())
    unequal = len({run.last for run in comparison.runs}) > 1
    differences = comparison.differences
    matter = sum(each.matters for each in differences)
    if differences:
        until = f", up to iteration {comparison.until} where one is longer" if unequal else ""
        parts.append(Text(f"{matter} of {len(differences)} metrics that are in both differ by more than noise{until}:"))
        kept = differences if every else differences[:ROWS]
        header = ("metric", "A", "B", "B to A", "best A", "best B")
        parts.append(_Rows(header, [_difference(each) for each in kept], ("best A", "best B", "B to A", "A")))
        if len(kept) < len(differences):
            left = len(differences) - len(kept)
            parts.append(Text(f"{left} more metrics are not in the table: --all shows them.", style="dim"))
        parts.append(Text("A and B are medians of a metric's last tenth.", style="dim"))
    else:
        parts.append(Text("No metric is in both."))
    for letter, names in zip("AB", comparison.only, strict=True):
        if names:
            told = listed(map(printable, names), len(names) if every else 8)
            parts.append(Text(f"Only in {letter} ({len(names)}): {told}"))
    return parts


def show(parts: Iterable[RenderableType], stream: TextIO | None = None, width: int = 100_000) -> None:
    """Print to a stream or the standard output: on a terminal in colour and its width, else plain and wide.

    Args:
        width: of what is no terminal, in columns.
    """
    stream = stream or sys.stdout
    target = io.StringIO()
    plain: Any = {"width": width, "color_system": None, "force_terminal": False, "legacy_windows": False}
    console = Console(file=target, **({"force_terminal": True} if stream.isatty() else plain))
    for part in parts:
        console.print(part)
    text = target.getvalue()
    encoding = getattr(stream, "encoding", None) or "utf-8"
    lines = [line.rstrip() for line in text.encode(encoding, "replace").decode(encoding).splitlines()]
    stream.write("\n".join(lines) + "\n")


def _detection(summary: Summary) -> RenderableType:
    worst = {finding.severity for finding in summary.findings}
    style = "bold red" if "problem" in worst else "bold green" if summary.healthy else "bold yellow"
    return Text(detection(summary.findings, bool(summary.measured)), style=style)


def _finding(finding: Finding) -> RenderableType:
    sign, style = STYLES[finding.severity]
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, min_width=7)
    grid.add_column(overflow="fold")
    grid.add_row(
        Text(f" {sign}", style=style),
        Text(finding.severity, style=style),
        Text.assemble(finding.what, " ", (finding.action, "italic")),
    )
    return grid


@dataclass(frozen=True)
class _Rows:
    """A table that leaves out columns where the terminal is too narrow for their numbers."""

    header: Sequence[str]  # the name first
    rows: Sequence[Sequence[str]]
    dispensable: Sequence[str]  # the columns that are left out, in this order

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        kept = list(range(len(self.header)))
        for name in self.dispensable:
            if NAME + sum(widths[column] + 2 for column in kept[1:]) > options.max_width:
                kept.remove(self.header.index(name))
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
        table.add_column(self.header[0], overflow="fold", min_width=NAME)
        for column in kept[1:]:
            table.add_column(self.header[column], justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(Text(printable(row[0])), *(Text(row[column]) for column in kept[1:]))
        yield table


def _numbers(numbers: Statistics) -> list[str]:
    bad = f" ({numbers.nonfinite} not finite)" if numbers.nonfinite else ""
    ends = [number(each) for each in (numbers.first, numbers.last)]
    return [*ends, _cell(numbers.min), _cell(numbers.max), f"{numbers.values}{bad}"]


def _difference(each: Difference) -> list[str]:
    ratio = each.b / each.a if each.a and math.isfinite(each.a) and math.isfinite(each.b) else math.nan
    change = f"{100 * (ratio - 1):+.1f} %" if 0.5 <= ratio <= 2 else f"x {ratio:.3g}" if math.isfinite(ratio) else ""
    best = ["" if math.isnan(value) else _cell(value) for value in (each.best_a, each.best_b)]
    return [f"{each.name}{'' if each.matters else '  (noise)'}", _cell(each.a), _cell(each.b), change, *best]


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else number(value)
