"""The parameters that optimizer steps were to move, and samples of weights before and after a train step."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.devices import move
from ignite_monitor.model.dtensor import reshard
from ignite_monitor.model.names import held_by, is_from_torch, learning_rates
from ignite_monitor.model.sampling import ParameterSamples

_FEW = 32  # elements of a sample that are not 0, from which its norm has an error of about 15 %


class UpdatedParameters:
    """Collects the parameters that optimizer steps were to move.

    A step moves the parameters with ``requires_grad`` in groups with a learning rate other than 0. Its optimizer needs
    a gradient of one of them, and no ``found_inf`` that skips a fused step.
    """

    def __init__(self, indices: Mapping[int, int]) -> None:
        self.any = False  # True if a step was made, possibly with a learning rate of 0
        self._indices = indices  # id of a parameter -> its index
        self._moves: list[tuple[list[int], Any]] = []  # indices, and True or a condition that the device knows

    def __bool__(self) -> bool:
        return bool(self._moves)

    def started(self, optimizer: Optimizer) -> list[int]:
        """Note a step that is about to be made; return its indices."""
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
        for rate, members in zip(learning_rates(optimizer), indices, strict=True):
            moves = (rate != 0) & is_made
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


class StepMeasurement:
    """Sample the weights before and after each train step of a run.

    Without an optimizer, the parameters of every optimizer count.

    Attributes:
        samples: the sampled elements.
        indices: indices of the parameters that count.
        min_nonzero: number of non-zero elements below which the norm of a sample is no estimate; 0 without a sample.
        stepped: the parameters that steps were to move.
        sizes: the number of elements in each sample, by index.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, optimizer: Optimizer | None) -> None:
        reshard(model)
        self.samples = ParameterSamples(model, sample_size)
        self.min_nonzero = (self.samples.counts / _FEW).clamp(max=_FEW) * (self.samples.factors > 1)
        self._model, self._optimizer = model, optimizer
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet([] if optimizer is None else [optimizer])
        self._before: dict[int, Tensor] = {}  # samples by index, of the start of the last measured train step

    def fits(self) -> bool:
        """Return True if the model's parameters are still those that are sampled."""
        reshard(self._model)
        return self.samples.fits()

    @torch.no_grad()
    def start(self) -> None:
        """Keep the samples of the weights, before a train step."""
        self.indices = self.samples.measurable
        if self._optimizer is not None:
            held = held_by(self._optimizer)
            self.indices = [index for index in self.indices if id(self.samples.parameters[index]) in held]
        self.stepped = UpdatedParameters({id(self.samples.parameters[index]): index for index in self.indices})
        parts = [self.samples.take(index, self.samples.parameters[index]) for index in self.indices]
        self.sizes = {index: part.numel() for index, part in zip(self.indices, parts, strict=True)}
        self._flat_before = torch.cat(parts) if parts else self.samples.factors[:0]
        self._before = dict(zip(self.indices, self.split(self._flat_before, self.indices), strict=True))

    def step_started(self, optimizer: Optimizer) -> list[int]:
        """Note an optimizer's step that is about to be made; return the indices of its parameters."""
        indices = self.stepped.started(optimizer)
        if indices:
            self._optimizers.add(optimizer)
        return indices

    def changes(self, indices: Sequence[int]) -> Tensor:
        """The changes of sampled weights since the iteration started, one parameter after the other."""
        after = self.samples.flat(indices, [self.samples.parameters[index] for index in indices])
        return after.sub_(torch.cat([self._before[index] for index in indices]))

    def split(self, flat: Tensor, indices: Sequence[int]) -> Sequence[Tensor]:
        """Split samples of some parameters, one parameter after the other, by parameter."""
        return flat.split([self.sizes[index] for index in indices])  # type: ignore[no-any-return]

    @property
    def keeps_no_copies(self) -> bool:
        """True if only torch's own optimizers have made steps: they keep no copies of low-precision weights."""
        return all(map(is_from_torch, self._optimizers))
