"""State of detectors: plain tensors, which are replaced and never changed in place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ignite_monitor.model.devices import move_like

State = dict[str, Tensor]


class Statistics:
    """Named numbers in the rows of one tensor. A reference to ``rows`` is a snapshot of them."""

    def __init__(self, initial: State) -> None:
        self._names = tuple(initial)
        self._initial = self.rows = torch.stack([value.to(torch.float64) for value in initial.values()])

    def named(self, rows: Tensor) -> State:
        """Name the rows of a tensor like ``rows``."""
        return dict(zip(self._names, rows.unbind(), strict=True))

    def move_like(self, value: Tensor) -> None:
        """Move the numbers to the device and dtype of a value."""
        if self.rows.device != value.device or self.rows.dtype != value.dtype:
            self._initial, self.rows = move_like(self._initial, value), move_like(self.rows, value)

    def reset_threshold(self) -> None:
        """Discard all earlier values."""
        self.rows = self._initial

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return self.named(self.rows.clone())

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from saved numbers; a ValueError if they are of another kind."""
        self.rows = torch.stack([*loaded(self.named(self.rows), state_dict).values()])


def load_all(parts: Mapping[str, Statistics], states: Mapping[str, Any]) -> None:
    """Load the states of several parts by name; an error changes none of them."""
    copies = {name: copy.copy(part) for name, part in parts.items() if name in states}
    for name, part in copies.items():
        part.load_state_dict(states[name])
    for name, part in copies.items():
        vars(parts[name]).update(vars(part))


def loaded(current: State, saved: Any) -> State:
    """Convert saved numbers to devices and dtypes of others; a ValueError if names or shapes differ from theirs."""
    is_flat = isinstance(saved, Mapping) and not any(isinstance(value, Mapping) for value in saved.values())
    given = {name: torch.as_tensor(value) for name, value in saved.items()} if is_flat else {}
    current_shapes, shapes = ({name: tuple(v.shape) for name, v in state.items()} for state in (current, given))
    if shapes != current_shapes:
        raise ValueError(
            f"Argument state_dict should hold {current_shapes}, but given {shapes}: was it saved with another "
            "threshold rule?"
        )
    return {name: move_like(given[name], value) for name, value in current.items()}
