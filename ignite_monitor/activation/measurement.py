"""Values of the metrics of one kind of tensor in one iteration."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.activation.metric import AGGREGATIONS, MetricSet, call_metric
from ignite_monitor.activation.statistics import (
    STATISTICS,
    SUMMED,
    WITHOUT_STATISTICS,
    Part,
    merged,
    partial_sums,
    statistics,
    table_of,
    with_units,
)
from ignite_monitor.model.devices import move, move_like
from ignite_monitor.monitor.ranks import Rows
from ignite_monitor.monitor.transfer import NamedValues

# Tensors of at most so many elements are measured together: an operation on one takes longer than its arithmetic.
SMALL = 2**15

# Elements of pending tensors, which are measured together.
_MOST_WAITING = 2**22


class Measurement:
    """Measures tensors of one family of keys in one iteration."""

    def __init__(self, family: str, metrics: MetricSet) -> None:
        self.family = family
        self.metrics = metrics
        self._columns = [index for index, wanted in enumerate(metrics.builtin) if wanted]
        self._waiting: dict[Any, tuple[list[str], list[Tensor]]] = {}  # by what measures them together
        self._waiting_size = 0
        self._waiting_values: dict[str, list[tuple[str, Tensor, float]]] = {}  # aggregation -> key, value, weight
        self._parts: dict[int, list[Part]] = {}  # by number of units (0 for none)
        # By aggregation, and by number of units those of table_of(); one part after flush().
        self._tables: dict[str | int, list[NamedValues]] = {}
        self._order: dict[str, int] = {}  # key -> place in the order of execution

    def add(self, key: str, name: str, tensor: Tensor, unit: int | None = None, *, copy: bool = False) -> None:
        """Measure a tensor without a graph, which must not change before :meth:`flush`, unless it is copied."""
        size = tensor.numel()
        if not size:
            return
        if self.metrics.custom:
            self._call(key, name, tensor.detach())
        if not self._columns or tensor.dtype in WITHOUT_STATISTICS:
            return
        self._order.setdefault(key, len(self._order))
        if size > SMALL:
            self._measure([key], tensor.unsqueeze(0), unit)
            return
        group = unit, tensor.shape, tensor.dtype, tensor.device
        if group not in self._waiting:
            self._waiting[group] = [], []
        keys, tensors = self._waiting[group]
        keys.append(key)
        tensors.append(tensor.clone() if copy else tensor)
        self._waiting_size += size
        if self._waiting_size > _MOST_WAITING:
            self.flush()

    def aggregate(self, key: str, how: str, value: Tensor, weight: float = 1.0) -> None:
        """Aggregate a value of the widest dtype with those of its key."""
        self._waiting_values.setdefault(how, []).append((key, value, weight))

    def flush(self) -> None:
        """Measure pending tensors, and merge the tables of all passes."""
        waiting, self._waiting, self._waiting_size = self._waiting, {}, 0
        for (unit, *_), (keys, tensors) in waiting.items():
            self._measure(keys, torch.stack(tensors), unit)
        measured, self._parts = self._parts, {}
        for units, parts in measured.items():
            self._tables.setdefault(units, []).append(table_of(parts))
        values, self._waiting_values = self._waiting_values, {}
        for how, pending in values.items():
            first = pending[0][1]
            stacked = torch.stack([move_like(value, first) for _, value, _ in pending]).view(len(pending), -1)
            weights = torch.tensor([[weight] for _, _, weight in pending], dtype=stacked.dtype, device="cpu")
            rows = AGGREGATIONS[how].partial(stacked, move(weights, stacked.device))
            self._tables.setdefault(how, []).append(NamedValues([key for key, _, _ in pending], rows))
        self._tables = {kind: [merged(parts, _summed(kind))] for kind, parts in self._tables.items()}

    def rows(self) -> tuple[Rows, Rows]:
        """Everything measured: columns that add up over ranks, and columns whose maximum over ranks is taken."""
        self.flush()
        sums, maxima = Rows(), Rows()
        for kind, [(keys, rows)] in self._tables.items():
            for table, columns in zip((sums, maxima), rows.tensor_split([_summed(kind)], 1), strict=True):
                if columns.shape[1]:
                    table[self.family, kind] = NamedValues(keys, columns)
        return sums, maxima

    def values(self, sums: Rows, maxima: Rows) -> list[NamedValues]:
        """Names and values, not finite where there are none, from rows of this rank or of all."""
        results, parts = [], []
        for (family, kind), (keys, rows) in (maxima | sums).items():
            if family == self.family and kind in AGGREGATIONS:
                results.append(NamedValues([f"{family}/{key}" for key in keys], AGGREGATIONS[kind].finish(rows)))
            elif family == self.family:
                parts.append(NamedValues(keys, with_units(rows, maxima[family, kind].values, kind)))
        if parts:
            together = statistics(parts)
            # Reports name the first non-finite output by the order of the names.
            place_of = [self._order.get(key, i) for i, key in enumerate(together.names)]
            keys, rows = together.rows(sorted(range(len(place_of)), key=place_of.__getitem__))
            names = [f"{self.family}/{key}/{STATISTICS[index]}" for key in keys for index in self._columns]
            columns = rows.unbind(1)
            results.append(NamedValues(names, torch.stack([columns[i] for i in self._columns], 1).flatten()))
        return results

    def _measure(self, keys: list[str], tensors: Tensor, unit: int | None) -> None:
        part = partial_sums(keys, tensors, None if unit is None else unit + 1)
        self._parts.setdefault(0 if unit is None else part.largest.shape[1], []).append(part)

    def _call(self, key: str, name: str, tensor: Tensor) -> None:
        for metric_name, metric in self.metrics.of(name):
            value = call_metric(metric, f"Metric {metric_name!r} of {self.family}/{key}", tensor)
            self.aggregate(f"{key}/{metric_name}", metric.aggregate, value, tensor.numel())


def _summed(kind: str | int) -> int:
    return SUMMED if isinstance(kind, int) else AGGREGATIONS[kind].summed


def collect_rows(measurements: Iterable[Measurement]) -> tuple[Rows, Rows]:
    """The rows of all measurements, as :meth:`Measurement.rows` has them."""
    sums, maxima = Rows(), Rows()
    for measurement in measurements:
        own_sums, own_maxima = measurement.rows()
        sums |= own_sums
        maxima |= own_maxima
    return sums, maxima


def collect_values(measurements: Sequence[Measurement], rows: tuple[Rows, Rows] | None = None) -> list[NamedValues]:
    """The values of all measurements, from rows of this rank (None) or of all."""
    rows = collect_rows(measurements) if rows is None else rows
    return [values for measurement in measurements for values in measurement.values(*rows)]
