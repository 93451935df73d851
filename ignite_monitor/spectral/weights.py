"""Weights as matrices, put together by shape, whole or shared out over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model._torch import foreach_copy
from ignite_monitor.model.norms import is_sharded
from ignite_monitor.model.sharding import all_reduce
from ignite_monitor.spectral.acting_weights import MATRIX, STACK, TABLE, ActingWeight
from ignite_monitor.spectral.matrices import AllReduce, Matrices

# So many elements are measured as one batch, which is a float32 copy of them. On the CPU batches make no big matrix
# faster, and one alone need not be copied.
_BATCH = {"cpu": 1 << 18}
_LARGE_BATCH = 1 << 24


class Weight(NamedTuple):
    """One weight as a matrix."""

    name: str  # the parameter's
    local: Tensor  # what this rank holds of it, of shape (rows, in·k…)
    rows: int  # how many there are on all ranks
    groups: tuple[Any, ...]  # of processes, over whose ranks the rows are shared out; none where they are all here
    scale: float  # sqrt(out / in); NaN for a table, which maps nothing

    def less(self, before: Tensor) -> Weight:
        """What has been added to what this rank held of it before, which is used up."""
        if before.dtype != _work_dtype(before.dtype):
            before = before.to(_work_dtype(before.dtype))
        return self._replace(local=torch.sub(self.local, before, out=before))


class Batch(NamedTuple):
    """Weights that are measured at once."""

    names: list[str]
    matrices: Matrices  # some turned and filled up with zeros
    dtype: torch.dtype  # what they are stored in
    is_shared: bool  # whether their rows are shared out over ranks


def as_weights(acting: ActingWeight, whole: bool) -> list[Weight]:
    """A weight as matrices: one, or those of a stack, called ``{name}/{i}``.

    Where a DTensor's rows are shared out, each rank keeps its own; placed in any other way it is gathered, as it is
    where all of it is needed.
    """
    value: Any = acting.value()
    local = value
    groups: tuple[Any, ...] = ()
    if is_sharded(value):
        whole = whole or acting.kind != MATRIX or bool(acting.groups)
        sharded = [i for i, placement in enumerate(value.placements) if not placement.is_replicate()]
        if all(value.placements[i].is_shard(0) for i in sharded) and not (whole and sharded):
            groups = tuple(value.device_mesh.get_group(i) for i in sharded)
            local = value.to_local()
        else:
            value = local = value.full_tensor()
    if acting.kind == STACK:
        stack = value.flatten(0, -3)
        scale = math.sqrt(stack.shape[2] / stack.shape[1] if acting.by_input else stack.shape[1] / stack.shape[2])
        return [Weight(f"{acting.name}/{i}", each, len(each), (), scale) for i, each in enumerate(stack)]
    if acting.groups:
        value = local = local.unflatten(0, (acting.groups, -1)).transpose(1, 2).flatten(0, 1)
    rows = value.numel() // value.shape[-1] if acting.kind == TABLE else len(value)
    columns = value.numel() // rows
    scale = math.sqrt(columns / rows if acting.by_input else rows / columns)
    return [Weight(acting.name, local.reshape(-1, columns), rows, groups, math.nan if acting.kind == TABLE else scale)]


def batches(weights: Iterable[Weight]) -> Iterable[Batch]:
    """Weights of one size, dtype and device together; each batch, which may be a copy, when it is asked for."""
    alike: dict[Any, list[tuple[Weight, Tensor]]] = {}
    for weight in weights:
        local = weight.local
        # Fewer batches are quicker on an accelerator, so there shapes go together that have the shorter side in common:
        # rows of zeros change no norm. Of what is shared out a rank can't know how many rows others would need.
        together = local.device.type != "cpu" and not weight.groups
        if together and len(local) < local.shape[1]:
            local = local.T
        shape = local.shape[1:] if together else (weight.rows, *local.shape)
        alike.setdefault((local.device, local.dtype, shape, weight.groups), []).append((weight, local))
    for (device, dtype, _, groups), members in alike.items():
        members.sort(key=lambda each: -len(each[1]))
        while members:
            # Every rank makes the same batches, whatever its part of the rows.
            weight, local = members[0]
            rows = weight.rows if groups else len(local)
            size = max(1, _BATCH.get(device.type, _LARGE_BATCH) // (rows * local.shape[1]))
            batch, members = members[:size], members[size:]
            parts = [each.to(_work_dtype(dtype)) for _, each in batch]
            if len({len(part) for part in parts}) > 1:
                stack = parts[0].new_zeros(len(parts), *parts[0].shape)
                foreach_copy([row[: len(part)] for row, part in zip(stack, parts, strict=True)], parts)
            else:
                stack = torch.stack(parts) if len(parts) > 1 else parts[0].unsqueeze(0)
            matrices = Matrices(stack, _over(groups) if groups else None)
            yield Batch([each.name for each, _ in batch], matrices, dtype, bool(groups))


def _over(groups: tuple[Any, ...]) -> AllReduce:
    def over_groups(values: Tensor, largest: bool) -> Tensor:
        for group in groups:
            values = all_reduce(values, largest, group)
        return values

    return over_groups


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
