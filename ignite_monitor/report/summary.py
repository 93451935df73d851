"""Findings and measurements of a run, also as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ignite_monitor.report import layers, training, weights
from ignite_monitor.report.curves import curves, lost_value
from ignite_monitor.report.families import Group, groups
from ignite_monitor.report.finding import Finding, in_order
from ignite_monitor.report.gradients import gradient_findings, norms, value_spikes
from ignite_monitor.report.series import Series, Statistics, natural, number, plural, statistics

VERSION = 3
"""Version of the JSON; raised when a key changes its meaning or is removed."""

Rule = Callable[[Group, Sequence[Group]], Iterator[Finding]]

RULES: dict[str, tuple[Rule, ...]] = {
    "grad": (gradient_findings,),
    "spike": (value_spikes, lost_value),
    "rollback": (training.rollbacks,),
    "weights": (
        weights.frozen,
        weights.ratios,
        weights.small_or_large_gradients,
        weights.lost_updates,
    ),
    "activation": (layers.nonfinite, layers.dead, layers.outliers),
    "attention_entropy": (layers.collapsed,),
    "attention_logit_max": (layers.large_logits,),
    "optimizer": (training.stale, training.eps_rules),
    "replicas": (training.disagreement,),
    "step": (training.waiting, weights.group_rates),
    "rcc": (layers.drift, layers.untrained, layers.far_layers),
    "spectral": (layers.spectral,),
    "noise scale": (training.noise_scale,),
    "curvature": (training.curvature,),
    "other": (curves,),
}
"""Kind of group -> the rules for its metrics."""


def find(run: Mapping[str, Series]) -> list[Finding]:
    """Findings of a run in the order of what happened; notes last.

    Examples:
        .. code-block:: python

            for finding in find(tidy(read_hdf5("run.h5"))):
                print(finding.severity, finding.text)
    """
    every = groups(run)
    findings = [each for group in every for rule in RULES.get(group.kind, ()) for each in rule(group, every)]
    if not any(group.kind == "grad" and (group.get("norm") or group.get("stepped")) for group in every):
        what = "The gradients were not monitored: the file has no metrics of a GradMonitor."
        findings.append(Finding("not_monitored", "note", what, advice="Attach a GradMonitor and log_to the logger."))
    return in_order(findings)


def healthy(findings: list[Finding]) -> bool | None:
    """True if all findings are notes; None if, in addition, the gradients were not monitored."""
    if any(finding.severity != "note" for finding in findings):
        return False
    return None if any(finding.kind == "not_monitored" for finding in findings) else True


def detection(findings: list[Finding], monitored: bool) -> str:
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


def measured(run: Mapping[str, Series]) -> list[str]:
    """Measurements in the file, in words."""
    every = groups(run)
    return [words for group in every if (words := _words(group, every))]


def _words(group: Group, run: Sequence[Group]) -> str:
    known = norms(group) if group.kind == "grad" else None
    if known is not None:
        values = known.each.finite.values
        between = f", {number(float(values.min()), 3)} to {number(float(values.max()), 3)}" if len(values) else ""
        return f"{plural(len(known.each.steps), 'gradient norm')} ({group.name('norm')}{between})"
    if group.kind == "weights" and (frozen := group.get("frozen_count")):
        return f"weight updates in {plural(len(frozen.steps), 'iteration')} ({group.root}/*)"
    if group.kind == "activation":
        modules = {item for each in group.items.values() for item in each}
        return f"activations of {plural(len(modules), 'module')} ({group.root}/*)"
    if group.kind == "attention_entropy":
        return f"{plural(len(group.each('entropy')), 'attention head')} ({group.root}/*)"
    if group.kind == "rcc":
        both = layers.updates_and_drifts(group)
        share = f", {100 * layers.weight_share(both):.0f} % of whose change is due to their own weights" if both else ""
        return f"the coordinate check of {plural(len(group.each('weight_update')), 'layer')}{share} ({group.root}/*)"
    return f"spectral norms ({group.root}/*)" if group.kind == "spectral" else ""


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


def summarise(file: str, run: Mapping[str, Series]) -> Summary:
    """Summarise a run, which has one series at least."""
    own: list[str] = []
    monitored: list[str] = []
    parts: list[str] = []  # of layers, parameters, heads
    for group in groups(run):
        whole = own if group.kind == "other" else monitored
        whole += sorted((name for name, _ in group.scalars.values()), key=natural)
        parts += sorted((name for items in group.items.values() for name, _ in items.values()), key=natural)
    monitored += parts
    counting = [run[name].steps for name in (*own, *monitored)]
    return Summary(
        file,
        min(int(steps[0]) for steps in counting),
        max(int(steps[-1]) for steps in counting),
        find(run),
        measured(run),
        {name: statistics(run[name]) for name in (*own, *monitored)},
    )


def as_json(summary: Summary) -> dict[str, Any]:
    """A summary as JSON's own types; numbers that are not finite are None."""
    return {
        "version": VERSION,
        "file": summary.file,
        "iterations": {"first": summary.first, "last": summary.last},
        "healthy": summary.healthy,
        "measured": summary.measured,
        "findings": findings_json(summary.findings),
        "metrics": {name: plain(numbers._asdict()) for name, numbers in summary.metrics.items()},
    }


def findings_json(findings: list[Finding]) -> list[dict[str, Any]]:
    """Findings as JSON's own types."""
    return [
        {
            **{key: getattr(each, key) for key in ("kind", "severity", "text")},
            **{key: list(getattr(each, key)) for key in ("metrics", "iterations")},
            "values": plain(each.values),
        }
        for each in findings
    ]


def plain(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, of which those that are not finite become None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in numbers.items()
    }
