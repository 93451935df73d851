"""Reduction over ranks of named rows that not every rank has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload, wide_dtype
from ignite_monitor.monitor.ranks import from_every_rank, max_over_ranks, sum_over_ranks
from ignite_monitor.monitor.transfer import DeferredFlag, NamedValues

Rows = dict[Any, NamedValues]  # kind -> names and their rows; the rows of a kind have one length

Table = tuple[str, Any, int]  # reduction, kind, length of the rows


class RankReduction:
    """Sum or maximum over ranks of rows that not every rank has.

    The ranks agree on the names in the first iteration, and where a rank has new ones, in the next: every iteration has
    two collectives, whatever a rank has. Missing rows count as 0 and minus infinity.
    """

    def __init__(self) -> None:
        self._names: dict[Table, list[str]] | None = None
        self._has_news = DeferredFlag()

    def __call__(self, sums: Rows, maxima: Rows, device: torch.device) -> tuple[Rows, Rows]:
        """Return the sums and maxima of all ranks' rows on a device."""
        own = {("sum", kind, rows.values.shape[1]): rows for kind, rows in sums.items()}
        own |= {("max", kind, rows.values.shape[1]): rows for kind, rows in maxima.items()}
        if self._names is None or self._has_news.take(wait=True):
            self._names = _union(self._names or {}, own)
        has_news = any(not {*rows.names} <= {*self._names.get(table, ())} for table, rows in own.items())
        flag = torch.full((1,), float(has_news), dtype=wide_dtype(device), device=device)
        total = sum_over_ranks(torch.cat([*_in_order(self._names, "sum", own, 0.0, device), flag]))
        largest = torch.cat([*_in_order(self._names, "max", own, -torch.inf, device), flag])
        largest = max_over_ranks(largest.nan_to_num(torch.inf, torch.inf, -torch.inf))
        self._has_news.set(total[-1] > 0)
        return _split(self._names, "sum", total), _split(self._names, "max", largest)


def _union(known: Mapping[Table, list[str]], own: Mapping[Table, NamedValues]) -> dict[Table, list[str]]:
    """Return the names that any rank knows or has, in the same order on all ranks."""
    mine = [*known.items(), *((table, list(rows.names)) for table, rows in own.items())]
    union: dict[Table, dict[str, None]] = {}
    for tables in from_every_rank(mine):
        for table, names in tables:
            union.setdefault(table, {}).update(dict.fromkeys(names))
    return {table: list(names) for table, names in union.items()}


def _in_order(
    names: Mapping[Table, list[str]],
    reduction: str,
    own: Mapping[Table, NamedValues],
    missing: float,
    device: torch.device,
) -> Iterator[Tensor]:
    """Yield this rank's rows of every table, flat, with a value for what is missing."""
    for table in names:
        if table[0] == reduction:
            rows = own.get(table, NamedValues([], torch.zeros((0, table[2]), device=device)))
            values = rows.values.to(device, wide_dtype(device))
            place = {name: index for index, name in enumerate(rows.names)}
            index = torch.tensor([place.get(name, len(place)) for name in names[table]], device="cpu")
            values = torch.cat([values, values.new_full((1, table[2]), missing)])
            yield values[upload(index, device)].flatten()


def _split(names: Mapping[Table, list[str]], reduction: str, flat: Tensor) -> Rows:
    tables = [table for table in names if table[0] == reduction]
    sizes = [len(names[table]) * table[2] for table in tables]
    parts = flat[: sum(sizes)].split(sizes)
    return {
        table[1]: NamedValues(names[table], part.view(-1, table[2])) for table, part in zip(tables, parts, strict=True)
    }
