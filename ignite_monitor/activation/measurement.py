"""Values of the metrics of one kind of tensor in one iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.activation.accumulator import Accumulator
from ignite_monitor.activation.metric import MetricSet, call_metric
from ignite_monitor.activation.statistics import STATISTICS, WITHOUT_STATISTICS, statistics
from ignite_monitor.model.devices import move_like, upload
from ignite_monitor.monitor.rank_reduction import Rows
from ignite_monitor.monitor.transfer import NamedValues


class Measurement:
    """Measures tensors of one family of keys."""

    def __init__(self, family: str, metrics: MetricSet) -> None:
        self.family = family
        self.metrics = metrics
        self._columns = [index for index, wanted in enumerate(metrics.builtin) if wanted]
        self._accumulator = Accumulator()
        self._aggregates: dict[str, _Aggregate] = {}
        self._order: dict[str, int] = {}  # key -> place in the order of execution

    def clear(self) -> None:
        """Forget all tensors."""
        self._accumulator.clear()
        self._aggregates.clear()

    def wants(self, name: str) -> bool:
        """Whether any metric applies to a module or parameter."""
        return bool(self._columns or self.metrics.of(name))

    def add(self, key: str, name: str, tensor: Tensor, unit: int | None = None, *, copy: bool = False) -> None:
        """Measure a tensor without a graph, under ``no_grad``; a complex one by the user's own functions alone.

        Args:
            key: what its keys start with, after the family.
            name: the module or parameter that it belongs to.
            tensor: the tensor. It must not change before :meth:`flush`, unless it is copied.
            unit: the dimension whose indices are units.
            copy: whether to copy the tensor where it waits.
        """
        if self._columns:
            self._order.setdefault(key, len(self._order))
            self._accumulator.add(key, tensor, unit, copy=copy)
        if self.metrics.own:
            self._call(key, name, tensor.detach())

    def add_difference(self, key: str, name: str, tensor: Tensor, other: Tensor) -> None:
        """Measure the difference of two tensors, both detached."""
        if self._columns and tensor.dtype not in WITHOUT_STATISTICS:
            # In half precision the difference would be rounded, and float8 has no arithmetic.
            dtype = torch.float64 if torch.float64 in (tensor.dtype, other.dtype) else torch.float32
            self._accumulator.add(key, tensor.to(dtype) - other.to(dtype))
        if self.metrics.own:
            self._call(key, name, tensor, other)

    def aggregate(self, key: str, how: str, value: Tensor, weight: float = 1.0) -> None:
        """Aggregate a value, 0-dim and of the widest dtype, with those of its key."""
        new = _Aggregate(how, value * weight if how == "mean" else value, weight)
        known = self._aggregates.get(key)
        self._aggregates[key] = new if known is None else known.plus(new)

    def flush(self) -> None:
        """Measure the tensors that wait."""
        self._accumulator.flush()

    def rows(self) -> tuple[Rows, Rows]:
        """Everything measured: rows that add up over ranks, and rows whose maximum over ranks is taken."""
        sums: Rows = {}
        maxima: Rows = {}
        for units, (own, largest) in self._accumulator.result().items():
            sums[self.family, "sums", units] = own
            maxima[self.family, "units", units] = NamedValues(own.names, largest)
        by_kind: dict[str, dict[str, _Aggregate]] = {}
        for key, each in self._aggregates.items():
            by_kind.setdefault(each.how, {})[key] = each
        for how, of_kind in by_kind.items():
            first = next(iter(of_kind.values())).value
            values = torch.stack([move_like(each.value, first) for each in of_kind.values()])
            if how in _EXTREMES:
                maxima[self.family, how] = NamedValues(list(of_kind), (_EXTREMES[how] * values).unsqueeze(1))
            else:
                weights = torch.tensor([each.weight for each in of_kind.values()], dtype=values.dtype, device="cpu")
                rows = torch.stack([values, upload(weights, values.device)], 1)
                sums[self.family, how] = NamedValues(list(of_kind), rows)
        return sums, maxima

    def statistics(self, sums: Rows, maxima: Rows) -> list[NamedValues]:
        """Names and values of the built-in metrics, NaN where there are none, from rows of this rank or of all."""
        tables, names = [], list[str]()
        for (family, kind, *rest), (own, rows) in sums.items():
            if (family, kind) == (self.family, "sums"):
                (units,) = rest
                tables.append(_with_units(rows, maxima[family, "units", units].values, units))
                names += own
        if not names:
            return []
        table = torch.cat(tables)
        if len(set(names)) < len(names):  # some tensors have had several numbers of units
            by_name: dict[str, Tensor] = {}
            for name, row in zip(names, table.unbind(), strict=True):
                known = by_name.get(name)
                by_name[name] = row if known is None else torch.cat([known[:9] + row[:9], known[9:].maximum(row[9:])])
            names, table = list(by_name), torch.stack([*by_name.values()])
        places = sorted(range(len(names)), key=lambda place: self._order.get(names[place], place))
        if places != list(range(len(names))):  # the order in which reports look for the first non-finite output
            names = [names[place] for place in places]
            table = table[upload(torch.tensor(places, dtype=torch.int64, device="cpu"), table.device)]
        values = statistics(table[:, :7], dead=table[:, 7], units=table[:, 8], largest=table[:, 9])
        keys = [f"{self.family}/{name}/{STATISTICS[index]}" for name in names for index in self._columns]
        chosen = (
            values if len(self._columns) == len(STATISTICS) else torch.stack([values[:, i] for i in self._columns], 1)
        )
        return [NamedValues(keys, chosen.flatten())]

    def _call(self, key: str, name: str, *tensors: Tensor) -> None:
        if tensors[0].numel():
            for metric_name, metric in self.metrics.of(name):
                value = call_metric(metric, f"Metric {metric_name!r} of {self.family}/{key}", tensors)
                how = metric.aggregate or self.metrics.aggregate
                self.aggregate(f"{key}/{metric_name}", how, value, tensors[0].numel())


class _Aggregate(NamedTuple):
    """Aggregate of several values: weighted sum and sum of weights for a mean, or sum, largest or smallest value."""

    how: str
    value: Tensor
    weight: float

    def plus(self, other: _Aggregate) -> _Aggregate:
        value = _COMBINED[self.how](self.value, move_like(other.value, self.value))
        return _Aggregate(self.how, value, self.weight + other.weight)


_COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": torch.add,
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
}
_EXTREMES = {"max": 1.0, "min": -1.0}
_VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda rows: rows[:, 0] / rows[:, 1],
    "sum": lambda rows: torch.where(rows[:, 1] > 0, rows[:, 0], math.nan),
    "max": lambda rows: rows[:, 0],
    "min": lambda rows: -rows[:, 0],
}


def rows_of(measurements: Iterable[Measurement]) -> tuple[Rows, Rows]:
    """The :meth:`Measurement.rows` of several measurements together."""
    sums: Rows = {}
    maxima: Rows = {}
    for each in measurements:
        own_sums, own_maxima = each.rows()
        sums |= own_sums
        maxima |= own_maxima
    return sums, maxima


def values_of(measurements: Iterable[Measurement], sums: Rows, maxima: Rows) -> list[NamedValues]:
    """Names and values, not finite where there are none, from rows of this rank or of all."""
    found = [
        NamedValues([f"{family}/{key}" for key in keys], _VALUES[how](values))
        for (family, how, *_), (keys, values) in (sums | maxima).items()
        if how in _VALUES
    ]
    return found + [values for each in measurements for values in each.statistics(sums, maxima)]


def _with_units(sums: Tensor, largest: Tensor, units: int) -> Tensor:
    """Sums, the number of dead units, the number of units, the largest absolute value: of shape (tensors, 10)."""
    top = largest.amax(1)
    dead = (largest == 0).sum(1).to(top.dtype) if units else torch.zeros_like(top)
    return torch.cat([sums, torch.stack([dead, torch.full_like(top, units), top], 1)], 1)
