"""What a monitor publishes, and its way to the host."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, repeat
from typing import Any, ClassVar, NamedTuple

import torch
from ignite.base import Serializable
from ignite.engine import Engine
from torch import Tensor

from ignite_monitor.model.devices import upload, wide_dtype
from ignite_monitor.schema import Schema


class NamedValues(NamedTuple):
    """Names, and what belongs to each.

    Attributes:
        names: the names.
        values: a number, or a row of numbers, for each name.
    """

    names: Sequence[str]
    values: Tensor

    def rows(self, index: Sequence[int]) -> NamedValues:
        """Some of them, in another order."""
        chosen = upload(torch.tensor(index, dtype=torch.int64, device="cpu"), self.values.device)
        return NamedValues([self.names[i] for i in index], self.values[chosen])


def joined(parts: Sequence[NamedValues]) -> NamedValues:
    """All of them on the device of the first, a name's last number in place of its earlier ones.

    Args:
        parts: at least one.
    """
    if len(parts) == 1:
        return parts[0]
    names = [name for part in parts for name in part.names]
    like = parts[0].values
    wide = wide_dtype(like.device)
    values = [each.to(like.device, wide, non_blocking=like.device.type != "cpu") for _, each in parts]
    together = NamedValues(names, torch.cat(values))
    last = {name: index for index, name in enumerate(names)}
    return together if len(last) == len(names) else together.rows([*last.values()])


def is_on_host(values: Tensor) -> bool:
    """Whether nobody has to wait to read the values."""
    return values.is_cpu


def as_published(value: Tensor) -> Any:
    """A 0-dim tensor as users get it: a Python number, or the tensor where they would have to wait for one."""
    return value.tolist() if is_on_host(value) else value


def transfer(groups: Sequence[Sequence[Tensor]]) -> list[list[list[float]]]:
    """The elements of groups of tensors, each flat, in one transfer per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensors in groups:
        for tensor in tensors:
            wide = tensor.to(wide_dtype(tensor.device))
            by_device.setdefault(tensor.device, []).append(wide.reshape(-1))
    numbers = {device: iter(torch.cat(tensors).tolist()) for device, tensors in by_device.items()}
    return [[list(islice(numbers[tensor.device], tensor.numel())) for tensor in tensors] for tensors in groups]


class Publisher(Serializable):
    """Keeps values in ``metrics`` and ``engine.state.metrics``: floats as soon as nobody has to wait for them.

    What could not be measured is absent. Where that is known on a device alone there is a number in its place that is
    not finite, and no value by the schema; it vanishes when it comes to the host.

    Attributes:
        schema: all that may be published, and which numbers stand for what is absent.
        prefix: what the names start with, before a slash; empty if the names hold it.
        metrics: this iteration's values by name: floats, or 0-dim tensors as long as they lie on a device.
    """

    schema: ClassVar[Schema] = Schema("other", "", ())

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.metrics: dict[str, float | Tensor] = {}
        self._engine: weakref.ref[Engine] | None = None
        self._waiting: list[NamedValues] = []  # on a device, all that are tensors
        self._is_complete = True  # with what is known only now that someone has asked

    # What a monitor overrides

    def deferred_tensors(self) -> list[Tensor]:
        """Tensors of any shape that come to the host together with what is published, when someone asks for it."""
        return []

    def resolve_deferred(self, extra: list[list[float]]) -> dict[str, float]:
        """Someone has asked for what is published, and it has come to the host.

        Args:
            extra: the elements of the tensors that :meth:`deferred_tensors` gave.

        Returns:
            More values, name, without the prefix, -> number, that are known only now.
        """
        return {}

    # What a monitor calls

    def clear_metrics(self) -> None:
        """Take back what has been published in this iteration."""
        self._take_from_engine(self.metrics)
        self.metrics.clear()
        self._waiting.clear()
        self._is_complete = True

    def publish(self, **values: Tensor | float) -> None:
        """Put values where handlers and loggers find them, in ``metrics`` and in ``engine.state.metrics``.

        Args:
            values: name, without the prefix, -> number or 0-dim tensor.
        """
        numbers: dict[str, float] = {}
        tables = []
        for name, value in values.items():
            if not isinstance(value, Tensor):
                numbers[name] = float(value)
            elif is_on_host(value):
                numbers[name] = float(as_published(value))
            else:
                tables.append(NamedValues([name], value.reshape(1)))
        self._put_numbers(numbers)
        self._publish(tables)

    def publish_table(self, names: Sequence[str], values: Tensor) -> None:
        """Put many values where :meth:`publish` puts single ones.

        Args:
            names: the names, without the prefix.
            values: the values, one-dimensional.
        """
        self._publish([NamedValues(names, values)])

    def on_host(self) -> Mapping[str, float | Tensor]:
        """This iteration's values as floats; those of all monitors on the engine come over in one transfer."""
        if not self._is_complete:
            _bring_to_host([each for each in self._with_same_engine() if not each._is_complete])
        return self.metrics

    def _with_same_engine(self) -> Sequence[Publisher]:
        return [self]

    def _attached_to(self) -> Engine | None:
        return self._engine() if self._engine is not None else None

    def _named(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name

    def _publish(self, tables: Iterable[NamedValues]) -> None:
        for table in tables:
            if is_on_host(table.values):
                self._put_numbers(dict(zip(table.names, table.values.tolist(), strict=True)))
            else:
                self._waiting.append(table)
                self._put(dict(zip(table.names, table.values.unbind(), strict=True)))
        self._is_complete = False

    def _put_numbers(self, numbers: dict[str, float]) -> None:
        if not numbers:
            return
        if not math.isfinite(sum(numbers.values())):
            absent = self.schema.absent(numbers)
            shown = {self._named(name) for name in absent} & self.metrics.keys()
            self._take_from_engine(shown)
            for name in shown:
                del self.metrics[name]
            numbers = {name: numbers[name] for name in numbers if name not in absent}
        self._put(numbers)

    def _put(self, values: Mapping[str, float | Tensor]) -> None:
        named = {self._named(name): value for name, value in values.items()} if self.prefix else values
        self.metrics.update(named)
        if (engine := self._attached_to()) is not None:
            engine.state.metrics.update(named)

    def _take_from_engine(self, names: Iterable[str]) -> None:
        if (engine := self._attached_to()) is not None:
            deque(map(engine.state.metrics.pop, names, repeat(None)), maxlen=0)  # of very many names twice as fast


def _bring_to_host(publishers: Sequence[Publisher]) -> None:
    groups = [[*(values for _, values in each._waiting), *each.deferred_tensors()] for each in publishers]
    for publisher, numbers in zip(publishers, transfer(groups), strict=True):
        waiting = [names for names, _ in publisher._waiting]
        publisher._waiting.clear()
        publisher._is_complete = True
        for names, own in zip(waiting, numbers, strict=False):
            publisher._put_numbers(dict(zip(names, own, strict=True)))
        publisher._put_numbers(publisher.resolve_deferred(numbers[len(waiting) :]))
