"""Sampled elements of a model's parameters, norms estimated from them, and samples before and after a train step."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model._torch import foreach_norm
from ignite_monitor.model.devices import device_of, move, wide_dtype
from ignite_monitor.model.names import held_by, named_parameters
from ignite_monitor.model.norms import all_reduce, is_dtensor

NARROW = (torch.bfloat16, torch.float16)
_MEASURABLE = (*NARROW, torch.float32, torch.float64, torch.complex64, torch.complex128)

# In an optimizer's state: float32 copies of weights, and what rounding has taken of them.
_COPY = re.compile("master|fp32_?(param|weight|copy)", re.IGNORECASE)
_COMPENSATION = re.compile("kahan|compensation", re.IGNORECASE)


def fnv1a_64(text: str) -> int:
    """The 64-bit FNV-1a hash of a text's UTF-8 bytes (Fowler, Noll and Vo)."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) % 2**64
    return value


def sample_indices(name: str, shape: Sequence[int], count: int | None) -> Tensor | None:
    """Draw elements of a flattened tensor uniformly, with replacement, by a generator that the name seeds.

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
        self._meshes: dict[tuple[Any, tuple[int, ...]], set[int]] = {}
        counts = torch.tensor([item.numel() for item in self.parameters], dtype=self.dtype, device="cpu")
        numels = counts.clone()
        for index in self.measurable:
            parameter = self.parameters[index]
            elements = sample_indices(self.names[index], parameter.shape, sample_size)
            if is_dtensor(parameter):
                dims = tuple(i for i, placement in enumerate(parameter.placements) if not placement.is_replicate())
                self._meshes.setdefault((parameter.device_mesh, dims), set()).add(index)
            if elements is not None:
                counts[index] = len(elements)
                held = _local_elements(parameter, elements) if is_dtensor(parameter) else elements
                self._elements[index] = move(held, local(parameter).device)
        self.counts = move(counts, self.device)
        self.factors = move((numels / counts).sqrt(), self.device)

    def fits(self) -> bool:
        """Return True if the model's parameters are still those that are sampled."""
        return _kinds(self._model) == self._kinds

    def take(self, index: int, tensor: Any) -> Tensor:
        """This rank's sampled elements of a tensor of a parameter's shape: 1-D, real, at least float32, or a view."""
        tensor = tensor.detach()
        if is_dtensor(tensor):
            placements = self.parameters[index].placements
            tensor = local(tensor if tensor.placements == placements else tensor.redistribute(placements=placements))
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
        """The l2 norm of each of some 1-D tensors, at least one, summed in the widest dtype."""
        return torch.stack(foreach_norm(list(samples), 2.0, dtype=self.dtype))

    def over_ranks(self, norms: Tensor, indices: Sequence[int]) -> Tensor:
        """Combine norms (…, indices) of the ranks' parts of parameters, the same on every rank."""
        for (mesh, dims), members in self._meshes.items():
            columns = [column for column, index in enumerate(indices) if index in members]
            at = move(torch.tensor(columns, dtype=torch.int64, device="cpu"), self.device)
            squares = norms.index_select(-1, at).square()
            for dim in dims if columns else ():
                squares = all_reduce(squares, group=mesh.get_group(dim))
            norms = norms.index_copy(-1, at, squares.sqrt())
        return norms


def is_measurable(parameter: Tensor) -> bool:
    """Return True for a parameter that has elements, with data, of a dtype to compute with."""
    has_data = parameter.numel() > 0 and parameter.layout == torch.strided and not parameter.is_meta
    return has_data and parameter.dtype in _MEASURABLE


def reshard(model: nn.Module) -> None:
    """Restore FSDP2's sharded parameters, which the optimizer holds, where a forward pass left unsharded ones."""
    modules: Iterable[Any] = (module for module in model.modules() if hasattr(module, "set_reshard_after_forward"))
    for module in modules:
        if not all(map(is_dtensor, module.parameters(recurse=False))):
            module.reshard()


def local(tensor: Any) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if is_dtensor(tensor) else tensor  # type: ignore[no-any-return]


def _kinds(model: nn.Module) -> list[Any]:
    return [(name, id(item), item.device, item.dtype, item.shape) for name, item, _ in named_parameters(model)]


def _local_elements(parameter: Any, elements: Tensor) -> Tensor:
    """Indices within this rank's part of a DTensor, from indices within the whole; other elements are dropped."""
    chunk = parameter.__create_chunk_list__()[0]  # what torch.distributed.checkpoint asks for: offset and size
    offsets, sizes, strides = torch.tensor(
        [chunk.offsets, chunk.sizes, torch.empty(chunk.sizes, device="meta").stride()], device="cpu"
    ).unsqueeze(-1)
    places = torch.stack(torch.unravel_index(elements, parameter.shape)) - offsets
    held = ((places >= 0) & (places < sizes)).all(0)
    at: Tensor = (places * strides).sum(0)[held]
    return at


