"""Which monitor a metric is of, by its name alone.

Monitors may have a prefix of the user's, and loggers put a tag before it: ``train/grad/norm``. So the monitors whose
schema has signs are known by the keys that stand together, whatever comes before them, the others by their prefix.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ignite_monitor.keys import ACTIVATION, RCC, SCHEMAS
from ignite_monitor.report.series import Series
from ignite_monitor.schema import Schema

PER_HEAD = {"attention_entropy": "entropy", "attention_logit_max": "logit_max"}
PER_LAYER = tuple(family for family in ACTIVATION.families if family not in PER_HEAD)
HEAD = re.compile(rf"(?:(?P<tag>.+?)/)?(?P<kind>{'|'.join(PER_HEAD)})/(?P<item>.+/head_\d+)")
LAYER = re.compile(rf"(?:(?P<tag>.+?)/)?(?P<kind>{'|'.join(PER_LAYER)})/(?P<item>.+)/(?P<metric>[^/]+)")
SIGNED = [schema for schema in SCHEMAS if schema.signs or schema is RCC]
NAMED = {schema.prefix: schema for schema in SCHEMAS if schema.prefix and schema not in SIGNED}
WORDS = re.compile(rf"(?:(?P<tag>.+?)/)?(?P<prefix>{'|'.join(NAMED)})/(?P<key>.+)")
KINDS = [*(schema.kind for schema in SIGNED), *PER_HEAD, *PER_LAYER]
KINDS += [*(schema.kind for schema in NAMED.values()), "other"]
"""All kinds of groups, in the order in which they are spoken of."""


@dataclass(frozen=True)
class Group:
    """The metrics of one monitor, by their last word."""

    kind: str  # one of KINDS: a monitor's schema's, a family of ActivationHandler's, or "other" for the user's own
    root: str  # what its names begin with
    scalars: dict[str, tuple[str, Series]] = field(default_factory=dict)  # of the whole model: metric -> (name, series)
    items: dict[str, dict[str, tuple[str, Series]]] = field(default_factory=dict)  # metric -> layer or parameter -> …

    def get(self, metric: str) -> Series:
        """The series of a metric of the whole model, without values where it is not there."""
        return self.scalars[metric][1] if metric in self.scalars else Series()

    def name(self, metric: str) -> str:
        """The full name of a metric of the whole model, whether it is there or not."""
        return f"{self.root}/{metric}"

    def each(self, metric: str) -> dict[str, Series]:
        """Layer or parameter -> its series; of a layer that RCCHandler has with and without its bias, with it."""
        series = {item: series for item, (_, series) in self.items.get(metric, {}).items()}
        if self.kind == RCC.kind:
            return {item: series[item] for item in series if item.removesuffix(".weight") not in series.keys() - {item}}
        return series

    def finite(self, metric: str) -> dict[str, Series]:
        """Likewise the finite parts of those that have one."""
        return {item: each.finite for item, each in self.each(metric).items() if np.isfinite(each.values).any()}

    def names(self, metric: str, items: Iterable[str]) -> tuple[str, ...]:
        """The full names of a metric of layers or parameters."""
        return tuple(self.items[metric][item][0] for item in items)


def groups(run: Mapping[str, Series]) -> list[Group]:
    """The metrics of a run by monitor; the user's own come last."""
    roots = [(schema, root) for schema in SIGNED for root in _roots(set(run), schema)]
    roots.sort(key=lambda each: -len(each[1]))
    by_root: dict[tuple[str, str], Group] = {}
    for name, series in run.items():
        kind, root, metric, item = _parts(name, roots)
        group = by_root.setdefault((kind, root), Group(kind, root))
        if item:
            group.items.setdefault(metric, {})[item] = (name, series)
        else:
            group.scalars[metric] = (name, series)
    return sorted(by_root.values(), key=lambda group: (KINDS.index(group.kind), group.root))


def _roots(names: set[str], schema: Schema) -> set[str]:
    if schema is RCC:
        first, *others = [key.pattern.partition("/{")[0] for key in schema.keys if "/{" in key.pattern]
        parted = [name.partition(f"/{first}/") for name in names]
        return {root for root, _, layer in parted if any(f"{root}/{each}/{layer}" in names for each in others)}
    roots = [{name[: -len(sign) - 1] for name in names if name.endswith(f"/{sign}")} for sign in schema.signs]
    return set.intersection(*roots)


def _parts(name: str, roots: list[tuple[Schema, str]]) -> tuple[str, str, str, str]:
    """Kind, root, metric and item."""
    for schema, root in roots:
        key = name.removeprefix(f"{root}/")
        if key != name and schema.find(key):
            metric, _, item = key.partition("/")
            return schema.kind, root, metric, item
    if match := HEAD.fullmatch(name) or LAYER.fullmatch(name):
        kind = match["kind"]
        return kind, _under(match["tag"], kind), PER_HEAD.get(kind) or match["metric"], match["item"]
    if (match := WORDS.fullmatch(name)) and NAMED[match["prefix"]].find(match["key"]):
        schema = NAMED[match["prefix"]]
        metric, _, item = match["key"].partition("/")
        return schema.kind, _under(match["tag"], schema.prefix), metric, item
    return "other", "", name, ""


def _under(tag: str | None, kind: str) -> str:
    return f"{tag}/{kind}" if tag else kind
