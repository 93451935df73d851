"""One number out of those that a metric has given of several tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload

AGGREGATES = ("mean", "sum", "max", "min", "last")

Aggregate = str | Callable[[Tensor], float | Tensor]

# Parts of aggregates, in a form in which those of several ranks can be put together: kind -> names and a row for each.
# A "ratio" is of the two numbers in a row, of a "sum" the second says how many there are, a "max" is one number.
Parts = dict[str, tuple[list[str], Tensor]]

# How many numbers of a name are kept apart where they can be put together.
_KEPT = 16


class Aggregation:
    """Collects weighted numbers by name."""

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[Aggregate, list[Tensor], list[float]]] = {}
        self._ratios: dict[tuple[str, ...], Tensor] = {}

    def add(self, name: str, value: Tensor, weight: float, how: Aggregate) -> None:
        """Take in a number.

        Args:
            value: the number, 0-dim, of the widest dtype.
            how: one of ``AGGREGATES``, or a function of all the numbers of a name.
        """
        _, values, weights = self._numbers.setdefault(name, (how, [], []))
        values.append(value)
        weights.append(weight)
        if how == "last":
            del values[:-1], weights[:-1]
        elif isinstance(how, str) and len(values) > _KEPT:
            kind, rows = _put_together(how, _stack(values)[None], [weights])
            ((_, numbers),) = numbers_of({kind: ([name], rows)})
            values[:] = [numbers[0]]
            weights[:] = [sum(weights)]

    def add_ratios(self, names: Sequence[str], totals: Tensor, counts: Tensor) -> None:
        """Take in sums and what to divide them by, for a mean over all there are.

        Args:
            totals: the sums, one for each name.
        """
        new = torch.stack([totals, counts], 1)
        known = self._ratios.get(tuple(names))
        self._ratios[tuple(names)] = new if known is None else known + new

    def parts(self) -> Parts:
        """What there is in each name, but for those with a function of the user's."""
        alike: dict[tuple[str, int], list[str]] = {}
        for name, (how, values, _) in self._numbers.items():
            if isinstance(how, str):
                alike.setdefault((how, len(values)), []).append(name)
        found: dict[str, list[tuple[list[str], Tensor]]] = {}
        for (how, _), names in alike.items():
            numbers = [self._numbers[name] for name in names]
            stacked = _stack([value for _, own, _ in numbers for value in own])
            kind, rows = _put_together(how, stacked.view(len(names), -1), [weights for _, _, weights in numbers])
            found.setdefault(kind, []).append((names, rows))
        for several, rows in self._ratios.items():
            found.setdefault("ratio", []).append((list(several), rows))
        return {
            kind: ([name for names, _ in rows for name in names], _cat([each for _, each in rows]))
            for kind, rows in found.items()
        }

    def values(self) -> dict[str, tuple[Callable[[Tensor], float | Tensor], Tensor]]:
        """Name -> the function of the user's, and all the numbers it is to be called with."""
        return {name: (how, _stack(own)) for name, (how, own, _) in self._numbers.items() if not isinstance(how, str)}


def numbers_of(parts: Parts) -> list[tuple[list[str], Tensor]]:
    """Names and the numbers that the parts make, NaN where there is none."""
    found = []
    for kind, (names, rows) in parts.items():
        if kind == "ratio":
            numbers = rows[:, 0] / rows[:, 1]
        elif kind == "sum":
            numbers = torch.where(rows[:, 1] > 0, rows[:, 0], math.nan)
        else:
            numbers = rows[:, 0] if kind == "max" else -rows[:, 0]
        found.append((names, numbers))
    return found


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
    device = values[0].device
    if any(value.device != device for value in values):
        values = [value.to(device, non_blocking=device.type != "cpu") for value in values]
    return torch.stack(values)


def _cat(rows: list[Tensor]) -> Tensor:
    device = rows[0].device
    return torch.cat([each.to(device, non_blocking=device.type != "cpu") for each in rows])
