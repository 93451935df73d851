"""Metrics of the gradients that an iteration's optimizer steps use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor, nn

from ignite_monitor.activation.measurement import Measurement, collect_values
from ignite_monitor.activation.metric import MetricSet
from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.model.dtensor import is_dtensor, whole_tensor
from ignite_monitor.monitor.transfer import NamedValues, joined


class GradientMetrics:
    """Measures the gradients of parameters in one iteration.

    A gradient is measured after a backward that reached its parameter, in place of an earlier measurement, and again
    when an optimizer starts its first step with it, where it may have been clipped. A gradient that no backward of this
    iteration has produced is measured then for the first time. Backwards that are never an iteration's last one, by the
    smallest number of backwards so far, are not followed by a measurement.

    Attributes:
        unknown: number of parameters whose gradients are not known, since there were fewer backwards than ever.
    """

    def __init__(
        self,
        parameters: Mapping[nn.Parameter, tuple[str, str]],  # name, and name for loggers
        metrics: MetricSet,
        fewest: dict[nn.Parameter, int],  # smallest number of backwards in an iteration, kept over iterations
    ) -> None:
        self.unknown = 0
        self._parameters = parameters
        self._metrics = metrics
        self._fewest = fewest
        self._backwards: Counter[nn.Parameter] = Counter()
        self._before: list[NamedValues] = []
        self._after: list[NamedValues] = []
        self._measured: set[nn.Parameter] = set()
        self._stepped: set[nn.Parameter] = set()
        self._sharded: dict[nn.Parameter, tuple[Tensor, Tensor | None]] = {}

    def gradients_ready(self, scale: Tensor | None, reached: Set[int]) -> None:
        """Measure the scaled gradients that a backward may have changed, of parameters given by id."""
        changed = [item for item in self._parameters if id(item) in reached and item not in self._stepped]
        self._backwards.update(changed)
        last = [item for item in changed if self._backwards[item] >= self._fewest.get(item, 1)]
        self._measure_before(last, scale)

    def step_started(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        """Measure the scaled gradients of an optimizer's first step."""
        stepping = [item for item in parameters if item in self._parameters and item not in self._stepped]
        clipped = {item: item.grad for item in stepping if item in self._measured and item.grad is not None}
        self._measure_before([item for item in stepping if item not in self._backwards], scale)
        # All ranks gather sharded gradients, those without a step too: at the end of the iteration.
        sharded = {parameter: grad for parameter, grad in clipped.items() if is_dtensor(grad)}
        self._sharded |= {parameter: (grad.detach().clone(), scale) for parameter, grad in sharded.items()}
        whole = {parameter: grad for parameter, grad in clipped.items() if parameter not in sharded}
        self._after += self._measure("gradient_after_clip", whole, scale)
        self._stepped.update(stepping)

    def values(self) -> list[NamedValues]:
        """Names and values before clipping, and after clipping NaN where those of a parameter have not changed.

        Where gradients are sharded, all ranks have to call it.
        """
        for parameter, count in self._backwards.items():
            self._fewest[parameter] = min(count, self._fewest.get(parameter, count))
            self.unknown += parameter not in self._measured
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
        unclipped = {item: item.grad for item in parameters if item.grad is not None}
        self._before += self._measure("gradient", unclipped, scale)
        self._measured.update(unclipped)

    def _measure(
        self, family: str, gradients: Mapping[nn.Parameter, Tensor], scale: Tensor | None
    ) -> list[NamedValues]:
        measurement = Measurement(family, self._metrics)
        # As GradScaler.unscale_ does it, so that only clipping makes a difference.
        inverse = None if scale is None else scale.to(wide_dtype(scale.device)).reciprocal().float()
        for parameter, gradient in gradients.items():
            name, tag = self._parameters[parameter]
            if measurement.wants(name):
                whole = whole_tensor(gradient)
                if inverse is not None:
                    wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
                    whole = (wide * move(inverse, whole.device)).to(whole.dtype)
                measurement.add(tag, name, whole)
        return collect_values([measurement])


def _differing(before: NamedValues, after: NamedValues) -> NamedValues:
    """Values after clipping, NaN where none of a parameter's differs from the one before."""
    place_of = {name.partition("/")[2]: place for place, name in enumerate(before.names)}
    owners = [name.rpartition("/")[0] for name in after.names]
    owner_of = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    old = before.rows([place_of[name.partition("/")[2]] for name in after.names]).values
    differs = ((after.values != old) & ~(after.values.isnan() & old.isnan())).to(old.dtype)
    index = move(torch.tensor([owner_of[owner] for owner in owners], device="cpu"), old.device)
    counts = torch.zeros(len(owner_of), dtype=old.dtype, device=old.device).index_add_(0, index, differs)
    return NamedValues(after.names, torch.where(counts[index] > 0, after.values, math.nan))
