"""What the user's own metrics say: a loss that is not finite, or that lost what it had gained."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np

from ignite_monitor.report import limits
from ignite_monitor.report.families import Group
from ignite_monitor.report.finding import Finding, steps
from ignite_monitor.report.series import Series, iterations, number, printable

_SUFFIX = r"([_ .-]?(mean|avg|average|ema|total|sum|epoch|step|train|val|valid|test|\d+))*$"
SMALLER_IS_BETTER = re.compile(
    rf"(^|[^a-z])(\w*loss|nll|perplexity|ppl|error|mse|mae|rmse|wer|cer){_SUFFIX}", re.IGNORECASE
)
LARGER_IS_BETTER = re.compile(
    r"(^|[^a-z])(acc|accuracy|top\d|f1|precision|recall|auc|auroc|roc_auc|bleu|rouge|iou|miou|dice|map|psnr|ssim|r2|"
    rf"reward|return){_SUFFIX}",
    re.IGNORECASE,
)


def direction(name: str) -> int:
    """-1 if smaller values of a metric are better, 1 if larger are, 0 if the end of its name does not tell."""
    last = name.rpartition("/")[2]
    return -1 if SMALLER_IS_BETTER.search(last) else 1 if LARGER_IS_BETTER.search(last) else 0


def curves(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """Findings about the user's own metrics."""
    for name, series in group.scalars.values():
        yield from _nonfinite(name, series)
        if direction(name) < 0:
            yield from _lost(name, series.finite)


def lost_value(group: Group, run: Sequence[Group]) -> Iterator[Finding]:
    """A SpikeMonitor's value that ended far above its best."""
    yield from _lost(group.name("value"), group.get("value").finite)


def _nonfinite(name: str, series: Series) -> Iterator[Finding]:
    bad, good = series.where(~np.isfinite(series.values)), series.finite.steps
    if not len(bad):
        return
    stays = not np.isfinite(series.values[-1])
    finite = np.flatnonzero(np.isfinite(series.values))
    since = int(series.steps[finite[-1] + 1]) if stays and len(good) else int(bad[0])
    where = f"from iteration {since} to the end" if stays else f"in {iterations(bad)}"
    found = "NaN" if np.isnan(series.values[~np.isfinite(series.values)]).all() else "inf or NaN"
    what = f"{printable(name)} is {found} {where} ({len(bad)} of {len(series.steps)} values)."
    severity = "problem" if stays and direction(name) < 0 else "warning" if len(good) else "note"
    yield Finding("nonfinite_metric", severity, what, (name,), steps(bad), {"count": len(bad)})


def _lost(name: str, series: Series) -> Iterator[Finding]:
    if len(series.values) < limits.LOSS_POINTS:
        return
    begin, end = series.start(), series.end()
    smooth = _smoothed(series)
    at = int(np.argmin(smooth.values))
    lowest, best = int(smooth.steps[at]), float(smooth.values[at])
    noise = float(np.median(np.abs(np.diff(series.values))))
    gained, lost = begin - best, end - best
    if end > begin and lost > limits.LOST_GAIN * abs(begin) and lost > limits.LOST_GAIN * gained:
        what, kind, severity = f"ended above its start, at {number(end)} after {number(begin)}", "loss_rose", "problem"
    elif gained > 0 and (
        lost > max(limits.LOST_GAIN * gained, 2 * noise)
        or (best > 0 and end > limits.LOST_FACTOR * best and lost > max(limits.LOST_NOISE * noise, 0.1 * gained))
    ):
        what = f"fell from {number(begin)} to {number(best)} and rose again to {number(end)}"
        kind, severity = "loss_rose_again", "warning"
    else:
        return
    what = f"{printable(name)} {what}; it was lowest about iteration {lowest}."
    yield Finding(kind, severity, what, (name,), (lowest,), {"first": begin, "best": best, "end": end})


def _smoothed(series: Series) -> Series:
    """Running medians over a tenth of the series, at most 51 values; of a long series about 2,000 of them."""
    half = min(25, len(series.values) // 20)
    windows = np.lib.stride_tricks.sliding_window_view(series.values, 2 * half + 1)
    every = max(1, len(windows) // 2000)
    return Series(series.steps[half : len(series.steps) - half : every], np.median(windows[::every], axis=1))
