"""Sampled elements of a model's parameters, and norms estimated from them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ignite_monitor.model._torch import foreach_norm
from ignite_monitor.model.devices import device_of, move, upload, wide_dtype
from ignite_monitor.model.names import named_parameters
from ignite_monitor.model.norms import is_sharded
from ignite_monitor.model.sampling import sample_indices
from ignite_monitor.model.sharding import all_reduce

NARROW = (torch.bfloat16, torch.float16)
_MEASURABLE = (*NARROW, torch.float32, torch.float64, torch.complex64, torch.complex128)


class ParameterSamples:
    """The sampled elements of all parameters of a model.

    Which elements these are depends on a parameter's name and shape alone, see :func:`sample_indices`. Of a DTensor
    each rank has those that it holds; :meth:`over_ranks` combines the norms of the ranks' parts.

    Args:
        sample_size: how many elements to draw of each parameter; None for all.

    Attributes:
        names: the parameters' names, without those of wrappers.
        parameters: the parameters, each once.
        measurable: indices of the parameters with data of a dtype to compute with.
        device: of all results.
        dtype: of norms.
        counts: how many elements the sample of each parameter has, on all ranks together: (parameters,).
        factors: estimate the norm of a parameter from that of its sample: (parameters,).
    """

    def __init__(self, model: nn.Module, sample_size: int | None) -> None:
        self._model, self._kinds = model, _kinds(model)
        self.names = [name for name, _, _ in named_parameters(model)]
        self.parameters: list[Any] = [parameter for _, parameter, _ in named_parameters(model)]
        self.measurable = [index for index, each in enumerate(self.parameters) if is_measurable(each)]
        self.device = device_of(model)
        self.dtype = wide_dtype(self.device)
        self._elements: list[Tensor | None] = [None] * len(self.parameters)
        self._meshes: dict[tuple[Any, tuple[int, ...]], set[int]] = {}
        counts = torch.tensor([each.numel() for each in self.parameters], dtype=self.dtype, device="cpu")
        numels = counts.clone()
        for index in self.measurable:
            parameter = self.parameters[index]
            elements = sample_indices(self.names[index], parameter.shape, sample_size)
            if elements is not None:
                counts[index] = len(elements)
            if is_sharded(parameter):
                dims = tuple(i for i, placement in enumerate(parameter.placements) if not placement.is_replicate())
                self._meshes.setdefault((parameter.device_mesh, dims), set()).add(index)
                elements = None if elements is None else _local_elements(parameter, elements)
            self._elements[index] = None if elements is None else upload(elements, local(parameter).device)
        self.counts = upload(counts, self.device)
        self.factors = upload((numels / counts).sqrt(), self.device)

    def fits(self) -> bool:
        """Whether the model's parameters are still those that are sampled."""
        return _kinds(self._model) == self._kinds

    def take(self, index: int, tensor: Any) -> Tensor:
        """This rank's sampled elements of a tensor of a parameter's shape: 1-D, real, at least float32, maybe a view.

        A complex element gives two.
        """
        tensor = tensor.detach()
        if is_sharded(tensor):
            placements = self.parameters[index].placements
            tensor = local(tensor if tensor.placements == placements else tensor.redistribute(placements=placements))
        elements = self._elements[index]
        values: Tensor = tensor.reshape(-1) if elements is None else torch.take(tensor, elements)
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj()).flatten()
        if values.dtype in NARROW:
            values = values.float()
        return values if values.device == self.device else move(values, self.device)

    def flat(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
        """Copies of the sampled elements of some parameters, one parameter after the other."""
        return torch.cat([self.take(*pair) for pair in zip(indices, tensors, strict=True)])

    def norms(self, samples: Sequence[Tensor]) -> Tensor:
        """The l2 norm of each of some 1-D tensors, at least one, summed in the widest dtype."""
        return torch.stack(foreach_norm(list(samples), 2.0, dtype=self.dtype))

    def over_ranks(self, norms: Tensor, indices: Sequence[int]) -> Tensor:
        """Norms of what the ranks hold together, where parameters are sharded: one collective per sharded dimension.

        Args:
            norms: of this rank's parts, of shape (…, indices).
            indices: of the parameters, the same on every rank.
        """
        for (mesh, dims), members in self._meshes.items():
            columns = [column for column, index in enumerate(indices) if index in members]
            at = upload(torch.tensor(columns, dtype=torch.int64, device="cpu"), self.device)
            squares = norms.index_select(-1, at).square()
            for dim in dims if columns else ():
                squares = all_reduce(squares, group=mesh.get_group(dim))
            norms = norms.index_copy(-1, at, squares.sqrt())
        return norms


def is_measurable(parameter: Tensor) -> bool:
    """Whether a parameter has elements, with data, of a dtype to compute with."""
    has_data = parameter.numel() > 0 and parameter.layout == torch.strided and not parameter.is_meta
    return has_data and parameter.dtype in _MEASURABLE


def reshard(model: nn.Module) -> None:
    """Restore FSDP2's sharded parameters, which the optimizer holds, where a forward pass left unsharded ones."""
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


def _kinds(model: nn.Module) -> list[Any]:
    return [(name, id(each), each.device, each.dtype, each.shape) for name, each, _ in named_parameters(model)]


def _local_elements(parameter: Any, elements: Tensor) -> Tensor:
    """Of elements of the whole parameter those that this rank holds, as elements of its part."""
    chunk = parameter.__create_chunk_list__()[0]  # what torch.distributed.checkpoint asks for: offset and size
    at = torch.zeros_like(elements)
    held = torch.ones_like(elements, dtype=torch.bool)
    stride = numel = 1
    for whole, offset, size in reversed(list(zip(parameter.shape, chunk.offsets, chunk.sizes, strict=True))):
        place = elements // numel % whole - offset
        held &= (place >= 0) & (place < size)
        at += place * stride
        stride, numel = stride * size, numel * whole
    return at[held]
