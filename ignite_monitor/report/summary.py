"""What happened in a run, as words and numbers for people, and as JSON for machines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ignite_monitor.report.families import groups
from ignite_monitor.report.finding import Finding
from ignite_monitor.report.findings import find, healthy, looked_at
from ignite_monitor.report.series import Series, Statistics, statistics

VERSION = 1
"""Of the JSON: raised when a key changes its meaning or goes."""


@dataclass(frozen=True)
class Summary:
    """What happened in a run.

    Attributes:
        file: the run's file.
        first: its first iteration.
        last: its last iteration.
        findings: what happened, most important first.
        looked_at: what the file lets one judge.
        metrics: name -> numbers, the user's own metrics first.
    """

    file: str
    first: int
    last: int
    findings: list[Finding]
    looked_at: list[str]
    metrics: dict[str, Statistics]

    @property
    def healthy(self) -> bool | None:
        """Whether nothing but notes was found; None if there is no monitor's metric to judge by, and nothing else."""
        return healthy(self.findings) if self.looked_at or not healthy(self.findings) else None


def summarise(file: str, run: Mapping[str, Series]) -> Summary:
    """What happened in a run.

    Args:
        run: name -> series, of which there is one at least.
    """
    found = groups(run)
    # The user's own metrics may count epochs.
    watched = [name for group in found if group.kind != "other" for name in _names(group)] or list(run)
    ordered = [name for group in sorted(found, key=lambda group: group.kind != "other") for name in _names(group)]
    return Summary(
        file,
        min(int(run[name].steps[0]) for name in watched),
        max(int(run[name].steps[-1]) for name in watched),
        find(run),
        looked_at(run),
        {name: statistics(run[name]) for name in ordered},
    )


def as_json(summary: Summary) -> dict[str, Any]:
    """A summary as JSON's own types; numbers that are not finite are None."""
    return {
        "version": VERSION,
        "file": summary.file,
        "iterations": {"first": summary.first, "last": summary.last},
        "healthy": summary.healthy,
        "looked_at": summary.looked_at,
        "findings": findings_json(summary.findings),
        "metrics": {name: plain(numbers._asdict()) for name, numbers in summary.metrics.items()},
    }


def findings_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """Findings as JSON's own types."""
    return [
        {
            "kind": finding.kind,
            "severity": finding.severity,
            "text": finding.text,
            "metrics": list(finding.metrics),
            "iterations": list(finding.iterations),
            "values": plain(finding.values),
        }
        for finding in findings
    ]


def plain(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, of which those that are not finite become None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in numbers.items()
    }


def _names(group: Any) -> list[str]:
    names = [name for name, _ in group.scalars.values()]
    return names + [name for items in group.items.values() for name, _ in items.values()]
