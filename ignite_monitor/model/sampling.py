"""Sampled elements of a model's parameters before and after a train step, and norms estimated from them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.devices import device_of, move, wide_dtype
from ignite_monitor.model.dtensor import is_dtensor, local, local_elements, reshard
from ignite_monitor.model.names import held_by, is_from_torch, learning_rates, named_parameters
from ignite_monitor.model.norms import over_shards, wide_norms

NARROW = (torch.bfloat16, torch.float16)
_MEASURABLE = (*NARROW, torch.float32, torch.float64, torch.complex64, torch.complex128)
_FEW = 32  # elements of a sample that are not 0, from which its norm has an error of about 15 %


def fnv1a_64(text: str) -> int:
    """The 64-bit FNV-1a hash of a text's UTF-8 bytes (Fowler, Noll and Vo)."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def sample_indices(name: str, shape: Sequence[int], count: int | None) -> Tensor | None:
    """Draw elements of a flattened tensor uniformly, with replacement, seeded with the FNV-1a hash of the name.

    A two-dimensional tensor with more than ``count`` rows gives one element of each row: it may be an embedding, of
    which a step moves few rows. None if the tensor has no more elements than would be drawn.
    """
    numel, rows = torch.Size(shape).numel(), shape[0] if len(shape) == 2 else 0
    if count is None or numel <= max(count, rows):
        return None
    generator = torch.Generator("cpu").manual_seed(fnv1a_64(name))
    if rows <= count:
        return torch.randint(numel, (count,), generator=generator, device="cpu")
    columns = numel // rows
    within = torch.randint(columns, (rows,), generator=generator, device="cpu")
    return torch.arange(rows, device="cpu") * columns + within


class UpdatedParameters:
    """Collects the parameters that optimizer steps were to move.

    A step moves the parameters with ``requires_grad`` in groups with a learning rate other than 0, if its optimizer has
    a gradient of any of them.
    """

    def __init__(self, indices: Mapping[int, int]) -> None:
        self._indices = indices  # id of a parameter -> its index
        self._moves: list[tuple[list[int], Any]] = []  # indices, and True or a condition that the device knows

    def __bool__(self) -> bool:
        return bool(self._moves)

    def started(self, optimizer: Optimizer, made: bool | Tensor) -> list[int]:
        """Note a step that starts, and is made or not; return its indices."""
        groups = [
            [item for item in group["params"] if id(item) in self._indices and item.requires_grad]
            for group in optimizer.param_groups
        ]
        if all(item.grad is None for members in groups for item in members):
            return []
        indices = [[self._indices[id(item)] for item in members] for members in groups]
        for rate, members in zip(learning_rates(optimizer), indices, strict=True):
            moves = (rate != 0) & made
            if members and moves is not False:
                self._moves.append((members, moves))
        return [index for members in indices for index in members]

    def mask(self, size: int, device: torch.device) -> Tensor:
        """A bool tensor, True for each parameter that was to move."""
        mask: Tensor = torch.zeros(size, dtype=torch.bool, device=device)
        for indices, moves in self._moves:
            members = torch.zeros(size, dtype=torch.bool, device="cpu")
            members[indices] = True
            mask = mask | move(members, device) & (move(moves, device) if isinstance(moves, Tensor) else moves)
        return mask


