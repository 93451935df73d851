"""Parameters that have stopped moving."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import move


class FrozenParameters:
    """Counts for each parameter how many measured steps in a row have not moved it.

    Args:
        threshold: the largest update ratio of a step that does not move a parameter.
        patience: a parameter is frozen after this many such steps.

    Attributes:
        still: the counts, a float64 tensor.
    """

    def __init__(self, names: Sequence[str], threshold: float, patience: int) -> None:
        self.still = torch.zeros(len(names), dtype=torch.float64, device="cpu")
        self._names = list(names)
        self._threshold = threshold
        self._patience = patience

    def rename(self, names: Sequence[str], like: Tensor) -> None:
        """Continue with other parameters, on the device of a tensor; known names keep their counts."""
        still = move(self.still.to(like.dtype), like.device)
        known = {name: index for index, name in enumerate(self._names)}
        # A new name takes the zero at the end.
        at = torch.tensor([known.get(name, len(known)) for name in names], device="cpu")
        self.still = torch.cat([still, still.new_zeros(1)])[move(at, like.device)]
        self._names = list(names)

    def observe(self, ratios: Tensor, moved: Tensor) -> Tensor:
        """Count one step, by update ratios and which parameters were to move; which of those are frozen.

        Other parameters keep their counts. A ratio of NaN, of weights that are not finite, resets the count.
        """
        counts = torch.where(ratios <= self._threshold, self.still + 1, 0)
        self.still = torch.where(moved, counts, self.still)
        return moved & (self.still >= self._patience)

    def is_frozen(self, still: float) -> bool:
        """Whether a count is that of a frozen parameter."""
        return still >= self._patience

    def state_dict(self) -> OrderedDict[str, Any]:
        """A list of names and a tensor of counts."""
        return OrderedDict(names=list(self._names), still=self.still)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; parameters that it does not know start at 0.

        Raises:
            TypeError: if its names are no list of strings, or its counts no numbers.
            ValueError: if it is damaged or of another model.
        """
        names = state_dict["names"]
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"Argument state_dict should hold a list of names in 'names', but it holds {names!r}")
        try:
            counts = torch.as_tensor(state_dict["still"], dtype=torch.float64, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"Argument state_dict should hold a tensor of counts in 'still': {error}") from error
        if counts.shape != (len(names),) or not bool((counts.isfinite() & (counts >= 0)).all()):
            raise ValueError("Argument state_dict should hold in 'still' one finite count of at least 0 for each name")
        saved = dict(zip(names, counts.tolist(), strict=True))
        if saved.keys().isdisjoint(self._names):
            raise ValueError(f"Argument state_dict should be of this model, but its names are {list(names)[:3]} …")
        self.still = torch.tensor([saved.get(name, 0.0) for name in self._names], dtype=torch.float64, device="cpu")
