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
from ignite_monitor.optimizer_state.moments import Moments, is_real
from ignite_monitor.optimizer_state.rows import row_sums, statistics_of


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
        self._held = held_by(optimizer)
        self._places = {
            id(parameter): place
            for place, parameter in enumerate(self.samples.parameters)
            if id(parameter) in self._held and is_real(parameter)
        }
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
        self._stepped = SteppedParameters(self._places)
        self._stepped.started(optimizer)
        gradients: list[Tensor | None] = [None] * len(samples.parameters)
        weights: list[Tensor | None] = list(gradients)
        for place in self._places.values():
            parameter = samples.parameters[place]
            if parameter.grad is not None and parameter.grad.layout == torch.strided:
                gradients[place], weights[place] = samples.placed(place, parameter.grad), parameter
        self._with_gradient = {place for place, each in enumerate(gradients) if each is not None}
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
        samples, moments = self.samples, Moments(optimizer, self.samples, self._places)
        if not moments:
            return True, None
        weights: list[Tensor | None] = [
            each if place in self._with_gradient else None for place, each in enumerate(samples.parameters)
        ]
        sums = []
        for group in samples.groups:
            if group.now.is_complex():  # of which nothing is said
                nothing = torch.full((6, len(group.places)), math.nan, device=group.now.device)
                sums.append(nothing.to(samples.dtype))
                continue
            square, momentum = group.room("square"), group.room("momentum")
            for sources, rows in ((weights, group.now), (moments.square, square), (moments.momentum, momentum)):
                group.copy(sources, rows)
            change = group.now.sub_(group.before)
            factors = (each[group.index] for each in (moments.correction, moments.eps))
            sums.append(
                row_sums(group.room("gradient"), square, momentum, change, group.weights, group.elements, *factors)
            )
        found = statistics_of(samples.means(sums))
        stepped = self._stepped.mask(self._masks)
        made, adapted, moving = (
            stepped & self._masks.of(self._with_gradient & places)
            for places in (self._with_gradient, moments.with_square, moments.with_momentum)
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
