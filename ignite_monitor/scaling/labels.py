"""Where tensors come from, while a model is traced, and what the model has multiplied them by since."""

from __future__ import annotations

import math
import traceback
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import DispatchMode, is_functorch_wrapped, pytree
from ignite_monitor.model._torch import storage_of as _storage_of
from ignite_monitor.scaling.graph import Node

FLAT = 0.02
"""By how much of its logarithm a factor may differ between the models and be taken for the same."""


class TracingError(RuntimeError):
    """The graph of a model can't be followed."""


class Label(NamedTuple):
    """Where a tensor comes from."""

    node: str | None = None  # the node whose output it follows
    weight: str | None = None  # the parameter outside of all layers that it is, or is a part of
    outside: str | None = None  # the parameter outside of all layers that its inputs were multiplied by
    lost: str | None = None  # why it can't be said
    layer: str | None = None  # the layer whose output it is, but for its shape and the numbers that multiplied it
    growth: float = 0.0  # the logarithm of how much more the larger model has multiplied it by than the smaller one
    line: str | None = None  # where it was multiplied by what grows
    scores: tuple[str, int, int] | None = None  # of a product of two activations: where, summed over how many elements

    def times(self, growth: float, line: str | None) -> Label:
        """The label of a multiple."""
        return self._replace(growth=self.growth + growth, line=self.line or line)

    def settled(self) -> Label:
        """The label without its factor."""
        return self._replace(layer=None, growth=0.0, line=None)


CONSTANT = Label()


class MadeTensors(DispatchMode):
    """Keeps whatever any operation makes, those too that a function mode is not shown."""

    def __init__(self) -> None:
        super().__init__()
        self._tensors: dict[int, Tensor] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor) in self._tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "is_view", False):  # of a buffer, say
            return result
        for tensor in tensors_in(result):
            self._tensors.setdefault(storage_of(tensor), tensor)
        return result


def storage_of(tensor: Tensor) -> int:
    """What all views of a tensor have in common; 0 where there is no such thing."""
    return 0 if tensor.layout != torch.strided or is_functorch_wrapped(tensor) else _storage_of(tensor)


def tensors_in(tree: Any, depth: int = 0) -> list[Tensor]:
    """All tensors in a tree.

    Args:
        depth: how many levels deep to look into the attributes of objects, too.
    """
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, list, dict):  # nearly always, and much faster than a walk through any kind of tree
        parts = tree.values() if isinstance(tree, dict) else tree
        return [tensor for part in parts for tensor in tensors_in(part, depth)]
    leaves = pytree.tree_leaves(tree)
    if len(leaves) != 1 or leaves[0] is not tree:
        return tensors_in(leaves, depth)
    is_object = depth > 0 and hasattr(tree, "__dict__") and not isinstance(tree, (nn.Module, type))
    return tensors_in(vars(tree), depth - 1) if is_object else []


