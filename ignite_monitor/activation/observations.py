"""Statistics of named tensors that come one after the other, small ones taken together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from ignite_monitor.activation.statistics import WITHOUT_STATISTICS, is_float8, statistics, sum_up, unit_dimension
from ignite_monitor.model._torch import is_functorch_wrapped
from ignite_monitor.model.devices import move_like, upload, wide_dtype
from ignite_monitor.monitor.publisher import NamedValues

# Tensors of at most so many elements are copied, and their sums taken with those of others: an operation on a small
# tensor takes longer than the arithmetic in it.
_SMALL = 2**16

# All stacks together take up at most so many bytes, and one at most so many. There is room for so many tensors of a
# shape at first, and for twice as many whenever it runs out.
_BYTES = 2**24
_STACK_BYTES = 2**22
_ROWS = 32

# Of tensors that are not copied, so many elements wait to be summed up together.
_LOOSE = 2**22

# How many units are kept apart, of names in another order each time, before they are merged.
_UNITS = 2**20

_strided = torch.strided


class _Stack:
    """Named copies of tensors of one shape, on the CPU in float64, which sums are taken in there.

    Attributes:
        tensor: the copies, of shape (room, ...).
        rows: the same, one by one.
        names: what the copies belong to, fewer than there are rows.
    """

    def __init__(self, like: Tensor, room: int) -> None:
        with torch.inference_mode(False):  # what is made in it can't be written to outside of it
            self.tensor = torch.empty(room, *like.shape, dtype=_stacked_dtype(like), device=like.device)
            self.rows = self.tensor.unbind()
        self.names: list[str] = []
        self.room = room
        self.bytes = self.tensor.numel() * self.tensor.itemsize

    def take(self) -> NamedValues:
        """The copies, which stay as they are until the next one is added."""
        names, self.names = self.names, []
        return NamedValues(names, self.tensor[: len(names)])


class Observations:
    """Adds up the sums of tensors by name, which with units have a batch, and with it units that may be dead."""

    def __init__(self, with_units: bool = True) -> None:
        self._with_units = with_units
        # The memory is kept for the next tensors.
        self._stacks: dict[tuple[torch.Size, torch.dtype, torch.device], _Stack] = {}
        self._loose: list[NamedValues] = []
        self._loose_size = 0
        self.clear()

    def clear(self) -> None:
        """Forget what has been observed."""
        self._take_all()  # of an iteration that an error has ended
        # By series of names, which may hold one more than once, and number of units.
        self._sums: dict[tuple[torch.device, tuple[str, ...]], Tensor] = {}
        self._units: dict[tuple[torch.device, tuple[str, ...], int], Tensor] = {}
        self._kept = 0

    def add_again(self, name: str, tensor: Tensor) -> bool:
        """Observe a small tensor of a shape that there is still room for; returns whether it is one."""
        if tensor.is_nested or is_functorch_wrapped(tensor):
            return False
        stack = self._stacks.get((tensor.shape, tensor.dtype, tensor.device))
        if stack is None or (row := len(stack.names)) == stack.room or tensor.layout is not _strided:
            return False
        stack.rows[row].copy_(tensor)
        stack.names.append(name)
        return True

    def add(self, name: str, tensor: Tensor) -> None:
        """Observe a tensor, under ``no_grad``; nothing of one that has no statistics.

        With units it may be changed in place afterwards, without them only after :meth:`flush`.
        """
        if self.add_again(name, tensor) or tensor.dtype in WITHOUT_STATISTICS:
            return
        size = tensor.numel()
        if size > _SMALL:
            self._sum_up([NamedValues([name], tensor.unsqueeze(0))])
        # An activation may change, so that it has to wait as a copy; elsewhere a copy makes sums quicker.
        elif size and (self._with_units or tensor.device.type == "cpu"):
            self._make_room(tensor, 1)
            self.add_again(name, tensor)
        elif size:
            self._loose.append(NamedValues([name], tensor.detach().unsqueeze(0)))
            self._loose_size += size
            if self._loose_size > _LOOSE:
                self.flush()

    def add_each(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Observe several, each with its name."""
        for name, tensor in tensors:
            self.add(name, tensor)

    def add_all(self, names: Sequence[str], tensors: Tensor) -> None:
        """Observe tensors, of shape (names, ...) and without a gradient, which may be changed in place afterwards."""
        if tensors.numel() > _SMALL:
            self._sum_up([NamedValues(names, tensors)])
        elif tensors.numel():
            stack = self._stacks.get((tensors.shape[1:], tensors.dtype, tensors.device))
            if stack is None or len(stack.names) + len(names) > stack.room:
                stack = self._make_room(tensors[0], len(names))
            stack.tensor[len(stack.names) : len(stack.names) + len(names)].copy_(tensors)
            stack.names += names

    def flush(self) -> None:
        """Take the sums of the tensors that wait for it."""
        self._sum_up(self._take_all())

    def result(self) -> tuple[NamedValues, dict[int, NamedValues]] | None:
        """What has been observed; None if nothing has.

        Returns:
            The sums, each name once, with rows as :func:`sum_up` gives them; and number of units -> the names of which
            tensors with so many were seen, with the units as it gives them. With 0 it is a single one of tensors that
            have none.
        """
        self.flush()
        if not self._sums:
            return None
        self._merge()
        (((_, names), sums),) = self._sums.items()
        units = {count: NamedValues(list(own), each) for (_, own, count), each in self._units.items()}
        return NamedValues(list(names), sums), units

    def _take_all(self) -> list[NamedValues]:
        loose, self._loose, self._loose_size = self._loose, [], 0
        return loose + [stack.take() for stack in self._stacks.values() if stack.names]

    def _make_room(self, like: Tensor, rows: int) -> _Stack:
        """A stack with room for more tensors of a shape; what has to be taken out for it is summed up."""
        key = (like.shape, like.dtype, like.device)
        stack = self._stacks.get(key)
        taken = [stack.take()] if stack is not None and stack.names else []
        most = _STACK_BYTES // (like.numel() * _stacked_dtype(like).itemsize)
        wanted = max(rows, min(most, _ROWS if stack is None else 2 * stack.room))
        if stack is None or stack.room < wanted:
            stack = _Stack(like, wanted)
            if stack.bytes + sum(each.bytes for each in self._stacks.values()) > _BYTES:
                taken += self._take_all()
                self._stacks.clear()
            self._stacks[key] = stack
        self._sum_up(taken)
        return stack

    def _sum_up(self, stacks: Iterable[NamedValues]) -> None:
        by_device: dict[torch.device, list[NamedValues]] = {}
        for stack in stacks:
            by_device.setdefault(stack.values.device, []).append(stack)
        for device, own in by_device.items():
            self._add_sums(device, own)

    def _add_sums(self, device: torch.device, stacks: list[NamedValues]) -> None:
        shaped = []
        for _, tensors in stacks:
            unit = unit_dimension(tensors.shape[1:]) if self._with_units else None
            if not tensors.is_floating_point() or tensors.itemsize == 1:
                tensors = tensors.to(torch.float32 if tensors.itemsize == 1 else wide_dtype(device))
            shaped.append((tensors, unit))
        sums, units = sum_up(shaped)
        series = (device, tuple(chain.from_iterable(names for names, _ in stacks)))
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
        ((device, _), like), *_ = self._sums.items()
        by_count: dict[int, list[NamedValues]] = {}
        for (_, names, count), units in self._units.items():
            by_count.setdefault(count, []).append(
                NamedValues(names, units.to(device, non_blocking=device.type != "cpu"))
            )
        largest = {count: _largest_by_name(own) for count, own in by_count.items()}
        self._units = {(device, tuple(names), count): units for count, (names, units) in largest.items()}
        # In the order of the units, in which no row has to be moved as a rule.
        unique = list(dict.fromkeys(name for own, _ in largest.values() for name in own))
        rows = [name for _, own in self._sums for name in own]
        sums = torch.cat([move_like(each, like) for each in self._sums.values()])
        if rows != unique:
            zeros = torch.zeros(len(unique), sums.shape[1], dtype=sums.dtype, device=device)
            sums = zeros.index_add_(0, _index(rows, unique, device), sums)
        self._sums = {(device, tuple(unique)): sums}

    def _is_merged(self) -> bool:
        """Whether it is so already, as it is where each name was seen once, all in a single pass."""
        names = next(iter(self._sums))[1]
        own = [each for _, names, _ in self._units for each in names]
        counts = {count for _, _, count in self._units}
        return len(self._sums) == 1 and len(set(names)) == len(own) == len(names) and len(counts) == len(self._units)


