"""Samples of a model's parameters, taken at the same places again and again, in few operations."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.capture.names import named_parameters
from ignite_monitor.functional._devices import upload, wide_dtype
from ignite_monitor.functional.norms import is_sharded
from ignite_monitor.functional.sampling import fnv1a_64, spread_indices
from ignite_monitor.functional.sparse import summed_values
from ignite_monitor.functional.updates import row_norms


class ParameterSamples:
    """The sampled elements of all parameters of a model, and room for their values.

    The places depend on a parameter's name and size alone. Of a DTensor each rank looks at those sampled elements
    that it holds, and :meth:`over_ranks` puts the ranks' norms together.

    Parameters without elements, and those that are not floating point, have no sample and NaN for a norm.

    Args:
        model: the model.
        sample_size: how many elements to take of each parameter, None for all. Of an embedding at least one of each
            row is taken, since a step may move few of them.

    Attributes:
        names: the parameters' names, without those of wrappers.
        parameters: the parameters, each once.
        measurable: the places of those that have a sample.
        sharded: the places of those that are DTensors.
        device: where results are.
        dtype: what they are in.
    """

    def __init__(self, model: nn.Module, sample_size: int | None) -> None:
        found = list(named_parameters(model))
        self.names = [name for name, _, _ in found]
        self.parameters = [parameter for _, parameter, _ in found]
        self.device = self.parameters[0].device
        self.dtype = wide_dtype(self.device)
        self.measurable = {place for place, parameter in enumerate(self.parameters) if is_measurable(parameter)}
        self.sharded = {place for place, parameter in enumerate(self.parameters) if is_sharded(parameter)}
        self._modules = list(model.modules())
        self._identity = self._identify()
        scales: list[float] = []
        groups: dict[tuple[torch.device, torch.dtype, int, bool], list[tuple[int, Any, Tensor | None]]] = {}
        meshes: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
        parameter: Any
        for place, (name, parameter, owner) in enumerate(found):
            numel = parameter.numel()
            size = sample_size
            if size is not None and isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
                size = max(size, len(parameter))
            taken = numel if size is None else min(size, numel)
            scales.append(math.sqrt(numel / taken) if taken else 1.0)
            if place not in self.measurable:
                continue
            # Places in the part that this rank holds; None for all of it.
            index = None if taken == numel else spread_indices(fnv1a_64(name), numel, taken)
            if place in self.sharded:
                index = None if index is None else _local_places(parameter, index)
                dims = tuple(i for i, placed in enumerate(parameter.placements) if not placed.is_replicate())
                meshes.setdefault((parameter.device_mesh, dims), []).append(place)
            local = _local(parameter)
            width = local.numel() if index is None else len(index)
            if width:
                key = (local.device, _work_dtype(local.dtype), width, index is None)
                groups.setdefault(key, []).append((place, parameter, index))
        self._groups = [_Group(device, dtype, members) for (device, dtype, _, _), members in groups.items()]
        self._scales = upload(torch.tensor(scales, dtype=self.dtype), self.device)
        self._meshes = {key: upload(torch.tensor(places), self.device) for key, places in meshes.items() if key[1]}
        # Where in the groups' results each parameter's is; after the last one comes 0, of a parameter whose elements
        # are all on other ranks, and then NaN.
        members = [place for group in self._groups for place in group.places]
        positions = {place: position for position, place in enumerate(members)}
        self._positions = upload(
            torch.tensor(
                [positions.get(place, len(members) + (place not in self.measurable)) for place in range(len(found))]
            ),
            self.device,
        )
        self._absent = upload(torch.tensor([0.0, math.nan], dtype=self.dtype), self.device)

    def fit(self) -> bool:
        """Whether the model's parameters are still those that were sampled."""
        return self._identify() == self._identity

    def keep_weights(self, weights: Sequence[Tensor]) -> None:
        """Copy the sampled elements of the weights, to be compared with later ones.

        Args:
            weights: for each parameter itself, or another tensor of its shape.
        """
        for group in self._groups:
            group.copy(weights, group.before)

    def weights_and_changes(self, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Norms of the sampled elements of the kept weights, and of what has changed since.

        Args:
            weights: as for :meth:`keep_weights`.
        """
        kept, changed = [], []
        for group in self._groups:
            group.copy(weights, group.now)
            kept.append(row_norms(group.before))
            changed.append(row_norms(group.now.sub_(group.before)))
        return self._in_order(kept), self._in_order(changed)

    def gradient_norms(self, gradients: Sequence[Tensor | None], sparse: Mapping[int, Tensor]) -> Tensor:
        """Norms of gradients, estimated from their sampled elements; of sparse ones from all they hold.

        Args:
            gradients: for each parameter its gradient; without one the norm is any number.
            sparse: place of a parameter -> its gradient, where that is sparse.
        """
        norms = []
        for group in self._groups:
            group.copy(gradients, group.now)
            norms.append(row_norms(group.now))
        estimated = self._in_order(norms) * self._scales
        for place, gradient in sparse.items():
            estimated[place] = row_norms(summed_values(gradient).reshape(1, -1))[0]
        return estimated

    def over_ranks(self, norms: Tensor) -> Tensor:
        """Norms of what the ranks hold together, where parameters are sharded: one collective per sharded dimension.

        Args:
            norms: of this rank's parts, of shape (…, parameters).
        """
        for (mesh, dims), places in self._meshes.items():
            from torch.distributed import all_reduce

            squares = norms.index_select(-1, places) ** 2
            for dim in dims:
                all_reduce(squares, group=mesh.get_group(dim))
            norms = norms.index_copy(-1, places, squares.sqrt())
        return norms

    def _in_order(self, norms: list[Tensor]) -> Tensor:
        absent = self._absent
        return torch.cat([*(norm.to(absent, non_blocking=True) for norm in norms), absent])[self._positions]

    def _identify(self) -> list[Any]:
        """What makes the samples useless when it changes: modules, and parameters with their place and kind."""
        found: list[Any] = []
        for module in self._modules:
            found += map(id, module._modules.values())
            for parameter in module._parameters.values():
                if parameter is not None:
                    found += (id(parameter), parameter.device, parameter.dtype, parameter.shape)
        return found


class _Group:
    """Parameters on one device of which equally many elements are looked at, or all: a row each."""

    def __init__(self, device: torch.device, dtype: torch.dtype, members: list[tuple[int, Any, Tensor | None]]) -> None:
        self.places = [place for place, _, _ in members]
        parts = [_local(parameter) for _, parameter, _ in members]
        indices = [index for _, _, index in members if index is not None]
        self._indices = list(upload(torch.stack(indices), device).unbind()) if indices else []
        width = len(indices[0]) if indices else parts[0].numel()
        self.before, self.now = (torch.zeros(len(members), width, dtype=dtype, device=device) for _ in range(2))
        # Rows in the shapes of what is copied to them.
        self._targets = {
            id(rows): [row if indices else row.view(part.shape) for row, part in zip(rows, parts, strict=True)]
            for rows in (self.before, self.now)
        }
        self._is_sharded = any(is_sharded(parameter) for _, parameter, _ in members)

    def copy(self, sources: Sequence[Tensor | None], rows: Tensor) -> None:
        """Copy the sampled elements of those sources that there are.

        Args:
            sources: for each parameter of the model a tensor of its shape, or None.
            rows: where to, ``before`` or ``now``.
        """
        targets = self._targets[id(rows)]
        found: list[Any] = [sources[place] for place in self.places]
        if self._is_sharded:
            found = [_local(source) for source in found]
        if self._indices:
            for source, index, target in zip(found, self._indices, targets, strict=True):
                if source is None:
                    continue
                if source.dtype == target.dtype:
                    torch.take(source, index, out=target)
                else:
                    target.copy_(torch.take(source, index))
            return
        if any(source is None for source in found):
            pairs = [pair for pair in zip(targets, found, strict=True) if pair[1] is not None]
            targets, found = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        if found:
            torch._foreach_copy_(targets, found)


def is_measurable(parameter: Tensor) -> bool:
    """Whether a parameter has elements, of floating point.

    Args:
        parameter: the parameter.
    """
    return parameter.numel() > 0 and (parameter.is_floating_point() or parameter.is_complex())


def reshard(model: nn.Module) -> None:
    """Put FSDP2's sharded parameters, which the optimizer holds, back in place where a forward pass left whole ones.

    Args:
        model: the model.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not isinstance(getattr(fsdp, "FSDPModule", None), type):
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule) and not all(map(is_sharded, module.parameters(recurse=False))):
            module.reshard()


def _local(tensor: Any) -> Tensor:
    local: Tensor = tensor.to_local() if is_sharded(tensor) else tensor
    return local


def _local_places(parameter: Any, index: Tensor) -> Tensor:
    """Of places in the whole parameter, those that this rank holds, as places in its part."""
    chunks = parameter.__create_chunk_list__()  # what torch.distributed.checkpoint asks for: offset and size
    local = torch.zeros_like(index)
    held = torch.ones_like(index, dtype=torch.bool)
    stride = numel = 1
    for whole, offset, size in reversed(list(zip(parameter.shape, chunks[0].offsets, chunks[0].sizes, strict=True))):
        at = index // numel % whole - offset
        held &= (at >= 0) & (at < size)
        local += at * stride
        stride, numel = stride * size, numel * whole
    return local[held]


def _work_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_complex or dtype.itemsize > 4 else torch.float32
