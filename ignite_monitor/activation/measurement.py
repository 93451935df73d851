"""What metrics say of tensors of one kind in one iteration."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.activation.metric import Aggregate, MetricSet, as_number, call_metric
from ignite_monitor.activation.observations import Observations, statistics_of
from ignite_monitor.activation.statistics import STATISTICS, WITHOUT_STATISTICS, is_float8
from ignite_monitor.model.devices import move_like, upload
from ignite_monitor.monitor.publisher import NamedValues
from ignite_monitor.monitor.rank_reduction import Rows
from ignite_monitor.monitor.ranks import from_every_rank

# How many numbers of a name are kept apart where they can be put together.
_KEPT = 16


class Measurement:
    """Collects what metrics say of the tensors of one kind, which with ``units`` have a batch."""

    def __init__(self, family: str, metrics: MetricSet, *, units: bool = False) -> None:
        self.family = family
        self.metrics = metrics
        self._columns = [index for index, wanted in enumerate(metrics.builtin) if wanted]
        # The last tensors' names, and those of their statistics.
        self._known: tuple[Sequence[str], list[str]] = (), []
        self._observations = Observations(units)
        self._numbers = _Numbers()
        self._metric_of: dict[str, str] = {}  # of numbers that a function of the user's puts together
        # A quicker :meth:`add`, without the name, for a tensor like one that was added; it says whether it was.
        self.add_again: Callable[[str, Tensor], bool] = _never
        if self._columns and not metrics.own:
            self.add_again = self._observations.add_again

    def clear(self) -> None:
        """Forget what has been added."""
        self._observations.clear()
        self._numbers = _Numbers()
        self._metric_of.clear()

    def wants(self, name: str) -> bool:
        """Whether there is anything to measure of a module or parameter."""
        return bool(self._columns or self.metrics.of(name))

    def add(self, key: str, name: str, tensor: Tensor) -> None:
        """Measure a tensor, under ``no_grad``; by the user's own metrics alone if it is complex."""
        if self._columns:
            self._observations.add(key, tensor)
        if self.metrics.own:
            self._call(key, name, (tensor.detach(),))

    def add_each(self, tensors: Sequence[tuple[str, str, Tensor]]) -> None:
        """As :meth:`add`, of tensors without a graph: name, key and tensor."""
        if self.metrics.own:
            for name, key, tensor in tensors:
                self.add(key, name, tensor)
        elif self._columns:
            self._observations.add_each([each[1:] for each in tensors])

    def add_difference(self, key: str, name: str, tensor: Tensor, other: Tensor) -> None:
        """As :meth:`add`, of the difference of two tensors, both detached."""
        if self._columns and tensor.dtype not in WITHOUT_STATISTICS:
            self._observations.add(key, _difference(tensor, other))
        if self.metrics.own:
            self._call(key, name, (tensor, other))

    def add_all(self, keys: Sequence[str], name: str, tensors: Tensor) -> None:
        """Measure tensors that belong to one module, of shape (keys, ...), detached."""
        if self._columns:
            self._observations.add_all(keys, tensors)
        if self.metrics.own:
            for key, tensor in zip(keys, tensors, strict=True):
                self._call(key, name, (tensor,))

    def record(self, key: str, value: object, device: torch.device) -> None:
        """Take in a value that is no metric's: a number, or a tensor, of which the mean counts."""
        weight = value.numel() if isinstance(value, Tensor) else 1
        self._numbers.add(key, as_number(value, device), weight, self.metrics.aggregate)

    def add_ratios(self, keys: Sequence[str], totals: Tensor, counts: Tensor) -> None:
        """Take in sums, and what to divide them by for a mean over all there are."""
        new = torch.stack([totals, counts], 1)
        known = self._numbers.ratios.get(tuple(keys))
        self._numbers.ratios[tuple(keys)] = new if known is None else known + new

    def add_maxima(self, keys: Sequence[str], values: Tensor) -> None:
        """Take in numbers of which the largest counts; minus infinity where there is none."""
        known = self._numbers.maxima.get(tuple(keys))
        self._numbers.maxima[tuple(keys)] = values if known is None else torch.maximum(known, values)

    def pass_ended(self) -> None:
        """A forward pass has ended: the next one is likely to show the same tensors, in the same order."""
        self._observations.flush()

    # What it has come to

    def sums_and_maxima(self) -> tuple[Rows, Rows]:
        """All there is: rows to add up over ranks, and rows of which to take the largest numbers."""
        sums: Rows = {}
        maxima: Rows = {}
        observed = self._observations.result()
        if observed is not None:
            sums[self.family, "sums"], units = observed
            maxima |= {(self.family, "units", count): largest for count, largest in units.items()}
        for kind, rows in self._numbers.rows().items():
            (maxima if kind in ("max", "min") else sums)[self.family, kind] = rows
        return sums, maxima

    def values(self, over_ranks: tuple[Rows, Rows] | None = None) -> list[NamedValues]:
        """Names and their numbers, not finite where there is none, of this rank alone or of all.

        Args:
            over_ranks: what :meth:`sums_and_maxima` has come to on all ranks, other measurements' included.
        """
        sums, maxima = self.sums_and_maxima() if over_ranks is None else over_ranks
        own = {kind[1:]: rows for kind, rows in (sums | maxima).items() if kind[0] == self.family}
        found: list[NamedValues] = []
        if ("sums",) in own:
            units = {kind[1]: rows for kind, rows in own.items() if kind[0] == "units"}
            found.append(self._statistics(own["sums",], units))
        for kind, (names, rows) in own.items():
            if kind[0] in _VALUES:
                found.append(NamedValues([f"{self.family}/{name}" for name in names], _VALUES[kind[0]](rows)))
        return found + self._aggregated(everywhere=over_ranks is not None)

    def _statistics(self, sums: NamedValues, units: dict[int, NamedValues]) -> NamedValues:
        values = statistics_of(sums, units)
        if len(self._columns) < len(STATISTICS):
            values = torch.stack([values[:, index] for index in self._columns], 1)
        if sums.names != self._known[0]:
            kinds = [STATISTICS[index] for index in self._columns]
            self._known = sums.names, [f"{self.family}/{name}/{kind}" for name in sums.names for kind in kinds]
        return NamedValues(self._known[1], values.flatten())

    def _call(self, key: str, name: str, tensors: tuple[Tensor, ...]) -> None:
        for metric, each in self.metrics.of(name):
            number = call_metric(each, f"Metric {metric!r} of {self.family}/{key}", tensors)
            how = each.aggregate or self.metrics.aggregate
            called = f"{key}/{metric}"
            self._numbers.add(called, number, tensors[0].numel(), how)
            if callable(how):
                self._metric_of[called] = metric

    def _aggregated(self, everywhere: bool) -> list[NamedValues]:
        """What functions of the user's make of a metric's numbers.

        Raises:
            RuntimeError: if one raises an error, which is its cause.
        """
        values = {(name, self._metric_of.get(name)): own for name, own in self._numbers.to_be_aggregated().items()}
        if everywhere and self.metrics.gathers:
            ranks = from_every_rank({key: numbers.cpu() for key, numbers in values.items()})
            keys = dict.fromkeys(key for each in ranks for key in each)
            values = {key: torch.cat([each[key] for each in ranks if key in each]) for key in keys}
        found: list[NamedValues] = []
        for (name, metric), numbers in values.items():
            how = self.metrics.function_of(metric)
            try:
                number = as_number(how(numbers), numbers.device)
            except Exception as error:
                raise RuntimeError(f"The aggregate of {self.family}/{name} failed: {error}") from error
            found.append(NamedValues([f"{self.family}/{name}"], number.reshape(1)))
        return found


