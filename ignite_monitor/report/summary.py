"""What happened in a run, and what there was to judge it by; as JSON for machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ignite_monitor.report import layers, training, weights
from ignite_monitor.report.curves import curves
from ignite_monitor.report.families import Group, groups
from ignite_monitor.report.finding import KINDS, SEVERITIES, Finding
from ignite_monitor.report.gradients import gradient_findings, no_step, norms
from ignite_monitor.report.series import Series, Statistics, natural, number, plural, statistics

VERSION = 1
"""Of the JSON: raised when a key changes its meaning or goes."""

Rule = Callable[[Group, Sequence[Group]], Iterator[Finding]]

RULES: dict[str, tuple[Rule, ...]] = {
    "grad": (gradient_findings,),
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
    "step": (training.waiting,),
    "rcc": (layers.drift, layers.untrained, layers.far_layers),
    "spectral": (layers.spectral,),
    "noise scale": (training.noise_scale,),
    "curvature": (training.curvature,),
    "other": (curves,),
}
"""What is asked of the metrics of each kind."""


def find(run: Mapping[str, Series]) -> list[Finding]:
    """What happened in a run, most important first.

    Examples:
        .. code-block:: python

            for finding in find(tidy(read_hdf5("run.h5"))):
                print(finding.severity, finding.text)
    """
    every = groups(run)
    findings = [each for group in every for rule in RULES.get(group.kind, ()) for each in rule(group, every)]
    if not any(group.kind == "grad" for group in every):
        findings.append(_no_gradients(every))
    kinds = list(KINDS)
    return sorted(findings, key=lambda finding: (SEVERITIES.index(finding.severity), kinds.index(finding.kind)))


def _no_gradients(every: Sequence[Group]) -> Finding:
    """That no norms are there, be it that there is no monitor, or that it saw no step."""
    own = {name: series for group in every if group.kind == "other" for name, series in group.scalars.values()}
    for name, series in own.items():
        if name.endswith("/stepped") and not series.values.any():
            return no_step(name, len(series.steps))
    what = "The gradients were not judged: no GradMonitor's metrics are in the file."
    how = "Attach GradMonitor and log_to the logger; if it is, give it the optimizer whose step() the train step calls."
    return Finding("not_judged", "note", what, advice=how)


def healthy(findings: list[Finding]) -> bool | None:
    """Whether nothing is among them but notes; None if nothing is, and the gradients were not judged."""
    if any(finding.severity != "note" for finding in findings):
        return False
    return None if any(finding.kind == "not_judged" for finding in findings) else True


def detection(findings: list[Finding], monitored: bool) -> str:
    """A run in a few words; ``monitored``: whether there is a monitor's metric in the file."""
    counts = {kind: sum(finding.severity == kind for finding in findings) for kind in ("problem", "warning")}
    told = [plural(count, kind) for kind, count in counts.items() if count]
    if told:
        return f"Needs attention: {' and '.join(told)}."
    if not monitored:
        return "No monitor's metrics are in this file, so there is little to judge by."
    if healthy(findings) is None:
        return "Nothing unusual, but the gradients were not judged."
    return "Healthy: nothing in this run needs attention."


def looked_at(run: Mapping[str, Series]) -> list[str]:
    """What a run's file lets one judge, in words."""
    every = groups(run)
    return [words for group in every if (words := _words(group, every))]


def _words(group: Group, run: Sequence[Group]) -> str:
    known = norms(group, run) if group.kind == "grad" else None
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
        share = (
            f", {100 * layers.weight_share(both):.0f} % of whose changes is their own weights' doing" if both else ""
        )
        return f"the coordinate check of {plural(len(group.each('weight_update')), 'layer')}{share} ({group.root}/*)"
    return f"spectral norms ({group.root}/*)" if group.kind == "spectral" else ""


@dataclass(frozen=True)
class Summary:
    """What happened in a run."""

    file: str
    first: int  # iteration
    last: int
    findings: list[Finding]  # most important first
    looked_at: list[str]  # what the file lets one judge
    metrics: dict[str, Statistics]  # the user's own first, those of single layers last

    @property
    def healthy(self) -> bool | None:
        """Whether nothing but notes was found; None if there was too little to judge by."""
        return healthy(self.findings)


def summarise(file: str, run: Mapping[str, Series]) -> Summary:
    """What happened in a run, which has one series at least."""
    own: list[str] = []  # they may count epochs
    monitored: list[str] = []
    parts: list[str] = []  # of layers, parameters, heads
    for group in groups(run):
        whole = own if group.kind == "other" else monitored
        whole += sorted((name for name, _ in group.scalars.values()), key=natural)
        parts += sorted((name for items in group.items.values() for name, _ in items.values()), key=natural)
    monitored += parts
    counting = [run[name].steps for name in monitored or own]
    return Summary(
        file,
        min(int(steps[0]) for steps in counting),
        max(int(steps[-1]) for steps in counting),
        find(run),
        looked_at(run),
        {name: statistics(run[name]) for name in (*own, *monitored)},
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
