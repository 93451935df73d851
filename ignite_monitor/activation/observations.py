"""Statistics of named tensors that come one after the other, small ones taken together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ignite_monitor.activation.stacks import Stacks
from ignite_monitor.activation.statistics import has_statistics, is_float8, statistics, sum_up, unit_dimension
from ignite_monitor.model.devices import upload, wide_dtype

# Tensors of at most so many elements are copied, and their sums taken with those of others: an operation on a small
# tensor takes longer than the arithmetic in it.
_SMALL = 2**16

# How many units are kept apart, of names in another order each time, before they are merged.
_UNITS = 2**20


class Table(NamedTuple):
    """What has been observed of each name.

    Attributes:
        names: the names, each once.
        sums: as in :class:`~ignite_monitor.activation.statistics.Sums`, a row for each name.
        units: number of units -> the names of which tensors with so many were seen, and their units as in
            :class:`~ignite_monitor.activation.statistics.Sums`. With 0 it is a single one of tensors that have none.
    """

    names: list[str]
    sums: Tensor
    units: dict[int, tuple[list[str], Tensor]]

    def statistics(self) -> Tensor:
        """The statistics, of shape (names, 6), NaN where there is none."""
        parts = [_of_units(units, largest, self.sums.dtype) for units, (_, largest) in self.units.items()]
        if [name for names, _ in self.units.values() for name in names] == self.names:
            return statistics(self.sums, *torch.cat(parts, 1))
        found = torch.zeros(3, len(self.names), dtype=self.sums.dtype, device=self.sums.device)
        for (names, _), own in zip(self.units.values(), parts, strict=True):
            places = _places(names, self.names, found.device)
            found[0, places] = torch.maximum(found[0, places], own[0])
            found[1:, places] += own[1:]
        return statistics(self.sums, *found)


class Observations:
    """Adds up the sums of tensors by name.

    Args:
        with_units: whether the tensors have a batch, and with it units that may be dead.
    """

    def __init__(self, with_units: bool = True) -> None:
        self._with_units = with_units
        self._stacks = Stacks()
        self.add_again = self._stacks.add
        self.clear()

    def clear(self) -> None:
        """Forget what has been observed."""
        for _ in self._stacks.take():
            pass  # of an iteration that an error has ended
        # By series of names, which may hold one more than once, and number of units.
        self._sums: dict[tuple[torch.device, tuple[str, ...]], Tensor] = {}
        self._units: dict[tuple[torch.device, tuple[str, ...], int], Tensor] = {}
        self._kept = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Observe a tensor, which may be changed in place afterwards; nothing of one that has no statistics.

        Args:
            tensor: the tensor; where it is part of a graph, under ``no_grad``.
        """
        if self.add_again(name, tensor) or not has_statistics(tensor):
            return
        size = tensor.numel()
        if size > _SMALL:
            self._sum_up([([name], tensor.unsqueeze(0))])
        elif size:
            self._make_room(tensor, 1)
            self._stacks.add(name, tensor)

    def add_all(self, names: Sequence[str], tensors: Tensor) -> None:
        """Observe tensors of one shape, which may be changed in place afterwards.

        Args:
            names: what each belongs to.
            tensors: of shape (names, ...), without a gradient.
        """
        size = tensors.numel()
        if size > _SMALL:
            self._sum_up([(names, tensors)])
        elif size and not self._stacks.add_all(names, tensors):
            self._make_room(tensors[0], len(names))
            self._stacks.add_all(names, tensors)

    def flush(self) -> None:
        """Take the sums of the tensors that wait for it."""
        self._sum_up(self._stacks.take())

    def table(self) -> Table | None:
        """What has been observed; None if nothing has."""
        self.flush()
        if not self._sums:
            return None
        self._merge()
        (((_, names), sums),) = self._sums.items()
        return Table(list(names), sums, {count: (list(own), each) for (_, own, count), each in self._units.items()})

    def _make_room(self, like: Tensor, rows: int) -> None:
        self._sum_up(self._stacks.grow(like, rows))

    def _sum_up(self, stacks: Iterable[tuple[Sequence[str], Tensor]]) -> None:
        by_device: dict[torch.device, list[tuple[Sequence[str], Tensor]]] = {}
        for names, tensors in stacks:
            by_device.setdefault(tensors.device, []).append((names, tensors))
        for device, own in by_device.items():
            self._add_sums(device, own)

    def _add_sums(self, device: torch.device, stacks: list[tuple[Sequence[str], Tensor]]) -> None:
        shaped = []
        for _, tensors in stacks:
            unit = unit_dimension(tensors.shape[1:]) if self._with_units else None
            if not tensors.is_floating_point() or is_float8(tensors):
                tensors = tensors.to(torch.float32 if tensors.itemsize == 1 else wide_dtype(device))
            shaped.append((tensors, unit))
        sums, units = sum_up(shaped)
        series = (device, tuple(name for names, _ in stacks for name in names))
        known = self._sums.get(series)
        self._sums[series] = sums if known is None else known + sums
        for (names, _), (tensors, unit), largest in zip(stacks, shaped, units, strict=True):
            kind = (device, tuple(names), 0 if unit is None else tensors.shape[unit + 1])
            known = self._units.get(kind)
            self._units[kind] = largest if known is None else torch.maximum(known, largest)
            self._kept += largest.numel() if known is None else 0
        if self._kept > _UNITS:
            self._merge()

    def _merge(self) -> None:
        """Make a single series of all, with each name once, and one of each number of units."""
        self._kept = 0
        if self._is_merged():
            return
        device = next(iter(self._sums))[0]
        by_count: dict[int, list[tuple[tuple[str, ...], Tensor]]] = {}
        for (_, names, count), units in self._units.items():
            by_count.setdefault(count, []).append((names, _to(device, units)))
        largest = {count: _largest_by_name(own) for count, own in by_count.items()}
        self._units = {(device, tuple(names), count): units for count, (names, units) in largest.items()}
        # In the order of the units, in which no row has to be moved as a rule.
        unique = list(dict.fromkeys(name for own, _ in largest.values() for name in own))
        rows = [name for _, own in self._sums for name in own]
        sums = torch.cat([_to(device, each) for each in self._sums.values()])
        if rows != unique:
            zeros = torch.zeros(len(unique), sums.shape[1], dtype=sums.dtype, device=device)
            sums = zeros.index_add_(0, _places(rows, unique, device), sums)
        self._sums = {(device, tuple(unique)): sums}

    def _is_merged(self) -> bool:
        """Whether it is so already, as it is where each name was seen once, all in a single pass."""
        names = next(iter(self._sums))[1]
        own = [each for _, names, _ in self._units for each in names]
        counts = {count for _, _, count in self._units}
        return len(self._sums) == 1 and len(set(names)) == len(own) == len(names) and len(counts) == len(self._units)


