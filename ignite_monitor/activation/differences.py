"""What a model's modules return, less what those of its reference do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.activation.measured import Measured
from ignite_monitor.activation.metric import MetricSet
from ignite_monitor.model.aside import is_plain
from ignite_monitor.model.devices import upload
from ignite_monitor.model.tensors import floating_tensors, tagged_tensors
from ignite_monitor.reference.call import Call, Comparison, NotComparableError


class OutputComparison(Comparison):
    """Measures each output of the model against that of the reference.

    Attributes:
        measured: what takes the differences in.
    """

    by_weights = False

    def __init__(self, tags: Mapping[str, str], metrics: MetricSet) -> None:
        self.tags = tags
        self.measured = Measured("activation_difference", metrics)

    def clear(self) -> None:
        self.measured.clear()

    def keep(self, call: Call) -> Sequence[Tensor | None]:
        return [tensor for _, tensor in floating_tensors(call.output)]

    def leave(self, call: Call) -> bool:
        ours, tag = tagged_tensors(call.output), self.tags[call.name]
        theirs = [each for each in call.kept if each is not None]
        if [tensor.shape for _, tensor in ours] != [each.shape for each in theirs]:
            raise NotComparableError("its outputs have other shapes than in the reference")
        if not all(map(is_plain, [*(each for _, each in ours), *theirs])):
            raise NotComparableError("its outputs have no values of their own here (DTensors, nested, sparse)")
        for (place, tensor), other in zip(ours, theirs, strict=True):
            key = f"{tag}/{place}" if place else tag
            self.measured.see_difference(key, call.name or "_root_", tensor.detach(), other.detach())
        return True

    def passed(self, results: dict[str, list[Any]]) -> None:
        self.measured.pass_ended()


def without(found: tuple[list[str], Tensor], incomplete: Collection[str]) -> tuple[list[str], Tensor]:
    """Names and numbers, but for the differences of some modules."""
    names, numbers = found
    starts = tuple(f"activation_difference/{tag}/" for tag in incomplete)
    kept = [place for place, name in enumerate(names) if not name.startswith(starts)] if starts else []
    if not starts or len(kept) == len(names):
        return found
    return [names[place] for place in kept], numbers[
        upload(torch.tensor(kept, dtype=torch.int64, device="cpu"), numbers.device)
    ]