class Labels:
    """The labels of tensors, and the nodes that they name.

    Attributes:
        nodes: the graph's nodes.
        made: all tensors that were made.
        warnings: scores that grow with the width, in words.
        takers: layer -> what takes its output: "linear", "norm", "nonlinear", or "zero" for a weight that is zero.
        products: layers whose outputs are multiplied with each other.
    """

    def __init__(self, small: Labels | None = None) -> None:
        self.nodes: list[Node] = []
        self.made = MadeTensors()
        self.warnings: list[str] = []
        self.takers: dict[str, set[str]] = {}
        self.products: list[set[str]] = []
        self._own: dict[str, dict[float, str | None]] = {}  # layer -> growth -> line, where its factor ended
        self._last: dict[str, tuple[float, str | None]] = {}  # layer -> the factor so far
        self._small = small
        self._numbers: dict[str, float] = {}  # by a name that is that of the same operation in both models
        self._counts: Counter[str] = Counter()
        self._names: Counter[str] = Counter()
        self._junctions: dict[tuple[str, frozenset[str]], str] = {}
        self._path: list[tuple[str, nn.Module]] = []
        # Tensors are kept while tracing, so that no other gets the id of one.
        self._labels: dict[int, tuple[Tensor, Label]] = {}
        self._written: dict[int, tuple[Any, Label]] = {}

    def own_growth(self, layer: str) -> float:
        """The logarithm of how much more the larger model multiplies a layer by than the smaller one, on its own.

        Raises:
            TracingError: if that is not one number.
        """
        growth, line = self._last.get(layer, (0.0, None))
        growths = self._own.get(layer) or {growth: line}
        if max(growths) - min(growths) > FLAT:
            lines = " and ".join(dict.fromkeys(line or "without a factor" for line in growths.values()))
            raise TracingError(
                f"{layer} is used in several ways, with factors that depend on the width in different ways ({lines}), "
                "so they are none of its own: multiply inside of the module, after a layer of its own, or by what does "
                "not depend on the width"
            )
        return next(iter(growths))

    def _multiplied(self, labels: list[Label]) -> None:
        layers = {label.layer for label in labels if label.layer is not None}
        if len(layers) > 1:
            self.products.append(layers)

    def _resolved(self, label: Label, taker: str = "linear") -> Label:
        """The label once its factor is that of the layer it comes from, if it comes straight from one."""
        if label.layer is None:
            return label
        self.takers.setdefault(label.layer, set()).add(taker)
        self._own.setdefault(label.layer, {}).setdefault(round(label.growth, 6), label.line)
        return label.settled()

    def _unattributed(self, label: Label) -> Label:
        if label.scores is not None:
            if label.growth > 0:
                self._warn_of_heads(*label.scores, math.exp(label.growth))
            return label._replace(growth=0.0, line=None, scores=None)
        return Label(
            lost=f"{label.line or label.node}, a factor that depends on the width (times {math.exp(label.growth):.3g} "
            "from the smaller model to the larger) and is of no layer before or after it"
        )

    def _warn_of_heads(self, where: str, small: int, large: int, times: float) -> None:
        self.warnings.append(
            f"{where}: the heads grow with width, from {small} to {large}, but scores are divided by less than that. "
            f"Where queries and keys align, they will be {times:.3g} times as large in the larger model; give it a "
            "scale that is proportional to 1 / the head's dimension."
        )

    def _small_number(self, name: str, number: float) -> float:
        """What a number of the same operation is in the smaller model."""
        key = self._where(name)
        self._counts[key] += 1
        key = f"{key}#{self._counts[key]}"
        self._numbers[key] = number
        return number if self._small is None else self._small._numbers.get(key, number)

    def _check_heads(self, where: str, size: int, scale: float, growth: float) -> bool:
        """Whether heads grow; they are told of if scores do."""
        small = int(self._small_number(f"{where} size", size))
        times = scale * size / (self._small_number(f"{where} scale", scale) * small) * math.exp(growth)
        if size > small and times > 1.05:
            self._warn_of_heads(where, small, size, times)
        return size > small

    def _sum(self, where: str, labels: list[Label], kind: str = "sum", settle: bool = False) -> Label:
        """The label of what is made of several, as large as the largest of them.

        Args:
            settle: whether a factor is one of the layer before, even where there is one label alone.
        """
        moving = [label for label in labels if label.node is not None or label.lost is not None]
        if settle or len({label[4:] for label in moving}) > 1:  # rotated queries, say, are of one layer still
            labels = [self._resolved(label) for label in labels]
        joined = self._join(kind, where, labels)
        known = [label for label in labels if label.node is not None]
        if joined.node is None or not known:
            return joined
        growths = [label.growth for label in known]
        if max(growths) - min(growths) > FLAT:
            worst = max(known, key=lambda each: abs(each.growth))
            label = self._unattributed(worst)
            return label._replace(node=joined.node) if worst.scores else label
        line = next((label.line for label in labels if label.line is not None), None)
        layer = known[0].layer if len({label.layer for label in moving}) == 1 else None
        return joined._replace(growth=growths[0], line=line, layer=layer, scores=known[0].scores)

    def _join(self, kind: str, name: str, labels: list[Label]) -> Label:
        for label in labels:
            if label.lost is not None:
                return label
        nodes = list(dict.fromkeys(label.node for label in labels if label.node is not None))
        if len(nodes) > 1:
            key = (kind, frozenset(nodes))
            if key not in self._junctions:
                unique, _ = self._unique(name)
                self.nodes.append(Node(unique, kind, tuple(nodes)))
                self._junctions[key] = unique
            return Label(node=self._junctions[key])
        if nodes:
            return Label(node=nodes[0])
        return min(labels, key=lambda label: (label.outside is None, label.weight is None), default=CONSTANT)

    def _where(self, name: str) -> str:
        return f"{self._path[-1][0]}.{name}" if self._path and self._path[-1][0] else name

    def _unique(self, name: str) -> tuple[str, int]:
        times = self._names[name]
        self._names[name] += 1
        return (f"{name}#{times + 1}" if times else name), times

    def _get(self, tensor: Tensor) -> Label:
        if is_functorch_wrapped(tensor):
            return Label(lost="a function transform, as vmap")
        known = self._labels.get(id(tensor))
        written = self._written.get(storage_of(tensor)) if self._written else None
        if known is not None:
            label = known[1]
        elif written is None and tensor.is_floating_point() and tensor in self.made:
            label = Label(lost="an operation that torch does not show")
        else:
            label = CONSTANT
        if written is None or label == written[1]:
            return label
        return self._sum(self._where("write"), [label, written[1]])

    def _put(self, tensor: Tensor, label: Label) -> None:
        self._labels[id(tensor)] = (tensor, label)

    def _write(self, tensor: Tensor, label: Label) -> None:
        """What is written into a tensor is in all views of it."""
        storage = storage_of(tensor)
        if storage and label != CONSTANT:
            before = self._written.get(storage)
            labels = [label] if before is None or before[1].node == label.node else [before[1], label]
            self._written[storage] = (tensor, self._sum(self._where("write"), labels))


def line_of_code() -> str | None:
    """The line of the model's code that is running."""
    for frame, line in traceback.walk_stack(None):
        if frame.f_globals.get("__name__", "").partition(".")[0] not in {"torch", "ignite_monitor"}:
            return f"{Path(frame.f_code.co_filename).name}:{line}"
    return None
