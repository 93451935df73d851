"""The metrics of a run by the monitor that published them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ignite_monitor.keys import ACTIVATION, SCHEMAS
from ignite_monitor.report.series import Series

PER_HEAD = {"attention_entropy": "entropy", "attention_logit_max": "logit_max"}
OTHER = "other"  # the user's own metrics
KINDS = [schema.kind for schema in SCHEMAS if schema is not ACTIVATION]
KINDS += [*PER_HEAD, *(family for family in ACTIVATION.families if family not in PER_HEAD), OTHER]
"""Kinds of groups, in the order in which they are shown."""


@dataclass(frozen=True)
class Group:
    """The metrics of one monitor."""

    kind: str  # a schema's, a family of ActivationHandler's, or OTHER
    root: str  # prefix of its names
    scalars: dict[str, tuple[str, Series]] = field(default_factory=dict)  # of the whole model: metric -> (name, series)
    items: dict[str, dict[str, tuple[str, Series]]] = field(default_factory=dict)  # metric -> layer or parameter -> …

    def get(self, metric: str) -> Series:
        """The series of a metric of the whole model, empty if it was not recorded."""
        return self.scalars[metric][1] if metric in self.scalars else Series()

    def name(self, metric: str) -> str:
        """The full name of a metric of the whole model."""
        return f"{self.root}/{metric}"

    def each(self, metric: str) -> dict[str, Series]:
        """Layer or parameter -> its series."""
        return {item: series for item, (_, series) in self.items.get(metric, {}).items()}

    def finite(self, metric: str) -> dict[str, Series]:
        """Layer or parameter -> the finite part of its series, if there is one."""
        return {item: each.finite for item, each in self.each(metric).items() if np.isfinite(each.values).any()}

    def names(self, metric: str, items: Iterable[str]) -> tuple[str, ...]:
        """The full names of a metric of layers or parameters."""
        return tuple(self.items[metric][item][0] for item in items)


def groups(run: Mapping[str, Series]) -> list[Group]:
    """The metrics of a run by monitor, the user's own last.

    Args:
        run: a :class:`~ignite_monitor.report.series.Run`; metrics of any other mapping are the user's own.
    """
    monitors = getattr(run, "monitors", {})
    by_root: dict[tuple[str, str], Group] = {}
    for name, series in run.items():
        kind, root = monitors.get(name, ("user", ""))
        kind, root, metric, item = _parts(name, kind, root)
        group = by_root.setdefault((kind, root), Group(kind, root))
        if item:
            group.items.setdefault(metric, {})[item] = (name, series)
        else:
            group.scalars[metric] = (name, series)
    order = {kind: place for place, kind in enumerate(KINDS)}
    return sorted(by_root.values(), key=lambda group: (order.get(group.kind, len(KINDS) - 1.5), group.root))


def _parts(name: str, kind: str, root: str) -> tuple[str, str, str, str]:
    """Kind, root, metric and item."""
    if kind == "user":
        return OTHER, "", name, ""
    key = name.removeprefix(f"{root}/") if root else name
    metric, _, item = key.partition("/")
    if kind != ACTIVATION.kind:
        return kind, root, metric, item
    root = f"{root}/{metric}" if root else metric
    if metric in PER_HEAD:
        return metric, root, PER_HEAD[metric], item
    item, _, last = item.rpartition("/")
    return metric, root, last, item
