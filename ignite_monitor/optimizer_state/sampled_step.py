"""What an optimizer's moments say of a step, of sampled elements."""

from __future__ import annotations

import itertools
import math
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.devices import upload
from ignite_monitor.model.optimizers import held_by
from ignite_monitor.model.samples import ParameterSamples, reshard
from ignite_monitor.monitor.stepped import HostMasks, SteppedParameters
from ignite_monitor.optimizer_state.moments import Moments, is_real, kind_of
from ignite_monitor.optimizer_state.rows import Kind, StateRows, statistics_of

_strided = torch.strided
_sampled_as = attrgetter("shape", "device", "dtype")


class Measured(NamedTuple):
    """What is known of a step.

    Attributes:
        statistics: what :func:`statistics_of` gives, NaN where a parameter has none: of shape (3, parameters).
        update_norm: the norm of what the step has changed in all of them, 0-dim.
    """

    statistics: Tensor
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
        self.samples = ParameterSamples(model, sample_size, rows=0.5)
        self._rows = [StateRows([*of]) for _, of in itertools.groupby(self.samples.groups, lambda group: group.kind)]
        self._held, self._sampled = held_by(optimizer), [*map(_sampled_as, self.samples.parameters)]
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
        """Whether the optimizer holds the same parameters as ever, and they are where and what they were."""
        return held_by(optimizer) == self._held and [*map(_sampled_as, self.samples.parameters)] == self._sampled

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
        for rows in self._rows:
            rows.copy(Kind.BEFORE, weights)
            rows.copy(Kind.GRADIENT, gradients)
            if scale is not None:
                rows.unscale(scale)

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
        for rows in self._rows:
            for kind, sources in (
                (Kind.AFTER, weights),
                (Kind.SQUARE, moments.square),
                (Kind.MOMENTUM, moments.momentum),
            ):
                rows.copy(kind, sources)
        least = moments.eps / moments.correction
        means = samples.means([rows.sums(least) for rows in self._rows] or [torch.empty(6, 0)])
        statistics = statistics_of(means, moments.correction)
        of_rows = (self._with_gradient, moments.with_square, moments.with_eps, moments.with_momentum)
        masks = torch.stack([self._masks.of(self._with_gradient & indices) for indices in of_rows])
        made, known = (masks & self._stepped.mask(self._masks)).tensor_split([1])
        total = torch.where(made[0], means[Kind.CHANGE], 0.0).dot(self._numels).sqrt()
        # 0 / 0 where there was no step
        return True, Measured(torch.where(known, statistics, math.nan), total / made.any())
