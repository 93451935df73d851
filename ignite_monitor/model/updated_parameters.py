"""The parameters that optimizer steps were to move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ignite_monitor.model.devices import move
from ignite_monitor.model.names import learning_rates


class UpdatedParameters:
    """Collects the parameters that optimizer steps were to move.

    A step moves the parameters with ``requires_grad`` in groups with a learning rate other than 0, if its optimizer has
    a gradient of any of them.
    """

    def __init__(self, indices: Mapping[int, int]) -> None:
        self._indices = indices  # id of a parameter -> its index
        self._moves: list[tuple[list[int], Any]] = []  # indices, and True or a condition that the device knows

    def __bool__(self) -> bool:
        return bool(self._moves)

    def started(self, optimizer: Optimizer, made: bool | Tensor) -> list[int]:
        """Note a step that starts, and is made or not; return its indices."""
        groups = [
            [item for item in group["params"] if id(item) in self._indices and item.requires_grad]
            for group in optimizer.param_groups
        ]
        if all(item.grad is None for members in groups for item in members):
            return []
        indices = [[self._indices[id(item)] for item in members] for members in groups]
        for rate, members in zip(learning_rates(optimizer), indices, strict=True):
            moves = (rate != 0) & made
            if members and moves is not False:
                self._moves.append((members, moves))
        return [index for members in indices for index in members]

    def mask(self, size: int, device: torch.device) -> Tensor:
        """A bool tensor, True for each parameter that was to move."""
        mask: Tensor = torch.zeros(size, dtype=torch.bool, device=device)
        for indices, moves in self._moves:
            members = torch.zeros(size, dtype=torch.bool, device="cpu")
            members[indices] = True
            mask = mask | move(members, device) & (move(moves, device) if isinstance(moves, Tensor) else moves)
        return mask
