"""Parameters that have stopped moving, that no optimizer holds, or that no backward reaches."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ignite_monitor.model.devices import move
from ignite_monitor.model.names import held_by, listed

_NAMED = 10


class FrozenParameters:
    """Counts for each parameter how many measured steps in a row have not moved it, in the tensor ``still``."""

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
        at = torch.tensor([known.get(name, len(known)) for name in names], dtype=torch.long, device="cpu")
        self.still = torch.cat([still, still.new_zeros(1)])[move(at, like.device)]
        self._names = list(names)

    def observe(self, ratios: Tensor, moved: Tensor) -> Tensor:
        """Count one step, by update ratios and which parameters were to move; return which of those are frozen.

        Other parameters keep their counts. A ratio of NaN, of weights that are not finite, resets the count.
        """
        counts = torch.where(ratios <= self._threshold, self.still + 1, 0)
        self.still = torch.where(moved, counts, self.still)
        return moved & (self.still >= self._patience)

    def is_frozen(self, still: float) -> bool:
        """Return True for the count of a frozen parameter."""
        return still >= self._patience

    def state_dict(self) -> OrderedDict[str, Any]:
        """Return a list of names and a tensor of counts."""
        return OrderedDict(names=list(self._names), still=self.still)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state; parameters that it does not know start at 0."""
        names, counts = state_dict["names"], state_dict["still"]
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"Argument state_dict should hold a list of names in 'names', but it holds {names!r}")
        if not isinstance(counts, Tensor):
            raise TypeError(f"Argument state_dict should hold a tensor of counts in 'still', but it holds {counts!r}")
        counts = counts.to("cpu", torch.float64)
        if counts.shape != (len(names),) or not bool((counts.isfinite() & (counts >= 0)).all()):
            raise ValueError("Argument state_dict should hold in 'still' one finite count of at least 0 for each name")
        if set(names).isdisjoint(self._names):
            raise ValueError(f"Argument state_dict should be of this model, but its names are {names[:3]} …")
        own, self._names, self.still = self._names, names, counts
        self.rename(own, like=counts)


class UntrainedParameters:
    """Finds parameters with ``requires_grad`` that did not learn in the first ``patience`` measured steps."""

    def __init__(self, patience: int) -> None:
        self._steps_left = patience
        self._held: set[int] = set()
        self._reached: set[int] = set()

    def observe(self, parameters: Sequence[nn.Parameter], optimizer: Optimizer | None = None) -> None:
        """Note the parameters with a gradient, and those that an optimizer holds that makes a step."""
        if self._steps_left:
            self._reached.update(id(parameter) for parameter in parameters if parameter.grad is not None)
            self._held |= set() if optimizer is None else held_by(optimizer)

    def completed(self, parameters: Mapping[str, nn.Parameter]) -> str:
        """Count a step; return the report after the last one, else an empty text."""
        if not self._steps_left:
            return ""
        self._steps_left -= 1
        if self._steps_left:
            return ""
        trainable = {id(parameter): name for name, parameter in parameters.items() if parameter.requires_grad}
        parts = {
            "in no optimizer that has made a step": trainable.keys() - self._held,
            "without a gradient so far": (trainable.keys() & self._held) - self._reached,
        }
        texts = []
        for title, keys in parts.items():
            names = [name for key, name in trainable.items() if key in keys]
            if names:
                texts.append(f"{title}: {listed(names, _NAMED)}")
        return "; ".join(texts)
