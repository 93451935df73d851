"""What train steps do to the sampled parameters of a model."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Mapping, Set
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.optimizers import held_by
from ignite_monitor.model.samples import NARROW, ParameterSamples, reshard
from ignite_monitor.monitor.stepped import HostMasks, SteppedParameters


class StepResult(NamedTuple):
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


class GradientNorms:
    """Measures the gradient of each parameter by itself through one iteration.

    A gradient is measured when a backward that reached its parameter has ended; what becomes of it between that and a
    step, clipping for one, does not count. One that no backward of this iteration has made is set by hand, or left from
    an earlier iteration, and is measured each time that a step is about to be made with it. Once a step is made,
    gradients of later backwards are another optimizer's: a GAN's generator sends some into its discriminator. They
    count only when a step is made with them.

    Which norm is whose is known on the host, so that nothing has to be looked at on the device.

    Args:
        indices: id of a parameter -> its index; parameters that are not in it do not count.
    """

    def __init__(self, samples: ParameterSamples, indices: Mapping[int, int]) -> None:
        self._samples = samples
        self._indices = indices
        self._norms: list[Tensor] = []
        self._length = 0
        # Index -> where in all of these its norm is: of the latest gradient that a backward has left, of the one that
        # the step that is going on has been started with, and of the one that a step was made with.
        self._latest: dict[int, int] = {}
        self._taken: dict[int, int] = {}
        self._used: dict[int, int] = {}

    @torch.no_grad()
    def gradients_ready(self, scale: Tensor | None, reached: Set[int]) -> None:
        """A backward has ended, which may have changed the gradients of these, by id, and scaled them."""
        self._latest |= self._measure((index for key, index in self._indices.items() if key in reached), scale)

    @torch.no_grad()
    def step_started(self, indices: Iterable[int], scale: Tensor | None, reduced: bool) -> None:
        """An optimizer is about to make its step.

        Args:
            scale: what gradients are scaled by that no backward has made; None for 1.
            reduced: whether gradients are the same on every rank.
        """
        indices = list(indices)
        self._taken = {index: self._latest[index] for index in indices if index in self._latest}
        if reduced:
            self._taken |= self._measure((index for index in indices if index not in self._latest), scale)

    def step_completed(self, indices: Iterable[int]) -> None:
        """An optimizer has made its step."""
        used = {index: self._taken[index] for index in indices if index in self._taken}
        self._used |= used
        self._samples.gradients_used(used)

    def result(self, masks: HostMasks) -> tuple[Tensor, Tensor] | None:
        """Each parameter's norm, and whether it has one; None if none has."""
        positions = self._latest | self._used
        return (self._samples.ordered(self._norms, positions), masks.of(positions)) if positions else None

    def _measure(self, indices: Iterable[int], scale: Tensor | None) -> dict[int, int]:
        """Where the norms of the gradients are that there are now: index -> position."""
        parameters = self._samples.parameters
        gradients = {
            index: gradient
            for index in indices
            if (gradient := parameters[index].grad) is not None and parameters[index].requires_grad
        }
        positions: dict[int, int] = {}
        for indices_of, norms in self._samples.gradient_norms(gradients) if gradients else ():
            self._norms.append(norms if scale is None else norms / scale.to(norms))
            positions.update((index, self._length + at) for index, at in indices_of.items())
            self._length += len(norms)
        # Of those whose elements are all on other ranks.
        positions.update((index, -1) for index in self._samples.without_elements(gradients))
        return positions


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
    def completed(self) -> StepResult | None:
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
        return StepResult(norms, with_gradient, weights, changes, moved, lost)

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
