"""Accumulation of the built-in statistics of named tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ignite_monitor.activation.statistics import PIECE, WITHOUT_STATISTICS, Moments, as_sums, merged, moments
from ignite_monitor.model.devices import move, upload
from ignite_monitor.monitor.transfer import NamedValues

# Tensors of at most so many elements are measured together: an operation on one takes longer than its arithmetic.
SMALL = 2**16

# Bytes of tensors that wait to be measured.
_BYTES = 2**24

# Numbers kept for tensors that are measured together with others each time.
_KEPT = 2**20


class Accumulator:
    """Accumulates moments of tensors by name, small tensors of one shape together."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all tensors."""
        self._pending: list[tuple[str, Tensor, int | None]] = []
        self._bytes = 0
        # Names of the tensors measured together, one name possibly more than once, and their number of units.
        self._moments: dict[tuple[tuple[str, ...], int], Moments] = {}
        self._size = 0

    def add(self, name: str, tensor: Tensor, unit: int | None = None, *, copy: bool = False) -> None:
        """Add a tensor without a graph.

        Args:
            name: its name.
            tensor: the tensor. It must not change before :meth:`flush`, unless it is copied.
            unit: the dimension whose indices are units.
            copy: whether to copy a tensor that waits to be measured.
        """
        size = tensor.numel()
        if not size or tensor.dtype in WITHOUT_STATISTICS:
            return
        if size > SMALL:
            self._measure((name,), tensor.unsqueeze(0), unit)
        else:
            self._pending.append((name, tensor.clone() if copy else tensor, unit))
            self._bytes += size * tensor.itemsize
            if self._bytes > _BYTES:
                self.flush()

    def flush(self) -> None:
        """Measure the tensors that wait."""
        groups: dict[tuple[Any, ...], tuple[list[str], list[Tensor]]] = {}
        for name, tensor, unit in self._pending:
            names, tensors = groups.setdefault((unit, tensor.shape, tensor.dtype, tensor.device), ([], []))
            names.append(name)
            tensors.append(tensor)
        self._pending, self._bytes = [], 0
        for (unit, *_), (names, tensors) in groups.items():
            most = max(PIECE // tensors[0].numel(), 1)
            for start in range(0, len(names), most):
                part = slice(start, start + most)
                self._measure(tuple(names[part]), torch.stack(tensors[part]), unit)

    def result(self) -> dict[int, tuple[NamedValues, Tensor]]:
        """Number of units -> names, each once, with sums as of :func:`as_sums`, and the largest values of the units."""
        self.flush()
        if len({name for names, _ in self._moments for name in names}) < sum(len(names) for names, _ in self._moments):
            self._merge()
        by_units: dict[int, list[tuple[tuple[str, ...], Moments]]] = {}
        for (names, units), found in self._moments.items():
            by_units.setdefault(units, []).append((names, found))
        return {units: _joined(own) for units, own in by_units.items()}

    def _measure(self, names: tuple[str, ...], tensors: Tensor, unit: int | None) -> None:
        new = moments(tensors, None if unit is None else unit + 1)
        key = names, 0 if unit is None else new.largest.shape[1]
        if key in self._moments:
            new = merged(self._moments[key], new)
        else:
            self._size += new.largest.numel()
        self._moments[key] = new
        if self._size > _KEPT:
            self._merge()

    def _merge(self) -> None:
        """Merge what belongs to the same name and number of units."""
        single: dict[tuple[tuple[str, ...], int], Moments] = {}
        for (names, units), found in self._moments.items():
            rows = zip(names, found.rows.split(1), found.largest.split(1), strict=True)
            for name, row, largest in rows:
                own = Moments(found.elements, found.vectors, row, largest)
                known = single.get(((name,), units))
                single[(name,), units] = own if known is None else merged(known, own)
        self._moments = single
        self._size = sum(each.largest.numel() for each in single.values())


def _joined(parts: list[tuple[tuple[str, ...], Moments]]) -> tuple[NamedValues, Tensor]:
    like = parts[0][1].rows
    counts = [[each.elements, each.vectors] for names, each in parts for _ in names]
    rows, largest = (
        torch.cat([move(each, like.device) for each in column])
        for column in zip(*((each.rows, each.largest) for _, each in parts), strict=True)
    )
    counted = upload(torch.tensor(counts, dtype=like.dtype, device="cpu"), like.device)
    return NamedValues([name for names, _ in parts for name in names], as_sums(counted, rows)), largest
