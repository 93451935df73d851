"""The ranks whose optimizers step together, and reductions over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ignite_monitor.model._torch import has_communication_hook, is_in_join
from ignite_monitor.model.devices import device_of, move, wide_dtype
from ignite_monitor.model.dtensor import all_reduce, is_dtensor, reshard
from ignite_monitor.model.norms import combine, norms, reduce_norm, total_norm
from ignite_monitor.monitor.transfer import NamedValues

NOT_REDUCED = "DistributedDataParallel ignores parameters, or a communication hook may leave gradients of one rank"

Group = Any  # a ProcessGroup or DeviceMesh, whose classes torch has only with torch.distributed; or None


class Ranks:
    """The ranks whose optimizers step together.

    They are the ranks over which the wrappers of the models reduce gradients (``DistributedDataParallel``,
    ``fully_shard``, tensor parallelism), and those of ``group``; without either this rank alone. Reductions go over one
    process group after the other.

    Attributes:
        groups: process groups of this rank, which make up the ranks.
        size: number of ranks.
        replicas: number of ranks over which the wrappers reduce gradients.
        ignored: ids of the parameters that ``DistributedDataParallel`` ignores.

    Raises:
        TypeError: if ``group`` has another type.
    """

    def __init__(self, group: Any, *models: nn.Module) -> None:
        is_group = dist.is_available() and isinstance(group, dist.ProcessGroup)
        if not (group is None or is_group or hasattr(group, "get_local_rank")):
            raise TypeError(f"Argument group should be of type ProcessGroup or DeviceMesh, but given {type(group)}")
        self._group, self._models = group, models
        self.release()

    def release(self) -> None:
        """Forget the process groups: this rank is alone."""
        self.groups: list[Any] = []
        self._wrappers: list[DistributedDataParallel] = []
        self._reduced, self.ignored = set[int](), set[int]()  # ids of parameters of the wrappers
        self.size = self.replicas = 1

    def resolve(self, *wrappers: nn.Module) -> None:
        """Find the process groups.

        Args:
            wrappers: modules that the train step calls in place of the models.

        Raises:
            ValueError: if the ranks of two wrappers, or of a wrapper and of the group, overlap in part.
        """
        self.release()
        if not (dist.is_available() and dist.is_initialized()):
            return
        modules = [module for model in (*self._models, *wrappers) for module in model.modules()]
        self._wrappers = [module for module in modules if isinstance(module, DistributedDataParallel)]
        for wrapper in self._wrappers:
            for name, parameter in wrapper.module.named_parameters():
                (self.ignored if name in wrapper.parameters_to_ignore else self._reduced).add(id(parameter))
        for model in self._models:
            reshard(model)
        parameters: Any = (parameter for model in self._models for parameter in model.parameters())
        meshes = {parameter.device_mesh for parameter in parameters if is_dtensor(parameter)}
        wrapper_groups = [wrapper.process_group for wrapper in self._wrappers]
        wrapper_groups += [mesh for mesh in meshes if mesh.get_coordinate() is not None]
        wrapped = _union(wrapper_groups)
        self.groups = wrapped if self._group is None else _union([*wrapper_groups, self._group])
        self.replicas, self.size = (math.prod(map(dist.get_world_size, groups)) for groups in (wrapped, self.groups))

    @property
    def exceed_wrappers(self) -> bool:
        """True if no wrapper makes these ranks wait for each other in a backward pass."""
        return self.size > self.replicas

    @property
    def all_present(self) -> bool:
        """True if all ranks are at this point; under ``join()`` some may be gone."""
        return self.size == 1 or not any(map(is_in_join, self._wrappers))

    def reduces(self, parameters: Iterable[Tensor]) -> bool:
        """Return False if a wrapper ignores one of the parameters, or its communication hook may reduce none."""
        return self.ignored.isdisjoint(map(id, parameters)) and not any(map(has_communication_hook, self._wrappers))

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, of one shape on all ranks."""
        return self._reduce(values)

    def max(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum of the ranks' tensors."""
        return self._reduce(values, largest=True)

    def any(self, flag: Tensor) -> Tensor:
        """Return where a bool tensor is True on any rank; under ``join()`` on this rank."""
        return self.max(flag.to(torch.float32)) > 0 if self.size > 1 and self.all_present else flag

    def _reduce(self, values: Tensor, largest: bool = False) -> Tensor:
        for group in self.groups:
            values = all_reduce(values, largest, group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, any object that can be pickled, in the same order on all ranks."""
        values = [value]
        for group in self.groups:
            parts: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(parts, values, group)
            values = [item for part in parts for item in part]
        return values

    def value_of_first_rank(self, value: Any) -> Any:
        """Return the value of the first rank, any object that can be pickled."""
        box = [value]
        for group in self.groups:
            dist.broadcast_object_list(box, dist.get_global_rank(group, 0), group)
        return box[0]

    def norm(
        self,
        parameters: Sequence[nn.Parameter],
        norm_type: float,
        parts: Tensor | None = None,
        flags: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the p-norm of the gradients of parameters over all ranks, and where flags of any rank are set.

        Gradients that wrappers reduce count once, those of parameters that ``DistributedDataParallel`` ignores as parts
        of one gradient. Of all others each rank has another part with a group; without one all ranks have the same
        gradient, and the power mean of their norms counts.

        Args:
            parameters: parameters of the models; those without a gradient do not count.
            norm_type: p of the norm.
            parts: the norms of the gradients of all parameters, if they are known.
            flags: flags of this rank, a bool vector.
        """
        gradients = [gradient for gradient in map(attrgetter("grad"), parameters) if gradient is not None]
        if parts is None and len(gradients) < len(parameters):
            parameters = [parameter for parameter in parameters if parameter.grad is not None]
        if self._have_same(parameters):
            value = total_norm(gradients, norm_type) if parts is None else combine(parts, norm_type, gradients)
            return value, value if flags is None else flags
        device = device_of(self._models[0])
        norm = torch.zeros((), dtype=wide_dtype(device), device=device)
        if parameters:
            parts = (norms(gradients, norm_type) if parts is None else parts).to(norm)
            copies = torch.tensor([*map(self._copies, parameters)], device="cpu")
            norm = combine(parts / move(copies, device).to(norm) ** (1.0 / norm_type), norm_type)
        local_flags = norm.new_zeros(0) if flags is None else flags.to(norm)
        reduced = reduce_norm(torch.cat([norm.view(1), local_flags]), norm_type, self._reduce)
        return reduced[0], reduced[1:] > 0

    def _have_same(self, parameters: Iterable[nn.Parameter]) -> bool:
        if self.size == 1 or not self.all_present:
            return True
        if self.exceed_wrappers or not self.reduces(parameters):
            return False
        return all(map(is_dtensor, [item for item in parameters if id(item) not in self._reduced]))

    def _copies(self, parameter: nn.Parameter) -> int:
        """Return the number of ranks whose norms of a parameter stand for one gradient."""
        if id(parameter) in self.ignored:
            return 1
        if self._group is None:
            return self.size
        return self.replicas if id(parameter) in self._reduced or is_dtensor(parameter) else 1


def _ranks_and_groups(group: Any) -> tuple[set[int], list[Any]]:
    """Return the ranks of a ProcessGroup or DeviceMesh, and the process groups that make it up."""
    if isinstance(group, dist.ProcessGroup):
        return set(dist.get_process_group_ranks(group)), [group]
    return set(group.mesh.flatten().tolist()), [group.get_group(dim) for dim in range(group.ndim)]


def _union(groups: Iterable[Any]) -> list[Any]:
    """Return process groups of this rank; reductions over one after the other are over the ranks of all of them.

    Raises:
        ValueError: if groups overlap in part.
    """
    taken: list[set[int]] = []
    union: list[Any] = []
    for ranks, parts in sorted(map(_ranks_and_groups, groups), key=lambda both: -len(both[0])):
        if any(map(ranks.issubset, taken)):
            continue
        if any(len(ranks & others) != 1 for others in taken):
            raise ValueError(
                "Argument group should be a DeviceMesh of all ranks whose optimizers step together: those of the "
                "model's wrappers, or of a wrapper and the group, overlap in part, or this rank is in none of them"
            )
        taken.append(ranks)
        union += parts
    return union


Rows = dict[Any, NamedValues]  # kind -> names and their rows; the rows of a kind have one length

Table = tuple[bool, Any, int]  # whether the maximum is taken, kind, length of the rows


class RankReduction:
    """Sum or maximum over ranks of rows that not every rank has.

    The ranks exchange the names of their rows in the calls 1, 2, 4 and 8 and in every 16th. Until then the rows of new
    names are not included, and no rank waits for one that has others. Missing rows count as 0 and minus infinity.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._calls = ranks, 0
        self._own: dict[tuple[Table, str], None] = {}  # names that this rank has had
        self._exchanged: dict[tuple[Table, str], None] = {}  # the same on all ranks, in one order

    def __call__(self, sums: Rows, maxima: Rows, device: torch.device) -> tuple[Rows, Rows]:
        """Return the sums and maxima of all ranks' rows on a device."""
        tables = {(False, kind, rows.values.shape[1]): rows for kind, rows in sums.items()}
        for kind, (names, values) in maxima.items():  # the maximum of NaN depends on the order of ranks
            rows = NamedValues(names, values.nan_to_num(math.inf, math.inf, -math.inf))
            tables[True, kind, values.shape[1]] = rows
        self._own |= {(table, name): None for table, rows in tables.items() for name in rows.names}
        self._calls += 1
        if self._calls in (1, 2, 4, 8) or self._calls % 16 == 0:
            self._exchanged |= dict.fromkeys(self._ranks.value_of_first_rank(self._news()))  # most often those of all
            self._exchanged |= dict.fromkeys(chain.from_iterable(self._ranks.gather(self._news())))
        known: dict[Table, list[str]] = {}
        for table, name in self._exchanged:
            known.setdefault(table, []).append(name)
        reduced = Rows(), Rows()
        for is_max, over_ranks, missing in ((False, self._ranks.sum, 0.0), (True, self._ranks.max, -math.inf)):
            chosen = [table for table in known if table[0] == is_max]
            default = torch.full((1, 1), missing, dtype=wide_dtype(device), device=device)
            parts = [_in_order(tables.get(table), known[table], default.expand(1, table[2])) for table in chosen]
            whole = over_ranks(torch.cat(parts)).split([*map(len, parts)]) if parts else ()
            for table, part in zip(chosen, whole, strict=True):
                reduced[is_max][table[1]] = NamedValues(known[table], part.view(-1, table[2]))
        return reduced

    def _news(self) -> list[tuple[Table, str]]:
        return [item for item in self._own if item not in self._exchanged]


def _in_order(rows: NamedValues | None, names: Sequence[str], missing: Tensor) -> Tensor:
    """Return this rank's rows in the order of names, flat; ``missing`` is the row of a name that it does not have."""
    place = {} if rows is None else {name: index for index, name in enumerate(rows.names)}
    values = missing if rows is None else torch.cat([rows.values.to(missing), missing])
    index = torch.tensor([place.get(name, -1) for name in names], dtype=torch.int64, device="cpu")
    return values[move(index, missing.device)].flatten()
