"""What train steps do to the sampled parameters of a model."""

from __future__ import annotations

import math
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.capture.samples import ParameterSamples, reshard
from ignite_monitor.handlers._stepped import HostMasks, SteppedParameters

_NARROW = (torch.bfloat16, torch.float16)


class Measured(NamedTuple):
    """What a train step did, for each parameter; anything where a mask is False.

    Attributes:
        gradients: norms of the gradients that the step was made with, or that are still accumulated.
        with_gradient: which parameters had one; None if none had.
        weights: norms of the weights before the step.
        changes: norms of what it changed of them.
        moved: which parameters it was to move; None if there was no step.
    """

    gradients: Tensor
    with_gradient: Tensor | None
    weights: Tensor
    changes: Tensor
    moved: Tensor | None


class SampledTrainStep:
    """Follows the train steps of a run, one after the other.

    Args:
        model: the model.
        sample_size: see :class:`ParameterSamples`.
        optimizer: the optimizer whose parameters count; None for all.

    Attributes:
        samples: the sampled parameters.
        rounded: names of parameters of low precision of which no float32 copy is at hand.
    """

    def __init__(self, model: nn.Module, sample_size: int | None, optimizer: Optimizer | None) -> None:
        reshard(model)
        self._model = model
        self.samples = ParameterSamples(model, sample_size)
        self.rounded: set[str] = set()
        self._optimizer = optimizer
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet([] if optimizer is None else [optimizer])
        self._measurable = {id(self.samples.parameters[place]): place for place in self.samples.measurable}
        self._narrow = [place for place, each in enumerate(self.samples.parameters) if each.dtype in _NARROW]
        self._masks = HostMasks(len(self.samples.names), self.samples.device)
        self._places: dict[int, int] = {}
        self._stepped = SteppedParameters({})
        self._gradient: tuple[Tensor, Tensor] | None = None
        self._used: tuple[Tensor, Tensor] | None = None

    def fits(self) -> bool:
        """Whether the model's parameters are still those that were sampled."""
        if not self.samples.fit():
            reshard(self._model)
            return self.samples.fit()
        return True

    @torch.no_grad()
    def start(self) -> None:
        """A train step is about to start: keep the weights' samples."""
        self._places = self._measurable
        if self._optimizer is not None:
            held = held_by(self._optimizer)
            self._places = {key: place for key, place in self._measurable.items() if key in held}
        self._stepped = SteppedParameters(self._places)
        self._gradient = self._used = None
        self.samples.keep_weights(self._weights())

    def gradients_ready(self, scale: Tensor | None, stepping: Optimizer | None) -> None:
        """A backward has ended.

        Args:
            scale: what the gradients are scaled by; None for 1.
            stepping: the optimizer in whose step it has; None if in none.
        """
        if stepping is not None:
            self._stepped.met_gradients(stepping)
        self._measure_gradient(scale)

    def step_started(self, optimizer: Optimizer, reduced: bool) -> None:
        """An optimizer is about to make its step with the gradients that are there.

        Args:
            optimizer: the optimizer.
            reduced: whether they are the same on every rank.
        """
        self._optimizers.add(optimizer)
        self._stepped.started(optimizer)
        if self._gradient is None and reduced:
            # Set by hand. Fused optimizers are given what to unscale them by.
            self._measure_gradient(getattr(optimizer, "grad_scale", None))

    def step_completed(self, optimizer: Optimizer) -> None:
        """The optimizer has returned from its step.

        Args:
            optimizer: the optimizer.
        """
        if self._stepped.completed(optimizer):
            # Gradients of a later backward may be another optimizer's: a GAN's generator sends some into its
            # discriminator. They are news only once a step is made with them.
            self._used = self._gradient

    @torch.no_grad()
    def completed(self) -> Measured | None:
        """The train step has returned: what it did, or None if there was neither a gradient nor a step."""
        samples, gradient = self.samples, self._used or self._gradient
        if gradient is None and not self._stepped:
            return None
        nothing = torch.zeros(len(samples.names), dtype=samples.dtype, device=samples.device)
        norms, with_gradient = (nothing, None) if gradient is None else gradient
        weights = changes = nothing
        moved = None
        if self._stepped:
            weights, changes = samples.weights_and_changes(self._weights())
            moved = self._stepped.mask(self._masks)
        norms, weights, changes = samples.over_ranks(torch.stack([norms, weights, changes])).unbind()
        return Measured(norms, with_gradient, weights, changes, moved)

    @torch.no_grad()
    def _measure_gradient(self, scale: Tensor | None) -> None:
        gradients: list[Tensor | None] = [None] * len(self.samples.parameters)
        sparse: dict[int, Tensor] = {}
        found = []
        for place in self._places.values():
            parameter: Any = self.samples.parameters[place]
            gradient = parameter.grad
            if gradient is None:
                continue
            found.append(place)
            if place in self.samples.sharded and gradient.placements != parameter.placements:
                gradient = gradient.redistribute(placements=parameter.placements)
            if gradient.layout == torch.strided:
                gradients[place] = gradient
            else:
                sparse[place] = gradient
        if found:
            norms = self.samples.gradient_norms(gradients, sparse)
            self._gradient = (norms if scale is None else norms / scale.to(norms), self._masks.of(found))

    def _weights(self) -> list[Tensor]:
        weights: list[Tensor] = list(self.samples.parameters)
        for place in self._narrow:
            weights[place] = self._precise(self.samples.names[place], self.samples.parameters[place])
        return weights

    def _precise(self, name: str, parameter: nn.Parameter) -> Tensor:
        for optimizer in self._optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if (
                    isinstance(value, Tensor)
                    and value.shape == parameter.shape
                    and value.dtype in (torch.float32, torch.float64)
                    and ("master" in str(key) or "fp32" in str(key))
                ):
                    self.rounded.discard(name)
                    return value
        self.rounded.add(name)
        return parameter


def held_by(optimizer: Optimizer) -> set[int]:
    """The ids of an optimizer's parameters.

    Args:
        optimizer: the optimizer.
    """
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def unknown_where(values: Tensor, known: Tensor | None) -> Tensor:
    """Values with NaN where they are not known.

    Args:
        values: the values.
        known: bool, where they are; None for nowhere.
    """
    return torch.full_like(values, math.nan) if known is None else torch.where(known, values, math.nan)
