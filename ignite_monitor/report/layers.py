"""Findings about single parameters, parameter groups and layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ignite_monitor.hdf5.layout import printable
from ignite_monitor.report import limits
from ignite_monitor.report.finding import Finding, iterations, listed, number, plural, times
from ignite_monitor.report.run import MIN_ONSET, Recorded, Run, Series


def frozen(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Parameters that no longer move."""
    name, counts = monitor.name("frozen_count"), monitor.get("frozen_count").finite
    count, since = (int(counts.last), counts.since(counts.values > 0)) if counts else (0, 0)
    if not count:
        return
    onsets = {
        parameter: _frozen_since(series, counts)
        for parameter, series in monitor.items("topk_frozen/{}").items()
        if series.steps[-1] == counts.steps[-1]
    }
    order = sorted(onsets, key=lambda parameter: onsets[parameter])
    named = [f"{printable(parameter)} since iteration {onsets[parameter]}" for parameter in order]
    more = f" and {count - len(named)} more" if count > len(named) else ""
    where = f": {listed(named, 8)}{more}" if named else f", since iteration {since}"
    what = f"{plural(count, 'parameter')} no longer move{'s' * (count == 1)} ({name}){where}."
    severity, advice = "problem", ""
    # The bias of attention keys, and one before a BatchNorm, has no gradient.
    if len(onsets) == count and all(item.endswith(".bias") and f"{item[:-4]}weight" not in onsets for item in onsets):
        what, severity, advice = f"{what} These are biases whose weights move.", "note", "No action needed."
    names, begins = (name, *monitor.names("topk_frozen/{}", order)), sorted({*onsets.values()} or {since})
    yield Finding("frozen_parameters", severity, what, names, begins, {"count": count}, advice)


def _frozen_since(series: Series, counts: Series) -> int:
    """First iteration of the period without a move that lasts to the end.

    A value is the number of monitored steps since; their distance follows from two values, or from the log.
    """
    step, still = int(series.steps[-1]), series.values[-1]
    distance = float(np.median(np.diff(counts.steps))) if len(counts.steps) > 1 else 1.0
    if len(series.values) > 1 and still > series.values[-2]:
        distance = (step - series.steps[-2]) / (still - series.values[-2])
    return max(int(counts.steps[0]), round(float(step - (still - 1) * distance)))


def persistent(run: Run) -> Iterator[Finding]:
    """Metrics that are beyond their limit at the end of the run."""
    for limit in limits.PERSISTENT:
        for monitor in run.of(limit.monitor):
            series, name = monitor.get(limit.key).finite, monitor.name(limit.key)
            beyond = _beyond({name: series}, limit.limit, limit.below).get(name)
            if beyond is None:
                continue
            pattern = limits.LARGEST.get(limit.key, "")
            items = monitor.items(pattern) if pattern else {}
            largest = sorted(items, key=lambda item: -items[item].last_quarter.median)[:3]
            named = f"; largest in {listed(map(printable, largest))}" if largest else ""
            what = f"{limit.text.format(beyond.value)} ({name}), {beyond.words}{named}."
            names, values = (name, *monitor.names(pattern, largest)), {"value": beyond.value}
            initially = beyond.initially and series.steps[0] <= run.first_made
            yield Finding(limit.kind, limit.severity, what, names, (beyond.since,), values, initially=initially)