def statistics_of(sums: NamedValues, units: Mapping[int, NamedValues]) -> Tensor:
    """The statistics of what :meth:`Observations.result` gives, of shape (names, 6), NaN where there is none."""
    names, rows = sums
    parts = [_of_units(count, largest, rows.dtype) for count, (_, largest) in units.items()]
    if [name for own, _ in units.values() for name in own] == names:
        return statistics(rows, *torch.cat(parts, 1))
    found = torch.zeros(3, len(names), dtype=rows.dtype, device=rows.device)
    for (own, _), part in zip(units.values(), parts, strict=True):
        index = _index(own, names, found.device)
        found[0, index] = torch.maximum(found[0, index], part[0])
        found[1:, index] += part[1:]
    return statistics(rows, *found)


def _of_units(units: int, largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each row the largest absolute value, how many units are dead, and how many there are."""
    top = largest.amax(1).to(dtype)
    dead = (largest == 0).sum(1).to(dtype) if units else torch.zeros_like(top)
    return torch.stack([top, dead, torch.full_like(top, units)])


def _stacked_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of a tensor's copy."""
    if tensor.device.type == "cpu":
        return torch.float64
    return torch.float32 if is_float8(tensor) else tensor.dtype


def _index(names: Iterable[str], among: Iterable[str], device: torch.device) -> Tensor:
    index = {name: i for i, name in enumerate(among)}
    return upload(torch.tensor([index[name] for name in names], dtype=torch.int64, device="cpu"), device)


def _largest_by_name(series: list[NamedValues]) -> NamedValues:
    """Each name once, with the elementwise maxima of its rows."""
    rows = torch.cat([units for _, units in series])
    rounds: list[dict[str, int]] = []
    seen: dict[str, int] = {}
    for index, name in enumerate(name for names, _ in series for name in names):
        times = seen[name] = seen.get(name, -1) + 1
        if times == len(rounds):
            rounds.append({})
        rounds[times][name] = index
    names = list(rounds[0])
    if len(rounds) == 1:
        return NamedValues(names, rows)
    # Not scatter_reduce, which deterministic algorithms forbid on CUDA.
    first, *others = [upload(torch.tensor([*each.values()], device="cpu"), rows.device) for each in rounds]
    largest = rows[first]
    for again, chosen in zip(rounds[1:], others, strict=True):
        own = _index(again, names, rows.device)
        largest[own] = torch.maximum(largest[own], rows[chosen])
    return NamedValues(names, largest)
