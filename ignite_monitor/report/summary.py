"""Summaries of a run and comparisons of two, also as JSON."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ignite_monitor.report import causes, gradients, layers, losses
from ignite_monitor.report.finding import SEVERITIES, Finding, in_order, listed, plural
from ignite_monitor.report.run import MonitorSeries, Run, Series, natural

VERSION = 6  # of the JSON; raised when a key changes its meaning or is removed

MATTERS = 0.05  # relative difference of two values
NOISE = 2.0  # ratio of the difference to the noise within the runs

RUN_RULES = (  # rules for the whole run
    *(causes.reported, losses.curves, losses.overfitting, layers.persistent, gradients.not_monitored),
)
RULES: dict[str, tuple[Callable[[MonitorSeries, Run], Iterator[Finding]], ...]] = {  # by the kind of monitor
    "grad": (gradients.gradient_findings,),
    "spike": (gradients.value_spikes,),
    "weights": (layers.exploding, layers.vanishing),
    "activation": (layers.outliers,),
    "step": (
        *(causes.rate_vanished, causes.group_rates, causes.clipped_away, causes.weight_changed, causes.shrinking),
    ),
}


def diagnose(run: Run) -> tuple[list[Finding], list[str]]:
    """Apply all rules to a run; return the findings, causes first and notes last, and a line for each failed rule."""
    findings: list[Finding] = []
    failed: list[str] = []
    calls: list[tuple[Callable[..., Iterator[Finding]], tuple[Any, ...]]] = [
        *((rule, (run,)) for rule in RUN_RULES),
        *((rule, (monitor, run)) for monitor in run.monitors for rule in RULES.get(monitor.kind, ())),
        # These judge the findings of the others.
        *((causes.large_updates, (monitor, run, findings)) for monitor in run.of("step")),
        *((rule, (run, findings)) for rule in (losses.learning, causes.rate_rises)),
        *((causes.input_scale, (monitor, run, findings)) for monitor in run.of("step")),
    ]
    with np.errstate(all="ignore"):
        for rule, arguments in calls:
            try:
                findings.extend(rule(*arguments))
            except Exception as error:  # noqa: BLE001 - the other rules still say what they find
                failed.append(f"rule {rule.__name__} failed: {type(error).__name__}: {' '.join(str(error).split())}")
    return in_order(findings, run.distance), failed


def measured(run: Run) -> list[str]:
    """Describe the measurements in the file: the metrics of each monitor and the number of its iterations."""
    texts = []
    for monitor in run.monitors:
        count = max(len(series.iterations) for series in monitor.series.values())
        name = f" ({monitor.name('*')})" if monitor.root else ""
        metrics = plural(len(monitor.series), f"{monitor.kind} metric")
        texts.append(f"{metrics}{name} in {plural(count, 'iteration')}")
    return texts


class Statistics(NamedTuple):
    """A series as a row of a table."""

    first: float
    last: float
    min: float  # of the finite values; NaN if there is none
    max: float
    values: int  # number of values
    nonfinite: int  # number of non-finite values
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Summary:
    """Findings, measurements and statistics of a run."""

    file: str
    first: int  # iteration
    last: int
    findings: list[Finding]  # causes before symptoms, notes last
    failed: list[str]  # rules that failed, as lines
    measured: list[str]  # measurements in the file, in words
    metrics: dict[str, Statistics]  # the user's own first, those of single layers last

    @property
    def healthy(self) -> bool | None:
        """True if all findings are notes; None if, in addition, not all could be seen."""
        if any(finding.severity != "note" for finding in self.findings):
            return False
        return None if self.failed or any(finding.kind == "not_monitored" for finding in self.findings) else True

    @property
    def assessment(self) -> str:
        """The run in a few words."""
        counts = {kind: sum(finding.severity == kind for finding in self.findings) for kind in SEVERITIES[:2]}
        if any(counts.values()):
            parts = listed(plural(count, kind) for kind, count in counts.items() if count)
            first = self.findings[0]
            when = f" in iteration {first.onset}" if first.onset else ""
            sign = f" Cause unknown; the first sign was {first.kind}{when}."
            return f"Needs attention: {parts}.{sign * first.is_symptom}"
        if not self.measured:
            return "The file has no metrics of a monitor, so little can be detected."
        if self.failed:
            return f"Nothing unusual, but {plural(len(self.failed), 'rule')} failed."
        if self.healthy is None:
            return "Nothing unusual, but not everything was judged."
        return "Healthy: nothing in this run needs attention."

    @property
    def common_fields(self) -> dict[str, Any]:
        """File, findings with the evidence that they rest on, and failed rules, in JSON."""
        findings = []
        for it in self.findings:
            evidence = {"metrics": it.metrics, "iterations": it.iterations, "values": it.values}
            findings.append({"kind": it.kind, "severity": it.severity, "text": it.text, "evidence": evidence})
        return {"file": self.file, "findings": findings, "failed": self.failed}

    def as_json(self) -> dict[str, Any]:
        """Convert to JSON's own types."""
        head = {"version": VERSION, "iterations": {"first": self.first, "last": self.last}, "healthy": self.healthy}
        assessment = {"assessment": self.assessment, "measured": self.measured}
        return dict(_json(head | assessment | self.common_fields | {"metrics": self.metrics}))


