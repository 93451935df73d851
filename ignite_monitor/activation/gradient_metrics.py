"""Metrics of the gradients that an iteration's optimizer steps are made with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor, nn

from ignite_monitor.activation.measurement import Measurement
from ignite_monitor.activation.metric import MetricSet
from ignite_monitor.model.devices import upload
from ignite_monitor.model.norms import any_sharded, is_sharded, whole_tensor
from ignite_monitor.monitor.publisher import NamedValues, joined


class GradientMetrics:
    """Measures the gradients of parameters through one iteration.

    A gradient is measured when a backward that reached its parameter has ended, in place of an earlier measurement, and
    once more when an optimizer is about to make its step with it, where it may have been clipped. One that no backward
    of this iteration has made, set by hand or left from an earlier one, is measured then. What comes after the first
    step belongs to another optimizer's backward, or to a step that is not looked at. A parameter has a name and a tag.
    """

    def __init__(self, parameters: Mapping[nn.Parameter, tuple[str, str]], metrics: MetricSet) -> None:
        self._parameters = parameters
        self._metrics = metrics
        self._before: list[NamedValues] = []
        self._after: list[NamedValues] = []
        self._measured: set[nn.Parameter] = set()
        self._kept: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}
        self._stepped: set[nn.Parameter] = set()

    def gradients_ready(self, scale: Tensor | None, reached: Set[int]) -> None:
        """A backward has ended, which may have changed the gradients of these, by id, and scaled them."""
        waiting = (each for each in self._parameters if each not in self._stepped and id(each) in reached)
        changed = list(_gradients(waiting))
        self._before += self._measure("gradient", changed, scale)
        self._measured.update(parameter for parameter, _ in changed)

    def step_started(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        """An optimizer is about to make its first step, with gradients that are scaled."""
        own = [each for each in parameters if each in self._parameters and each not in self._stepped]
        gradients = list(_gradients(own))
        by_hand = [(each, gradient) for each, gradient in gradients if each not in self._measured]
        of_backward = [(each, gradient) for each, gradient in gradients if each in self._measured]
        if any_sharded(gradient for _, gradient in of_backward):  # which all ranks gather, also those without a step
            sharded = {each: gradient for each, gradient in of_backward if is_sharded(gradient)}
            self._kept |= {each: (gradient.detach().clone(), scale) for each, gradient in sharded.items()}
            of_backward = [each for each in of_backward if each[0] not in sharded]
        self._before += self._measure("gradient", by_hand, scale)
        self._after += self._measure("gradient_after_clip", of_backward, scale)
        self._stepped.update(own)

    def numbers(self) -> tuple[list[NamedValues], list[NamedValues]]:
        """Names and numbers before and after clipping; after it NaN where those of a parameter have not changed.

        Where gradients are sharded, all ranks have to ask.
        """
        if not self._before:
            return [], []
        self._after += self._of_kept()
        before = joined(self._before)
        return [before], [_differing(before, joined(self._after))] if self._after else []

    def _measure(
        self, family: str, gradients: list[tuple[nn.Parameter, Tensor]], scale: Tensor | None
    ) -> list[NamedValues]:
        measured = Measurement(family, self._metrics)
        tensors = [gradient for _, gradient in gradients]
        if any_sharded(tensors):  # one after the other
            for parameter, gradient in gradients:
                name, tag = self._parameters[parameter]
                if measured.wants(name):
                    measured.add(tag, name, _unscaled(whole_tensor(gradient), scale))
        else:
            dense = [each.detach() if each.layout == torch.strided else whole_tensor(each) for each in tensors]
            names = [self._parameters[parameter] for parameter, _ in gradients]
            if scale is not None:
                dense = [_unscaled(each, scale) for each in dense]
            measured.add_each([(*own, each) for own, each in zip(names, dense, strict=True)])
        return measured.values()

    def _of_kept(self) -> list[NamedValues]:
        if not any_sharded(self._parameters):
            return []
        measured = Measurement("gradient_after_clip", self._metrics)
        for parameter in self._parameters:
            if parameter not in self._measured or not is_sharded(parameter):
                continue
            name, tag = self._parameters[parameter]
            if measured.wants(name):
                gradient, scale = self._kept.get(parameter, (parameter, None))
                whole = whole_tensor(gradient)
                if parameter in self._kept:
                    measured.add(tag, name, _unscaled(whole, scale))
        return measured.values()


def _unscaled(gradient: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return gradient
    return gradient.to(torch.promote_types(gradient.dtype, torch.float32)) / scale.to(gradient.device)


def _gradients(parameters: Iterable[nn.Parameter]) -> Iterable[tuple[nn.Parameter, Tensor]]:
    return ((each, each.grad) for each in parameters if each.grad is not None)


def _differing(before: NamedValues, after: NamedValues) -> NamedValues:
    """Those after, NaN where none of a parameter's differs from the one before."""
    index_of = {name.partition("/")[2]: i for i, name in enumerate(before.names)}
    names, numbers = after
    owners = [name.rpartition("/")[0] for name in names]
    number_of = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    index = torch.tensor(
        [[index_of[name.partition("/")[2]] for name in names], [number_of[owner] for owner in owners]], device="cpu"
    )
    indices, owner = upload(index, numbers.device).unbind()
    earlier = before.values[indices]
    differs = (numbers != earlier) & ~(numbers.isnan() & earlier.isnan())
    counts = torch.zeros(len(number_of), dtype=numbers.dtype, device=numbers.device)
    counts.index_add_(0, owner, differs.to(numbers.dtype))
    return NamedValues(names, torch.where(counts[owner] > 0, numbers, math.nan))
