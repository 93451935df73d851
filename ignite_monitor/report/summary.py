"""Findings, measurements and statistics of a run, also as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ignite_monitor.report import layers, training
from ignite_monitor.report.finding import Finding, in_order
from ignite_monitor.report.gradients import gradient_findings, norms, value_spikes
from ignite_monitor.report.run import Recorded, Run
from ignite_monitor.report.series import Statistics, natural, number, plural, statistics

VERSION = 3
"""Version of the JSON; raised when a key changes its meaning or is removed."""

RULES: dict[str, tuple[Callable[[Recorded, Run], Iterator[Finding]], ...]] = {
    "grad": (gradient_findings,),
    "spike": (value_spikes, training.lost_value),
    "weights": (layers.frozen, layers.update_ratios),
    "activation": (layers.nonfinite, layers.dead, layers.outliers, layers.collapsed, layers.large_logits),
    "replicas": (training.disagreement,),
    "step": (layers.group_rates,),
    "rcc": (layers.coordinate_check,),
    "spectral": (layers.spectral,),
    "noise scale": (training.noise_scale,),
    "curvature": (training.curvature,),
}
"""Kind of monitor -> the rules for its metrics."""


def find(run: Run) -> list[Finding]:
    """Return the findings of a run in the order of what happened; notes last."""
    findings = [*training.curves(run), *training.rolled_back(run), *training.persistent(run)]
    findings += [
        finding for monitor in run.monitors for rule in RULES.get(monitor.kind, ()) for finding in rule(monitor, run)
    ]
    if not any(monitor.get("norm") or monitor.get("stepped") for monitor in run.of("grad")):
        what = "The gradients were not monitored: the file has no metrics of a GradMonitor."
        findings.append(Finding("not_monitored", "note", what, advice="Attach a GradMonitor and log_to the logger."))
    return in_order(findings)


def healthy(findings: list[Finding]) -> bool | None:
    """Return True if all findings are notes; None if, in addition, the gradients were not monitored."""
    if any(finding.severity != "note" for finding in findings):
        return False
    return None if any(finding.kind == "not_monitored" for finding in findings) else True


def assessment(findings: list[Finding], monitored: bool) -> str:
    """Describe a run in a few words; ``monitored``: whether the file has metrics of a monitor."""
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in ("problem", "warning")}
    parts = [plural(count, kind) for kind, count in counts.items() if count]
    if parts:
        return f"Needs attention: {' and '.join(parts)}."
    if not monitored:
        return "The file has no metrics of a monitor, so little can be detected."
    if healthy(findings) is None:
        return "Nothing unusual, but the gradients were not monitored."
    return "Healthy: nothing in this run needs attention."


def measured(run: Run) -> list[str]:
    """Describe the measurements in the file."""
    words = []
    for monitor in run.monitors:
        known = norms(monitor) if monitor.kind == "grad" else None
        if known is not None:
            values = known.norm.finite.values
            between = f", {number(values.min(), 3)} to {number(values.max(), 3)}" if len(values) else ""
            words.append(f"{plural(len(known.norm.steps), 'gradient norm')} ({monitor.name('norm')}{between})")
        if frozen := monitor.get("frozen_count"):
            words.append(f"weight updates in {plural(len(frozen.steps), 'iteration')} ({monitor.name('*')})")
        counts = {
            "module": len({key.split("/")[1] for key in monitor.series if key.startswith("activation/")}),
            "attention head": len(monitor.each("attention_entropy/{}")),
            "layer": len(monitor.each("weight_update/{}")),
        }
        words += [f"{plural(count, what)} ({monitor.name('*')})" for what, count in counts.items() if count]
    return words


@dataclass(frozen=True)
class Summary:
    """Findings, measurements and statistics of a run."""

    file: str
    first: int  # iteration
    last: int
    findings: list[Finding]  # in the order of what happened
    measured: list[str]  # measurements in the file, in words
    metrics: dict[str, Statistics]  # the user's own first, those of single layers last

    @property
    def healthy(self) -> bool | None:
        """True if all findings are notes; None if, in addition, the gradients were not monitored."""
        return healthy(self.findings)


def summarise(file: str, run: Run) -> Summary:
    """Summarise a run, which has one series at least."""
    names = sorted(run.own, key=natural)
    for of_parts in (False, True):
        for monitor in run.monitors:
            keys = [key for key in monitor.series if ("/" in key) is of_parts]
            names += map(monitor.name, sorted(keys, key=natural))
    counting = [run.series[name].steps for name in names]
    return Summary(
        file,
        min(int(steps[0]) for steps in counting),
        max(int(steps[-1]) for steps in counting),
        find(run),
        measured(run),
        {name: statistics(run.series[name]) for name in names},
    )


def as_json(summary: Summary) -> dict[str, Any]:
    """Convert a summary to JSON's own types."""
    return {
        "version": VERSION,
        "file": summary.file,
        "iterations": {"first": summary.first, "last": summary.last},
        "healthy": summary.healthy,
        "measured": summary.measured,
        "findings": [finding_json(finding) for finding in summary.findings],
        "metrics": {name: plain(numbers, numbers._fields) for name, numbers in summary.metrics.items()},
    }


def finding_json(finding: Finding) -> dict[str, Any]:
    """Convert a finding to JSON's own types."""
    values = {name: value if math.isfinite(value) else None for name, value in finding.values.items()}
    return plain(finding, ("kind", "severity", "text", "metrics", "iterations")) | {"values": values}


def plain(record: Any, fields: Iterable[str]) -> dict[str, Any]:
    """Return fields of a record, with None for non-finite numbers."""
    values = {field: getattr(record, field) for field in fields}
    return {key: None if isinstance(it, float) and not math.isfinite(it) else it for key, it in values.items()}
