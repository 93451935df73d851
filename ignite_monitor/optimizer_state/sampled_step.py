"""What an optimizer's moments say of a step, of sampled elements."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.devices import upload
from ignite_monitor.model.optimizers import held_by
from ignite_monitor.model.samples import ParameterSamples, reshard
from ignite_monitor.monitor.stepped import HostMasks, SteppedParameters
from ignite_monitor.optimizer_state.moments import Moments, is_real, kind_of
from ignite_monitor.optimizer_state.rows import row_sums, statistics_of

_strided = torch.strided


class Measured(NamedTuple):
    """Statistics of each parameter, NaN where there is none.

    Attributes:
        rms: the root mean square of gradient over root of second moment.
        eps_share: of which part of the elements eps is larger than that root.
        momentum_cosine: the cosine of gradient and momentum.
        update_norm: the norm of what the step has changed in all of them, 0-dim.
    """

    rms: Tensor
    eps_share: Tensor
    momentum_cosine: Tensor
    update_norm: Tensor


class SampledStep:
    """Follows the steps of an optimizer, one after the other.

    Args:
        sample_size: see :class:`ParameterSamples`.
        optimizer: the optimizer; parameters of others do not count.

    Attributes:
        samples: the sampled parameters.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, optimizer: Optimizer) -> None:
        reshard(model)
        self._model = model
        self.samples = ParameterSamples(model, sample_size, rows=0.5)
        self._rows = [group.rooms("gradient", "momentum", "change", "square") for group in self.samples.groups]
        self._held = held_by(optimizer)
        self._indices = {
            id(parameter): index
            for index, parameter in enumerate(self.samples.parameters)
            if id(parameter) in self._held and is_real(parameter)
        }
        # No plain tensor is of the kind of a sharded one.
        self._kinds = [
            None if index in self.samples.sharded else kind_of(parameter)
            for index, parameter in enumerate(self.samples.parameters)
        ]
        numels = torch.tensor(
            [each.numel() for each in self.samples.parameters], dtype=self.samples.dtype, device="cpu"
        )
        self._numels = upload(numels, self.samples.device)
        self._masks = HostMasks(len(numels), self.samples.device)
        self._stepped = SteppedParameters({})
        self._with_gradient: set[int] = set()

    def fits(self, optimizer: Optimizer) -> bool:
        """Whether the model's parameters, and those that the optimizer holds, are still the same."""
        if held_by(optimizer) != self._held:
            return False
        if self.samples.fit():
            return True
        reshard(self._model)
        return self.samples.fit()

    @torch.no_grad()
    def started(self, optimizer: Optimizer, scale: Tensor | None) -> None:
        """The optimizer is about to make its step with the gradients that are there.

        Args:
            scale: what those are scaled by, 0-dim; None for 1.
        """
        samples = self.samples
        self._stepped = SteppedParameters(self._indices)
        self._stepped.started(optimizer)
        gradients: list[Tensor | None] = [None] * len(samples.parameters)
        weights: list[Tensor | None] = list(gradients)
        self._with_gradient = set()
        for index in self._indices.values():
            parameter = samples.parameters[index]
            gradient = parameter.grad
            if gradient is not None and gradient.layout is _strided:
                gradients[index] = samples.placed(index, gradient) if index in samples.sharded else gradient
                weights[index] = parameter
                self._with_gradient.add(index)
        samples.keep_weights(weights)
        for group in samples.groups:
            rows = group.room("gradient")
            group.copy(gradients, rows)
            if scale is not None:
                rows.div_(scale.to(rows, non_blocking=True))

    @torch.no_grad()
    def completed(self, optimizer: Optimizer) -> tuple[bool, Measured | None]:
        """The optimizer has returned from its step: whether it was made, and what is known of it."""
        self._stepped.completed(optimizer)
        if not self._stepped:
            return self._stepped.any, None
        samples, moments = self.samples, Moments(optimizer, self.samples, self._indices, self._kinds)
        if not moments:
            return True, None
        weights: list[Tensor | None] = [
            each if index in self._with_gradient else None for index, each in enumerate(samples.parameters)
        ]
        sums = []
        for group, rows in zip(samples.groups, self._rows, strict=True):
            if rows.is_complex():  # of which nothing is said
                nothing = torch.full((6, len(group.indices)), math.nan, device=rows.device)
                sums.append(nothing.to(samples.dtype))
                continue
            for name, sources in (("change", weights), ("square", moments.square), ("momentum", moments.momentum)):
                group.copy(sources, group.room(name))
            group.room("change").sub_(group.before)
            factors = moments.correction[group.index], moments.eps[group.index]
            sums.append(row_sums(rows, group.weights, group.elements, *factors))
        found = statistics_of(samples.means(sums))
        stepped = self._stepped.mask(self._masks)
        made, adapted, moving = (
            stepped & self._masks.of(self._with_gradient & indices)
            for indices in (self._with_gradient, moments.with_square, moments.with_momentum)
        )
        total = torch.where(made, found.change * self._numels, 0.0).sum().sqrt()
        return True, Measured(
            _known(found.rms, adapted),
            _known(found.eps_share, adapted & found.rms.isfinite() & ~moments.eps.isnan()),
            _known(found.momentum_cosine, moving),
            torch.where(made.any(), total, math.nan),
        )


def _known(values: Tensor, known: Tensor) -> Tensor:
    return torch.where(known & values.isfinite(), values, math.nan)