class _Numbers:
    """Weighted numbers by name, of which one is to be made.

    Attributes:
        ratios: names -> for each a sum and what to divide it by, of shape (names, 2).
        maxima: names -> for each the largest number, of shape (names,).
    """

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[Aggregate, list[Tensor], list[float]]] = {}
        self.ratios: dict[tuple[str, ...], Tensor] = {}
        self.maxima: dict[tuple[str, ...], Tensor] = {}

    def add(self, name: str, value: Tensor, weight: float, how: Aggregate) -> None:
        """Take in a number, 0-dim, of the widest dtype."""
        _, values, weights = self._numbers.setdefault(name, (how, [], []))
        values.append(value)
        weights.append(weight)
        if how == "last":
            del values[:-1], weights[:-1]
        elif isinstance(how, str) and len(values) > _KEPT:
            kind, rows = _put_together(how, _stack(values)[None], [weights])
            values[:] = [_VALUES[kind](rows)[0]]
            weights[:] = [sum(weights)]

    def rows(self) -> dict[str, NamedValues]:
        """Kind -> a row for each name, in a form in which those of several ranks can be put together.

        A "ratio" is of the two numbers in a row, of a "sum" the second says how many there are, a "max" and a "min",
        which is negated, are one number. Those with a function of the user's are not in it.
        """
        alike: dict[tuple[str, int], list[str]] = {}
        for name, (how, values, _) in self._numbers.items():
            if isinstance(how, str):
                alike.setdefault((how, len(values)), []).append(name)
        found: dict[str, list[tuple[Sequence[str], Tensor]]] = {}
        for (how, _), names in alike.items():
            numbers = [self._numbers[name] for name in names]
            stacked = _stack([value for _, own, _ in numbers for value in own])
            kind, rows = _put_together(how, stacked.view(len(names), -1), [weights for _, _, weights in numbers])
            found.setdefault(kind, []).append((names, rows))
        for several, rows in self.ratios.items():
            found.setdefault("ratio", []).append((several, rows))
        for several, largest in self.maxima.items():
            found.setdefault("max", []).append((several, largest.unsqueeze(1)))
        return {
            kind: NamedValues(
                [name for names, _ in parts for name in names],
                torch.cat([move_like(rows, parts[0][1]) for _, rows in parts]),
            )
            for kind, parts in found.items()
        }

    def to_be_aggregated(self) -> dict[str, Tensor]:
        """Name -> all the numbers that a function of the user's is to be called with."""
        return {name: _stack(own) for name, (how, own, _) in self._numbers.items() if not isinstance(how, str)}


