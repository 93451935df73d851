"""What train steps do to the sampled parameters of a model."""

from __future__ import annotations

import math
import weakref
from collections.abc import Set
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.optimizers import held_by
from ignite_monitor.model.samples import NARROW, ParameterSamples, reshard
from ignite_monitor.monitor.stepped import HostMasks, SteppedParameters
from ignite_monitor.weight_update.gradient_norms import GradientNorms


class Measured(NamedTuple):
    """What a train step did, for each parameter; anything where a mask is False.

    Attributes:
        gradients: norms of the gradients that the step was made with, or that are still accumulated.
        with_gradient: which parameters had one; None if none had.
        weights: norms of the weights before the step.
        changes: norms of what it changed of them.
        moved: which parameters it was to move; None if there was no step.
        lost: of the elements that had a gradient, the share that did not move for rounding; NaN if there are none, None
            if no parameter can lose an update.
    """

    gradients: Tensor
    with_gradient: Tensor | None
    weights: Tensor
    changes: Tensor
    moved: Tensor | None
    lost: Tensor | None


class SampledTrainStep:
    """Follows the train steps of a run, one after the other.

    Args:
        sample_size: see :class:`ParameterSamples`.
        optimizer: the optimizer whose parameters count; None for all.

    Attributes:
        samples: the sampled parameters.
        trainable: name -> parameter, of those that can have a gradient.
        rounded: names of parameters of low precision of which no float32 copy is at hand.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, optimizer: Optimizer | None) -> None:
        reshard(model)
        self._model = model
        self.samples = ParameterSamples(model, sample_size)
        self.rounded: set[str] = set()
        self._optimizer = optimizer
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet([] if optimizer is None else [optimizer])
        self._measurable = {id(self.samples.parameters[index]): index for index in self.samples.measurable}
        self.trainable = {
            self.samples.names[index]: self.samples.parameters[index] for index in self.samples.measurable
        }
        self._narrow = [index for index, each in enumerate(self.samples.parameters) if each.dtype in NARROW]
        self._masks = HostMasks(len(self.samples.names), self.samples.device)
        self._stepped = SteppedParameters({})
        self._gradients = GradientNorms(self.samples, {})

    @property
    def stepped(self) -> bool:
        """Whether an optimizer's step was made for any parameter, if only with a learning rate of 0."""
        return self._stepped.any

    def fits(self) -> bool:
        """Whether the model's parameters are still those that were sampled."""
        if not self.samples.fit():
            reshard(self._model)
            return self.samples.fit()
        return True

    @torch.no_grad()
    def start(self) -> None:
        """A train step is about to start: keep the weights' samples."""
        indices = self._measurable
        if self._optimizer is not None:
            held = held_by(self._optimizer)
            indices = {key: index for key, index in indices.items() if key in held}
        self._stepped = SteppedParameters(indices)
        self._gradients = GradientNorms(self.samples, indices)
        self.samples.keep_weights(self._weights())
        self.samples.forget_gradients()

    def gradients_ready(self, scale: Tensor | None, reached: Set[int], stepping: Optimizer | None) -> None:
        """A backward has ended, maybe in the step of an optimizer."""
        if stepping is not None:
            self._stepped.met_gradients(stepping)
        self._gradients.gradients_ready(scale, reached)

    def step_started(self, optimizer: Optimizer, scale: Tensor | None, reduced: bool) -> None:
        """An optimizer is about to make its step with the gradients that are there."""
        if optimizer not in self._optimizers:
            self._optimizers.add(optimizer)
            self._keep_copies(optimizer)
        indices = self._stepped.started(optimizer)
        self._gradients.step_started(indices, scale, reduced)

    def step_completed(self, optimizer: Optimizer) -> None:
        """The optimizer has returned from its step."""
        self._gradients.step_completed(self._stepped.completed(optimizer))

    @torch.no_grad()
    def completed(self) -> Measured | None:
        """The train step has returned: what it did, or None if there was neither a gradient nor a step."""
        samples, gradient = self.samples, self._gradients.result(self._masks)
        if gradient is None and not self._stepped:
            return None
        nothing = torch.zeros(len(samples.names), dtype=samples.dtype, device=samples.device)
        norms, with_gradient = (nothing, None) if gradient is None else gradient
        weights = changes = nothing
        moved = None
        if self._stepped:
            weights, changes = samples.weights_and_changes(self._weights())
            moved = self._stepped.mask(self._masks)
        rows = [norms, weights, changes]
        losing = self._losing() if moved is not None else []
        if moved is not None and losing:
            # Over ranks squares are summed, here counts.
            rows += samples.lost_updates().nan_to_num().sqrt().unbind()
        norms, weights, changes, *counts = samples.over_ranks(torch.stack(rows)).unbind()
        lost = None
        if moved is not None and counts:
            unmoved, updated = (torch.stack(counts) ** 2 * (self._masks.of(losing) & moved)).sum(1).unbind()
            lost = unmoved / updated
        return Measured(norms, with_gradient, weights, changes, moved, lost)

    def _losing(self) -> list[int]:
        """The indices of parameters that lose what rounding takes of an update."""
        return [
            index
            for index in self._narrow
            if self.samples.names[index] in self.rounded
            and not any(_is_compensated(each, self.samples.parameters[index]) for each in self._optimizers)
        ]

    def _weights(self) -> list[Tensor]:
        weights: list[Tensor] = list(self.samples.parameters)
        for index in self._narrow:
            weights[index] = self._precise(self.samples.names[index], self.samples.parameters[index])
        return weights

    @torch.no_grad()
    def _keep_copies(self, optimizer: Optimizer) -> None:
        """Of an optimizer that is met for the first time, take its float32 copies of the weights for these."""
        copies: list[Tensor | None] = [None] * len(self.samples.parameters)
        for index in self._narrow:
            copies[index] = _float32_copy(optimizer, self.samples.parameters[index])
        if any(each is not None for each in copies):
            self.samples.keep_weights(copies)

    def _precise(self, name: str, parameter: nn.Parameter) -> Tensor:
        for optimizer in self._optimizers:
            copy = _float32_copy(optimizer, parameter)
            if copy is not None:
                self.rounded.discard(name)
                return copy
        self.rounded.add(name)
        return parameter


def _float32_copy(optimizer: Optimizer, parameter: nn.Parameter) -> Tensor | None:
    for key, value in optimizer.state.get(parameter, {}).items():
        if (
            isinstance(value, Tensor)
            and value.shape == parameter.shape
            and value.dtype in (torch.float32, torch.float64)
            and ("master" in str(key) or "fp32" in str(key))
        ):
            return value
    return None


def _is_compensated(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    """Whether an optimizer adds what rounding took of an update to the next one."""
    return any("kahan" in str(key) or "compensation" in str(key) for key in optimizer.state.get(parameter, {}))


def unknown_where(values: Tensor, known: Tensor | None) -> Tensor:
    """Values with NaN where they are not known, by a mask, or at all."""
    return torch.full_like(values, math.nan) if known is None else torch.where(known, values, math.nan)
