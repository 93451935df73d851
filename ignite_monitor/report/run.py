"""A recorded run: the metrics of each monitor, and the user's own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ignite_monitor.keys import SCHEMAS
from ignite_monitor.report.series import Series

_ORDER = {schema.kind: place for place, schema in enumerate(SCHEMAS)}


@dataclass(frozen=True)
class Recorded:
    """The metrics of one monitor by their keys, which are the names without the root."""

    kind: str  # of the monitor's schema
    root: str  # tag and prefix
    series: dict[str, Series] = field(default_factory=dict)

    def name(self, key: str) -> str:
        """Return the full name of a key."""
        return f"{self.root}/{key}" if self.root else key

    def get(self, key: str) -> Series:
        """Return the series of a key, empty if it was not recorded."""
        return self.series.get(key, Series())

    def each(self, pattern: str) -> dict[str, Series]:
        """Return layer or parameter -> its finite series, for a pattern such as ``activation/{}/std``."""
        start, _, end = pattern.partition("{}")
        return {
            key[len(start) : len(key) - len(end)]: series.finite
            for key, series in self.series.items()
            if key.startswith(start) and key.endswith(end) and np.isfinite(series.values).any()
        }

    def names(self, pattern: str, items: Iterable[str]) -> tuple[str, ...]:
        """Return the full names of a pattern's items."""
        return tuple(self.name(pattern.format(item)) for item in items)


class Run:
    """Metrics of a run over iterations.

    Args:
        recording: as :func:`~ignite_monitor.read_hdf5` returns it.
    """

    def __init__(self, recording: Any) -> None:
        self.series: dict[str, Series] = {}  # by full name, in the order of recording
        self.own: dict[str, Series] = {}  # the user's own
        monitors: dict[tuple[str, str], Recorded] = {}
        for name in recording:
            series = Series(recording.iterations(name), recording[name][1])
            if (np.diff(series.steps) < 0).any():
                series = series.part(np.argsort(series.steps, kind="stable"))
            if not series:
                continue
            self.series[name] = series
            kind, root = recording.monitor(name)
            if kind == "user":
                self.own[name] = series
            else:
                key = name.removeprefix(f"{root}/") if root else name
                monitors.setdefault((kind, root), Recorded(kind, root)).series[key] = series
        self.monitors = sorted(monitors.values(), key=lambda monitor: (_ORDER.get(monitor.kind, 99), monitor.root))

    def of(self, kind: str) -> list[Recorded]:
        """Return the monitors of a kind."""
        return [monitor for monitor in self.monitors if monitor.kind == kind]
