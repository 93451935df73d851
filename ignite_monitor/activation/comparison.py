"""Metrics of the difference between the model's outputs and those of a reference."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from ignite_monitor.activation.measurement import Measurement
from ignite_monitor.activation.metric import MetricSet
from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.tensors import floating_tensors, tagged_tensors
from ignite_monitor.monitor.transfer import NamedValues
from ignite_monitor.reference.call import Call, Comparison, NotComparableError


class OutputComparison(Comparison):
    """Measures each output of the model against that of the reference; the tags are names as loggers take them."""

    by_weights = False

    def __init__(self, tags: Mapping[str, str], metrics: MetricSet) -> None:
        self._tags = tags
        self._metrics = metrics
        self.clear()

    def clear(self) -> None:
        self.measured = Measurement("activation_difference", self._metrics)

    def keep(self, call: Call) -> Sequence[Tensor | None]:
        return [tensor for _, tensor in floating_tensors(call.output)]

    def leave(self, call: Call) -> bool:
        tensors, tag = tagged_tensors(call.output), self._tags[call.name]
        initial = [tensor for tensor in call.kept if tensor is not None]
        if [tensor.shape for _, tensor in tensors] != [tensor.shape for tensor in initial]:
            raise NotComparableError("its outputs have other shapes than in the reference")
        if not all(map(is_plain, [*(tensor for _, tensor in tensors), *initial])):
            raise NotComparableError("its outputs have no values of their own here (DTensors, nested, sparse)")
        for (place, tensor), other in zip(tensors, initial, strict=True):
            key = f"{tag}/{place}" if place else tag
            self.measured.add(key, call.name or "_root_", tensor.detach(), minus=other.detach())
        return True

    def passed(self, results: dict[str, list[Any]]) -> None:
        self.measured.flush()

    def without(self, values: NamedValues, incomplete: Collection[str]) -> NamedValues:
        """Exclude the differences of modules of which a call could not be compared."""
        starts = tuple(f"activation_difference/{self._tags[name]}/" for name in incomplete)
        return values.rows([i for i, name in enumerate(values.names) if not name.startswith(starts)])
