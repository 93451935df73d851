"""Sampled elements of a model's parameters, and norms estimated from them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from ignite_monitor.model.devices import device_of, move, wide_dtype
from ignite_monitor.model.dtensor import is_dtensor, local, local_elements
from ignite_monitor.model.names import named_parameters
from ignite_monitor.model.norms import over_shards, wide_norms

NARROW = (torch.bfloat16, torch.float16)
_MEASURABLE = (*NARROW, torch.float32, torch.float64, torch.complex64, torch.complex128)


def sample_indices(name: str, shape: Sequence[int], count: int | None) -> Tensor | None:
    """Draw elements of a flattened tensor uniformly, with replacement, seeded with the CRC-32 of the name.

    A two-dimensional tensor with more than ``count`` rows gives one element of each row: it may be an embedding, of
    which a step moves few rows. None if the tensor has no more elements than would be drawn.
    """
    numel, rows = torch.Size(shape).numel(), shape[0] if len(shape) == 2 else 0
    if count is None or numel <= max(count, rows):
        return None
    generator = torch.Generator("cpu").manual_seed(crc32(name.encode()))
    if rows <= count:
        return torch.randint(numel, (count,), generator=generator, device="cpu")
    columns = numel // rows
    within = torch.randint(columns, (rows,), generator=generator, device="cpu")
    return torch.arange(rows, device="cpu") * columns + within


class ParameterSamples:
    """The sampled elements of all parameters of a model; of a DTensor those that this rank holds.

    Attributes:
        measurable: indices of the parameters with data of a dtype to compute with.
        counts: the sizes of the samples, on all ranks together: (parameters,).
        factors: the norm of a parameter over the norm of its sample, as estimated: (parameters,).
    """

    def __init__(self, model: nn.Module, sample_size: int | None) -> None:
        self._model, self._kinds = model, _kinds(model)
        self.names = [name for name, _, _ in named_parameters(model)]
        self.parameters: list[Any] = [parameter for _, parameter, _ in named_parameters(model)]
        self.measurable = [index for index, parameter in enumerate(self.parameters) if is_measurable(parameter)]
        self.device = device_of(model)
        self.dtype = wide_dtype(self.device)
        self._elements: dict[int, Tensor] = {}
        counts = torch.tensor([item.numel() for item in self.parameters], dtype=self.dtype, device="cpu")
        numels = counts.clone()
        for index in self.measurable:
            parameter = self.parameters[index]
            elements = sample_indices(self.names[index], parameter.shape, sample_size)
            if elements is not None:
                counts[index] = len(elements)
                held = local_elements(parameter, elements) if is_dtensor(parameter) else elements
                self._elements[index] = move(held, local(parameter).device)
        self.counts = move(counts, self.device)
        self.factors = move((numels / counts).sqrt(), self.device)

    def fits(self) -> bool:
        """Return True if the model's parameters are still those that are sampled."""
        return _kinds(self._model) == self._kinds

    def is_sampled(self, index: int) -> bool:
        """Return True unless all elements of a parameter are taken."""
        return index in self._elements

    def take_whole(self, names: Collection[str]) -> None:
        """Take all elements of some parameters from now on; of a DTensor those of this rank."""
        for index, name in enumerate(self.names if names else ()):
            if name in names and self._elements.pop(index, None) is not None:
                self.counts[index] = self.parameters[index].numel()
                self.factors[index] = 1.0

    def own_part(self, index: int, tensor: Any) -> Tensor:
        """This rank's part of a tensor of a parameter's shape."""
        tensor = tensor.detach()
        if is_dtensor(tensor):
            placements = self.parameters[index].placements
            tensor = local(tensor if tensor.placements == placements else tensor.redistribute(placements=placements))
        return tensor  # type: ignore[no-any-return]

    def take(self, index: int, tensor: Any) -> Tensor:
        """This rank's sampled elements of a tensor of a parameter's shape: 1-D, real, at least float32."""
        tensor = self.own_part(index, tensor)
        elements = self._elements.get(index)
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
        """The l2 norm of each of some 1-D tensors, at least one, in the widest dtype."""
        return wide_norms(samples).to(self.dtype)

    def over_ranks(self, norms: Tensor, indices: Sequence[int]) -> Tensor:
        """Combine norms (…, indices) of the ranks' parts of parameters, the same on every rank."""
        return over_shards(norms, [self.parameters[index] for index in indices])


def is_measurable(parameter: Tensor) -> bool:
    """Return True for a parameter that has elements, with data, of a dtype to compute with."""
    has_data = parameter.numel() > 0 and parameter.layout == torch.strided and not parameter.is_meta
    return has_data and parameter.dtype in _MEASURABLE


def _kinds(model: nn.Module) -> list[Any]:
    return [(name, id(item), item.device, item.dtype, item.shape) for name, item, _ in named_parameters(model)]
