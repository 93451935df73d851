"""Weights as matrices, put together by shape, whole or shared out over ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ignite_monitor.model.norms import is_sharded
from ignite_monitor.model.samples import is_measurable
from ignite_monitor.model.sharding import all_reduce
from ignite_monitor.spectral.matrices import AllReduce, Matrices

# So many elements are measured as one batch, which is a float32 copy of them. On the CPU batches make no big matrix
# faster, and one alone need not be copied.
_BATCH = {"cpu": 1 << 18}
_LARGE_BATCH = 1 << 24


class Weight(NamedTuple):
    """One weight as a matrix.

    Attributes:
        name: the parameter's name.
        local: what this rank holds of it, of shape (rows, in·k…).
        rows: how many rows there are on all ranks.
        groups: the process groups over whose ranks the rows are shared out; none where they are all here.
    """

    name: str
    local: Tensor
    rows: int
    groups: tuple[Any, ...]

    def less(self, before: Tensor) -> Weight:
        """What has been added to it.

        Args:
            before: what this rank held of it before; used up.
        """
        if before.dtype != _work_dtype(before.dtype):
            before = before.to(_work_dtype(before.dtype))
        return self._replace(local=torch.sub(self.local, before, out=before))


class Batch(NamedTuple):
    """Weights of one shape.

    Attributes:
        names: their names.
        matrices: the weights.
        dtype: what they are stored in.
        is_shared: whether their rows are shared out over ranks.
    """

    names: list[str]
    matrices: Matrices
    dtype: torch.dtype
    is_shared: bool


def is_matrix(parameter: Tensor) -> bool:
    """Whether a parameter has a spectral norm: at least two dimensions, and real numbers to compute with."""
    return parameter.ndim >= 2 and is_measurable(parameter) and not parameter.is_complex()


def as_weight(name: str, parameter: Tensor, whole: bool, turned: int = 0) -> Weight:
    """A parameter as a matrix.

    Where a DTensor's rows are shared out, each rank keeps its own; placed in any other way it is gathered, as it is
    where all of it is needed.

    Args:
        turned: the number of groups where its shape is (in, out / groups, k…), of which (out, in / groups · k…) is to
            be made; 0 where it is (out, in, k…).
    """
    local: Any = parameter.detach()
    groups: tuple[Any, ...] = ()
    if is_sharded(parameter):
        sharded = [i for i, placement in enumerate(local.placements) if not placement.is_replicate()]
        if all(local.placements[i].is_shard(0) for i in sharded) and not ((whole or turned) and sharded):
            groups = tuple(local.device_mesh.get_group(i) for i in sharded)
            local = local.to_local()
        else:
            local = local.full_tensor()
    if turned:
        local = local.unflatten(0, (turned, -1)).transpose(1, 2).flatten(0, 1)
    rows = turned * parameter.shape[1] if turned else len(parameter)
    return Weight(name, local.reshape(-1, parameter.numel() // rows), rows, groups)


def batches(weights: Iterable[Weight]) -> Iterable[Batch]:
    """Weights of one shape, dtype and device together.

    Yields:
        Each batch when it is asked for, since it may be a copy.
    """
    alike: dict[Any, list[Weight]] = {}
    for weight in weights:
        local = weight.local
        alike.setdefault((local.device, local.dtype, local.shape, weight.rows, weight.groups), []).append(weight)
    for (device, dtype, shape, rows, groups), members in alike.items():
        # Every rank makes the same batches, whatever its part of the rows.
        size = max(1, _BATCH.get(device.type, _LARGE_BATCH) // (rows * shape[1]))
        for first in range(0, len(members), size):
            batch = members[first : first + size]
            parts = [each.local.to(_work_dtype(dtype)) for each in batch]
            stack = torch.stack(parts) if len(parts) > 1 else parts[0].unsqueeze(0)
            matrices = Matrices(stack, _over(groups) if groups else None)
            yield Batch([each.name for each in batch], matrices, dtype, bool(groups))


def _over(groups: tuple[Any, ...]) -> AllReduce:
    def over_groups(values: Tensor, largest: bool) -> Tensor:
        for group in groups:
            values = all_reduce(values, largest, group)
        return values

    return over_groups


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32