# Kind of rows -> the numbers that they make, not finite where there is none.
_VALUES: dict[Any, Callable[[Tensor], Tensor]] = {
    "ratio": lambda rows: rows[:, 0] / rows[:, 1],
    "sum": lambda rows: torch.where(rows[:, 1] > 0, rows[:, 0], math.nan),
    "max": lambda rows: rows[:, 0],
    "min": lambda rows: -rows[:, 0],
}


def _put_together(how: str, values: Tensor, weights: list[list[float]]) -> tuple[str, Tensor]:
    """The kind, and a row of numbers for each of the values' rows."""
    if how == "mean":
        factors = upload(torch.tensor(weights, dtype=values.dtype, device="cpu"), values.device)
        return "ratio", torch.stack([(values * factors).sum(1), factors.sum(1)], 1)
    if how in ("last", "sum"):
        rows = values[:, -1] if how == "last" else values.sum(1)
        return "ratio" if how == "last" else "sum", torch.stack([rows, torch.ones_like(rows)], 1)
    return how, (values if how == "max" else -values).amax(1, keepdim=True)


def _stack(values: list[Tensor]) -> Tensor:
    return torch.stack([move_like(value, values[0]) for value in values])


def _never(key: str, tensor: Tensor) -> bool:
    return False


def _difference(current: Tensor, reference: Tensor) -> Tensor:
    # Of float16 the difference would be rounded, and bfloat16's more so.
    if is_float8(current):
        current = current.float()
    if is_float8(reference):
        reference = reference.float()
    dtype = torch.promote_types(torch.promote_types(current.dtype, reference.dtype), torch.float32)
    return current.to(dtype) - reference.to(dtype)
