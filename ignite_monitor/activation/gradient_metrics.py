"""Metrics of the gradients that an iteration's optimizer steps use."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor, nn

from ignite_monitor.activation.measurement import Measurement, values_of
from ignite_monitor.activation.metric import MetricSet
from ignite_monitor.model.devices import move
from ignite_monitor.model.dtensor import is_dtensor, whole_tensor
from ignite_monitor.monitor.transfer import NamedValues, joined


class GradientMetrics:
    """Measures the gradients of parameters in one iteration.

    A gradient is measured after each backward that reached its parameter, in place of an earlier measurement, and again
    when an optimizer starts its first step with it, where it may have been clipped. A gradient that no backward of this
    iteration has produced is measured then for the first time.

    Args:
        parameters: parameter -> its name, and its name as loggers take it.
        metrics: what to measure.
    """

    def __init__(self, parameters: Mapping[nn.Parameter, tuple[str, str]], metrics: MetricSet) -> None:
        self._parameters = parameters
        self._metrics = metrics
        self._before: list[NamedValues] = []
        self._after: list[NamedValues] = []
        self._measured: set[nn.Parameter] = set()
        self._stepped: set[nn.Parameter] = set()
        self._sharded: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}

    def gradients_ready(self, scale: Tensor | None, reached: Set[int]) -> None:
        """Measure the scaled gradients that a backward may have changed, of parameters given by id."""
        self._measure_before([parameter for parameter in self._parameters if id(parameter) in reached], scale)

    def step_started(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        """Measure the scaled gradients of an optimizer's first step."""
        own = [item for item in parameters if item in self._parameters and item not in self._stepped]
        clipped = {item: item.grad for item in own if item in self._measured and item.grad is not None}
        self._measure_before([parameter for parameter in own if parameter not in self._measured], scale)
        # All ranks gather sharded gradients, those without a step too: at the end of the iteration.
        sharded = {parameter: grad for parameter, grad in clipped.items() if is_dtensor(grad)}
        self._sharded |= {parameter: (grad.detach().clone(), scale) for parameter, grad in sharded.items()}
        whole = {parameter: grad for parameter, grad in clipped.items() if parameter not in sharded}
        self._after += self._measure("gradient_after_clip", whole, scale)
        self._stepped.update(own)

    def values(self) -> list[NamedValues]:
        """Names and values before clipping, and after clipping NaN where those of a parameter have not changed.

        Where gradients are sharded, all ranks have to call it.
        """
        if not self._before:
            return []
        for parameter in self._parameters:
            if parameter in self._measured and is_dtensor(parameter):
                gradient, scale = self._sharded.get(parameter, (parameter, None))
                values = self._measure("gradient_after_clip", {parameter: gradient}, scale)
                self._after += values if parameter in self._sharded else []
        before = joined(self._before)
        return [before, *([_differing(before, joined(self._after))] if self._after else [])]

    def _measure_before(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        unclipped = {item: item.grad for item in parameters if item.grad is not None and item not in self._stepped}
        self._before += self._measure("gradient", unclipped, scale)
        self._measured.update(unclipped)

    def _measure(
        self, family: str, gradients: Mapping[nn.Parameter, Tensor], scale: Tensor | None
    ) -> list[NamedValues]:
        measurement = Measurement(family, self._metrics)
        for parameter, gradient in gradients.items():
            name, tag = self._parameters[parameter]
            if measurement.wants(name):
                whole = whole_tensor(gradient)
                if scale is not None:
                    wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
                    whole = wide / scale.to(whole.device, non_blocking=True)
                measurement.add(tag, name, whole)
        return values_of([measurement])


def _differing(before: NamedValues, after: NamedValues) -> NamedValues:
    """Values after clipping, NaN where none of a parameter's differs from the one before."""
    index_of = {name.partition("/")[2]: i for i, name in enumerate(before.names)}
    owners = [name.rpartition("/")[0] for name in after.names]
    number_of = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    index = [[index_of[name.partition("/")[2]] for name in after.names], [number_of[owner] for owner in owners]]
    earlier, owner = move(torch.tensor(index, device="cpu"), after.values.device).unbind()
    values, old = after.values, before.values[earlier]
    differs = (values != old) & ~(values.isnan() & old.isnan())
    counts = torch.zeros(len(number_of), dtype=values.dtype, device=values.device)
    counts.index_add_(0, owner, differs.to(values.dtype))
    return NamedValues(after.names, torch.where(counts[owner] > 0, values, math.nan))
