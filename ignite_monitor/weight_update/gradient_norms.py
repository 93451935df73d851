"""The norms of the gradients that an iteration's optimizer steps were made with."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor

from ignite_monitor.model.samples import ParameterSamples
from ignite_monitor.monitor.stepped import HostMasks


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