def vanishing(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Weights, not biases, whose gradients are far smaller than the largest."""
    largest = monitor.get("grad_max")
    shares = {
        name: Series(series.steps, series.values / largest.at(series.steps)).finite
        for name, series in monitor.items("smallest_grad/{}").items()
        if not name.endswith("bias")
    }
    if small := _beyond(shares, limits.VANISHING, below=True):
        count = number(monitor.get("grad_min").finite.last_quarter.median, 2)
        what = (
            f"Gradients vanish: the smallest are {count} at the end ({monitor.name('grad_min')}), those of weights as "
        )
        what += "fractions of the largest"
        finding = Finding("vanishing_gradients", "warning", what)
        yield _about(monitor, "smallest_grad/{}", small, finding, run)


def shrinking(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Parameters whose norm falls fast from the first measurement on, and stays low."""
    norm, name = monitor.get("parameter_norm").finite, monitor.name("parameter_norm")
    if not norm:
        return
    early = norm.part(norm.steps <= norm.steps[0] + limits.SHRINK_ITERATIONS)
    begin, low, end = float(norm.values[0]), float(early.values.min()), norm.tail.median
    if limits.SHRINK_FACTOR * max(low, end) < begin:
        what = f"The norm of all parameters fell from {number(begin, 3)} to {number(low, 3)} in iterations "
        what += f"{norm.steps[0]} to {early.steps[early.values.argmin()]} ({name})."
        yield Finding("weights_shrank", "warning", what, (name,), norm.steps[:1], {"first": begin, "lowest": low})


def group_rates(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Parameter groups whose learning rate is far above the others', and those that hardly move.

    A far larger rate is a warning if the group's own update ratios are too, or if the parameters grow: then the ratios
    do not show it.
    """
    groups = monitor.items("lr/{}")
    rates = {group: float(series.values.max()) for group, series in groups.items()}
    norm = monitor.get("parameter_norm").finite
    growth = norm.tail.median / norm.values[0] if norm and norm.values[0] > 0 else 0.0
    for group, rate in rates.items():
        usual = float(np.median([other for name, other in rates.items() if name != group and other > 0] or [rate]))
        ratios, factor, fastest = _group_updates(run, monitor.root, group)
        most, severity, advice = ratios.last_quarter.median, "warning", ""
        kind, name, shown = "group_rate", monitor.name(f"lr/{group}"), number(rate, 3)
        what = f"Parameter {printable(group).replace('_', ' ')}{f' (with {fastest})' * bool(fastest)} "
        if rate >= limits.GROUP_RATE * usual > 0:
            what += f"has a learning rate of {shown} ({name}), {times(rate / usual)} that of the other groups"
            if factor >= limits.GROUP_RATIO:
                what += f", and moves {fastest} up to {times(factor)} more for its size than the median parameter"
            elif growth >= limits.GROUP_GROWTH:
                what += f", and the norm of all parameters grew {times(growth)}"
            else:
                severity = "note"
        elif not rate and len(groups[group].values) > 1:
            what += f"has a learning rate of 0 from the beginning to the end ({name})"
            advice = "Give it a learning rate, or set requires_grad=False if its parameters are not to learn."
        elif 0 < most < limits.SMALL_UPDATE and len(groups) > 1:
            kind = "small_updates"
            what += f"moves no parameter by more than {most:.2g} of its size per step, to the end, at a learning rate "
            what += f"of {shown} ({name})"
        else:
            continue
        values = {"rate": rate, "usual": usual}
        yield Finding(kind, severity, f"{what}.", (name,), groups[group].steps[:1], values, advice)


def _group_updates(run: Run, root: str, group: str) -> tuple[Series, float, str]:
    """Largest update ratios of a parameter group, and the parameter that has them most often.

    The factor is the largest median, over the quarters of the run, of these ratios to the median parameter's.

    Args:
        root: of the monitor that recorded the group's learning rate; update ratios of the same tag belong to it.
    """
    tag = root.rpartition("/")[0]
    for monitor in run.of("weights"):
        items = monitor.items(f"largest_update_ratio/{group}/{{}}")
        if items and monitor.root.rpartition("/")[0] == tag:
            joined = [np.concatenate(parts) for parts in zip(*items.values(), strict=True)]
            ratios = Series(*joined).part(np.argsort(joined[0], kind="stable"))
            usual = monitor.get("update_ratio_median").at(ratios.steps)
            known = (ratios.values > 0) & (usual > limits.SMALL_UPDATE)
            quarters = np.array_split(ratios.values[known] / usual[known], 4)
            factor = max(float(np.median(part)) if len(part) else 0.0 for part in quarters)
            return ratios, factor, printable(max(items, key=lambda item: len(items[item].steps)))
    return Series(), 0.0, ""


def nonfinite(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Activations that are inf or NaN."""
    counts = monitor.items("activation/{}/nonfinite_count")
    bad = {module: at for module, series in counts.items() if len(at := series.steps[series.values > 0])}
    if not bad:
        return
    begin = min(int(at[0]) for at in bad.values())
    first = _innermost([module for module, at in bad.items() if at[0] == begin])
    at = np.unique(np.concatenate(list(bad.values())))
    lasting = any(series.values[-1] > 0 for series in counts.values())
    more = f", and in {plural(len(bad) - 1, 'more module')}" if len(bad) > 1 else ""
    what = f"Activations that are inf or NaN ({monitor.name('activation')}), first in {printable(first)}{more}: "
    what += f"{iterations(at)}.{' They stay non-finite to the end.' * lasting}"
    severity, names = "problem" if lasting else "warning", monitor.names("activation/{}/nonfinite_count", bad)
    yield Finding("nonfinite_activations", severity, what, names, at, {"modules": len(bad)})


def _innermost(modules: Sequence[str]) -> str:
    """The first module that contains no other one; the output of a container comes after those of its modules."""
    for name in modules:
        inside = (other for other in modules if other.startswith((f"{name}.", f"{name}/")))
        if name != "_root_" and not any(inside):
            return name
    return modules[0]


class Beyond(NamedTuple):
    """A layer or head that is beyond a limit at the end of the run."""

    value: float  # median in the last quarter
    since: int  # iteration
    words: str  # since when
    initially: bool  # whether it has been beyond the limit from the first measurement on


def _beyond(items: Mapping[str, Series], limit: float, below: bool = False) -> dict[str, Beyond]:
    """Items beyond a limit at the end, and in 3 measurements at least, the farthest first."""
    sign = -1 if below else 1
    beyond = {
        item: Beyond(series.last_quarter.median, *series.onset(mask), bool(mask.all()))
        for item, series in items.items()
        if sign * series.last_quarter.median > sign * limit
        and (mask := sign * series.values > sign * limit).sum() >= MIN_ONSET
    }
    return dict(sorted(beyond.items(), key=lambda entry: -sign * entry[1].value))


def _about(monitor: Recorded, pattern: str, items: Mapping[str, Beyond], finding: Finding, run: Run) -> Finding:
    """Complete a finding by the names of layers or heads, the farthest first, and the iterations since when."""
    named = listed(f"{printable(item)} ({number(it.value, 2)}, {it.words})" for item, it in items.items())
    values = {"count": len(items), "farthest": next(iter(items.values())).value, **finding.values}
    at, names, what = sorted({it.since for it in items.values()}), monitor.names(pattern, items), finding.what
    # A measurement in the first step's iteration comes before that step.
    initially = any(it.initially for it in items.values()) and 0 < at[0] <= run.first_made
    onset = 0 if initially else at[0]
    return Finding(finding.kind, finding.severity, f"{what}: {named}.", names, at, values, "", onset, initially)


def dead(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Units that are 0 over the whole batch: from initialization on, or since the learning rate killed them."""
    if modules := _beyond(monitor.items("activation/{}/dead_fraction"), limits.DEAD_FRACTION):
        worst = next(iter(modules.values()))
        severity = "problem" if worst.value >= limits.MOSTLY_DEAD_FRACTION else "warning"
        what = "Fractions of units that are 0 over the whole batch, at the end"
        finding = _about(monitor, "activation/{}/dead_fraction", modules, Finding("dead_units", severity, what), run)
        advice = "Raise the biases before the activation, or re-initialize that layer; a dropout sets units to 0 too."
        yield replace(finding, advice=advice) if finding.initially else finding


def outliers(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Modules whose outputs are far larger than the others', or all of them far too large."""
    std = monitor.items("activation/{}/std")
    usual = float(np.median([series.last_quarter.median for series in std.values()] or [0.0]))
    limit = max(limits.USUAL_ACTIVATION, min(limits.ACTIVATION_SPREAD * usual, max(limits.LARGE_ACTIVATION, usual)))
    if far := _beyond(std, limit):
        what = f"Outputs whose standard deviation is far above the median module's {number(usual, 3)}, at the end"
        finding = Finding("activation_outlier", "warning", what, values={"median": usual})
        yield _about(monitor, "activation/{}/std", far, finding, run)


def collapsed(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Attention heads that attend to a single position."""
    heads = monitor.items("attention_entropy/{}")
    low, fallen = _beyond(heads, limits.COLLAPSED_ENTROPY, below=True), limits.ENTROPY_FALL * limits.COLLAPSED_ENTROPY
    # Some heads of a module may always have been sharp, but not all of them.
    wide = {head.rpartition("/")[0] for head in heads if head not in low}
    always = {head for head in low if heads[head].values.max() <= fallen and head.rpartition("/")[0] in wide}
    single = not any(series.values.any() for series in heads.values())  # position, so that entropies are 0
    if not single and (sharp := {head: it for head, it in low.items() if head not in always}):
        what = f"{len(sharp)} of {len(heads)} attention heads attend to a single position, by their entropy in nats"
        severity = "problem" if 2 * len(sharp) >= len(heads) else "warning"
        finding = Finding("attention_collapse", severity, what, values={"heads": len(heads)})
        yield _about(monitor, "attention_entropy/{}", sharp, finding, run)


def large_logits(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """Attention logits so large that rounding, and one key, decide."""
    if far := _beyond(monitor.items("attention_logit_max/{}"), limits.LARGE_LOGIT):
        what = f"Attention logits above {number(limits.LARGE_LOGIT)}, to the end"
        yield _about(monitor, "attention_logit_max/{}", far, Finding("large_logits", "warning", what), run)


def spectral(monitor: Recorded, run: Run) -> Iterator[Finding]:
    """The largest spectral norm, if it grew."""
    name, series = monitor.name("norm_max"), monitor.get("norm_max").finite
    if series and series.tail.median > limits.SPECTRAL_GROWTH * series.values[0] > 0:
        first, end = float(series.values[0]), series.tail.median
        what = f"The largest spectral norm grew {times(end / first)} ({name}), from {number(first)} to {number(end)}."
        yield Finding("spectral_growth", "warning", what, (name,), series.tail.steps[:1], {"first": first, "end": end})