class SteppedParameters:
    """Collects the parameters that optimizer steps were to move.

    A step moves the parameters with ``requires_grad`` in groups with a learning rate other than 0, if its optimizer has
    a gradient of any of them, unless ``found_inf`` skips a fused step.
    """

    def __init__(self, indices: Mapping[int, int]) -> None:
        self.any = False  # True if a step was made, possibly with a learning rate of 0
        self._indices = indices  # id of a parameter -> its index
        self._moves: list[tuple[list[int], Any]] = []  # indices, and True or a condition that the device knows

    def __bool__(self) -> bool:
        return bool(self._moves)

    def started(self, optimizer: Optimizer) -> list[int]:
        """Note a step that is about to be made, once unused gradients are hidden; return its indices."""
        groups = [
            [item for item in group["params"] if id(item) in self._indices and item.requires_grad]
            for group in optimizer.param_groups
        ]
        if all(item.grad is None for members in groups for item in members):
            return []
        self.any = True
        found_inf = getattr(optimizer, "found_inf", None)
        is_made = found_inf.reshape(()) == 0 if isinstance(found_inf, Tensor) else True
        indices = [[self._indices[id(item)] for item in members] for members in groups]
        for group, members in zip(optimizer.param_groups, indices, strict=True):
            moves = (group.get("lr") != 0) & is_made
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


class SampledStep:
    """Samples the weights before and after each train step of a run.

    If an optimizer keeps a float32 copy of a low-precision weight in its state, the copy is measured in its place.
    Without an optimizer, the parameters of every optimizer count; ``own`` are the indices of those that count.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, optimizer: Optimizer | None) -> None:
        reshard(model)
        self.samples = ParameterSamples(model, sample_size)
        self._model, self._optimizer = model, optimizer
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet([] if optimizer is None else [optimizer])

    def fits(self) -> bool:
        """Return True if the model's parameters are still those that are sampled."""
        reshard(self._model)
        return self.samples.fits()

    @torch.no_grad()
    def start(self) -> None:
        """Keep the samples of the weights, before a train step."""
        self.own = self.samples.measurable
        if self._optimizer is not None:
            held = held_by(self._optimizer)
            self.own = [index for index in self.own if id(self.samples.parameters[index]) in held]
        self.stepped = SteppedParameters({id(self.samples.parameters[index]): index for index in self.own})
        parts = [self.samples.take(index, self._weight(index)) for index in self.own]
        copies = torch.cat(parts).split(list(map(len, parts))) if parts else ()
        self._before: dict[int, Tensor] = dict(zip(self.own, copies, strict=True))

    @torch.no_grad()
    def step_started(self, optimizer: Optimizer) -> list[int]:
        """Note an optimizer's step that is about to be made; return the indices of its parameters."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            for index in self.own:
                copy = _state(optimizer, self.samples.parameters[index], _COPY)
                if copy is not None:
                    self._before[index] = self.samples.take(index, copy).clone()
        return self.stepped.started(optimizer)

    def before(self, indices: Sequence[int]) -> list[Tensor]:
        """The samples of each of some parameters when the iteration started."""
        return [self._before[index] for index in indices]

    def changes(self, indices: Sequence[int]) -> Tensor:
        """The changes of sampled weights since the iteration started, one parameter after the other."""
        after = self.samples.flat(indices, [self._weight(index) for index in indices])
        return after.sub_(torch.cat(self.before(indices)))

    def split(self, flat: Tensor, indices: Sequence[int]) -> Sequence[Tensor]:
        """Split samples of some parameters, one parameter after the other, by parameter."""
        return flat.split([len(self._before[index]) for index in indices])  # type: ignore[no-any-return]

    def is_rounded(self, index: int) -> bool:
        """Return True for a parameter of low precision without a float32 copy or a compensation of rounding."""
        parameter = self.samples.parameters[index]
        if parameter.dtype not in NARROW or self._weight(index) is not parameter:
            return False
        return all(_state(optimizer, parameter, _COMPENSATION) is None for optimizer in self._optimizers)

    def _weight(self, index: int) -> Tensor:
        parameter: Tensor = self.samples.parameters[index]
        copies = [_state(optimizer, parameter, _COPY) for optimizer in self._optimizers]
        return next((copy for copy in copies if copy is not None), parameter)


def _state(optimizer: Optimizer, parameter: Any, keys: re.Pattern[str]) -> Tensor | None:
    """The tensor of a low-precision parameter's shape in an optimizer's state whose key matches a pattern."""
    state = optimizer.state.get(parameter, {}) if parameter.dtype in NARROW else {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or value.shape != parameter.shape or not keys.search(str(key)):
            continue
        if keys is _COMPENSATION or value.dtype not in NARROW:
            return value
    return None
