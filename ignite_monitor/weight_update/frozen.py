"""Parameters that have stopped moving."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import move


class FrozenParameters:
    """Counts for each parameter how many measured steps in a row have not moved it, in the tensor ``counts``."""

    def __init__(self, names: Sequence[str], patience: int) -> None:
        self.counts = torch.zeros(len(names), dtype=torch.float64, device="cpu")
        self._names = list(names)
        self._patience = patience

    def rename(self, names: Sequence[str], like: Tensor) -> None:
        """Continue with other parameters, on the device of a tensor; known names keep their counts."""
        counts = move(self.counts.to(like.dtype), like.device)
        known = {name: index for index, name in enumerate(self._names)}
        # A new name takes the zero at the end.
        at = torch.tensor([known.get(name, len(known)) for name in names], dtype=torch.long, device="cpu")
        self.counts = torch.cat([counts, counts.new_zeros(1)])[move(at, like.device)]
        self._names = list(names)

    def observe(self, unmoved: Tensor, stepped: Tensor) -> Tensor:
        """Count one step, by what was not moved and what was to move; return which of the latter are frozen."""
        self.counts = torch.where(stepped, torch.where(unmoved, self.counts + 1, 0), self.counts)
        return stepped & (self.counts >= self._patience)

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return a list of names and a tensor of counts."""
        return OrderedDict(names=list(self._names), counts=self.counts)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; parameters that it does not know start at 0."""
        names, counts = state_dict["names"], state_dict["counts"]
        is_named = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not is_named or not isinstance(counts, Tensor):
            text = "Argument state_dict should hold a list of names in 'names' and a tensor in 'counts'"
            raise TypeError(f"{text}, but it holds {names!r} and {counts!r}")
        counts = counts.to("cpu", torch.float64)
        if counts.shape != (len(names),) or not bool((counts.isfinite() & (counts >= 0)).all()):
            raise ValueError("Argument state_dict should hold in 'counts' one finite count of at least 0 for each name")
        if set(names).isdisjoint(self._names):
            raise ValueError(f"Argument state_dict should be of this model, but its names are {names[:3]} …")
        current_names, self._names, self.counts = self._names, names, counts
        self.rename(current_names, like=counts)
