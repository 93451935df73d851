"""A recorded run: the series of each monitor's metrics, and of the user's own."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from ignite_monitor.keys import SCHEMAS

Array: TypeAlias = npt.NDArray[Any]

MIN_ONSET = 3  # values that make an onset

LOSS = re.compile(
    r"(^|[^a-z])(\w*loss|nll|perplexity|ppl|error|mse|mae|rmse|wer|cer)"
    r"([_ .-]?(mean|avg|average|ema|total|sum|epoch|step|train|val|valid|test|\d+))*$",
    re.IGNORECASE,
)

_ORDER = {schema.kind: place for place, schema in enumerate(SCHEMAS)}


class Series(NamedTuple):
    """A metric over the run; without values, and false, if it was not recorded."""

    iterations: Array = np.empty(0, int)  # ascending
    values: Array = np.empty(0)  # float64, non-finite ones included
    name: str = ""  # full name of the metric

    def __bool__(self) -> bool:
        return bool(len(self.iterations))

    def part(self, which: Array | slice) -> Series:
        """Select values by a mask, by indices or by a slice."""
        return Series(self.iterations[which], self.values[which], self.name)

    def over(self, other: Series) -> Series:
        """Divide the values by those of another series at the same iterations; the finite ratios."""
        return Series(self.iterations, self.values / other.at(self.iterations), self.name).finite

    @property
    def finite(self) -> Series:
        """The finite values."""
        keep = np.isfinite(self.values)
        return self if keep.all() else self.part(keep)

    @property
    def last_quarter(self) -> Series:
        """The last quarter of the values, at least one."""
        return self.part(slice(-max(1, len(self.iterations) // 4), None))

    @property
    def median(self) -> float:
        """Median of the finite values, NaN if there is none."""
        return float(np.median(self.finite.values)) if self.finite else math.nan

    @property
    def head(self) -> Series:
        """The first tenth of the finite values, at most 50."""
        return self.finite.part(slice(self._tenth))

    @property
    def tail(self) -> Series:
        """The last tenth of the finite values, at most 50."""
        return self.finite.part(slice(-self._tenth, None))

    @property
    def _tenth(self) -> int:
        return max(1, min(50, math.ceil(len(self.finite.values) / 10)))

    def at(self, iterations: Array) -> Array:
        """Return the values at some iterations, NaN where there is none."""
        if not self:
            return np.full(len(iterations), math.nan)
        index = np.minimum(np.searchsorted(self.iterations, iterations), len(self.iterations) - 1)
        return np.where(self.iterations[index] == iterations, self.values[index], math.nan)

    def since(self, condition: Array) -> int:
        """Return the step from which on a condition holds to the end, or else the last step."""
        failing = np.flatnonzero(~condition)
        return int(self.iterations[min(failing[-1] + 1, len(self.iterations) - 1) if len(failing) else 0])

    def onset(self, condition: Array) -> tuple[int, str]:
        """Return since when a condition holds, in words too; it has to hold for 3 values, and a tenth of them."""
        count, since = int(condition.sum()), self.since(condition)
        if condition.all() and count >= MIN_ONSET:
            return since, "from the first measurement on"
        if (self.iterations >= since).sum() >= max(MIN_ONSET, 0.1 * len(self.iterations)):
            return since, f"since iteration {since}"
        return int(self.iterations[condition.argmax()]), f"at {count} of {len(condition)} measurements"


@dataclass(frozen=True)
class MonitorSeries:
    """The metrics of one monitor by their keys, which are the names without the root."""

    kind: str  # of the monitor's schema
    root: str  # tag and prefix
    series: dict[str, Series] = field(default_factory=dict)

    def name(self, key: str) -> str:
        """Return the full name of a key."""
        return f"{self.root}/{key}" if self.root else key

    def get(self, key: str) -> Series:
        """Return the series of a key, empty if it was not recorded."""
        return self.series.get(key, Series(name=self.name(key)))

    def items(self, pattern: str) -> dict[str, Series]:
        """Return layer or parameter -> its finite series, for a pattern such as ``activation/{}/std``."""
        start, _, end = pattern.partition("{}")
        return {
            key[len(start) : len(key) - len(end)]: series.finite
            for key, series in self.series.items()
            if key.startswith(start) and key.endswith(end) and np.isfinite(series.values).any()
        }

    def rates(self, iterations: Array) -> Array:
        """Return the largest learning rate of all groups at some iterations, NaN where none was measured."""
        rates = [series.at(iterations) for series in self.items("lr/{}").values()]
        return np.max(rates, axis=0) if rates else np.full(len(iterations), math.nan)


class Run:
    """Metrics of a run over iterations, from what :func:`~ignite_monitor.read_hdf5` returns."""

    def __init__(self, recording: Any) -> None:
        self.series: dict[str, Series] = {}  # by full name, in the order of recording
        self.user_series: dict[str, Series] = {}  # the user's own
        monitors: dict[tuple[str, str], MonitorSeries] = {}
        for name in recording:
            series = Series(recording.iterations(name), recording[name][1], name)
            if (np.diff(series.iterations) < 0).any():
                series = series.part(np.argsort(series.iterations, kind="stable"))
            if not series:
                continue
            self.series[name] = series
            kind, root = recording.monitor(name)
            if kind == "user":
                self.user_series[name] = series
            else:
                key = name.removeprefix(f"{root}/") if root else name
                monitors.setdefault((kind, root), MonitorSeries(kind, root)).series[key] = series
        self.reports: list[Any] = list(getattr(recording, "reports", ()))
        self.settings: list[Any] = list(getattr(recording, "settings", ()))
        self.restarts: list[int] = list(getattr(recording, "restarts", ()))
        self.monitors = sorted(monitors.values(), key=lambda monitor: (_ORDER.get(monitor.kind, 99), monitor.root))

    def of(self, kind: str) -> list[MonitorSeries]:
        """Return the monitors of a kind."""
        return [monitor for monitor in self.monitors if monitor.kind == kind]

    def sibling(self, monitor: MonitorSeries, kind: str) -> MonitorSeries:
        """Return the one monitor of a kind whose tag and prefix begin as another's do; an empty one if none is."""
        tag = monitor.root.rpartition("/")[0]
        same = [it for it in self.of(kind) if tag in (it.root, it.root.rpartition("/")[0])]
        return same[0] if len(same) == 1 else MonitorSeries(kind, "")

    @property
    def distance(self) -> int:
        """Usual distance of measurements, in iterations."""
        measured = [
            it.iterations for monitor in self.of("step") for it in monitor.series.values() if len(it.iterations) > 1
        ]
        return int(max((np.median(np.diff(iterations)) for iterations in measured), default=0))

    @property
    def items(self) -> float:
        """Usual number of items in a batch, NaN if it is not known."""
        iterations, rates, _ = next((monitor.get("items_per_s") for monitor in self.of("step")), Series())
        times = next((monitor.get("time_ms") for monitor in self.of("step")), Series())
        return Series(iterations, rates * times.at(iterations) / 1e3).median

    @property
    def first_made(self) -> float:
        """The iteration of the first optimizer step; 0 if it is not known."""
        stepped = [monitor.get("stepped") for monitor in self.of("grad")]
        return min((float(it.iterations[it.values.argmax()]) for it in stepped if it.values.any()), default=0.0)

    @property
    def losses(self) -> list[Series]:
        """The loss that attach_monitors recorded, of several the one named so, and the user's own; of the last run."""
        recorded = [series for monitor in self.of("loss") for series in monitor.series.values()]
        kept = [series for series in recorded if series.name.endswith("/value") or is_loss(series.name)]
        kept = kept if len(kept) == 1 else [series for series in kept if series.name.endswith("/loss")]
        kept += [series for series in self.user_series.values() if is_loss(series.name)]
        return [series.part(series.iterations > max(self.restarts, default=0)) for series in kept]

    @property
    def loss(self) -> Series:
        """The first of the losses, from the first optimizer step on."""
        loss = next(iter(self.losses), Series())
        return loss.part(loss.iterations >= self.first_made)

    @property
    def judges_loss(self) -> bool:
        """True if losses have to fall: not those of a GAN or a DQN, with several models or no batches of the engine."""
        models, steps = sum("norm" in it.series for it in self.of("grad")), self.of("step")
        return models <= 1 and (not steps or any(monitor.get("items_per_s") for monitor in steps))


def is_loss(name: str) -> bool:
    """Check whether a metric is a loss, by the end of its name."""
    return LOSS.search(name.rpartition("/")[2]) is not None


def natural(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts ``layers.2`` before ``layers.10``."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name)]
