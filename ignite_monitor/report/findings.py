"""A run's series turned into what happened, most important first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ignite_monitor.report.activations import activation_findings, entropy_findings
from ignite_monitor.report.curves import curve_findings
from ignite_monitor.report.drift import drift_findings, spectral_findings
from ignite_monitor.report.families import Group, groups
from ignite_monitor.report.finding import SEVERITIES, Finding
from ignite_monitor.report.gradients import gradient_findings
from ignite_monitor.report.series import Series, number
from ignite_monitor.report.weights import weight_findings

ORDER = (
    "nonfinite_metric",
    "nonfinite_gradients",
    "spikes",
    "loss_rose",
    "loss_rose_again",
    "nonfinite_activations",
    "frozen_parameters",
    "attention_collapse",
    "dead_units",
    "level_change",
    "overflows",
    "large_updates",
    "small_updates",
    "update_ratio_outlier",
    "weight_update_outlier",
    "exploding_gradients",
    "vanishing_gradients",
    "spectral_growth",
    "frozen_for_a_while",
    "gap",
    "input_drift",
)
"""The kinds of findings, what matters most first."""


def find(run: Mapping[str, Series]) -> list[Finding]:
    """What happened in a run, most important first.

    Examples:
        .. code-block:: python

            for finding in find(tidy(read_hdf5("run.h5"))):
                print(finding.severity, finding.text)
    """
    found = list(_each(groups(run)))
    return sorted(found, key=lambda finding: (SEVERITIES.index(finding.severity), ORDER.index(finding.kind)))


def healthy(findings: list[Finding]) -> bool:
    """Whether nothing is among them but notes.

    Args:
        findings: what :func:`find` returned.
    """
    return all(finding.severity == "note" for finding in findings)


def looked_at(run: Mapping[str, Series]) -> list[str]:
    """What a run's file lets one judge, in words."""
    told = []
    for group in groups(run):
        norm, frozen = group.get("norm"), group.get("frozen_count")
        if group.kind == "grad" and norm is not None:
            finite = norm.finite.values
            between = f", {number(float(finite.min()), 3)} to {number(float(finite.max()), 3)}" if len(finite) else ""
            told.append(f"{len(norm.steps)} gradient norms ({group.name('norm')}{between})")
        elif group.kind == "weights" and frozen is not None:
            told.append(f"weight updates in {len(frozen.steps)} iterations ({group.root}/*)")
        elif group.kind == "activation":
            modules = {item for each in group.items.values() for item in each}
            told.append(f"activations of {len(modules)} module{'s' * (len(modules) != 1)} ({group.root}/*)")
        elif group.kind == "attention_entropy":
            told.append(f"{len(group.each('entropy'))} attention heads ({group.root}/*)")
        elif group.kind == "rcc":
            told.append(f"the coordinate check of {len(group.each('weight_update'))} layers ({group.root}/*)")
        elif group.kind == "spectral":
            told.append(f"spectral norms ({group.root}/*)")
    return told


def _each(found: list[Group]) -> Iterator[Finding]:
    weights = [group for group in found if group.kind == "weights"]
    for group in found:
        if group.kind == "grad":
            yield from gradient_findings(group, weights)
        elif group.kind == "weights":
            yield from weight_findings(group)
        elif group.kind == "activation":
            yield from activation_findings(group)
        elif group.kind == "attention_entropy":
            yield from entropy_findings(group)
        elif group.kind == "rcc":
            yield from drift_findings(group)
        elif group.kind == "spectral":
            yield from spectral_findings(group)
        elif group.kind == "other":
            yield from curve_findings(group)
