"""The norms of the gradients that an iteration's optimizer steps were made with."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor

from ignite_monitor.model._torch import version as own_version
from ignite_monitor.model.samples import ParameterSamples
from ignite_monitor.model.tensors import version
from ignite_monitor.monitor.stepped import HostMasks


class GradientNorms:
    """Follows the gradient of each parameter by itself through one iteration, and measures what is new.

    A gradient that nothing has touched since the iteration started is an earlier iteration's, and has no norm unless a
    step is made with it. After a backward the gradients that it has changed are measured; before a step those of its
    optimizer's that have not been, or that code of the user's has replaced. What has changed in place between the two
    is clipped or unscaled: its norm stays. Once a step is made with a gradient, later ones are another optimizer's: a
    GAN's generator sends some into its discriminator. They are news only when a step is made with them.

    Which norm is whose is known on the host, so that nothing has to be looked at on the device.

    Args:
        places: id of a parameter -> its place; parameters that are not in it do not count.
    """

    def __init__(self, samples: ParameterSamples, places: Mapping[int, int]) -> None:
        self._samples = samples
        self._places = places
        self._norms: list[Tensor] = []
        self._length = 0
        # Place -> where in all of these its norm is, of the latest gradient and of the one that a step was made with.
        self._latest: dict[int, int] = {}
        self._used: dict[int, int] = {}
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._see(self._gradients(places.values()))

    @torch.no_grad()
    def gradients_ready(self, scale: Tensor | None, reached: Set[int]) -> None:
        """A backward has ended.

        Args:
            scale: what the gradients are scaled by; None for 1.
        """
        gradients = self._gradients(self._places.values())
        parameters = self._samples.parameters
        self._measure(
            {
                place: gradient
                for place, gradient in gradients
                if self._is_replaced(place, gradient)
                or (id(parameters[place]) in reached and self._is_changed(place, gradient))
            },
            scale,
        )

    @torch.no_grad()
    def step_started(self, places: Iterable[int], scale: Tensor | None) -> None:
        """An optimizer is about to make its step.

        Args:
            scale: what their gradients are scaled by, where they have not been measured; None for 1.
        """
        gradients = self._gradients(places)
        self._measure(
            {
                place: gradient
                for place, gradient in gradients
                if place not in self._latest or self._is_replaced(place, gradient)
            },
            scale,
        )

    def step_completed(self, places: Iterable[int]) -> None:
        """An optimizer has made its step."""
        for place in places:
            if place in self._latest:
                self._used[place] = self._latest[place]

    def result(self, masks: HostMasks) -> tuple[Tensor, Tensor] | None:
        """Each parameter's norm, and whether it has one; None if none has."""
        positions = self._latest | self._used
        return (self._samples.ordered(self._norms, positions), masks.of(positions)) if positions else None

    def _gradients(self, places: Iterable[int]) -> list[tuple[int, Tensor]]:
        parameters = self._samples.parameters
        return [
            (place, gradient)
            for place in places
            if (gradient := parameters[place].grad) is not None and parameters[place].requires_grad
        ]

    def _see(self, gradients: Iterable[tuple[int, Tensor]]) -> None:
        for place, gradient in gradients:
            self._seen[place] = weakref.ref(gradient), self._version(place, gradient)

    def _version(self, place: int, gradient: Tensor) -> int:
        return version(gradient) if place in self._samples.sharded else own_version(gradient)

    def _is_replaced(self, place: int, gradient: Tensor) -> bool:
        return place not in self._seen or self._seen[place][0]() is not gradient

    def _is_changed(self, place: int, gradient: Tensor) -> bool:
        return self._seen[place][1] != self._version(place, gradient)

    def _measure(self, gradients: dict[int, Tensor], scale: Tensor | None) -> None:
        if not gradients:
            return
        self._see(gradients.items())
        for places, norms in self._samples.gradient_norms(gradients):
            self._norms.append(norms if scale is None else norms / scale.to(norms))
            self._latest.update((place, self._length + at) for place, at in places.items())
            self._length += len(norms)
        # Of those whose elements are all on other ranks.
        self._latest.update((place, -1) for place in gradients if not self._samples.has_elements(place))
