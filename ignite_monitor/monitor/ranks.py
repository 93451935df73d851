"""Reductions over the ranks of torch's process group: sums, norms, lists, and rows that not every rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.model._torch import is_in_join
from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.model.dtensor import all_reduce, any_dtensor, is_dtensor
from ignite_monitor.model.norms import combine, norms, reduce_norm, total_norm
from ignite_monitor.monitor.transfer import DeferredFlag, NamedValues

T = TypeVar("T")
Norms = Sequence[Tensor] | Tensor


def reduction_of(model: nn.Module, reduction: str) -> str | None:
    """Return the reduction that :func:`gradient_norm` needs; ValueError if the user's does not fit the wrapper."""
    if not any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return reduction
    if reduction == "sum":
        raise ValueError(
            "Argument reduction should be 'mean' with DistributedDataParallel, which leaves the same gradient on every "
            "rank, but given 'sum'"
        )
    return None  # bitwise the same, and join() does not allow for a collective of ours


def gradient_norm(gradients: Sequence[Tensor], norm_type: float, reduction: str | None) -> Tensor:
    """Return the p-norm of a gradient over all ranks, the same on every rank; exact for DTensors.

    Args:
        reduction: ``"mean"`` for the root mean square of the ranks' norms, ``"sum"`` if the ranks have parts of one
            gradient, None if their gradients are bitwise the same.
    """
    is_whole = not any_dtensor(gradients)  # then it counts as one tensor
    parts: Norms = [total_norm(gradients, norm_type)] if is_whole else norms(gradients, norm_type)
    if is_whole and reduction is None:
        return parts[0]
    gradients = gradients[:1] if is_whole else gradients
    return norm_of_parts(gradients, parts, norm_type, reduction, parts[0])[0]  # any flag: it is not used


def norm_of_parts(
    gradients: Sequence[Tensor], parts: Norms, norm_type: float, reduction: str | None, flag: Tensor
) -> tuple[Tensor, Tensor]:
    """Return :func:`gradient_norm` from the norms of all gradients, and whether a 0-dim flag is set on any rank."""
    if reduction is None or world_size() == 1:
        return combine(parts, norm_type, gradients), flag
    sharded = [is_dtensor(gradient) for gradient in gradients] if any_dtensor(gradients) else [False] * len(gradients)
    if all(sharded):
        return combine(parts, norm_type, gradients), flag
    own = combine([norm for norm, is_whole in zip(parts, sharded, strict=True) if not is_whole], norm_type)
    pair = torch.stack((own, flag.to(own)))
    if reduction == "mean":
        pair = reduce_norm(pair, 2.0, all_reduce) / world_size() ** 0.5
    else:
        pair = reduce_norm(pair, norm_type, all_reduce)
    whole = [norm for norm, is_whole in zip(parts, sharded, strict=True) if is_whole]
    return combine([pair[0], *whole], norm_type) if whole else pair[0], pair[1] > 0


def world_size() -> int:
    """Return the number of ranks of torch's process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own_rank() -> int:
    """Return the number of this rank."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_take_part(model: nn.Module) -> bool:
    """Return True if all ranks are at this point; under ``join()`` some may be gone."""
    if world_size() == 1:
        return True
    return not any(isinstance(module, DistributedDataParallel) and is_in_join(module) for module in model.modules())


def sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum of the ranks' tensors, of one shape on all ranks, in one collective."""
    return values if world_size() == 1 else all_reduce(values)


def max_over_ranks(values: Tensor) -> Tensor:
    """Return the elementwise maximum of the ranks' tensors, in one collective."""
    return values if world_size() == 1 else all_reduce(values, largest=True)


def from_every_rank(value: T) -> list[T]:
    """Return every rank's value, any object that can be pickled, in the order of ranks."""
    if world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


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
        reduced: list[Rows] = []
        for reduction, missing, over_ranks in (("sum", 0.0, sum_over_ranks), ("max", -torch.inf, max_over_ranks)):
            names = {table: known for table, known in self._names.items() if table[0] == reduction}
            rows = [_in_order(own.get(table), table, known, missing, device) for table, known in names.items()]
            flat = torch.cat([*rows, flag])
            flat = over_ranks(flat if reduction == "sum" else flat.nan_to_num(torch.inf, torch.inf, -torch.inf))
            *parts, flag = flat.split([*map(len, rows), 1])
            tables = zip(names.items(), parts, strict=True)
            reduced.append({kind: NamedValues(known, part.view(-1, n)) for ((_, kind, n), known), part in tables})
        self._has_news.set(flag[0] > 0)
        return reduced[0], reduced[1]


def _union(known: Mapping[Table, list[str]], own: Mapping[Table, NamedValues]) -> dict[Table, list[str]]:
    """Return the names that any rank knows or has, in the same order on all ranks."""
    own_tables = [*known.items(), *((table, list(rows.names)) for table, rows in own.items())]
    union: dict[Table, dict[str, None]] = {}
    for tables in from_every_rank(own_tables):
        for table, names in tables:
            union.setdefault(table, {}).update(dict.fromkeys(names))
    return {table: list(names) for table, names in union.items()}


def _in_order(
    own: NamedValues | None, table: Table, names: Sequence[str], missing: float, device: torch.device
) -> Tensor:
    """Return this rank's rows of a table in the order of names, flat, with a value for what is missing."""
    values = torch.full((1, table[2]), missing, dtype=wide_dtype(device), device=device)
    place = {} if own is None else {name: index + 1 for index, name in enumerate(own.names)}
    if own is not None:
        values = torch.cat([values, own.values.to(values)])
    index = torch.tensor([place.get(name, 0) for name in names], dtype=torch.int64, device="cpu")
    return values[move(index, device)].flatten()
