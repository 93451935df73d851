"""What the user's own metrics say: a loss that is not finite, or that lost what it had gained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Array, Series, iterations, number, printable

SMALLER_IS_BETTER = re.compile(
    r"(^|[^a-z])(\w*loss|nll|perplexity|ppl|error|mse|mae|rmse|wer|cer)([^a-z]|$)", re.IGNORECASE
)
LARGER_IS_BETTER = re.compile(
    r"(^|[^a-z])(acc|accuracy|top\d|f1|precision|recall|auc|auroc|roc_auc|bleu|rouge|iou|miou|dice|map|psnr|ssim|r2|"
    r"reward|return)([^a-z]|$)",
    re.IGNORECASE,
)


def direction(name: str) -> int:
    """-1 if smaller values of a metric are better, 1 if larger are, 0 if the last part of its name does not tell."""
    last = name.rpartition("/")[2]
    return -1 if SMALLER_IS_BETTER.search(last) else 1 if LARGER_IS_BETTER.search(last) else 0


def curves(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Findings about the user's own metrics."""
    for name, series in group.scalars.values():
        yield from _nonfinite(name, series)
        if direction(name) < 0:
            yield from _lost(name, series.finite)


def _nonfinite(name: str, series: Series) -> Iterator[Finding]:
    bad, good = series.where(~np.isfinite(series.values)), series.finite.steps
    if not len(bad):
        return
    stays = not np.isfinite(series.values[-1])
    since = int(bad[bad > good[-1]][0]) if stays and len(good) else int(bad[0])
    where = f"from iteration {since} to the end" if stays else f"in {iterations(bad)}"
    found = "NaN" if np.isnan(series.values[~np.isfinite(series.values)]).all() else "inf or NaN"
    what = f"{printable(name)} is {found} {where} ({len(bad)} of {len(series.steps)} values)."
    severity = "problem" if stays and direction(name) < 0 else "warning" if len(good) else "note"
    yield Finding("nonfinite_metric", severity, what, (name,), steps(bad), {"count": len(bad)})


def _lost(name: str, series: Series) -> Iterator[Finding]:
    if len(series.values) < limits.LOSS_POINTS:
        return
    begin, end = series.start(), series.end()
    smooth = _smoothed(series.values)
    at = int(np.argmin(smooth))
    lowest, best = int(series.steps[at]), float(smooth[at])
    gained, lost = begin - best, end - best
    if end > begin and lost > limits.LOST_GAIN * abs(begin) and lost > limits.LOST_GAIN * gained:
        what, kind, severity = f"ended above its start, at {number(end)} after {number(begin)}", "loss_rose", "problem"
    elif gained > 0 and lost > limits.LOST_GAIN * gained and lost > 2 * _noise(series.values):
        what = f"fell from {number(begin)} to {number(best)} and rose again to {number(end)}"
        kind, severity = "loss_rose_again", "warning"
    else:
        return
    what = f"{printable(name)} {what}; it was lowest about iteration {lowest}."
    yield Finding(kind, severity, what, (name,), (lowest,), {"first": begin, "best": best, "end": end})


def _smoothed(values: Array) -> Array:
    """Running medians over a tenth of the series, at most 51 values."""
    half = min(25, len(values) // 20)
    return np.asarray([np.median(values[max(0, at - half) : at + half + 1]) for at in range(len(values))])


def _noise(values: Array) -> float:
    """The usual step from a value to the next."""
    return float(np.median(np.abs(np.diff(values))))