class ParameterSamples:
    """The sampled elements of all parameters of a model, before and after each train step; of a DTensor this rank's.

    Without an optimizer, the parameters of every optimizer count.

    Attributes:
        counts: the sizes of the samples, on all ranks together: (parameters,).
        factors: the norm of a parameter over the norm of its sample, as estimated: (parameters,).
        min_nonzero: number of non-zero elements below which the norm of a sample is no estimate; 0 without a sample.
        indices: indices of the parameters that count in this train step.
        sizes: the number of elements that this rank has in each of their samples, by index.
        stepped: the parameters that steps were to move.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, optimizer: Optimizer | None = None) -> None:
        reshard(model)
        self._model, self._optimizer, self._kinds = model, optimizer, _kinds(model)
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet([] if optimizer is None else [optimizer])
        self._before: dict[int, Tensor] = {}  # samples by index, of the start of the last measured train step
        self.names = [name for name, _, _ in named_parameters(model)]
        self.parameters: list[Any] = [parameter for _, parameter, _ in named_parameters(model)]
        self.device = device_of(model)
        self.dtype = wide_dtype(self.device)
        self._places: dict[int, Tensor] = {}
        counts = torch.tensor([item.numel() for item in self.parameters], dtype=self.dtype, device="cpu")
        numels = counts.clone()
        self._measurable = [index for index, parameter in enumerate(self.parameters) if is_measurable(parameter)]
        for index in self._measurable:
            parameter = self.parameters[index]
            elements = sample_indices(self.names[index], parameter.shape, sample_size)
            if elements is not None:
                counts[index] = len(elements)
                held = local_elements(parameter, elements) if is_dtensor(parameter) else elements
                self._places[index] = move(held, local(parameter).device)
        self.counts = move(counts, self.device)
        self.factors = move((numels / counts).sqrt(), self.device)
        self.min_nonzero = (self.counts / _FEW).clamp(max=_FEW) * (self.factors > 1)

    def fits(self) -> bool:
        """Return True if the model's parameters are still those that are sampled."""
        reshard(self._model)
        return _kinds(self._model) == self._kinds

    def is_sampled(self, index: int) -> bool:
        """Return True unless all elements of a parameter are taken."""
        return index in self._places

    def take_whole(self, names: Collection[str]) -> None:
        """Take all elements of some parameters from now on; of a DTensor those of this rank."""
        for index, name in enumerate(self.names if names else ()):
            if name in names and self._places.pop(index, None) is not None:
                self.counts[index] = self.parameters[index].numel()
                self.factors[index] = 1.0

    @torch.no_grad()
    def start(self) -> None:
        """Keep the samples of the weights, before a train step."""
        self.indices = self._measurable
        if self._optimizer is not None:
            held = held_by(self._optimizer)
            self.indices = [index for index in self.indices if id(self.parameters[index]) in held]
        self.stepped = UpdatedParameters({id(self.parameters[index]): index for index in self.indices})
        parts = [self.take(index, self.parameters[index]) for index in self.indices]
        self.sizes = {index: part.numel() for index, part in zip(self.indices, parts, strict=True)}
        self._flat_before = torch.cat(parts) if parts else self.factors[:0]
        self._before = dict(zip(self.indices, self.split(self._flat_before, self.indices), strict=True))

    def step_started(self, optimizer: Optimizer, made: bool | Tensor) -> list[int]:
        """Note an optimizer's step that starts, and is made or not; return the indices of its parameters."""
        indices = self.stepped.started(optimizer, made)
        if indices:
            self._optimizers.add(optimizer)
        return indices

    @property
    def keeps_no_copies(self) -> bool:
        """True if only torch's own optimizers have made steps: they keep no copies of low-precision weights."""
        return all(map(is_from_torch, self._optimizers))

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
        elements = self._places.get(index)
        values: Tensor = tensor.reshape(-1) if elements is None else torch.take(tensor, elements)
        if values.is_complex():
            values = torch.view_as_real(values.resolve_conj()).flatten()
        if values.dtype in NARROW:
            values = values.float()
        return values if values.device == self.device else move(values, self.device)

    def flat(self, indices: Sequence[int], tensors: Sequence[Tensor]) -> Tensor:
        """Copies of the sampled elements of some parameters, one parameter after the other."""
        return torch.cat([self.take(*pair) for pair in zip(indices, tensors, strict=True)])

    def split(self, flat: Tensor, indices: Sequence[int]) -> Sequence[Tensor]:
        """Split samples of some parameters, one parameter after the other, by parameter."""
        return flat.split([self.sizes[index] for index in indices])  # type: ignore[no-any-return]

    def changes(self, indices: Sequence[int]) -> Tensor:
        """The changes of sampled weights since the iteration started, one parameter after the other."""
        after = self.flat(indices, [self.parameters[index] for index in indices])
        return after.sub_(torch.cat([self._before[index] for index in indices]))

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