def _of_units(units: int, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each row the largest absolute value, how many units are dead, and how many there are."""
    top = largest.amax(1).to(dtype)
    dead = (largest == 0).sum(1).to(dtype) if units else torch.zeros_like(top)
    return torch.stack([top, dead, torch.full_like(top, units)])


def _to(device: torch.device, tensor: Tensor) -> Tensor:
    return tensor.to(device, non_blocking=device.type != "cpu")


def _places(names: Iterable[str], among: Iterable[str], device: torch.device) -> Tensor:
    place = {name: i for i, name in enumerate(among)}
    return upload(torch.tensor([place[name] for name in names], dtype=torch.int64, device="cpu"), device)


def _largest_by_name(series: list[tuple[tuple[str, ...], Tensor]]) -> tuple[list[str], Tensor]:
    """Each name once, with the elementwise maxima of its rows."""
    rows = torch.cat([units for _, units in series])
    rounds: list[dict[str, int]] = []
    seen: dict[str, int] = {}
    for place, name in enumerate(name for names, _ in series for name in names):
        times = seen[name] = seen.get(name, -1) + 1
        if times == len(rounds):
            rounds.append({})
        rounds[times][name] = place
    names = list(rounds[0])
    if len(rounds) == 1:
        return names, rows
    # Not scatter_reduce, which deterministic algorithms forbid on CUDA.
    index = [upload(torch.tensor([*each.values()], device="cpu"), rows.device) for each in rounds]
    largest = rows[index[0]]
    for again, places in zip(rounds[1:], index[1:], strict=True):
        own = _places(again, names, rows.device)
        largest[own] = torch.maximum(largest[own], rows[places])
    return names, largest
