"""How large the outputs of layers are, and how far they have moved, while a model trains."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import wide_dtype
from ignite_monitor.model.modes import is_plain
from ignite_monitor.model.tensors import floating_tensors
from ignite_monitor.rcc.terms import output_change
from ignite_monitor.reference.call import Call, Comparison, NotComparableError
from ignite_monitor.reference.reference import Reference

QUANTITIES = ("activation", "change", "weight_update", "input_drift")


class OutputChanges(Comparison):
    """Measures the outputs of a model's layers, multipliers included."""

    def __init__(self, reference: Reference) -> None:
        self._run = reference.run
        self._mean_squares: dict[str, list[Tensor]] = {}

    def clear(self) -> None:
        self._mean_squares = {}

    def keep(self, call: Call) -> Sequence[Tensor | None]:
        return [_first(call.output)]

    def enter(self, call: Call) -> Tensor | None:
        """What the reference's layer makes of the inputs that the model's is about to get."""
        # The inputs of the whole model are those of the reference.
        return _first(self._run(call.name, call.args, call.kwargs)) if call.name else call.kept[0]

    def leave(self, call: Call) -> Tensor:
        """Mean squares of the call, one for each of :data:`QUANTITIES`.

        Raises:
            NotComparableError: if there is no output to measure.
        """
        found = [_first(call.output), call.entered, call.kept[0]]
        if any(each is None or not is_plain(each) for each in found) or len({each.shape for each in found}) > 1:
            raise NotComparableError("its outputs are no dense floating-point tensors of one shape")
        now, crossed, then = (each.detach().to(wide_dtype(each.device)) for each in found)
        change = output_change(now, crossed, then)
        parts = now, now - then, change.weight_update, change.input_drift
        return torch.stack([each.square().mean() for each in parts])

    def passed(self, results: dict[str, list[Any]]) -> None:
        for name, calls in results.items():
            self._mean_squares.setdefault(name, []).extend(calls)

    def values(self, incomplete: Collection[str]) -> dict[str, list[float]]:
        """The root mean squares of each layer, in the order of :data:`QUANTITIES`.

        Args:
            incomplete: names of layers that are left out.
        """
        found = {name: calls for name, calls in self._mean_squares.items() if name not in incomplete}
        if not found:
            return {}
        table = torch.stack([torch.stack(calls).mean(0).cpu() for calls in found.values()]).sqrt()
        return dict(zip(found, table.tolist(), strict=True))


def _first(output: Any) -> Tensor | None:
    return next((tensor for _, tensor in floating_tensors(output)), None)