def summarise(file: str, run: Run) -> Summary:
    """Summarise a run."""
    names = sorted(run.user_series, key=natural)
    for of_parts in (False, True):
        for monitor in run.monitors:
            keys = [key for key in monitor.series if ("/" in key) is of_parts]
            names += map(monitor.name, sorted(keys, key=natural))
    metrics = {name: _statistics(run.series[name]) for name in names}
    first = min((it.first_step for it in metrics.values()), default=0)
    last = max((it.last_step for it in metrics.values()), default=0)
    return Summary(file, first, last, *diagnose(run), measured(run), metrics)


def _statistics(series: Series) -> Statistics:
    steps, values, _ = series
    finite = series.finite.values
    least, most = (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)
    bad = len(values) - len(finite)
    return Statistics(float(values[0]), float(values[-1]), least, most, len(values), bad, int(steps[0]), int(steps[-1]))


class Difference(NamedTuple):
    """A metric in two runs."""

    a: float  # median of its last tenth in the first run
    b: float  # and in the second
    relative: float  # (b - a) / max(|a|, |b|); NaN if one is non-finite
    matters: bool  # whether the difference is more than noise


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    runs: tuple[Summary, Summary]
    until: int  # the last iteration that both have
    differences: dict[str, Difference]  # by metric, the largest first, the user's own before the rest
    only: tuple[list[str], list[str]]  # names of metrics of the first run only, and of the second only

    def as_json(self) -> dict[str, Any]:
        """Convert to JSON's own types."""
        both = zip(self.runs, self.only, strict=True)
        runs = [{"last_iteration": run.last, "only_here": only} | run.common_fields for run, only in both]
        head = {"version": VERSION, "compared_until": self.until}
        return dict(_json(head | {"runs": runs, "metrics": self.differences}))


def compare(files: tuple[str, str], runs: tuple[Run, Run]) -> Comparison:
    """Compare two runs, each metric up to the last iteration that both have."""
    first, second = (run.series for run in runs)
    summaries = summarise(files[0], runs[0]), summarise(files[1], runs[1])
    differences = {name: _difference(first[name], second[name]) for name in first if name in second}

    def place(name: str) -> tuple[Any, ...]:
        it = differences[name]
        size = math.inf if math.isnan(it.relative) else abs(it.relative)
        return not it.matters, not any(name in run.user_series for run in runs), -size, natural(name)

    ordered = {name: differences[name] for name in sorted(differences, key=place)}
    only = (sorted(first.keys() - second.keys(), key=natural), sorted(second.keys() - first.keys(), key=natural))
    until = min(summary.last for summary in summaries)
    return Comparison(summaries, until, ordered, only)


def _difference(*runs: Series) -> Difference:
    until = min(series.iterations[-1] for series in runs)
    parts = [series.part(series.iterations <= until) for series in runs]
    if not all(parts):
        return Difference(math.nan, math.nan, math.nan, False)
    a, b = (part.tail.median if np.isfinite(part.values[-1]) else float(part.values[-1]) for part in parts)
    gap, size = abs(b - a), max(abs(a), abs(b))
    if not math.isfinite(gap):
        return Difference(a, b, math.nan, repr(a) != repr(b))
    noise = max(float(np.median(np.abs(part.tail.values - part.tail.median))) for part in parts)
    return Difference(a, b, (b - a) / size if size else 0.0, gap > MATTERS * size and gap > NOISE * noise)


def _json(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    return [*map(_json, value)] if isinstance(value, (list, tuple)) else value
