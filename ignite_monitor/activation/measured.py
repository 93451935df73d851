"""What metrics say of tensors of one kind in one iteration."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ignite_monitor.activation.aggregation import Aggregation, numbers_of
from ignite_monitor.activation.metric import MetricSet, as_number, call_metric
from ignite_monitor.activation.observations import Observations, Table
from ignite_monitor.activation.statistics import STATISTICS, has_statistics, is_float8
from ignite_monitor.model.devices import upload, wide_dtype
from ignite_monitor.monitor.rank_reduction import Rows
from ignite_monitor.monitor.ranks import from_every_rank

Numbers = list[tuple[list[str], Tensor]]

_KINDS = ("ratio", "sum", "max", "min")


class Measured:
    """Collects what metrics say of the tensors of one kind.

    Args:
        units: whether the tensors have a batch, and thus units that may be dead.
    """

    def __init__(self, family: str, metrics: MetricSet, *, units: bool = False) -> None:
        self.family = family
        self.metrics = metrics
        self._columns = [place for place, wanted in enumerate(metrics.builtin) if wanted]
        self._table_names: tuple[list[str], list[str]] = ([], [])  # of the last table, and of its numbers
        self._observations = Observations(units)
        self._aggregation = Aggregation()
        self._metric_of: dict[str, str] = {}  # of numbers that a function of the user's puts together

    def clear(self) -> None:
        """Forget what has been seen."""
        self._observations.clear()
        self._aggregation = Aggregation()
        self._metric_of.clear()

    def wants(self, name: str) -> bool:
        """Whether there is anything to measure of a module or parameter."""
        return bool(self._columns or self.metrics.of(name))

    def see(self, key: str, name: str, tensor: Tensor) -> None:
        """Measure a tensor; by the user's own metrics alone if it is complex.

        Args:
            tensor: the tensor; where it is part of a graph, under ``no_grad``.
        """
        if self._columns:
            self._observations.add(key, tensor)
        if self.metrics.own:
            self._call(key, name, (tensor.detach(),))

    @property
    def see_again(self) -> Callable[[str, Tensor], bool]:
        """A quicker :meth:`see`, without the name, for a tensor like one that was seen; it says whether it was."""
        return self._observations.add_again if self._columns and not self.metrics.own else _never

    def see_difference(self, key: str, name: str, tensor: Tensor, other: Tensor) -> None:
        """As :meth:`see`, of the difference of two tensors.

        Args:
            tensor: the tensor, detached.
            other: what to subtract, detached.
        """
        if self._columns and has_statistics(tensor):
            self._observations.add(key, _difference(tensor, other))
        if self.metrics.own:
            self._call(key, name, (tensor, other))

    def see_all(self, keys: Sequence[str], name: str, tensors: Tensor) -> None:
        """Measure tensors of one shape that belong to one module.

        Args:
            tensors: of shape (keys, ...), detached.
        """
        if self._columns:
            self._observations.add_all(keys, tensors)
        if self.metrics.own:
            for key, tensor in zip(keys, tensors, strict=True):
                self._call(key, name, (tensor,))

    def record(self, key: str, value: object, device: torch.device) -> None:
        """Take in a value that is no metric's.

        Args:
            value: a number, or a tensor, of which the mean counts.
        """
        weight = value.numel() if isinstance(value, Tensor) else 1
        self._aggregation.add(key, as_number(value, device), weight, self.metrics.aggregate)

    def add_ratios(self, keys: Sequence[str], totals: Tensor, counts: Tensor) -> None:
        """Take in sums, and what to divide them by."""
        self._aggregation.add_ratios(keys, totals, counts)

    def pass_ended(self) -> None:
        """A forward pass has ended: the next one is likely to show the same tensors, in the same order."""
        self._observations.flush()

    # What it has come to

    def rows(self) -> tuple[Rows, Rows]:
        """All there is, as rows to add up over ranks, and rows of which to take the largest numbers."""
        sums: Rows = {}
        maxima: Rows = {}
        table = self._observations.table()
        if table is not None:
            sums[self.family, "table"] = (table.names, table.sums)
            for count, units in table.units.items():
                maxima[self.family, "units", count] = units
        for kind, part in self._aggregation.parts().items():
            (maxima if kind in ("max", "min") else sums)[self.family, kind] = part
        return sums, maxima

    def numbers(self, sums: Rows, maxima: Rows, everywhere: bool = False) -> Numbers:
        """Names and their numbers, NaN where there is none.

        Args:
            sums: the first of :meth:`rows`, of this rank or of all.
            maxima: the second.
        """
        found: Numbers = []
        if (self.family, "table") in sums:
            names, rows = sums[self.family, "table"]
            units = {kind[2]: each for kind, each in maxima.items() if kind[:2] == (self.family, "units")}
            values = Table(names, rows, units).statistics()
            if len(self._columns) < len(STATISTICS):
                values = torch.stack([values[:, place] for place in self._columns], 1)
            if names != self._table_names[0]:
                kinds = [STATISTICS[place] for place in self._columns]
                self._table_names = (names, [f"{self.family}/{name}/{kind}" for name in names for kind in kinds])
            found.append((self._table_names[1], values.flatten()))
        parts = {kind[1]: each for kind, each in (sums | maxima).items() if kind[0] == self.family}
        for several, numbers in numbers_of({kind: parts[kind] for kind in _KINDS if kind in parts}):
            found.append(([f"{self.family}/{name}" for name in several], numbers))
        return found + self._aggregated(everywhere)

    def _call(self, key: str, name: str, tensors: tuple[Tensor, ...]) -> None:
        for metric, each in self.metrics.of(name):
            number = call_metric(each, f"Metric {metric!r} of {self.family}/{key}", tensors)
            how = each.aggregate or self.metrics.aggregate
            called = f"{key}/{metric}"
            self._aggregation.add(called, number, tensors[0].numel(), how)
            if callable(how):
                self._metric_of[called] = metric

    def _aggregated(self, everywhere: bool) -> Numbers:
        """What functions of the user's make of a metric's numbers.

        Raises:
            RuntimeError: if one raises an error, which is its cause.
        """
        of = self._metric_of
        values = {(name, of.get(name)): numbers for name, (_, numbers) in self._aggregation.values().items()}
        if everywhere and self.metrics.gathers:
            ranks = from_every_rank({key: numbers.cpu() for key, numbers in values.items()})
            keys = dict.fromkeys(key for each in ranks for key in each)
            values = {key: torch.cat([each[key] for each in ranks if key in each]) for key in keys}
        found: Numbers = []
        for (name, metric), numbers in values.items():
            how = self.metrics.function_of(metric)
            try:
                number = as_number(how(numbers), numbers.device)
            except Exception as error:
                raise RuntimeError(f"The aggregate of {self.family}/{name} failed: {error}") from error
            found.append(([f"{self.family}/{name}"], number.reshape(1)))
        return found


def _never(key: str, tensor: Tensor) -> bool:
    return False


def put_together(found: Numbers) -> tuple[list[str], Tensor]:
    """All names and numbers, the later ones of a name in place of the earlier ones, on the device of the first.

    Args:
        found: names and numbers, at least one.
    """
    device = found[0][1].device
    if len(found) == 1:
        return found[0]
    names = [name for several, _ in found for name in several]
    wide = wide_dtype(device)
    numbers = torch.cat([each.to(device, wide, non_blocking=device.type != "cpu") for _, each in found])
    places = {name: place for place, name in enumerate(names)}
    if len(places) == len(names):
        return names, numbers
    return list(places), numbers[upload(torch.tensor([*places.values()], device="cpu"), device)]


def _difference(current: Tensor, reference: Tensor) -> Tensor:
    # Of float16 the difference would be rounded, and bfloat16's more so.
    if is_float8(current):
        current = current.float()
    if is_float8(reference):
        reference = reference.float()
    dtype = torch.promote_types(torch.promote_types(current.dtype, reference.dtype), torch.float32)
    return current.to(dtype) - reference.to(dtype)
