"""Metrics of the gradients of an iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set

import torch
from torch import Tensor, nn

from ignite_monitor.activation.measurement import Measurement, collect_values
from ignite_monitor.activation.metric import MetricSet
from ignite_monitor.model.devices import move, wide_dtype
from ignite_monitor.model.dtensor import is_dtensor, whole_tensor
from ignite_monitor.monitor.transfer import NamedValues


class GradientMetrics:
    """Measures the gradients of parameters in one iteration.

    A gradient is measured after a backward that reached its parameter, in place of an earlier measurement, until an
    optimizer starts a step with it. A gradient that no backward of this iteration has produced is measured then, unless
    it is sharded. Backwards that are never an iteration's last one, by the smallest number of backwards so far, are not
    followed by a measurement.

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
        self._values: list[NamedValues] = []
        self._measured: set[nn.Parameter] = set()
        self._stepped: set[nn.Parameter] = set()

    def gradients_ready(self, scale: Tensor | None, reached: Set[int]) -> None:
        """Measure the scaled gradients that a backward may have changed, of parameters given by id."""
        changed = [item for item in self._parameters if id(item) in reached and item not in self._stepped]
        self._backwards.update(changed)
        self._measure([item for item in changed if self._backwards[item] >= self._fewest.get(item, 1)], scale)

    def step_started(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        """Measure the scaled gradients with which an optimizer starts its first step, as far as they are not known."""
        stepping = [item for item in parameters if item in self._parameters and item not in self._stepped]
        # Gathering takes all ranks, and some may make no step.
        self._measure([item for item in stepping if item not in self._backwards and not is_dtensor(item)], scale)
        self._stepped.update(stepping)

    def values(self) -> list[NamedValues]:
        """Names and values; later ones take the place of earlier ones."""
        for parameter, count in self._backwards.items():
            self._fewest[parameter] = min(count, self._fewest.get(parameter, count))
            self.unknown += parameter not in self._measured
        return self._values

    def _measure(self, parameters: Iterable[nn.Parameter], scale: Tensor | None) -> None:
        measurement = Measurement("gradient", self._metrics)
        # As GradScaler.unscale_ does it.
        inverse = None if scale is None else scale.to(wide_dtype(scale.device)).reciprocal().float()
        for parameter in parameters:
            name, tag = self._parameters[parameter]
            if parameter.grad is None:
                continue
            self._measured.add(parameter)
            if not measurement.wants(name):
                continue
            whole = whole_tensor(parameter.grad)
            if inverse is not None:
                wide = whole.to(torch.promote_types(whole.dtype, torch.float32))
                whole = (wide * move(inverse, whole.device)).to(whole.dtype)
            measurement.add(tag, name, whole)
        self._values += collect_values([measurement])
