"""Reduction over ranks of named rows that not every rank has."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import upload, wide_dtype
from ignite_monitor.monitor.deferred_flag import DeferredFlag
from ignite_monitor.monitor.ranks import from_every_rank, max_over_ranks, sum_over_ranks
from ignite_monitor.monitor.transfer import NamedValues

# kind -> names and their rows; the rows of a kind have one length
Rows = dict[Any, NamedValues]

Slot = tuple[str, Any, str, int]  # reduction, kind, name, length


class RankReduction:
    """Sum or maximum over ranks of rows that not every rank has.

    The ranks agree on the names in the first iteration. New names are skipped until the ranks agree again in the next
    iteration, so every iteration has two collectives, whatever a rank has. Missing rows count as 0 and minus infinity.
    """

    def __init__(self) -> None:
        self._slots: list[Slot] = []
        self._agreed = False
        self._news = DeferredFlag()
        self._index: dict[tuple[str, tuple[Slot, ...]], Tensor] = {}

    def __call__(self, sums: Rows, maxima: Rows, device: torch.device) -> tuple[Rows, Rows]:
        """Return the rows of all ranks.

        Args:
            sums: rows to sum.
            maxima: rows to take the elementwise maximum of.
            device: device of the result.
        """
        own = [_slots("sum", sums), _slots("max", maxima)]
        if not self._agreed or self._news.take(wait=True):
            self._agree([*own[0], *own[1]])
        known = set(self._slots)
        new = any(slot not in known for slots in own for slot in slots)
        flag = torch.full((1,), float(new), dtype=wide_dtype(device), device=device)
        total = torch.cat([self._arranged("sum", own[0], sums, 0.0, device), flag])
        largest = self._arranged("max", own[1], maxima, -torch.inf, device).nan_to_num_(
            torch.inf, torch.inf, -torch.inf
        )
        total = sum_over_ranks(total)
        if len(largest):
            largest = max_over_ranks(largest)
        self._news.set(total[-1] > 0)
        return self._rows("sum", total), self._rows("max", largest)

    def _agree(self, own: list[Slot]) -> None:
        everyone = from_every_rank([*dict.fromkeys([*self._slots, *own])])
        union = dict.fromkeys(slot for slots in everyone for slot in slots)
        kinds = list(dict.fromkeys(slot[:2] for slot in union))
        self._slots = sorted(union, key=lambda slot: kinds.index(slot[:2]))
        self._agreed = True
        self._index.clear()

    def _arranged(self, how: str, own: list[Slot], rows: Rows, missing: float, device: torch.device) -> Tensor:
        """Return this rank's numbers, flat, in the common order."""
        wide = wide_dtype(device)
        slots = [slot for slot in self._slots if slot[0] == how]
        flat = [each.to(device, wide).flatten() for _, each in rows.values()]
        if own == slots:
            return torch.cat(flat) if flat else torch.zeros(0, dtype=wide, device=device)
        key = (how, tuple(own))
        index = self._index.get(key)
        if index is None:
            starts, start = {}, 0
            for slot in own:
                starts[slot] = start
                start += slot[3]
            nowhere = torch.tensor([start], device="cpu")
            parts = [
                torch.arange(starts[slot], starts[slot] + slot[3], device="cpu")
                if slot in starts
                else nowhere.expand(slot[3])
                for slot in slots
            ]
            index = upload(torch.cat([nowhere[:0], *parts]), device)
            self._index = {key: index} if len(self._index) > 8 else self._index | {key: index}
        return torch.cat([*flat, torch.full((1,), missing, dtype=wide, device=device)])[index]

    def _rows(self, how: str, flat: Tensor) -> Rows:
        rows: Rows = {}
        names: dict[tuple[Any, int], list[str]] = {}
        for each, kind, name, length in self._slots:
            if each == how:
                names.setdefault((kind, length), []).append(name)
        start = 0
        for (kind, length), own in names.items():
            end = start + len(own) * length
            rows[kind] = NamedValues(own, flat[start:end].view(len(own), length))
            start = end
        return rows


def _slots(how: str, rows: Rows) -> list[Slot]:
    return [(how, kind, name, each.shape[1]) for kind, (names, each) in rows.items() for name in names]
