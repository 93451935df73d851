"""Samples of a model's parameters, taken at the same offsets again and again, in few operations."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ignite_monitor.model._torch import foreach_copy, modules_of_each, parameters_of_each
from ignite_monitor.model.devices import device_of, upload, wide_dtype
from ignite_monitor.model.names import named_parameters
from ignite_monitor.model.norms import is_sharded, summed_values
from ignite_monitor.model.sampling import fnv1a_64, spread_indices, stratum_widths
from ignite_monitor.model.sharding import all_reduce
from ignite_monitor.model.updates import row_norms_of_each

NARROW = (torch.bfloat16, torch.float16)
_MEASURABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128)
_KEPT = 16

# Parameters of at most so many elements are sampled from a copy of all of them, in one operation, which takes less than
# one for each does; on the CPU those of one length. So long may the samples be, and so many elements the copy.
_COPIED = 1 << 18
_COPIED_ON_CPU = 1 << 12
_SHORT = 1 << 11
_ROOM = 1 << 23


class ParameterSamples:
    """The sampled elements of all parameters of a model, and room for their values.

    The offsets depend on a parameter's name and size alone. Of a DTensor each rank looks at those sampled elements
    that it holds, and :meth:`over_ranks` puts the ranks' norms together.

    Parameters without elements, and those of a dtype that is not for computing with (integers, float8), have no sample
    and NaN for a norm.

    Args:
        sample_size: how many elements to take of each parameter, None for all. Of a table with more rows than that one
            of each row is taken, since it may be an embedding, of which a step moves few rows.
        rows: of which part of the rows one is taken there.

    Attributes:
        names: the parameters' names, without those of wrappers.
        parameters: the parameters, each once.
        measurable: the indices of those that have a sample.
        sharded: the indices of those that are DTensors.
        device: where results are.
        dtype: what they are in.
        groups: the parameters of which this rank has elements, those together that are looked at in one operation.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, rows: float = 1.0) -> None:
        found = list(named_parameters(model))
        self.names = [name for name, _, _ in found]
        self.parameters = [parameter for _, parameter, _ in found]
        self.device = device_of(model)
        self.dtype = wide_dtype(self.device)
        self.measurable = {index for index, parameter in enumerate(self.parameters) if is_measurable(parameter)}
        self.sharded = {index for index, parameter in enumerate(self.parameters) if is_sharded(parameter)}
        self._modules = list(model.modules())
        self._identity = self._identify()
        self._scales: list[float] = []
        counts: list[float] = []
        members: dict[tuple[torch.device, torch.dtype, int, str], list[_Member]] = {}
        meshes: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
        room = _ROOM
        parameter: Any
        for index, (name, parameter, _) in enumerate(found):
            numel = parameter.numel()
            size = sample_size
            if size is not None and parameter.ndim == 2:
                size = max(size, int(rows * len(parameter)))
            taken = numel if size is None else min(size, numel)
            self._scales.append(math.sqrt(numel / taken) if taken else 1.0)
            counts.append(taken)
            if index not in self.measurable:
                continue
            # Offsets in the part that this rank holds, and what each weighs; None for all of it, or where all weigh 1.
            sampled = weight = None
            if taken < numel:
                sampled = spread_indices(fnv1a_64(name), numel, taken)
                if numel % taken:
                    weight = (stratum_widths(numel, taken).double() * taken / numel).sqrt()
            if index in self.sharded:
                if sampled is not None:
                    sampled, held = _local_offsets(parameter, sampled)
                    weight = None if weight is None else weight[held]
                dims = tuple(i for i, placed in enumerate(parameter.placements) if not placed.is_replicate())
                meshes.setdefault((parameter.device_mesh, dims), []).append(index)
            own = local(parameter)
            width = own.numel() if sampled is None else len(sampled)
            if width:
                on_cpu = own.device.type == "cpu"
                length, kind = width, "whole" if sampled is None else "sampled"
                most = min(room, _COPIED_ON_CPU if on_cpu else _COPIED)
                if width <= _SHORT and own.numel() <= most and not (on_cpu and sampled is None):
                    length, kind = width if on_cpu else 0, "copied"
                    room -= own.numel()
                key = (own.device, _work_dtype(own.dtype), length, kind)
                members.setdefault(key, []).append(_Member(index, parameter, sampled, weight))
        # Those of one device and dtype side by side.
        self.groups = [
            Group(device, dtype, each, kind == "copied")
            for (device, dtype, _, kind), each in sorted(members.items(), key=lambda item: str(item[0][:2]))
        ]
        self._with_elements = {index for group in self.groups for index in group.indices}
        self._factors, self._taken = (
            upload(torch.tensor(each, dtype=self.dtype, device="cpu"), self.device) for each in (self._scales, counts)
        )
        self._meshes = {
            key: upload(torch.tensor(indices, device="cpu"), self.device) for key, indices in meshes.items() if key[1]
        }
        # Where in the groups' results each parameter's is.
        in_groups = [index for group in self.groups for index in group.indices]
        self._positions = {index: position for position, index in enumerate(in_groups)}
        self._positions |= dict.fromkeys(self.measurable - self._with_elements, -1)
        self._absent = upload(torch.tensor([math.nan, 0.0], dtype=self.dtype, device="cpu"), self.device)
        self._orders: dict[tuple[int, ...], Tensor] = {}
        self._used: set[int] = set()
        self._counts: list[tuple[Tensor, Tensor]] = []

    def fit(self) -> bool:
        """Whether the model's parameters are still those that were sampled."""
        return self._identify() == self._identity

    def without_elements(self, indices: Iterable[int]) -> list[int]:
        """Those of the indices of whose sample this rank holds no element."""
        return [index for index in indices if index not in self._with_elements]

    def keep_weights(self, weights: Sequence[Tensor | None]) -> None:
        """Copy the sampled elements of weights, to be compared with later ones; of None what is kept stays."""
        for group in self.groups:
            group.copy(weights, group.before)

    def forget_gradients(self) -> None:
        """A train step starts: no element of the narrow parameters has had a gradient."""
        for group in self.groups:
            if group.with_gradient is not None:
                group.with_gradient.zero_()
        self._used.clear()

    def gradients_used(self, indices: Iterable[int]) -> None:
        """A step has been made with their gradients: later ones no longer say which elements had one."""
        self._used.update(indices)

    def lost_updates(self) -> Tensor:
        """Of how many elements with a gradient the change was 0, and how many had a gradient, estimated by the sample.

        To be asked after :meth:`weights_and_changes`, of narrow parameters alone.

        Returns:
            Of shape (2, parameters).
        """
        counts = [self._in_order(each, self._positions) for each in zip(*self._counts, strict=True)]
        return torch.stack(counts) * self._factors**2

    def weights_and_changes(self, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Norms of the sampled elements of the kept weights, which it uses up, and of what has changed since."""
        rows: list[Tensor] = []
        self._counts = []
        for group in self.groups:
            group.copy(weights, group.now)
            group.now.sub_(group.before)
            self._counts.append(group.unmoved())
            rows += [group.weigh(group.before), group.weigh(group.now)]
        norms = row_norms_of_each(rows)
        return self._in_order(norms[::2], self._positions), self._in_order(norms[1::2], self._positions)

    def gradient_norms(self, gradients: Mapping[int, Tensor]) -> list[tuple[dict[int, int], Tensor]]:
        """Norms of the sampled elements of some gradients; of sparse ones from all they hold.

        Returns:
            Pieces for :meth:`ordered`: index -> position in a tensor, and the tensor.
        """
        sources: list[Tensor | None] = [None] * len(self.parameters)
        positions: list[dict[int, int]] = []
        tables, scales = [], []
        for index, gradient in gradients.items():
            placed = self.placed(index, gradient)
            if placed.layout == torch.strided:
                sources[index] = placed
            else:
                positions.append({index: 0})
                tables.append(summed_values(placed).reshape(1, -1))
                scales.append(self._scales[index])
        for group in self.groups:
            rows = {index: row for row, index in enumerate(group.indices) if sources[index] is not None}
            if rows:
                group.copy(sources, group.now)
                group.keep_gradients([row for index, row in rows.items() if index not in self._used])
                first, last = min(rows.values()), max(rows.values())
                positions.append({index: row - first for index, row in rows.items()})
                tables.append(group.weigh(group.now, first, last))
        norms = row_norms_of_each(tables)
        norms[: len(scales)] = [each / scale for each, scale in zip(norms, scales, strict=False)]
        return [(own, each.to(self._absent, non_blocking=True)) for own, each in zip(positions, norms, strict=True)]

    def placed(self, index: int, tensor: Any) -> Tensor:
        """A tensor of a parameter's shape, in the parts that the parameter itself is in where it is a DTensor."""
        parameter: Any = self.parameters[index]
        if index in self.sharded and tensor.placements != parameter.placements:
            tensor = tensor.redistribute(placements=parameter.placements)
        own: Tensor = tensor
        return own

    def ordered(self, norms: Sequence[Tensor], positions: Mapping[int, int]) -> Tensor:
        """Each gradient's norm, estimated from that of its sampled elements.

        Args:
            positions: index of a parameter -> its position in all of them, one after the other, or -1 for 0; the others
                have NaN.
        """
        return self._in_order(norms, positions) * self._factors

    def means(self, sums: Sequence[Tensor]) -> Tensor:
        """Each parameter's means over its elements, of all ranks; NaN where it has no sample.

        The sums are, for each group, over the sampled elements of each row, weighed, and of shape (k, rows).
        """
        return self.over_ranks(self._in_order(sums, self._positions), power=1) / self._taken

    def over_ranks(self, norms: Tensor, power: int = 2) -> Tensor:
        """Norms of what the ranks hold together, where parameters are sharded: one collective per sharded dimension.

        Args:
            norms: of this rank's parts, of shape (…, parameters).
            power: 1 for sums in place of norms.
        """
        for (mesh, dims), indices in self._meshes.items():
            sums = norms.index_select(-1, indices) ** power
            for dim in dims:
                sums = all_reduce(sums, group=mesh.get_group(dim))
            norms = norms.index_copy(-1, indices, sums if power == 1 else sums.sqrt())
        return norms

    def _in_order(self, norms: Sequence[Tensor], positions: Mapping[int, int]) -> Tensor:
        end = sum(each.shape[-1] for each in norms) + len(self._absent)
        key = (end, *(positions.get(index, -2) for index in range(len(self.parameters))))
        if key not in self._orders:
            if len(self._orders) >= _KEPT:
                self._orders.clear()
            at = torch.tensor([at if at >= 0 else end + at for at in key[1:]], device="cpu")
            self._orders[key] = upload(at, self.device)
        absent = self._absent.expand(*norms[0].shape[:-1], -1) if norms else self._absent
        parts = [*(norm.to(absent, non_blocking=True) for norm in norms), absent]
        return torch.cat(parts, -1).index_select(-1, self._orders[key])

    def _identify(self) -> list[Any]:
        """What makes the samples useless when it changes: modules, and parameters with their device and kind."""
        found: list[Any] = [id(each) for own in modules_of_each(self._modules) for each in own.values()]
        for own in parameters_of_each(self._modules):
            for parameter in own.values():
                if parameter is not None:
                    found += (id(parameter), parameter.device, parameter.dtype, parameter.shape)
        return found


class _Member(NamedTuple):
    number: int
    parameter: Any
    elements: Tensor | None
    weight: Tensor | None


class Group:
    """Parameters on one device, with a row for the sample of each.

    Args:
        members: all with as long a sample, or all with all of their elements, unless ``from_copy``.
        from_copy: whether to take the samples from a copy of all of them; shorter ones end in zeros.

    Attributes:
        indices: those of the parameters.
        index: the same, as a tensor.
        kind: their device, and the dtype of what is copied of them.
        shape: of room for that, (rows, columns).
        weights: the root of what each sampled element weighs, of shape (rows or 1, columns); None for 1.
        elements: where rows hold elements and not the zeros at their ends, a bool tensor; None for everywhere.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, members: list[_Member], from_copy: bool) -> None:
        self.indices = [member.number for member in members]
        self.index = upload(torch.tensor(self.indices, device="cpu"), device)
        parts = [local(member.parameter) for member in members]
        sampled = [member.elements for member in members if member.elements is not None]
        width = len(sampled[0]) if sampled else parts[0].numel()
        self._copies: list[Tensor] = []
        if from_copy:
            *starts, end = itertools.accumulate((part.numel() for part in parts), initial=0)
            self._copy = torch.zeros(end + 1, dtype=dtype, device=device)
            self._copies = [
                self._copy[at : at + part.numel()].view(part.shape) for at, part in zip(starts, parts, strict=True)
            ]
            sampled = [
                start + (torch.arange(part.numel(), device="cpu") if member.elements is None else member.elements)
                for start, part, member in zip(starts, parts, members, strict=True)
            ]
            width = max(map(len, sampled))
            is_padded = any(len(each) < width for each in sampled)
            sampled = [F.pad(each, (0, width - len(each)), value=end) for each in sampled]
        self._sampled = upload(torch.stack(sampled) if sampled else torch.empty(0, device="cpu"), device)
        self._sampled_of_row = list(self._sampled.unbind())
        self.weights: Tensor | None = None
        if any(member.weight is not None for member in members):
            ones = torch.ones(width, dtype=torch.float64, device="cpu")
            sizes = {(member.parameter.numel(), is_sharded(member.parameter)) for member in members}
            alike = len(sizes) == 1 and not is_sharded(members[0].parameter)
            weighing = members[:1] if alike else members
            of_members = [ones[:0] if member.weight is None else member.weight for member in weighing]
            weights = torch.stack([torch.cat([each, ones[len(each) :]]) for each in of_members])
            self.weights = upload(weights.to(dtype.to_real()), device)
        self.elements = self._sampled != len(self._copy) - 1 if from_copy and is_padded else None
        self._shapes = [None if sampled else part.shape for part in parts]
        self._are_alike = device.type == "cpu" and len(set(self._shapes)) == 1 and parts[0].ndim > 0
        self._rooms: list[Tensor] = []
        self._targets: dict[int, list[Tensor]] = {}
        self.kind, self.shape = (device, dtype), (len(members), width)
        self._is_sharded = any(is_sharded(member.parameter) for member in members)
        self._narrow = {row for row, part in enumerate(parts) if part.dtype in NARROW}
        # Which elements of narrow parameters have had a gradient other than 0.
        self.with_gradient: Tensor | None = None
        if self._narrow:
            self.with_gradient = torch.zeros(self.shape, dtype=torch.bool, device=device)

    @functools.cached_property
    def before(self) -> Tensor:
        """Room for elements."""
        return self.room()

    @functools.cached_property
    def now(self) -> Tensor:
        """More of it."""
        return self.room()

    def room(self, rows: Tensor | None = None) -> Tensor:
        """Room for elements, of shape (rows, columns): new, or what is given for it."""
        if rows is None:
            device, dtype = self.kind
            rows = torch.zeros(self.shape, dtype=dtype, device=device)
        self._rooms.append(rows)
        # In the shapes of what is copied to them.
        shaped = zip(rows, self._shapes, strict=True)
        self._targets[id(rows)] = [row if shape is None else row.view(shape) for row, shape in shaped]
        return rows

    def keep_gradients(self, rows: Sequence[int]) -> None:
        """Keep where the gradients that have been copied are other than 0, in those of the rows that are narrow."""
        if self.with_gradient is None:
            return
        if len(rows) == len(self.indices):
            torch.ne(self.now, 0, out=self.with_gradient)
            return
        for row in self._narrow.intersection(rows):
            torch.ne(self.now[row], 0, out=self.with_gradient[row])

    def unmoved(self) -> tuple[Tensor, Tensor]:
        """In each row, how many elements had a gradient and a change of 0, and how many had a gradient."""
        if self.with_gradient is None:
            return (nothing := torch.zeros(len(self.indices), device=self.now.device)), nothing
        return (self.with_gradient & (self.now == 0)).sum(1), self.with_gradient.sum(1)

    def weigh(self, rows: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Some rows, the first to the last, in which each element is multiplied by what it weighs, in place."""
        end = len(rows) if last is None else last + 1
        rows = rows[first:end]
        if self.weights is not None:
            rows.mul_(self.weights if len(self.weights) == 1 else self.weights[first:end])
        return rows

    def copy(self, sources: Sequence[Tensor | None], rows: Tensor) -> None:
        """Copy sampled elements to rows of a :meth:`room`, of each parameter from a tensor of its shape, or of none."""
        targets = self._targets[id(rows)]
        found: list[Any] = [sources[index] for index in self.indices]
        present = [row for row, source in enumerate(found) if source is not None]
        if not present:
            return
        if self._is_sharded:
            found = [local(source) for source in found]
        if self._copies:
            foreach_copy([self._copies[row] for row in present], [found[row] for row in present])
            if len(present) == len(found) or rows is not self.before:  # of which nobody reads the other rows
                torch.take(self._copy, self._sampled, out=rows)
            else:
                for row in present:
                    torch.take(self._copy, self._sampled_of_row[row], out=targets[row])
            return
        if self._sampled_of_row:
            for source, sampled, target in zip(found, self._sampled_of_row, targets, strict=True):
                if source is None:
                    continue
                if source.dtype == target.dtype:
                    torch.take(source, sampled, out=target)
                else:
                    target.copy_(torch.take(source, sampled))
            return
        if len(present) < len(found):
            targets, found = [targets[row] for row in present], [found[row] for row in present]
        if self._are_alike and len(found) == len(rows):  # a third of the time that single copies take there
            torch.cat(found, out=rows.view(-1, *found[0].shape[1:]))
        else:
            foreach_copy(targets, found)


def is_measurable(parameter: Tensor) -> bool:
    """Whether a parameter has elements, with data, of a dtype to compute with."""
    has_data = parameter.numel() > 0 and parameter.layout == torch.strided and not parameter.is_meta
    return has_data and parameter.dtype in _MEASURABLE


def reshard(model: nn.Module) -> None:
    """Put FSDP2's sharded parameters, which the optimizer holds, back in place where a forward pass left whole ones."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(getattr(fsdp, "FSDPModule", None), type):
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule) and not all(map(is_sharded, module.parameters(recurse=False))):
            module.reshard()


def local(tensor: Any) -> Tensor:
    """The part of a tensor that this rank holds."""
    own: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return own


def _local_offsets(parameter: Any, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Of offsets in the whole parameter, those that this rank holds, as offsets in its part; and which those are."""
    chunks = parameter.__create_chunk_list__()  # what torch.distributed.checkpoint asks for: offset and size
    local = torch.zeros_like(offsets)
    held = torch.ones_like(offsets, dtype=torch.bool)
    stride = numel = 1
    for whole, offset, size in reversed(list(zip(parameter.shape, chunks[0].offsets, chunks[0].sizes, strict=True))):
        at = offsets // numel % whole - offset
        held &= (at >= 0) & (at < size)
        local += at * stride
        stride, numel = stride * size, numel * whole
    return local[held], held


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex or dtype.itemsize > 4 else torch.float32
