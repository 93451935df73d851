"""A run as one page of HTML: findings beside their evidence, the figure and the table of metrics; no script."""

from __future__ import annotations

import base64
import html
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ignite_monitor.hdf5.layout import printable
from ignite_monitor.report.finding import Finding, plural
from ignite_monitor.report.plot import Picture, draw, picture
from ignite_monitor.report.run import Run
from ignite_monitor.report.summary import Summary
from ignite_monitor.report.text import COLUMNS, ROWS, statistics_cells

PANELS = 2  # at most beside a finding
DRAWN = 20  # findings with a figure, the first ones

STYLE = """
:root { color-scheme: light dark; --back: #fff; --fore: #1d2329; --dim: #5a6570; --line: #d5dbe1; --problem: #b3161d;
  --warning: #8a5300; --note: #17628f; }
@media (prefers-color-scheme: dark) { :root { --back: #000; --fore: #e4e8ec; --dim: #a0aab4; --line: #3a424a;
  --problem: #ff7b80; --warning: #f0b040; --note: #6cc0f0; } }
body { background: var(--back); color: var(--fore); font: 16px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 75rem; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } .dim { color: var(--dim); }
img { display: block; height: auto; width: 100%; }
.images { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 19rem), 1fr)); }
.table { overflow-x: auto; }
.finding { border-left: 4px solid var(--note); display: grid; gap: 1rem; margin: 1rem 0; padding-left: 1rem; }
.problem { border-color: var(--problem); } .warning { border-color: var(--warning); }
.problem b { color: var(--problem); } .warning b { color: var(--warning); } .note b { color: var(--note); }
@media (min-width: 60rem) { .drawn { grid-template-columns: 2fr 3fr; } }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .15rem .6rem; text-align: right; white-space: nowrap; }
.words th, .words td { text-align: left; vertical-align: top; white-space: normal; }
th:first-child, td:first-child { min-width: 9rem; padding-left: 0; text-align: left; white-space: normal; }
"""
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(summary: Summary, run: Run, program: str) -> str:
    """Describe a run as a page of HTML without external resources; the program, with its version, is in the footer."""
    rows = [statistics_cells(name, numbers) for name, numbers in summary.metrics.items()]
    overview, latest = picture(run), max((it.run for it in run.settings), default=0)
    settings = [[it.monitor, it.text] for it in run.settings if it.run == latest]
    parts = [
        f"<h1>{_escaped(summary.file)}</h1>\n<p><strong>{_escaped(summary.assessment)}</strong></p>",
        f'<p class="dim">Iterations {summary.first} to {summary.last}, {plural(len(rows), "metric")}.',
        f"Measured: {_escaped('; '.join(summary.measured) or 'nothing by a monitor')}.</p>\n<h2>Findings</h2>",
        *(_finding(finding, run, place < DRAWN) for place, finding in enumerate(summary.findings)),
        *(f"<p>{_escaped(line)}</p>" for line in summary.failed),
        "<p>Nothing unusual.</p>" * (not summary.findings),
        "<h2>Overview</h2>" * bool(overview.panels),
        _images(overview),
        f"<h2>Metrics</h2>\n{_table(COLUMNS, rows[:ROWS])}",
    ]
    if more := rows[ROWS:]:
        head = f"<summary>{plural(len(more), 'more metric')}</summary>"
        parts.append(f"<details>{head}\n{_table(COLUMNS, more)}\n</details>")
    if settings:
        parts.append(f"<h2>Settings</h2>\n{_table(('monitor', 'versions, seed, arguments'), settings, 'words')}")
    body = "\n".join(filter(None, parts))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_escaped(summary.file)}</title>
<style>{STYLE}</style>
</head>
<body>
{body}
<p class="dim">Written by {_escaped(program)}.</p>
</body>
</html>
"""


def _escaped(text: str) -> str:
    return html.escape(printable(text))


def _finding(finding: Finding, run: Run, is_drawn: bool) -> str:
    shown = picture(run, re.compile(rf"\A(?:{'|'.join(map(re.escape, finding.metrics))})\Z"))
    figure = _images(replace(shown, panels=shown.panels[: PANELS * is_drawn]))
    paragraph = f"<b>{_escaped(finding.severity)}</b> ({_escaped(finding.kind)}): {_escaped(finding.text)}"
    return f'<section class="finding {finding.severity}{" drawn" * bool(figure)}"><p>{paragraph}</p>{figure}</section>'


def _images(shown: Picture) -> str:
    """Draw each panel, for light and dark pages; an image keeps the SVG's names and links apart from the page's."""
    images = []
    with tempfile.TemporaryDirectory() as folder:
        for panel in shown.panels:
            sources = []
            for dark in (False, True):
                draw(replace(shown, panels=[panel], headline=""), path := Path(folder, "figure.svg"), dark=dark)
                sources.append(f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}")
            source = f'<source media="(prefers-color-scheme: dark)" srcset="{sources[1]}">'
            images.append(f'<picture>{source}<img alt="{_escaped(panel.title)}" src="{sources[0]}"></picture>')
    return f'<div class="images">{"".join(images)}</div>' if images else ""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], style: str = "table") -> str:
    head = "".join(f"<th>{name}</th>" for name in columns)
    lines = [f"<tr>{''.join(f'<td>{_escaped(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return "\n".join([f'<div class="{style}"><table>', f"<tr>{head}</tr>", *lines, "</table></div>"])
