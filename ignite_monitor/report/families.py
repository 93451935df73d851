"""Which monitor a metric is of, by its name alone.

Monitors may have a prefix of the user's, and loggers put a tag before it: ``train/grad/norm``. So the monitors with a
prefix are known by the keys that stand together, whatever comes before them, the others by the words of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ignite_monitor.report.series import Series

# kind: the keys that tell it is there, and all that it publishes
SCALARS = {
    "grad": (
        {"norm", "spike"},
        {"norm", "threshold", "mean", "std", "spike", "spike_count", "skipped_count", "nonfinite_count"},
    ),
    "weights": (
        {"frozen_count"},
        {
            *(f"{what}_{which}" for what in ("grad", "update_ratio") for which in ("median", "p95", "min", "max")),
            *("vanishing_count", "exploding_count", "frozen_count"),
        },
    ),
}
NAMED = {
    "weights": {"topk_grad", "topk_frozen"},
    "rcc": {"weight_update", "input_drift", "input", "input_change", "output_change", "weight_share"},
}
PER_LAYER = ("activation", "parameter", "gradient", "activation_difference", "parameter_difference")
ENTROPY = re.compile(r"(?:(?P<tag>.+?)/)?attention_entropy/(?P<item>.+/head_\d+)")
LAYER = re.compile(rf"(?:(?P<tag>.+?)/)?(?P<kind>{'|'.join(PER_LAYER)})/(?P<item>.+)/(?P<metric>[^/]+)")
WORDS = re.compile(r"(?:(?P<tag>.+?)/)?(?P<kind>spectral|step)/(?P<metric>[^/]+)(?:/(?P<item>.+))?")


@dataclass(frozen=True)
class Group:
    """The metrics of one monitor.

    Attributes:
        kind: ``grad``, ``weights``, ``rcc``, ``activation``, ``parameter``, ``gradient``, ``activation_difference``,
            ``parameter_difference``, ``attention_entropy``, ``spectral``, ``step``, or ``other`` for the user's own.
        root: what its names begin with.
        scalars: metric -> (name, series), of those that speak of the whole model.
        items: metric -> layer or parameter -> (name, series).
    """

    kind: str
    root: str
    scalars: dict[str, tuple[str, Series]] = field(default_factory=dict)
    items: dict[str, dict[str, tuple[str, Series]]] = field(default_factory=dict)

    def get(self, metric: str) -> Series | None:
        """The series of a metric of the whole model.

        Args:
            metric: its last word.
        """
        return self.scalars[metric][1] if metric in self.scalars else None

    def name(self, metric: str) -> str:
        """The full name of a metric of the whole model, whether it is there or not.

        Args:
            metric: its last word.
        """
        return f"{self.root}/{metric}"

    def each(self, metric: str) -> dict[str, Series]:
        """Layer or parameter -> its series; of a layer that RCCHandler has with and without its bias, with it."""
        found = {item: series for item, (_, series) in self.items.get(metric, {}).items()}
        if self.kind == "rcc":
            found = {item: found[item] for item in found if item.removesuffix(".weight") not in found.keys() - {item}}
        return found


def groups(run: Mapping[str, Series]) -> list[Group]:
    """The metrics of a run by monitor; the user's own come last."""
    roots = {kind: _roots(set(run), kind) for kind in ("grad", "weights", "rcc")}
    found: dict[tuple[str, str], Group] = {}
    for name, series in run.items():
        kind, root, metric, item = _place(name, roots)
        group = found.setdefault((kind, root), Group(kind, root))
        if item:
            group.items.setdefault(metric, {})[item] = (name, series)
        else:
            group.scalars[metric] = (name, series)
    order = ["grad", "weights", "rcc", "attention_entropy", *PER_LAYER, "spectral", "step", "other"]
    return sorted(found.values(), key=lambda group: (order.index(group.kind), group.root))


def _roots(names: set[str], kind: str) -> set[str]:
    if kind == "rcc":
        parted = [name.partition("/weight_update/") for name in names]
        return {root for root, there, layer in parted if there and any(_drifts(names, root, layer))}
    signs, _ = SCALARS[kind]
    roots = [{name[: -len(sign) - 1] for name in names if name.endswith(f"/{sign}")} for sign in signs]
    return set.intersection(*roots)


def _drifts(names: set[str], root: str, layer: str) -> list[bool]:
    return [f"{root}/{metric}/{layer}" in names for metric in ("input_drift", "output_change", "weight_share")]


def _place(name: str, roots: Mapping[str, set[str]]) -> tuple[str, str, str, str]:
    """Kind, root, metric and item."""
    root, _, last = name.rpartition("/")
    for kind, (_, metrics) in SCALARS.items():
        if root in roots[kind] and last in metrics:
            return kind, root, last, ""
    if root in roots["rcc"]:
        return "rcc", root, last, ""
    for kind, metrics in NAMED.items():
        for metric in metrics:
            root, there, item = name.partition(f"/{metric}/")
            if there and root in roots[kind]:
                return kind, root, metric, item
    if match := ENTROPY.fullmatch(name):
        return "attention_entropy", _under(match["tag"], "attention_entropy"), "entropy", match["item"]
    if match := LAYER.fullmatch(name) or WORDS.fullmatch(name):
        return match["kind"], _under(match["tag"], match["kind"]), match["metric"], match["item"] or ""
    return "other", "", name, ""


def _under(tag: str | None, kind: str) -> str:
    return f"{tag}/{kind}" if tag else kind
