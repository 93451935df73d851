"""Evidence of faults, from the first iterations of a training run."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.devices import device_of
from ignite_monitor.model.dtensor import any_dtensor, local
from ignite_monitor.model.hashes import hashes_of
from ignite_monitor.model.modes import has_local_data
from ignite_monitor.model.names import held_by, is_from_torch, learning_rates, named_parameters
from ignite_monitor.model.norms import total_norm
from ignite_monitor.model.sampling import is_measurable
from ignite_monitor.model.tensors import bits_of

COMPARED = 3  # batches


@dataclass(eq=False)
class Evidence:
    """Evidence since a check began."""

    model: nn.Module
    optimizer: Optimizer
    iterations: int = 0
    stepped: set[int] = field(default_factory=set)  # iterations with a step of the optimizer
    seen: set[int] = field(default_factory=set)  # ids of the parameters that had a gradient
    calls: list[bool] = field(default_factory=list)  # True for one of DistributedDataParallel, False for its module
    batches: list[Tensor | None] = field(default_factory=list)  # hashes of the first ones
    steps_of_torch: bool = True  # all steps are those of optimizers of torch
    others_stepped: bool = False  # another optimizer made a step
    uses_gradients: bool = False  # a step started with a gradient
    rates: list[Tensor] = field(default_factory=list)  # 1 for a learning rate of 0, of each group in each step
    found: Tensor = field(default_factory=lambda: torch.zeros((), device="cpu"))  # maximum norm after the last backward
    used: list[Tensor] = field(default_factory=list)  # of each step: found before it, and the maximum norm at its start
    norms: list[Tensor] = field(default_factory=list)  # maximum norm of the gradients after each step
    initial_norms: list[list[Tensor]] = field(default_factory=lambda: [[]])  # before each backward, by step

    def __post_init__(self) -> None:
        ids = held_by(self.optimizer)
        self.names = {id(parameter): name for name, parameter, _ in named_parameters(self.model)}
        self.parameters: list[Any] = [parameter for _, parameter, _ in named_parameters(self.model)]
        self.held = [item for item in self.parameters if id(item) in ids]
        # Those that it does not hold, and that require gradients.
        rest = [item for item in self.parameters if id(item) not in ids and item.requires_grad and is_measurable(item)]
        self.others = [item for item in rest if local(item).numel()]
        self._before = self._hashes()

    def _hashes(self) -> list[Tensor]:
        """Hash the optimizer's parameters, and the others."""
        device, pair = device_of(self.model), (self.held, self.others)
        hashed = [{str(i): item for i, item in enumerate(items) if has_local_data(local(item))} for items in pair]
        return [hashes_of(items, device) for items in hashed]

    def note_batch(self, batch: Any) -> None:
        """Hash each of the first batches."""
        with contextlib.suppress(Exception):  # a batch may hold objects of any kind, and training continues
            if self.iterations <= COMPARED:
                self.batches.append(hash_batch(batch))

    def note_gradients(self) -> None:
        """Note the parameters that have a gradient."""
        self.seen.update(id(item) for item in (*self.held, *self.others) if item.grad is not None)

    def note_use(self) -> None:
        """Note the gradients that a step starts with, after its closure has computed them."""
        self.used += [self.found, self.largest_gradient()]
        self.uses_gradients |= any(item.grad is not None for item in self.held)

    def note_step(self, optimizer: Optimizer) -> None:
        """Note a step, after which gradients are as it leaves them: a fused optimizer has unscaled them."""
        self.norms.append(self.largest_gradient())
        self.initial_norms.append([])
        self.stepped.add(self.iterations)
        self.steps_of_torch &= is_from_torch(optimizer)
        flags = [rate == 0 for rate in learning_rates(self.optimizer)]
        self.rates += [flag if isinstance(flag, Tensor) else torch.tensor(flag, device="cpu") for flag in flags]

    def largest_gradient(self) -> Tensor:
        """Return the maximum norm of the optimizer's gradients, 0-dim; NaN if it is not known, or there are none."""
        gradients = [item.grad for item in self.held if item.grad is not None]
        is_known = gradients and not any_dtensor(gradients)
        return total_norm(gradients, math.inf) if is_known else torch.tensor(math.nan, device="cpu")

    def numbers(self) -> list[Tensor]:
        """Return the numbers to bring to the host when the check ends."""
        changes = [(before != after).any() for before, after in zip(self._before, self._hashes(), strict=True)]
        return [*changes, *self.rates, *self.used, *self.norms, *chain(*self.initial_norms)]

    def read(self, numbers: Iterable[list[float]]) -> None:
        """Compare the :meth:`numbers` on the host."""
        values = chain(*numbers)
        self.held_change, self.others_change = map(bool, islice(values, 2))
        self.rate_is_zero = all([*islice(values, len(self.rates))])
        used = [*islice(values, len(self.used))]
        self.loses_gradients = len(used) > 2 and all(0 < norm < math.inf for norm in used[::2]) and not any(used[1::2])
        norms = [*islice(values, len(self.norms))]
        first, *rest = [[*islice(values, len(initial))] for initial in self.initial_norms]
        self.discarded = first[1:].count(0)  # backwards that find zeros, before the first step
        followed = [(norm, initial) for norm, initial in zip(norms, rest, strict=True) if initial]
        # The first backward after each step finds its gradients, and no other one finds zeros.
        self.followed, self.keeps_gradients = len(followed), all(it[0] == n and all(it) for n, it in followed)


def hash_batch(batch: Any) -> Tensor | None:
    """Return None for a batch with objects of unknown equality, and for constants, which may be placeholders."""
    leaves = _leaves(batch)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_cpu and has_local_data(leaf)]
    others = [leaf for leaf in leaves if isinstance(leaf, (str, bytes, int, float, type(None)))]
    bits = [bits_of(tensor).flatten() for tensor in tensors]
    if len(tensors) + len(others) < len(leaves) or all(torch.equal(item, item[:1].expand_as(item)) for item in bits):
        return None
    return hashes_of({str(i): leaf for i, leaf in enumerate(leaves)}, torch.device("cpu"))


def _leaves(value: Any) -> list[Any]:
    members = tuple(value.items()) if isinstance(value, Mapping) else value
    return [leaf for item in members for leaf in _leaves(item)] if isinstance(members, (list, tuple)) else [value]
