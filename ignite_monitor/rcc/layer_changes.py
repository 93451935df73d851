"""The norms of all calls of a train step: their means over calls and ranks, by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import move_like, upload, wide_dtype
from ignite_monitor.model.updates import order_statistics
from ignite_monitor.monitor.ranks import sum_over_ranks, world_size
from ignite_monitor.rcc.layers import LayerCalls
from ignite_monitor.rcc.terms import QUANTITIES, weight_share
from ignite_monitor.reference.reference import Reference

_PLACES = 2 * len(QUANTITIES)  # with the bias, and without it
_UPDATES, _DRIFTS = [0, len(QUANTITIES)], [1, len(QUANTITIES) + 1]


class LayerChanges(LayerCalls):
    """Adds up the norms of the calls of a model's layers."""

    def __init__(self, reference: Reference, tags: dict[str, str]) -> None:
        super().__init__(reference, tags)
        self._rows = {name: row for row, name in enumerate(tags)}
        self._tags = list(tags.values())
        # Layers and places, the sum of norms for each, and how many norms that is of.
        self._sums: list[tuple[list[tuple[str, int]], Tensor, int]] = []

    def clear(self) -> None:
        self._sums = []

    def passed(self, results: dict[str, list[Any]]) -> None:
        vectors: dict[tuple[str, int], list[Tensor]] = {}
        for name, calls in results.items():
            for norms in calls:
                for place, each in norms.items():
                    vectors.setdefault((name, place), []).append(each)
        # What has as many norms is summed at once.
        alike: dict[Any, list[tuple[str, int]]] = {}
        for where, found in vectors.items():
            alike.setdefault((found[0].device, found[0].dtype, *map(len, found)), []).append(where)
        for (device, _, *sizes), cells in alike.items():
            if sum(sizes):
                table = torch.cat([each for cell in cells for each in vectors[cell]]).view(len(cells), -1)
                self._sums.append((cells, table.sum(1, dtype=wide_dtype(device)), sum(sizes)))

    def values(self, incomplete: Collection[str], device: torch.device) -> tuple[list[str], Tensor, dict[str, Tensor]]:
        """Names and values by layer, and what there is over layers by name; NaN stands for what is absent.

        Args:
            incomplete: names of layers that are left out.
            device: where the values are to be where nothing was measured.
        """
        means, measured = self._mean_over_ranks(incomplete, device)
        table = torch.cat([means, weight_share(means[:, _UPDATES], means[:, _DRIFTS])], 1)
        # Of what is measured on no rank, or isn't finite.
        table = torch.where(table.isfinite(), table, math.nan)
        shares = [(row, _PLACES + _DRIFTS.index(place)) for row, place in measured if place in _DRIFTS]
        cells = sorted([*measured, *shares])
        index = [row * table.shape[1] + place for row, place in cells]
        values = table.flatten()[upload(torch.tensor(index, dtype=torch.long, device="cpu"), table.device)]
        over_layers: dict[str, Tensor] = {}
        for place, kind in enumerate(QUANTITIES[:2]):
            if any(cell[1] == place for cell in cells):
                median, _, _, largest = order_statistics(table[:, place]).unbind()
                over_layers |= {f"{kind}_max": largest, f"{kind}_median": median}
        return [self._name_of(*cell) for cell in cells], values, over_layers

    def _name_of(self, row: int, place: int) -> str:
        kinds: Sequence[str] = [*QUANTITIES, *QUANTITIES, "weight_share", "weight_share"]
        without = len(QUANTITIES) <= place < _PLACES or place > _PLACES
        return f"{kinds[place]}/{self._tags[row]}{'.weight' if without else ''}"

    def _mean_over_ranks(
        self, incomplete: Collection[str], device: torch.device
    ) -> tuple[Tensor, set[tuple[int, int]]]:
        """Means by layer and place, NaN where there is none; and which of them some rank may have measured.

        The size is the same on every rank, whatever that has reached, and so is the number of collectives.
        """
        device = self._sums[0][1].device if self._sums else device
        size, dtype = len(self._rows) * _PLACES, wide_dtype(device)
        left_out = {self._rows[name] for name in incomplete}
        cells = [[self._rows[name] * _PLACES + place for name, place in each] for each, _, _ in self._sums]
        counts = [0] * size
        for each, (_, _, count) in zip(cells, self._sums, strict=True):
            for cell in each:
                counts[cell] += count if cell // _PLACES not in left_out else 0
        both = torch.zeros(2, size, dtype=dtype, device=device)
        both[1] = upload(torch.tensor(counts, dtype=dtype, device="cpu"), device)
        if self._sums:
            index = upload(torch.tensor([cell for each in cells for cell in each], device="cpu"), device)
            both[0].index_add_(0, index, torch.cat([move_like(totals, both) for _, totals, _ in self._sums]))
            both[0] = torch.where(both[1] > 0, both[0], 0.0)
        if world_size() == 1:
            measured = {cell for cell, count in enumerate(counts) if count}
        else:
            both = sum_over_ranks(both)
            layers = enumerate(self.layers.values())
            measured = {row * _PLACES + place for row, layer in layers for place in range(layer.places)}
        return (both[0] / both[1]).view(-1, _PLACES), {divmod(cell, _PLACES) for cell in measured}
